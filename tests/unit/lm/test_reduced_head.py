import pytest
import torch
from torch import nn

from outrider.law.draft import truncate
from outrider.law.params import LawParams
from outrider.law.transforms import RowContext, law_probs
from outrider.lm.reduced_head import ReducedHead, left_out
from tests.harness.workers import int32

VOCAB = 50
KEPT = torch.tensor([3, 7, 8, 21, 49])


def head(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, ReducedHead]:
    torch.manual_seed(0)
    whole = nn.Linear(16, VOCAB, bias=False, dtype=dtype)
    some = nn.Linear(16, len(KEPT), bias=False, dtype=dtype)
    some.weight.data = whole.weight.data[KEPT]
    return whole, ReducedHead(some, KEPT, VOCAB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kept_tokens_score_what_the_whole_head_says_and_others_are_left_out(dtype: torch.dtype) -> None:
    whole, reduced = head(dtype)
    hidden = torch.randn(2, 3, 16, dtype=dtype)
    logits = reduced(hidden)
    assert logits.shape == (2, 3, VOCAB)
    torch.testing.assert_close(logits[..., KEPT], whole(hidden)[..., KEPT])
    out = left_out(logits[0, 0])
    assert sorted(torch.nonzero(~out).flatten().tolist()) == KEPT.tolist()
    assert bool(logits.isfinite().all())


LAWS = {
    "plain": LawParams(),
    "hot": LawParams(temperature=100.0),
    "biased": LawParams(logit_bias=((0, 99.0), (7, -100.0))),
    "penalised": LawParams(repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=-2.0),
    "nucleus": LawParams(top_p=0.999999, min_p=1e-6, top_k=40),
    "allowed": LawParams(allowed_token_ids=(0, 1, 21)),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_left_out_token_has_no_probability_whatever_the_law(name: str) -> None:
    _, reduced = head()
    logits = reduced(torch.randn(4, 16))
    probs = law_probs(logits, [RowContext(LAWS[name], int32([0, 1, 3]))] * 4, VOCAB)
    mass = probs.sum(0)
    assert set(torch.nonzero(mass).flatten().tolist()) <= set(KEPT.tolist())
    torch.testing.assert_close(probs.sum(1), torch.ones(4))
    for ids, law in truncate(probs, 32):
        assert set(ids.tolist()) <= set(KEPT.tolist())
        assert law.sum() == pytest.approx(1.0)


def test_where_only_left_out_tokens_are_allowed_there_is_still_a_law() -> None:
    _, reduced = head()
    probs = law_probs(reduced(torch.randn(1, 16)), [RowContext(LawParams(allowed_token_ids=(0, 1)), int32([5]))], VOCAB)
    assert probs[0, :2].tolist() == [0.5, 0.5]
