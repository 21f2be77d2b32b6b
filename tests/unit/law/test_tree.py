import numpy as np
import pytest

from outrider.law.noise import Purpose, RoundNoise
from outrider.law.sparse import SparseLaw
from outrider.law.tree import Tree, depths_of

#        row 0
#       /     \
#     t0(1)   t1(2)
#     /  \      \
#  t2(3) t3(4)  t4(5)
#                 \
#                 t5(6)
PARENTS = np.array([0, 0, 1, 1, 2, 5], np.int32)


def test_a_shape_by_its_parents():
    tree = Tree.of(PARENTS)
    assert tree is not None
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert tree.ranks.tolist() == [0, 1, 0, 1, 0, 0]
    assert [list(tree.children(row)) for row in range(7)] == [[0, 1], [2, 3], [4], [], [], [5], []]
    assert [tree.path(row) for row in (0, 2, 4, 6)] == [(), (1,), (0, 3), (1, 4, 5)]
    assert tree.leaves() == [3, 4, 6]
    assert tree.depth == 3


def test_a_chain_is_no_tree():
    assert Tree.of(np.arange(5, dtype=np.int32)) is None
    assert Tree.of(np.empty(0, np.int32)) is None
    assert list(depths_of(None, 4)) == [0, 1, 2, 3]
    assert list(depths_of(Tree.of(PARENTS), 7)) == [0, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("parents", [[1], [-1], [0, 2], [0, 1, 0], [0, 0, -1], [0, 0, 3]])
def test_a_token_follows_a_row_before_it_and_rows_ascend(parents):
    with pytest.raises(ValueError, match="follows a row"):
        Tree.of(np.array(parents, np.int32))


def test_the_head_of_a_tree_is_one():
    tree = Tree.of(PARENTS)
    law = SparseLaw.concatenate([(np.arange(size, dtype=np.int32), np.ones(size)) for size in (2, 3, 1, 0, 0, 4)])
    for count in range(7):
        head, left = tree.head(count), tree.law_of_head(law, count)
        assert (head is None) == (count < 2)
        assert len(left.sizes) == count
        followed = set(PARENTS[:count].tolist())
        assert [size > 0 for size in left.sizes] == [row in followed for row in range(count)]
        assert left.token_ids.tolist() == law.token_ids[: left.sizes.sum()].tolist()


def test_no_two_rows_at_one_position_share_noise_and_first_children_are_a_chain():
    tree, noise = Tree.of(np.repeat(np.arange(8), 8).astype(np.int32)), RoundNoise(seed=5, base_length=9)
    noises = tree.noises(noise)
    assert len({(each.seed, depth) for each, depth in zip(noises, tree.depths, strict=True)}) == len(noises)
    row = 0
    while tree.children(row):
        assert noises[row] == noise
        row = tree.children(row)[0] + 1
    assert tree.noises(RoundNoise(5, 10))[2] != RoundNoise(noises[2].seed, 10)
    uniforms = [each.uniform(Purpose.ACCEPT, 20) for each in set(noises)]
    assert len(set(uniforms)) == len(uniforms)
