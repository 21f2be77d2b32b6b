"""How often a copy goes on: what a model says after its last tokens stood somewhere before in prompt or answer.

    python -m bench.copied [--temperatures 0 0.7 1] [--answers FILE]

The target answers the prompts of three workloads. Wherever the last tokens of an answer stood before, the index of the
`suffix` proposer says so, with the length of the match. Printed by that length: how often the model then said what was
said there; the chance that it gave to that (what `ratio` accepts of it as a point mass), and what `ratio` would accept
if the continuations that were found were a law, weighed as they are; and last, tokens a pass and tokens verified a pass
of `suffix` and of `prompt_lookup`, played through the answers. --answers keeps the answers for another run.
"""

import argparse
import pickle
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.made_model import tiny_model
from draft_service.proposers.prompt_lookup import lookup
from draft_service.suffix.continuing import Place, continued
from draft_service.suffix.index import MAX_MATCH, SuffixIndex
from outrider.bench.pair import prompt_ids
from outrider.bench.prompts import BUILT_IN, built_in
from outrider.cli.weights import fetch
from outrider.law.sparse import Float32Array, Int32Array
from outrider.lm.engine import Engine, Segment
from outrider.lm.load import EngineOptions, load_engine

# Likeliest tokens that are remembered of each law; the rest has next to nothing.
_TOP = 64
# Lengths of matches that are told apart, each up to the next.
LENGTHS = (2, 3, 4, 6, 8, 12, 16, 32)
# As the proposer weighs places whose match is shorter.
_FADING = 0.5


@dataclass
class Answer:
    """One answer, and the likeliest tokens at each of its places with their probabilities."""

    workload: str
    temperature: float
    prompt: Int32Array
    tokens: list[int] = field(default_factory=list)
    laws: list[tuple[Int32Array, Float32Array]] = field(default_factory=list)

    @property
    def text(self) -> Int32Array:
        return np.array([*self.prompt, *self.tokens], np.int32)


def answers(engine: Engine, temperature: float, longest: int, count: int) -> list[Answer]:
    """To the built-in prompts, all in lockstep."""
    tokenizer = engine.info.tokenizer
    assert tokenizer is not None
    rng = np.random.default_rng(1)
    made = [
        Answer(each.name, temperature, np.array(prompt_ids(tokenizer, prompt), np.int32))
        for each in built_in(BUILT_IN)
        for prompt in each.prompts[:count]
    ]
    running = [(answer, sequence := engine.open(answer.prompt), answer.prompt[sequence.length :]) for answer in made]
    for _ in range(longest):
        rows = engine.forward([Segment(sequence, fed, 1) for _, sequence, fed in running])
        drawn = [(*each[:2], _draw(each[0], row[-1].float(), rng)) for each, row in zip(running, rows, strict=True)]
        for _, sequence, token in drawn:
            if token in engine.info.eos_token_ids:
                sequence.free()
        running = [
            (answer, sequence, np.array([token], np.int32))
            for answer, sequence, token in drawn
            if token not in engine.info.eos_token_ids
        ]
        if not running:
            break
    for _, sequence, _ in running:
        sequence.free()
    return made


def _draw(answer: Answer, logits: torch.Tensor, rng: np.random.Generator) -> int:
    law = torch.softmax(logits / (answer.temperature or 1.0), 0)
    probs = law.double().numpy()
    token = int(rng.choice(len(probs), p=probs / probs.sum())) if answer.temperature else int(logits.argmax())
    top = law.topk(min(_TOP, len(law)))
    answer.tokens.append(token)
    answer.laws.append((top.indices.numpy().astype(np.int32), top.values.numpy()))
    return token


def copies(answer: Answer) -> Iterator[tuple[int, bool, float, float]]:
    """(length of the match, whether the copy went on, its probability, what is accepted of the continuations' law)."""
    index, begins = SuffixIndex(), len(answer.prompt)
    text = answer.text
    index.extend(text[: begins + 1])
    for at in range(begins + 1, len(text)):
        places = index.find(index.tokens[-MAX_MATCH:], len(index) - 1)
        if places:
            longest = max(matched for matched, _ in places)
            votes: Counter[int] = Counter()
            for matched, place in places:
                votes[index.tokens[place + 1]] += _FADING ** (longest - matched)  # type: ignore[assignment]
            law = dict(zip(*(each.tolist() for each in answer.laws[at - begins]), strict=True))
            best, total = votes.most_common(1)[0][0], sum(votes.values())
            shared = sum(min(vote / total, law.get(token, 0.0)) for token, vote in votes.items())
            yield longest, best == text[at], law.get(best, 0.0), shared
        index.extend(text[at : at + 1])


