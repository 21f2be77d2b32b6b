import numpy as np
import pytest

from outrider.lm.branches import grown

# Places 0 ... 9 are a chain; the entries 10 ... 15 follow 9, 9, 10, 10, 11, 14.
TREE = grown(None, 10, np.array([9, 9, 10, 10, 11, 14]))


def test_a_tree_by_places():
    assert TREE is not None
    assert (TREE.trunk, TREE.end) == (10, 16)
    assert TREE.positions.tolist() == [10, 10, 11, 11, 11, 12]
    assert TREE.positions_of(np.array([3, 9, 10, 15, 16])).tolist() == [3, 9, 10, 12, 16]
    seen = [[0], [1], [0, 2], [0, 3], [1, 4], [1, 4, 5]]
    assert [np.flatnonzero(row).tolist() for row in TREE.seen] == seen
    assert [TREE.parent_of(place) for place in (0, 5, 10, 11, 15)] == [-1, 4, 9, 9, 14]


def test_a_tree_grows_in_parts_and_finds_its_trunk():
    for cut in range(9):
        parents = np.array([7, 8, 9, 9, 10, 10, 11, 14])
        parts = grown(grown(None, 8, parents[:cut]), 8 + cut, parents[cut:])
        assert (parts.trunk, parts.parents.tolist()) == (10, TREE.parents.tolist())
    # A later entry may go back behind what was the trunk.
    back = grown(TREE, 16, np.array([6]))
    assert back.trunk == 7
    assert back.positions.tolist() == [7, 8, 9, *TREE.positions.tolist(), 7]


def test_a_chain_is_no_tree():
    assert grown(None, 4, np.arange(3, 9)) is None
    assert grown(None, 0, np.arange(-1, 3)) is None
    assert TREE.cut(11) is None
    assert TREE.cut(4) is None
    assert TREE.cut(12).parents.tolist() == [9, 9]


@pytest.mark.parametrize("parents", [[10], [-2], [9, 12]])
def test_what_follows_nothing_is_refused(parents):
    with pytest.raises(ValueError, match="follows none"):
        grown(None, 10, np.array(parents))


def test_paths():
    tokens = np.array([5, 6, 7, 8, 7, 9], np.int32)
    for wanted, path in [([5, 8, 1], [10, 13]), ([6, 7, 9], [11, 14, 15]), ([6, 8], [11]), ([7], []), ([], [])]:
        assert TREE.path(tokens, np.array(wanted, np.int32)) == path
        TREE.require_path(path)
    for path in ([12], [10, 14], [11, 10], [15]):
        with pytest.raises(ValueError, match="no path"):
            TREE.require_path(path)


def test_a_mask_holds_each_branch_apart():
    rows, keys = np.arange(8, 16), np.arange(4, 20)
    seen = keys[None] <= rows[:, None]
    TREE.restrict(seen, rows, keys)
    assert [keys[row].tolist() for row in seen] == [
        list(range(4, 9)),
        list(range(4, 10)),
        *([*range(4, 10), *path] for path in ([10], [11], [10, 12], [10, 13], [11, 14], [11, 14, 15])),
    ]
