"""The transforms held against transformers' own processors, and their definitions where those leave ties open."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as theirs

from outrider.law import transforms
from outrider.law.params import LawParams
from outrider.law.transforms import NonFiniteLogits, RowContext, law_probs

torch.set_num_threads(1)


class OutputPenalties(LogitsProcessor):
    """Presence and frequency penalty, which transformers lacks, one token at a time."""

    def __init__(self, presence, frequency, prompt_length):
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        output = input_ids[0, self.prompt_length :].tolist()
        for token in set(output):
            scores[0, token] -= self.presence
            scores[0, token] -= self.frequency * output.count(token)
        return scores


def their_processors(params, vocab_size):
    bias = {(token,): float(value) for token, value in params.logit_bias if value > -100}
    banned = [token for token, value in params.logit_bias if value == -100]
    banned += params.banned_token_ids
    if params.allowed_token_ids:
        banned += sorted(set(range(vocab_size)) - set(params.allowed_token_ids))
    stops = list(params.stop_token_ids)
    wanted = [
        (params.repetition_penalty != 1, lambda: theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)),
        (True, lambda: OutputPenalties(params.presence_penalty, params.frequency_penalty, params.prompt_length)),
        (bias, lambda: theirs.SequenceBiasLogitsProcessor(bias)),
        (banned, lambda: theirs.SuppressTokensLogitsProcessor(banned)),
        (
            stops,
            lambda: theirs.MinNewTokensLengthLogitsProcessor(params.prompt_length, params.min_tokens, stops),
        ),
        (params.temperature != 1, lambda: theirs.TemperatureLogitsWarper(params.temperature)),
        (params.top_k, lambda: theirs.TopKLogitsWarper(params.top_k)),
        (params.top_p < 1, lambda: theirs.TopPLogitsWarper(params.top_p)),
        (params.min_p > 0, lambda: theirs.MinPLogitsWarper(params.min_p)),
    ]
    return LogitsProcessorList([make() for want, make in wanted if want])


def their_probs(row, context):
    ids = torch.from_numpy(context.tokens.astype(np.int64))[None]
    return their_processors(context.params, len(row))(ids, row[None].float()).softmax(dim=1)[0]


def random_params(rng, vocab_size):
    """Every parameter present or absent by a coin of its own."""

    def maybe(value, default):
        return value if rng.random() < 0.5 else default

    ids = rng.permutation(vocab_size)
    bias = tuple((int(token), float(rng.choice([-100.0, rng.uniform(-5, 5)]))) for token in ids[: vocab_size // 4])
    return LawParams(
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        logit_bias=maybe(bias, ()),
        temperature=maybe(float(rng.uniform(0.3, 2)), 1.0),
        top_k=maybe(int(rng.integers(1, vocab_size + 5)), 0),
        top_p=maybe(float(rng.uniform(0.05, 0.99)), 1.0),
        min_p=maybe(float(rng.uniform(0, 0.5)), 0.0),
        prompt_length=int(rng.integers(1, 10)),
        stop_token_ids=maybe(tuple(ids[-2:].tolist()), ()),
        min_tokens=int(rng.integers(0, 10)),
        # Whatever else is masked, one token is left.
        allowed_token_ids=maybe(tuple(ids[: vocab_size // 2 + 1].tolist()), ()),
        banned_token_ids=maybe(tuple(ids[vocab_size // 4 + 1 :: 2].tolist()), ()),
    )


def random_rows(seed, vocab_size, rows):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 2.5, (rows, vocab_size + 3)).astype(np.float32))
    logits[:, vocab_size:] = 50.0  # padding, likelier than all that is real
    contexts = []
    for _ in range(rows):
        params = random_params(rng, vocab_size)
        tokens = rng.integers(0, vocab_size, params.prompt_length + rng.integers(0, 12)).astype(np.int32)
        contexts.append(RowContext(params, tokens))
    return logits, contexts


@pytest.mark.parametrize(("vocab_size", "rows"), [(5, 400), (60, 400), (2000, 100)])
def test_any_combination_equals_transformers(vocab_size, rows):
    """Rows of many sessions with different parameters in one call: equal masks, probabilities to 1e-6."""
    logits, contexts = random_rows(vocab_size, vocab_size, rows)
    ours = law_probs(logits, contexts, vocab_size)
    assert ours.shape == (rows, vocab_size)
    assert ours.dtype == torch.float32
    for row, (mine, context) in enumerate(zip(ours, contexts, strict=True)):
        expected = their_probs(logits[row, :vocab_size], context)
        assert torch.equal(mine > 0, expected > 0), context.params
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -2.0},
        {"logit_bias": ((3, 4.0), (5, -100.0), (7, 100.0))},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.8},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"stop_token_ids": (1, 2), "min_tokens": 40},
        {"allowed_token_ids": (3, 7, 3, 29)},
        {"banned_token_ids": (5, 0, 5)},
        {"allowed_token_ids": (1, 2, 3), "banned_token_ids": (2,), "stop_token_ids": (1, 2), "min_tokens": 40},
        {"allowed_token_ids": (3, 5, 7), "logit_bias": ((3, 4.0), (5, -100.0), (9, 100.0))},
    ],
)
def test_each_transform_alone_equals_transformers(params):
    params = LawParams(prompt_length=4, **params)
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(1)) * 2
    tokens = np.array([1, 5, 9, 5, 3, 5, 5, 0], dtype=np.int32)
    ours = law_probs(logits, [RowContext(params, tokens)] * 50, 30)
    assert not torch.equal(ours, logits.softmax(dim=1))
    for row, mine in zip(logits, ours, strict=True):
        expected = their_probs(row, RowContext(params, tokens))
        assert torch.equal(mine > 0, expected > 0)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_batched_rows_equal_single_rows_bit_for_bit():
    logits, contexts = random_rows(3, 50, 200)
    contexts[::7] = [replace(one, params=replace(one.params, temperature=0.0)) for one in contexts[::7]]
    together = law_probs(logits, contexts, 50)
    alone = [law_probs(logits[row : row + 1], [context], 50) for row, context in enumerate(contexts)]
    assert torch.equal(together, torch.cat(alone))


def test_a_large_row_does_not_depend_on_its_company_nor_on_the_number_of_threads():
    """A reduction split over threads would round otherwise for one row than for many."""
    logits, contexts = random_rows(9, 50_000, 6)
    together = law_probs(logits, contexts, 50_000)
    try:
        torch.set_num_threads(2)
        alone = [law_probs(logits[row : row + 1], [context], 50_000) for row, context in enumerate(contexts)]
    finally:
        torch.set_num_threads(1)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_transformed_in_float32(dtype):
    logits, contexts = random_rows(4, 50, 50)
    low = logits.to(dtype)
    assert torch.equal(law_probs(low, contexts, 50), law_probs(low.float(), contexts, 50))


def test_top_k_keeps_all_ties_at_its_border_as_transformers_does():
    logits = (torch.randn(200, 40, generator=torch.Generator().manual_seed(2)) * 2).round()
    contexts = [RowContext(LawParams(top_k=k, prompt_length=1), np.zeros(1, np.int32)) for k in range(1, 41)] * 5
    ours = law_probs(logits, contexts, 40)
    for row, mine, context in zip(logits, ours, contexts, strict=True):
        assert torch.equal(mine > 0, their_probs(row, context) > 0)
    assert any(int((mine > 0).sum()) > context.params.top_k for mine, context in zip(ours, contexts, strict=True))


def test_top_p_keeps_as_many_ties_as_transformers_and_the_lowest_ids():
    logits = (torch.randn(300, 40, generator=torch.Generator().manual_seed(3)) * 2).round()
    context = RowContext(LawParams(top_p=0.83, prompt_length=1), np.zeros(1, np.int32))
    cut = 0
    for row, mine in zip(logits, law_probs(logits, [context] * 300, 40), strict=True):
        expected = their_probs(row, context)
        torch.testing.assert_close(mine.sort().values, expected.sort().values, rtol=0, atol=1e-6)
        border = row[mine > 0].min()
        at_border = (mine > 0)[row == border]
        cut += not at_border.all()
        assert at_border.tolist() == sorted(at_border.tolist(), reverse=True)
    assert cut > 50


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30),
    st.floats(1e-6, 1, exclude_max=True),
    st.integers(0, 30),
)
def test_top_p_is_the_smallest_set_whose_mass_reaches_it(values, top_p, top_k):
    """By definition: dropping its least likely token leaves less than top_p, and none outside is likelier than it."""
    logits = torch.tensor([values])
    tokens = np.empty(0, np.int32)
    before = law_probs(logits, [RowContext(LawParams(top_k=top_k), tokens)], len(values))[0].double()
    after = law_probs(logits, [RowContext(LawParams(top_k=top_k, top_p=top_p), tokens)], len(values))[0]
    kept = after > 0
    mass = before[kept].sum() / before.sum()
    assert mass > top_p - 1e-6
    assert kept.sum() == 1 or mass - before[kept].min() < top_p + 1e-6
    assert kept.all() or before[~kept].max() <= before[kept].min()
    torch.testing.assert_close(after.double(), torch.where(kept, before, 0) / before[kept].sum(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("levels", [0, 8])
@pytest.mark.parametrize("scale", [0.1, 2.0, 30.0])
def test_top_p_is_the_same_on_an_accelerator(scale, levels):
    """Both ways to the nucleus, on laws flat and peaked, with and without ties."""
    scores = torch.randn(40, 5_000, generator=torch.Generator().manual_seed(7)) * scale
    scores = (scores * levels).round() / levels if levels else scores
    scores[:, 4_000:] = -torch.inf
    limits = np.random.default_rng(1).uniform(0.01, 0.999, 40).tolist()
    assert torch.equal(transforms._nucleus(scores, limits), transforms._nucleus_on_device(scores, limits))


@pytest.mark.parametrize("temperature", [0.0, 0.99e-5])
def test_greedy_is_one_hot_at_the_lowest_argmax_after_penalties_and_bans(temperature):
    params = LawParams(temperature=temperature, top_k=2, top_p=0.1, logit_bias=((4, -100.0),), frequency_penalty=1.0)
    tokens = np.array([6], dtype=np.int32)
    logits = torch.tensor([[0.0, 1.0, 3.0, 3.0, 9.0, 3.0, 3.5]] * 2)
    logits = torch.cat([logits, torch.zeros(2, 40_000)], dim=1)
    probs = law_probs(logits, [RowContext(params, tokens)] * 2, logits.shape[1])
    assert probs.argmax(dim=1).tolist() == [2, 2]
    assert probs.sum(dim=1).tolist() == probs.amax(dim=1).tolist() == [1.0, 1.0]


def test_the_argmax_of_equals_is_the_lowest_id_at_any_place():
    for first in (0, 1, 7, 8, 63, 64, 1000, 49_000):
        logits = torch.zeros(3, 49_152)
        logits[:, first::5] = 1.0
        contexts = [RowContext(LawParams(temperature=0.0), np.empty(0, np.int32))] * 3
        assert law_probs(logits, contexts, 49_152).argmax(dim=1).tolist() == [first] * 3


def test_a_bias_of_minus_100_bans_and_of_plus_100_decides():
    """A7 at the level of the law."""
    logits = torch.tensor([[200.0, 0.0, 0.0, -30.0]])
    context = RowContext(LawParams(logit_bias=((0, -100.0),)), np.empty(0, np.int32))
    assert law_probs(logits, [context], 4)[0].tolist() == pytest.approx([0, 0.5, 0.5, 0], abs=1e-6)
    context = RowContext(LawParams(logit_bias=((3, 100.0),)), np.empty(0, np.int32))
    assert law_probs(logits - torch.tensor([[200.0, 0, 0, 0]]), [context], 4)[0, 3] > 1 - 1e-6


def test_stop_tokens_are_masked_until_min_tokens_were_generated():
    params = LawParams(prompt_length=3, stop_token_ids=(1, 2, 1), min_tokens=2)
    logits = torch.zeros(4, 4)
    contexts = [RowContext(params, np.zeros(length, np.int32)) for length in (3, 4, 5, 6)]
    assert (law_probs(logits, contexts, 4)[:, 1] > 0).tolist() == [False, False, True, True]


def test_the_logits_are_left_as_they_were():
    logits, contexts = random_rows(6, 50, 60)
    copy = logits.clone()
    law_probs(logits, contexts, 50)
    law_probs(logits[:, :50], contexts, 50)
    assert torch.equal(logits, copy)
    plain = [RowContext(LawParams(), np.empty(0, np.int32))] * 60
    assert law_probs(logits[:, :50], plain, 50).data_ptr() != logits.data_ptr()


def test_a8_penalties_count_the_draft_tokens_before_the_position():
    """Frequency penalty -2 and +2 give different laws, and both depend on the block's own tokens."""
    logits = torch.zeros(1, 6)
    prompt, block = [0, 1], [4, 4]
    laws = {}
    for penalty in (-2.0, 2.0):
        params = LawParams(frequency_penalty=penalty, prompt_length=2)
        for drafted in (0, 1, 2):
            tokens = np.array(prompt + block[:drafted], dtype=np.int32)
            laws[penalty, drafted] = law_probs(logits, [RowContext(params, tokens)], 6)[0]
            expected = their_probs(logits[0], RowContext(params, tokens))
            torch.testing.assert_close(laws[penalty, drafted], expected, rtol=0, atol=1e-6)
    assert laws[-2.0, 2][4] > laws[-2.0, 1][4] > 1 / 6 > laws[2.0, 1][4] > laws[2.0, 2][4]
    assert laws[-2.0, 0].tolist() == laws[2.0, 0].tolist()