Propose = Callable[[SuffixIndex, int], Sequence[int]]


def suffix(index: SuffixIndex, limit: int) -> Sequence[int]:
    places = index.find(index.tokens[-MAX_MATCH:], len(index) - 1)
    return continued([Place(index.tokens, at + 1, matched) for matched, at in places], index.tokens, limit).tokens


def prompt_lookup(index: SuffixIndex, limit: int) -> Sequence[int]:
    return lookup(np.array(index.tokens, np.int32), limit).tolist()


def played(answer: Answer, propose: Propose, lookahead: int) -> tuple[int, int]:
    """(passes, draft tokens verified) in which the answer would have been written after its first token."""
    index, at, text = SuffixIndex(), len(answer.prompt) + 1, answer.text
    index.extend(text[:at])
    passes = verified = 0
    while at < len(text):
        block = list(propose(index, min(lookahead, len(text) - at)))
        kept = next((n for n, (a, b) in enumerate(zip(block, text[at:], strict=False)) if a != b), len(block))
        kept = min(kept + 1, len(text) - at)
        passes, verified = passes + 1, verified + len(block)
        index.extend(text[at : at + kept])
        at += kept
    return passes, verified


def by_length(told: Sequence[Answer]) -> Table:
    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for title in ("temperature", "match", "places", "went on", "1 - 1.35 m^-1.25", "point mass", "law"):
        made.add_column(title, justify="right")
    for temperature in dict.fromkeys(answer.temperature for answer in told):
        found: dict[int, list[tuple[bool, float, float]]] = defaultdict(list)
        for answer in told:
            for matched, *rest in copies(answer) if answer.temperature == temperature else ():
                found[max(length for length in LENGTHS if length <= matched)].append(tuple(rest))  # type: ignore[arg-type]
        everything = [each for length in LENGTHS for each in found[length]]
        for name, of in [*((f"{length}+", found[length]) for length in LENGTHS), ("all", everything)]:
            if of:
                went, point, law = np.mean(np.array(of, float), axis=0)
                fitted = "" if name == "all" else f"{1 - 1.35 * int(name[:-1]) ** -1.25:.2f}"
                shares = f"{went:.2f}", fitted, f"{point:.3f}", f"{law:.3f}"
                made.add_row(f"{temperature:g}", name, str(len(of)), *shares)
    return made


def by_workload(told: Sequence[Answer], lookaheads: Sequence[int]) -> Table:
    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for title in ("temperature", "workload", "lookahead", "suffix", "verified", "prompt_lookup", "verified"):
        made.add_column(title, justify="right")
    for temperature, workload in dict.fromkeys((answer.temperature, answer.workload) for answer in told):
        mine = [each for each in told if (each.temperature, each.workload) == (temperature, workload)]
        for lookahead in lookaheads:
            numbers = []
            for propose in (suffix, prompt_lookup):
                passes, verified = np.sum([played(each, propose, lookahead) for each in mine], axis=0)
                tokens = sum(len(each.tokens) - 1 for each in mine)
                numbers += [f"{tokens / passes:.2f}", f"{verified / passes:.2f}"]
            made.add_row(f"{temperature:g}", workload, str(lookahead), *numbers)
    return made


def told_by(options: argparse.Namespace) -> list[Answer]:
    if options.answers and options.answers.exists():
        return pickle.loads(options.answers.read_bytes())  # type: ignore[no-any-return]
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        target = tiny_model(directory) if options.smoke else options.target or f"gguf:{fetch()}"
        dtype = "float32" if options.smoke else options.dtype
        engine = load_engine(target, EngineOptions(dtype=dtype, threads=options.threads))
        counts = options.tokens, options.prompts
        told = [one for temperature in options.temperatures for one in answers(engine, temperature, *counts)]
    if options.answers:
        options.answers.write_bytes(pickle.dumps(told))
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="", help="MODEL; the demo's target without it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--tokens", type=int, default=160, help="most of each answer")
    parser.add_argument("--prompts", type=int, default=99, help="most of each workload")
    parser.add_argument("--lookaheads", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--answers", type=Path, help="file of answers, written where it is not there")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model: shows that this runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.tokens, options.prompts = 60, 1
    told = told_by(options)
    console = Console(width=110)
    console.print(by_length(told))
    console.print(by_workload(told, options.lookaheads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
