"""What a distilled draft is worth: tokens a pass on questions that are new to it, and what a step of it costs.

    python -m bench.draft_worth [--target MODEL --draft DIRECTORY] [--threads N]

The target writes greedy answers to questions of the kinds that its draft learned from, but none that it learned from:
whole questions that are held out, and others that the target makes up now. The draft reads them, and each round through
an answer gives as many tokens as its greedy block would have had accepted, and one. Then both engines take steps in
turn, after a context of 256. Without options the demo's pair is measured. Prints two figures last and exits with 1 when
one misses its goal: tokens a pass at lookahead 4, at least 2.2; a draft step over a target pass of one position, at
most 0.1.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.progress import Progress

from bench.made_model import tiny_model
from outrider.cli.demo import demo_draft
from outrider.cli.run import told
from outrider.cli.weights import fetch
from outrider.distill.acceptance import rounds_of
from outrider.distill.corpus import CorpusOptions
from outrider.distill.openings import Openings
from outrider.distill.run import DistillOptions, distill
from outrider.distill.shard import ScoredText
from outrider.distill.target import Target
from outrider.distill.writer import Writer, WriterOptions
from outrider.lm.engine import Engine, Segment
from outrider.lm.load import EngineOptions, load_engine

TOKENS_GOAL, STEP_GOAL = 2.2, 0.1
LOOKAHEAD, CONTEXT, STEPS = 4, 256, 40
# Of the openings; distill draws with others.
_SEED = 7_000_000_000


def answers(target: str, dtype: str, texts: int, longest: int) -> list[ScoredText]:
    """Greedy ones to new questions."""
    teacher = Target.load(target, dtype, torch.device("cpu"), lambda _part, _what: None)
    rng = np.random.default_rng(_SEED)
    openings = Openings(teacher.vocabulary.tokenizer, teacher.vocabulary.size).draw(texts, rng, held_out=True)
    writer = Writer(teacher, WriterOptions(answer_tokens=longest, temperatures=(0.0,)))
    with Progress(transient=True) as progress:
        task = progress.add_task("writing answers", total=texts)
        return writer.write(openings, rng, lambda done: progress.advance(task, done))


def tokens_per_pass(draft: Engine, texts: Sequence[ScoredText]) -> tuple[float, int]:
    """(tokens a pass, rounds)"""
    rounds: list[int] = []
    for text in texts:
        sequence = draft.open(text.tokens[:1])
        fed = text.tokens[sequence.length : -1]
        (logits,) = draft.forward([Segment(sequence, fed, len(fed))])
        sequence.free()
        right = logits.float().argmax(1).numpy() == text.tokens[-len(fed) :]
        rounds += rounds_of(right[None, -answer_length(text) :], LOOKAHEAD)
    return 1 + float(np.mean(rounds)), len(rounds)


def answer_length(text: ScoredText) -> int:
    """Laws in the last unbroken run."""
    scored = text.scored[:-1]
    gaps = np.flatnonzero(~scored)
    return len(scored) - (int(gaps[-1]) + 1 if len(gaps) else 0)


def step_costs(target: Engine, draft: Engine) -> tuple[float, float, float]:
    """Median milliseconds of a draft step, and of a target pass over one position and over a block."""
    tokens = np.arange(CONTEXT, dtype=np.int32) % min(target.info.vocab_size, draft.info.vocab_size)
    sequences = {}
    for engine in (target, draft):
        sequences[id(engine)] = sequence = engine.open(tokens)
        engine.forward([Segment(sequence, tokens[sequence.length :], 1)])

    def timed(engine: Engine, positions: int) -> float:
        sequence, began = sequences[id(engine)], time.perf_counter()
        engine.forward([Segment(sequence, tokens[:positions], positions)])
        seconds = time.perf_counter() - began
        sequence.truncate(CONTEXT)
        return 1e3 * seconds

    rounds = [
        ([timed(draft, 1) for _ in range(LOOKAHEAD)], timed(target, LOOKAHEAD + 1), timed(target, 1))
        for _ in range(STEPS)
    ]
    steps = [step for mine, *_ in rounds for step in mine]
    return median(steps), median(single for *_, single in rounds), median(block for _, block, _ in rounds)


def tiny_pair(directory: str) -> tuple[str, str]:
    """A target of two layers and a draft that learned next to nothing."""
    target, out = tiny_model(directory), Path(directory) / "draft"
    corpus = CorpusOptions(texts=8, held_out=8, writer=WriterOptions(slots=8, turn_tokens=4, answer_tokens=16, k=8))
    options = DistillOptions(layers=1, kept=16, dtype="float32", report_tokens=16, corpus=corpus)
    distill(target, out, out / "work", options, lambda _part, _done, _total, _note="": None)
    return target, str(out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="", help="MODEL")
    parser.add_argument("--draft", default="", help="what `outrider distill` made for it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--tokens-goal", type=float, default=TOKENS_GOAL)
    parser.add_argument("--step-goal", type=float, default=STEP_GOAL)
    parser.add_argument("--smoke", action="store_true", help="a tiny random pair: shows that this runs")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory, told():
        if options.smoke:
            options.target, options.draft = tiny_pair(directory)
            options.dtype, options.texts, options.answer_tokens = "float32", 8, 24
        target = options.target or f"gguf:{fetch()}"
        draft = options.draft or demo_draft(target)
        torch.set_num_threads(options.threads)
        texts = answers(target, options.dtype, options.texts, options.answer_tokens)
        served = EngineOptions(dtype=options.dtype, threads=options.threads, context_length=512, target=target)
        engines = load_engine(target, served), load_engine(draft, served)
        tokens, rounds = tokens_per_pass(engines[1], texts)
        step, single, block = step_costs(*engines)
    print(f"draft step {step:.2f} ms, target pass {single:.2f} ms, over {LOOKAHEAD + 1} positions {block:.2f} ms")
    reached = tokens >= options.tokens_goal, step / single <= options.step_goal
    said = ["" if it else ": MISSED" for it in reached]
    print(f"tokens per pass: {tokens:.2f} in {rounds} rounds, goal {options.tokens_goal:g}{said[0]}")
    print(f"draft step / target pass: {step / single:.3f}, goal {options.step_goal:g}{said[1]}")
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