def test_a10_rejected_draft_tokens_leave_no_trace_in_the_law():
    """The row after a rejection is the row of the same prefix without speculation, bit for bit."""
    params = LawParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7, prompt_length=2, top_p=0.9)
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(5))
    prefix = np.array([3, 9, 9, 1], dtype=np.int32)
    drafted = np.array([16, 16, 4], dtype=np.int32)
    contexts = [RowContext(params, np.concatenate([prefix, drafted[:count]])) for count in range(4)]
    block = law_probs(logits, contexts, 20)
    assert torch.equal(block[0], law_probs(logits[:1], [RowContext(params, prefix)], 20)[0])
    assert not torch.equal(law_probs(logits[:1], [contexts[3]], 20)[0], block[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("bad", [[torch.nan, 0, 1], [torch.inf, 0, 1], [-torch.inf] * 3, [torch.nan] * 3])
def test_k3_rows_that_are_no_law_are_named(bad, temperature):
    logits = torch.zeros(5, 3)
    logits[1] = logits[4] = torch.tensor(bad)
    contexts = [RowContext(LawParams(temperature=temperature), np.empty(0, np.int32))] * 5
    with pytest.raises(NonFiniteLogits) as caught:
        law_probs(logits, contexts, 3)
    assert caught.value.rows == [1, 4]
    good = [0, 2, 3]
    assert torch.isfinite(law_probs(logits[good], [contexts[row] for row in good], 3)).all()


def test_k3_a_ban_does_not_hide_a_broken_row_and_nan_in_the_padding_is_no_fault():
    context = RowContext(LawParams(logit_bias=((0, -100.0),)), np.empty(0, np.int32))
    with pytest.raises(NonFiniteLogits):
        law_probs(torch.tensor([[torch.inf, 0.0, 0.0]]), [context], 3)
    assert law_probs(torch.tensor([[0.0, 0.0, torch.nan]]), [context], 2).tolist() == [[0.0, 1.0]]


def test_minus_infinity_is_an_ordinary_logit():
    context = RowContext(LawParams(top_k=2, top_p=0.9, min_p=0.1, temperature=0.5), np.empty(0, np.int32))
    probs = law_probs(torch.tensor([[-torch.inf, 0.0, -torch.inf]]), [context], 3)
    assert probs.tolist() == [[0.0, 1.0, 0.0]]


def test_nothing_left_to_draw_is_an_error_and_not_a_row_of_nan():
    everything = RowContext(LawParams(logit_bias=tuple((token, -100.0) for token in range(3))), np.empty(0, np.int32))
    with pytest.raises(NonFiniteLogits):
        law_probs(torch.zeros(1, 3), [everything], 3)
    overflow = RowContext(LawParams(temperature=2e-5), np.empty(0, np.int32))
    with pytest.raises(NonFiniteLogits):
        law_probs(torch.tensor([[3e38, 0.0]]), [overflow], 2)


def test_contexts_and_rows_must_agree():
    with pytest.raises(ValueError, match="2 rows of logits, 1 contexts"):
        law_probs(torch.zeros(2, 3), [RowContext(LawParams(), np.empty(0, np.int32))], 3)
    assert law_probs(torch.zeros(0, 3), [], 3).shape == (0, 3)
