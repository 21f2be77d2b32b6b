"""Tiny random models of real architectures behind the services, in float32.

Greedy parity with transformers' `generate`, and caches that hold what was committed and nothing else.
"""

import numpy as np
import pytest
import torch

from orchestrator.links.draft import DraftLink
from outrider.lm.engine import Engine
from outrider.net.arrays import int32s
from outrider.v1.draft_pb2 import DraftEvent
from tests.harness.engines_lm import own_logits, own_model, served_tiny_engine, text
from tests.harness.models import CONTEXT, VOCAB
from tests.harness.orchestrator import ask
from tests.harness.parity import first_mismatch, generate_alone
from tests.harness.system import start_system
from tests.harness.wrappers import ChangedEngine, RecordingEngine, always_wrong

GREEDY = {"temperature": 0.0}
LOOKAHEADS = range(1, 9)
TOKENIZER = f"synthetic:vocab_size={VOCAB}"
# Added to a draft's logits: it then agrees with its target in a part of the positions.
BIAS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
ARCHITECTURES = ["llama", "qwen2_biases", "mistral_window", "gemma3"]


def resembling(inner: Engine) -> Engine:
    return ChangedEngine(inner, lambda rows: rows + BIAS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_a21_k1_every_lookahead_says_what_generate_says(architecture: str) -> None:
    """With a draft that is the target, one like it, and one that is always wrong. The last two have windows of 8."""
    model = own_model(architecture)
    prompts = [text(length, length).tolist() for length in (12, 30)]
    expected = [(prompt, generate_alone(model, prompt, 40)) for prompt in prompts]
    cases = [(prompt, ids, lookahead) for prompt, ids in expected for lookahead in LOOKAHEADS]
    for kind in (lambda inner: inner, resembling, always_wrong):
        async with start_system(
            served_tiny_engine(architecture), kind(served_tiny_engine(architecture)), tokenizer=TOKENIZER
        ) as system:
            requests = (ask(prompt, max_tokens=40, lookahead=lookahead, **GREEDY) for prompt, _, lookahead in cases)
            generations = await system.generate_all(requests)
        for (prompt, ids, lookahead), one in zip(cases, generations, strict=True):
            mismatch = first_mismatch(model, prompt, one.ids, ids)
            if mismatch is not None:
                print(f"{architecture}, lookahead {lookahead}: {mismatch}")
            assert mismatch is None or mismatch.excused
        assert kind is not always_wrong or sum(one.accepted for one in generations) == 0


async def test_c2_the_targets_own_draft_is_accepted_whole_over_256_tokens() -> None:
    """A draft that misses a token after a block accepted whole is found here: its next block is wrong."""
    changes = {"max_position_embeddings": 2 * CONTEXT, "eos_token_id": None}
    async with start_system(
        served_tiny_engine("llama", **changes), served_tiny_engine("llama", **changes), tokenizer=TOKENIZER
    ) as system:
        requests = (ask(text(5, 3).tolist(), max_tokens=256, lookahead=lookahead, **GREEDY) for lookahead in LOOKAHEADS)
        generations = await system.generate_all(requests)
    for lookahead, one in zip(LOOKAHEADS, generations, strict=True):
        assert one.accepted == one.drafted > 0, lookahead
        assert one.ids == generations[0].ids
        assert len(one.rounds) == 1 + -(-255 // (lookahead + 1))


async def test_c1_caches_hold_the_committed_tokens_after_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both caches begin a round one short of the committed tokens, the draft's two short after a block accepted whole:
    no token is computed twice, and the next block is that of a fresh draft.
    """
    blocks: list[tuple[int, list[int]]] = []
    dispatch = DraftLink._dispatch

    def seen(link: DraftLink, event: DraftEvent) -> None:
        if event.block.tokens:
            blocks.append((event.base_length, int32s(event.block.tokens, "tokens").tolist()))
        dispatch(link, event)

    monkeypatch.setattr(DraftLink, "_dispatch", seen)
    changes = {"eos_token_id": None}
    target, draft = (RecordingEngine(served_tiny_engine("mistral_window", **changes)) for _ in range(2))
    model, prompt, lookahead = own_model("mistral_window"), text(9, 2).tolist(), 4
    async with start_system(target, resembling(draft), tokenizer=TOKENIZER, ahead_blocks=0) as system:
        target.fed.clear()
        draft.fed.clear()
        one = await system.generate(ask(prompt, max_tokens=150, lookahead=lookahead, **GREEDY))
    whole, rounds = prompt + one.ids, [each for each in one.rounds[1:] if each.drafted]
    assert {each.accepted for each in rounds if each.drafted == lookahead} == set(range(lookahead + 1))

    assert [fed.start for fed in target.fed[1:]] == [each.base_length - 1 for each in one.rounds[1:]]
    assert [len(fed.tokens) for fed in target.fed[1:]] == [1 + each.drafted for each in one.rounds[1:]]

    whole_before = [False] + [each.accepted == each.drafted for each in rounds[:-1]]
    begins = [fed for fed in draft.fed if fed.start + len(fed.tokens) in {each.base_length for each in rounds}]
    begins = [fed for fed in begins if fed.tokens == tuple(whole[fed.start : fed.start + len(fed.tokens)])]
    by_base = {fed.start + len(fed.tokens): fed for fed in begins}
    for each, short in zip(rounds, whole_before, strict=True):
        assert by_base[each.base_length].start == each.base_length - (2 if short else 1)

    for base, tokens in blocks:
        chain = whole[:base]
        for token in tokens:
            fresh = own_logits(model, np.array(chain, np.int32))[-1] + BIAS
            assert int(fresh.argmax()) == token
            chain.append(token)
