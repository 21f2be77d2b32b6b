"""Passes of sessions that come, share what they begin with and go on at different speeds, against a model's own
forward."""

import math

import numpy as np
import torch

from outrider.lm.causal_lm import CausalLm
from outrider.lm.engine import Segment
from tests.harness.engines_lm import PAGE, assert_same, own_logits, own_model, text

# New positions of each session in each pass. The last session begins as the fourth does, once that is far enough.
STEPS = ((1, 0, 3, 160, 2, 0), (0, 1, 17, 1, 1, 0), (0, 4, 1, 29, 5, 9), (0, 0, 2, 10, 9, 2))
COMMON = 90


def through_steps(engine: CausalLm, architecture: str, *, page: int = PAGE, **changes: object) -> None:
    """Raises AssertionError where a row differs, or pages are left behind."""
    model = own_model(architecture, **changes)
    texts = [text(sum(rows), seed) for seed, rows in enumerate(zip(*STEPS, strict=True))]
    cached = COMMON // page * page
    texts[5] = np.concatenate([texts[3][:cached], texts[5]])
    sequences = [engine.open(it[:1]) for it in texts[:5]]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in STEPS:
        if step[5] and len(sequences) == 5:
            sequences.append(engine.open(texts[5]))
            assert sequences[5].length == cached, "shares the pages of the fourth"
        active = [index for index, count in enumerate(step) if count]
        segments = []
        for index in active:
            at = sequences[index].length
            segments.append(Segment(sequences[index], texts[index][at : at + step[index]], step[index]))
        for index, logits in zip(active, engine.forward(segments), strict=True):
            rows[index].append(logits.cpu())
    for tokens, parts in zip(texts, rows, strict=True):
        found = torch.cat(parts)
        assert_same(found, own_logits(model, tokens)[-len(found) :])
    for sequence in sequences:
        sequence.free()
    assert engine.pages()[0] == 0


def through_broken_pages(engine: CausalLm, architecture: str) -> None:
    """Ragged passes in a cache full of what a broken session left. Raises AssertionError where a row differs."""
    model, storage = own_model(architecture), engine.storage
    for tensor in storage.layers:
        tensor[:, : storage.null_page * storage.page_size] = math.nan
    texts = [text(length, length) for length in (2, 5, 9, 11)]
    sequences = [engine.open(it[:1]) for it in texts]
    engine.forward([Segment(it, words[:1], 0) for it, words in zip(sequences, texts, strict=True)])
    rows = engine.forward([Segment(it, words[1:], len(words) - 1) for it, words in zip(sequences, texts, strict=True)])
    for words, logits in zip(texts, rows, strict=True):
        assert_same(logits, own_logits(model, words)[1:])
