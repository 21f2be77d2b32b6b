import numpy as np
import pytest
import torch

from outrider.law import answer as module
from outrider.law import rows as rows_module
from outrider.law import sample as sample_module
from outrider.law import transforms as transforms_module
from outrider.law.answer import Question, answer
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.law.rows import Sample, Support, SupportRows, sample_rows, support_rows
from outrider.law.transforms import RowContext, greedy_tokens, law_probs

VOCAB = 70
PARAMS = [
    LawParams(),
    LawParams(temperature=0.0, repetition_penalty=1.3),
    LawParams(temperature=0.6, top_p=0.8),
    LawParams(temperature=0.0),
    LawParams(top_k=4, presence_penalty=1.5, prompt_length=2),
]
SUPPORT = np.array([3, 2], np.int32), np.array([4, 60, 1, 9, 8], np.int32)


def logits(rows, seed):
    return torch.randn(rows, VOCAB + 3, generator=torch.Generator().manual_seed(seed)) * 3


def question(index, *, support=False):
    noise = RoundNoise(100 + index, 4)
    tokens = np.array([1, 2, 3, 4, 4 + index, 9], np.int32)
    return Question(PARAMS[index % len(PARAMS)], noise, tokens, SUPPORT if support else None)


def contexts(one):
    return [RowContext(one.params, one.tokens[: 4 + row]) for row in range(3)]


def expected(rows, one):
    probs = law_probs(rows, contexts(one), VOCAB)
    if one.support is not None:
        return support_rows(probs, [Support(one.noise, *one.support)])[0]
    return sample_rows(probs, [Sample(one.noise, 3)])[0]


def same(one, other):
    if isinstance(one, SupportRows):
        pairs = ((getattr(one, name), getattr(other, name)) for name in ("probs", "tail_masses", "tail_tokens"))
        return all(left.tolist() == right.tolist() for left, right in pairs)
    return one.tolist() == other.tolist()


def mixed():
    return [(logits(3, index), question(index, support=index % 2 == 0)) for index in range(10)]


@pytest.mark.parametrize("limit", [1, 4 * 7 * VOCAB, 1 << 22])
def test_every_block_gets_what_it_asked_for_whatever_the_company(limit, monkeypatch):
    monkeypatch.setattr(module, "_BYTES_ON_CPU", limit)
    blocks = mixed()
    for (rows, one), made in zip(blocks, answer(blocks, VOCAB), strict=True):
        assert same(made, expected(rows, one))
    assert answer([], VOCAB) == []


def test_k3_rows_without_a_law_are_their_own_blocks_affair():
    blocks = mixed()
    blocks[2][0][1, 5] = float("nan")
    blocks[3][0][2] = float("inf")
    banned = LawParams(logit_bias=tuple((token, -100.0) for token in range(VOCAB)))
    blocks[5] = blocks[5][0], Question(banned, RoundNoise(1, 4), blocks[5][1].tokens)
    made = answer(blocks, VOCAB)
    assert [index for index, one in enumerate(made) if one is None] == [2, 3, 5]
    for index in (0, 1, 4, 6, 7, 8, 9):
        assert same(made[index], expected(*blocks[index]))


@pytest.mark.parametrize("index", range(4))
def test_k3_blocks_none_of_which_has_a_law(index):
    bad = torch.full((3, VOCAB), float("nan"))
    assert answer([(bad, question(index, support=index == 3))] * 2, VOCAB) == [None, None]


def test_nan_in_the_padding_is_nobodys_affair():
    rows, one = logits(3, 1), question(0)
    rows[:, VOCAB:] = float("nan")
    assert answer([(rows, one)], VOCAB)[0] is not None


def test_greedy_tokens_are_those_of_the_one_hot_law():
    for seed in range(20):
        rows = logits(3, seed)
        rows[0, [5, 30]] = 50.0
        one = Question(PARAMS[1], RoundNoise(1, 4), np.array([1, 2, 3, 4, 5, 30], np.int32))
        laws = law_probs(rows, contexts(one), VOCAB)
        assert greedy_tokens(rows, contexts(one), VOCAB).tolist() == laws.argmax(dim=1).tolist()
    assert greedy_tokens(rows, [RowContext(LawParams(), one.tokens)] * 3, VOCAB)[0] == 5


def test_nothing_dense_leaves_the_device(monkeypatch):
    """What an accelerator would send to the host, counted: a few hundred numbers a row of a vocabulary of 152k."""
    monkeypatch.setattr(sample_module, "_at_least", sample_module._at_least_on_device)
    monkeypatch.setattr(rows_module, "_chunk_sums", rows_module._chunk_sums_on_device)
    monkeypatch.setattr(transforms_module, "_largest", transforms_module._largest_on_device)
    moved = []

    def counted(name):
        original = getattr(torch.Tensor, name)

        def spy(tensor, *arguments, **options):
            moved.append(tensor.numel())
            return original(tensor, *arguments, **options)

        monkeypatch.setattr(torch.Tensor, name, spy)

    for name in ("cpu", "numpy", "tolist"):
        counted(name)
    vocab = 151_936
    rows = torch.randn(3, vocab, generator=torch.Generator().manual_seed(5))
    for support in (SUPPORT, None):
        asked = Question(LawParams(temperature=0.8), RoundNoise(1, 4), np.arange(6, dtype=np.int32), support)
        assert answer([(rows, asked)], vocab)[0] is not None
    assert moved
    assert max(moved) <= 3 * 2048
