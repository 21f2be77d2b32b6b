"""Log probabilities: log-softmax of the raw logits, top tokens in a decided order, rows free of their neighbours."""

import numpy as np
import pytest
import torch

from outrider.law import logprobs
from outrider.law.logprobs import LogprobQuestion, LogprobRows, logprob_rows
from outrider.net.arrays import ArrayError, logprobs_from_message, logprobs_message

torch.set_num_threads(1)
VOCAB = 50


def question(rng: np.random.Generator, lookahead: int, top: int) -> LogprobQuestion:
    sizes = rng.integers(0, 4, lookahead).astype(np.int32)
    support = [rng.permutation(VOCAB)[:size] for size in sizes]
    joined = np.concatenate([np.empty(0), *support]).astype(np.int32)
    return LogprobQuestion(rng.integers(0, VOCAB, lookahead + 1).astype(np.int32), sizes, joined, top)


def naive(logits: torch.Tensor, asked: LogprobQuestion) -> LogprobRows:
    logs = logits[:, :VOCAB].double().log_softmax(dim=1).numpy()
    rows = np.repeat(np.arange(len(asked.sizes)), asked.sizes)
    order = np.argsort(-logs, axis=1, kind="stable")[:, : asked.top].astype(np.int32)
    return LogprobRows(
        logs[rows, asked.support],
        logs[np.arange(len(asked.drawn)), asked.drawn],
        order,
        np.take_along_axis(logs, order.astype(np.int64), axis=1),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_log_softmax(dtype: torch.dtype) -> None:
    """Whole logits have ties by the dozen, negative ones and both zeros among them."""
    rng = np.random.default_rng(1)
    questions = [question(rng, lookahead, top) for lookahead, top in ((3, 5), (0, 20), (6, 0), (1, 1))]
    rows = [len(one.drawn) for one in questions]
    whole = rng.integers(-3, 4, (sum(rows), VOCAB + 2)) * rng.choice([-1.0, 1.0], (sum(rows), VOCAB + 2))
    logits = torch.from_numpy(whole).to(dtype)
    logits[:, VOCAB:] = 60  # padding
    logits[2, 7] = -torch.inf
    made = logprob_rows(logits, questions, VOCAB)
    for one, asked, part in zip(made, questions, torch.split(logits, rows), strict=True):
        expected = naive(part, asked)
        assert one.top_ids.tolist() == expected.top_ids.tolist()
        for name in ("support", "drawn", "top"):
            mine = getattr(one, name)
            assert mine.dtype == np.float32
            np.testing.assert_allclose(mine, getattr(expected, name), atol=2e-6)


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    questions = [question(rng, 4, 5) for _ in range(6)]
    logits = torch.from_numpy(rng.normal(size=(30, VOCAB)).astype(np.float32))
    alone = [logprob_rows(logits[5 * i : 5 * i + 5], [one], VOCAB)[0] for i, one in enumerate(questions)]
    for room in (1, 7 * 8 * VOCAB, 1 << 22):
        monkeypatch.setattr(logprobs, "_BYTES_ON_CPU", room)
        for one, other in zip(logprob_rows(logits, questions, VOCAB), alone, strict=True):
            for name in ("support", "drawn", "top_ids", "top"):
                assert np.array_equal(getattr(one, name), getattr(other, name))


def test_no_more_top_tokens_than_the_vocabulary_has() -> None:
    asked = LogprobQuestion(np.array([0], np.int32), np.empty(0, np.int32), np.empty(0, np.int32), 20)
    (rows,) = logprob_rows(torch.tensor([[0.0, 1.0, 1.0]]), [asked], 3)
    assert rows.top_ids.tolist() == [[1, 2, 0]]
    message = logprobs_message(rows)
    assert logprobs_from_message(message, 0, 0, 20, 3).top.tolist() == rows.top.tolist()
    with pytest.raises(ValueError, match="1 rows of logits for questions about 2"):
        logprob_rows(torch.zeros(1, 3), [asked, asked], 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("drawn", b""),
        ("support", b"\0\0\0\0"),
        ("top_ids", b"\7\0\0\0" * 4),
        ("top", b"\0"),
        ("drawn", b"\0\0\xc0\x7f" * 2),
    ],
)
def test_impossible_messages_are_refused(field: str, value: bytes) -> None:
    asked = LogprobQuestion(np.array([0, 1], np.int32), np.array([1], np.int32), np.array([2], np.int32), 2)
    (rows,) = logprob_rows(torch.randn(2, 6), [asked], 6)
    message = logprobs_message(rows)
    back = logprobs_from_message(message, 1, 1, 2, 6)
    assert (back.top_ids == rows.top_ids).all()
    assert (back.support == rows.support).all()
    message.support = message.support if field != "support" else b""
    setattr(message, field, value if field != "support" else value * 2)
    with pytest.raises(ArrayError):
        logprobs_from_message(message, 1, 1, 2, 6)
