"""The draft that comes with the sources, on questions that it has not learned from."""

from pathlib import Path

import numpy as np
import pytest

from outrider.cli.drafts import MODELS, shipped_draft
from outrider.cli.weights import SMOLLM2, cache_directory
from outrider.distill.acceptance import rounds_of
from outrider.law.sparse import Int32Array
from outrider.lm.engine import Engine, Segment
from outrider.lm.load import EngineOptions, load_engine
from tests.harness.grid import PROMPTS, chat_tokens
from tests.harness.workers import int32

WEIGHTS = cache_directory() / Path(SMOLLM2.member).name
# Four of chat, two of code, a list.
CHOSEN = (0, 1, 2, 4, 5, 8, 15)
TOKENS, LOOKAHEAD = 48, 4
# The model card says what was measured on more text.
LEAST_TOKENS_PER_PASS = 1.4
MOST_BYTES = 25 * 10**6

pytestmark = [
    pytest.mark.skipif(
        not WEIGHTS.is_file(), reason=f"the demo's weights are not in {WEIGHTS.parent}: run `make demo`"
    ),
    pytest.mark.timeout(600),
]


def greedy(target: Engine, prompt: list[int]) -> Int32Array:
    """Prompt and answer."""
    tokens, new = list(prompt), list(prompt)
    sequence = target.open(int32(prompt))
    new = tokens[sequence.length :]
    while len(tokens) < len(prompt) + TOKENS and tokens[-1] not in target.info.eos_token_ids:
        (logits,) = target.forward([Segment(sequence, int32(new), 1)])
        new = [int(logits[0].argmax())]
        tokens += new
    sequence.free()
    return int32(tokens)


def right(draft: Engine, said: Int32Array, answer: int) -> np.ndarray:  # type: ignore[type-arg]
    """[answer] whether the draft's likeliest token is the one that was said."""
    sequence = draft.open(said[:1])
    (logits,) = draft.forward([Segment(sequence, said[sequence.length : -1], answer)])
    sequence.free()
    return np.asarray(logits.argmax(1).numpy() == said[-answer:])


def test_it_is_small_and_says_which_target_it_is_for() -> None:
    target = f"gguf:{WEIGHTS}"
    directory = Path(shipped_draft(target))
    assert directory.parent == MODELS
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) <= MOST_BYTES
    assert shipped_draft("gguf:/no/such.gguf") == shipped_draft("synthetic:vocab_size=4") == ""


def test_it_is_accepted_as_often_as_promised() -> None:
    model = f"gguf:{WEIGHTS}"
    options = EngineOptions(dtype="bfloat16", threads=1, context_length=512, kv_pages=200, target=model)
    target, draft = load_engine(model, options), load_engine(shipped_draft(model), options)
    assert target.info.vocab_fingerprint == draft.info.vocab_fingerprint
    assert target.info.tokenizer is not None
    rounds: list[int] = []
    for prompt in chat_tokens(target.info.tokenizer, [PROMPTS[index] for index in CHOSEN]):
        said = greedy(target, prompt)
        rounds += rounds_of(right(draft, said, len(said) - len(prompt))[None], LOOKAHEAD)
    tokens_per_pass = 1 + np.mean(rounds)
    print(f"{tokens_per_pass:.2f} tokens per pass in {len(rounds)} rounds")
    assert tokens_per_pass >= LEAST_TOKENS_PER_PASS
