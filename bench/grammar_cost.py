"""What a grammar costs: compiling, masks along a draft path, applying them. `python bench/grammar_cost.py MODEL`."""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from outrider.law.language import Language
from outrider.law.masking import forbid
from outrider.law.params import LawParams
from outrider.law.sparse import Int32Array
from outrider.lm.grammars import SessionGrammars
from outrider.lm.tokenizer import load_tokenizer, vocabulary_of

LOOKAHEAD = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = json.dumps({"name": "Ada Lovelace", "age": 36, "tags": ["math", "engine", "poetry", "x y z"]})
PROSE = "the quick brown fox jumps over the lazy dog and so on"
CASES = {
    "schema": (Language("json_schema", json.dumps(SCHEMA)), JSON),
    "any JSON": (Language("json_schema", "{}"), JSON),
    "[a-z ]{1,200}": (Language("regex", "[a-z ]{1,200}"), PROSE),
    "expressions": (
        Language("lark", 'start: expr\nexpr: NUM | "(" expr ("+" | "*") expr ")"\nNUM: /[0-9]+/'),
        "((12+3)*((4+5)*66))",
    ),
}


def millis(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def rows(grammars: SessionGrammars, law: LawParams, tokens: Int32Array) -> list[float]:
    """Milliseconds a row of each round of a new session: blocks of LOOKAHEAD of which half is kept."""
    state = grammars.open(law)
    assert state is not None
    bases = range(0, len(tokens) - LOOKAHEAD, LOOKAHEAD // 2)
    path = [(tokens[: base + LOOKAHEAD], base) for base in bases]
    return [millis(lambda one=one: state.masks(*one)) / (LOOKAHEAD + 1) for one in path]  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    tokenizer = load_tokenizer(parser.parse_args().model)
    torch.set_num_threads(1)
    size, stop = vocabulary_of(tokenizer).size, tokenizer.eos_token_id
    grammars = SessionGrammars(tokenizer, size)
    print(f"{size} tokens; tables {millis(grammars.prepare):.0f} ms")
    for name, (language, text) in CASES.items():
        law = LawParams(grammar=language, stop_token_ids=(stop,))
        compiled = millis(lambda law=law: grammars.open(law))  # type: ignore[misc]
        tokens = np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32)
        cold, warm = (np.array(rows(grammars, law, tokens)) for _ in range(2))
        print(
            f"{name}: compile {compiled:.1f} ms; ms a row first session {cold.mean():.3f} (max {cold.max():.3f}), "
            f"second {warm.mean():.3f} (max {warm.max():.3f})"
        )
    state = grammars.open(LawParams(grammar=CASES["schema"][0], stop_token_ids=(stop,)))
    assert state is not None
    masks = list(enumerate(state.masks(np.empty(0, np.int32), 0).repeat(LOOKAHEAD + 1, axis=0)))
    scores = torch.randn(LOOKAHEAD + 1, size)
    forbid(scores, masks)
    applied = millis(lambda: [forbid(scores, masks) for _ in range(20)]) / 20 / len(masks)
    print(f"applying a mask: {applied:.3f} ms a row")


if __name__ == "__main__":
    main()
