"""Features: the hidden states that a pass brings back are transformers' own, whatever way the pass takes."""

import numpy as np
import pytest
import torch

from outrider.lm.engine import Segment
from outrider.lm.features import Tap
from outrider.lm.passes import PassRunner, Work
from outrider.lm.session_cache import Session, SessionCache
from tests.harness.engines_lm import own_model, text, tiny_engine
from tests.harness.workers import int32

# Fused, generic, with a scaled embedding, with learned positions.
KINDS = ["llama", "qwen3", "mistral_window", "gemma2_softcap", "gpt2", "gpt_neox"]
LAYERS = (3, 0, 2)


@torch.inference_mode()
def own_states(architecture, tokens):
    """[n, len(LAYERS) * hidden size] as transformers shows them."""
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    states = own_model(architecture)(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    assert len(states) == 4
    return torch.cat([states[layer][0] for layer in LAYERS], -1)


def assert_like(found, expected):
    assert found.dtype == torch.bfloat16
    assert found.shape == expected.shape
    # bfloat16 keeps eight bits.
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().mean()))


@pytest.mark.parametrize("architecture", KINDS)
def test_a_tap_gets_what_transformers_shows(architecture):
    engine = tiny_engine(architecture)
    info = engine.info
    assert (info.layers, info.hidden_size) == (3, 32)
    words, others = text(21, 1), text(9, 2)
    tap, some = Tap(LAYERS, 0), Tap(LAYERS, 6)
    first, second, third = (engine.open(words[:1]) for _ in range(3))
    plain = engine.forward([Segment(third, words, 2)])[0]
    rows, _ = engine.forward([Segment(first, words[:15], 2, tap=tap), Segment(second, others, 1, tap=some)])
    (after,) = engine.forward([Segment(first, words[15:], 2, tap=tap)])
    assert_like(tap.states(), own_states(architecture, words))
    assert_like(some.states(), own_states(architecture, others)[6:])
    # And the logits are what they are without.
    assert len(rows) == 2
    torch.testing.assert_close(after, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_features_of_layers_that_are_not_there_are_refused_before_the_pass(architecture):
    engine = tiny_engine(architecture)
    sequence = engine.open(int32([1]))
    for layer in (-1, 4):
        with pytest.raises(ValueError, match="there are 0 to 3"):
            engine.forward([Segment(sequence, int32([1, 2]), 1, tap=Tap((layer,), 0))])
    assert sequence.length == 0


def run(engine, session, tap, first_row, budget):
    """To the end of the session."""
    cache = SessionCache(60.0, lambda _: True, lambda _: None)
    runner = PassRunner(engine, cache, budget=budget, short=4)
    work = Work(session, session.length, first_row, 0, tap=tap)
    while work.remaining:
        assert runner.run([work]) is None
    return work


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_prompts_in_chunks_and_states_that_others_hold(budget):
    """What is wanted is computed again, though the cache has its keys and values."""
    engine, words = tiny_engine("llama"), text(30, 4)
    before = Session("before")
    before.extend(words)
    run(engine, before, None, 29, 64)
    for first in (0, 5, 16, 29):
        tap, session = Tap(LAYERS, first), Session("after")
        session.extend(words)
        work = run(engine, session, tap, 29, budget)
        assert_like(tap.states(), own_states("llama", words)[first:])
        # A page that lies before the first of them whole is taken over.
        assert work.computed <= 30 - first // 8 * 8
        session.free_state()


def test_a_session_that_is_computed_gives_them_again():
    engine, words = tiny_engine("llama"), text(30, 5)
    session = Session("session")
    session.extend(words)
    run(engine, session, None, 29, 64)
    tap = Tap(LAYERS, 11)
    session.recompute(11)
    assert run(engine, session, tap, 29, 64).computed == 19
    assert_like(tap.states(), own_states("llama", words)[11:])


def test_work_that_is_preempted_begins_anew():
    engine, words = tiny_engine("llama"), text(12, 6)
    session, tap = Session("session"), Tap(LAYERS, 0)
    session.extend(words)
    cache = SessionCache(60.0, lambda _: True, lambda _: None)
    work = Work(session, 12, 11, 0, tap=tap)
    assert PassRunner(engine, cache, budget=5, short=2).run([work]) is None
    work.preempt()
    while work.remaining:
        PassRunner(engine, cache, budget=5, short=2).run([work])
    assert_like(tap.states(), own_states("llama", words))
