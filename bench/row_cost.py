"""What law, noise and rows cost the target beside the pass that made the logits.

    python -m bench.row_cost [--model MODEL] [--large]

Measures one forward pass over `batch` blocks and then, from its logits, the rows of every acceptance rule, as the
target service makes them; the best of the repeats counts, which other load disturbs least. Exits with 1 when
a rule costs more than its limit: 10 % of the pass of the demo target (vocabulary 49k), 4 % of that of a model of
1.5B parameters (`--large`: vocabulary 152k, random weights, 7 GB of memory). Laws with top-p sort the vocabulary; their
cost is shown beside the limit and not held to it.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from outrider.law.answer import Question, answer
from outrider.law.draft import truncate
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.law.sparse import Int32Array
from outrider.lm.engine import Engine, Segment, SequenceState
from outrider.lm.load import EngineOptions, build_engine, load_engine
from outrider.lm.tokenizer import Vocabulary, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
LAW_TOP = 32
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
DEMO_LIMIT, LARGE_LIMIT = 10.0, 4.0
LARGE = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """Laws that a session may ask for, and which rows its rule needs."""

    rule: str
    params: LawParams
    support: bool
    limited: bool = True


CASES = [
    Case("greedy", LawParams(temperature=0.0), support=False),
    Case("coupled", LawParams(temperature=0.8), support=False),
    Case("ratio, block", LawParams(temperature=0.8), support=True),
    Case("coupled, top-p 0.95", LawParams(temperature=0.8, top_p=0.95), support=False, limited=False),
    Case("ratio, block, top-p 0.95", LawParams(temperature=0.8, top_p=0.95), support=True, limited=False),
]


@dataclass(frozen=True)
class Result:
    """The best times in milliseconds."""

    batch: int
    case: Case
    forward: float
    rows: float

    @property
    def percent(self) -> float:
        return 100.0 * self.rows / self.forward


def best_ms(action: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    """The action's shortest time, after one run that warms caches."""
    action()
    times = []
    for _ in range(repeats):
        start = clock()
        action()
        times.append(clock() - start)
    return min(times) * 1e3


class Bench:
    """Blocks of `lookahead` tokens after a context, of many sessions."""

    def __init__(
        self, engine: Engine, text: Int32Array, context: int, lookahead: int, repeats: int, clock: Callable[[], float]
    ) -> None:
        self._engine, self._text, self._context, self._lookahead = engine, text, context, lookahead
        self._repeats, self._clock = repeats, clock
        self._random = np.random.default_rng(7)

    def run(self, batch: int) -> list[Result]:
        """One result per case."""
        texts = [self._tokens(self._context + self._lookahead) for _ in range(batch)]
        sequences = [self._prefilled(text[: self._context - 1]) for text in texts]
        logits = self._pass(texts, sequences)
        forward = best_ms(lambda: self._pass(texts, sequences), self._repeats, self._clock)
        results = []
        for case in CASES:
            blocks = [(rows, self._question(case, rows, text)) for rows, text in zip(logits, texts, strict=True)]
            rows = best_ms(functools.partial(answer, blocks, self._engine.info.vocab_size), self._repeats, self._clock)
            results.append(Result(batch, case, forward, rows))
        for sequence in sequences:
            sequence.free()
        return results

    def _tokens(self, count: int) -> Int32Array:
        """A piece of the text, from a place of its own."""
        start = int(self._random.integers(0, len(self._text) - count))
        return self._text[start : start + count]

    def _prefilled(self, tokens: Int32Array) -> SequenceState:
        sequence = self._engine.open(tokens)
        self._engine.forward([Segment(sequence, tokens[sequence.length :], 0)])
        return sequence

    def _pass(self, texts: list[Int32Array], sequences: list[SequenceState]) -> list[torch.Tensor]:
        """The pass of a round: the last committed token and the block."""
        start = self._context - 1
        for sequence in sequences:
            sequence.truncate(start)
        return self._engine.forward(
            [
                Segment(sequence, text[start:], len(text) - start)
                for sequence, text in zip(sequences, texts, strict=True)
            ]
        )

    def _question(self, case: Case, logits: torch.Tensor, tokens: Int32Array) -> Question:
        noise = RoundNoise(int(self._random.integers(1 << 62)), self._context)
        support = None
        if case.support:
            rows = truncate((logits[:-1].float() * 0.9).softmax(dim=1), LAW_TOP)
            sizes = np.array([len(ids) for ids, _ in rows], dtype=np.int32)
            support = sizes, np.concatenate([ids for ids, _ in rows])
        return Question(case.params, noise, tokens, support)


def large_engine() -> Engine:
    """A model of 1.5B parameters in bfloat16 with random weights."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    model = AutoModelForCausalLM.from_config(Qwen2Config(**LARGE), dtype=torch.bfloat16).eval()
    size = int(LARGE["vocab_size"])
    vocabulary = Vocabulary(size, "random", bytes(4 * size))
    options = EngineOptions(context_length=1024, kv_pages=16 * 64)
    return build_engine("random 1.5B", model, vocabulary, options, lambda _fraction, _what: None)


def demo_engine(model: str) -> Engine:
    if not model:
        from outrider.cli.weights import fetch

        model = f"gguf:{fetch()}"
    return load_engine(model, EngineOptions(context_length=1024, kv_pages=16 * 64))


def text_for(engine: Engine, options: argparse.Namespace) -> Int32Array:
    """What a model of language reads: the documentation. Laws after random tokens would be flat as no text's are."""
    size = engine.info.vocab_size
    if options.large or options.smoke:
        return np.random.default_rng(3).integers(0, size, 20_000).astype(np.int32)
    pages = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))]
    ids = load_tokenizer(engine.info.model_id).encode("\n".join(pages), add_special_tokens=False)
    return np.array(ids, dtype=np.int32)


def report(title: str, engine: Engine, results: Sequence[Result], limit: float) -> bool:
    """Prints the table; whether every rule keeps within the limit."""
    print(
        f"{title}: {engine.info.model_id}, vocabulary {engine.info.vocab_size}, {engine.info.dtype}, limit {limit:g} %"
    )
    print(f"{'batch':>5}  {'rule':<26} {'pass ms':>9} {'rows ms':>9} {'%':>6}")
    for result in results:
        times = f"{result.forward:>9.2f} {result.rows:>9.3f} {result.percent:>6.2f}"
        print(f"{result.batch:>5}  {result.case.rule:<26} {times}{'' if result.case.limited else '  (not limited)'}")
    missed = [result for result in results if result.case.limited and result.percent > limit]
    for result in missed:
        print(f"MISSED: batch {result.batch}, {result.case.rule}: {result.percent:.2f} % is above {limit:g} %")
    return not missed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="MODEL in the demo target's place")
    parser.add_argument("--large", action="store_true", help="the model of 1.5B parameters instead")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0 leaves them")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine, with --threads 1")
    parser.add_argument("--limit", type=float, help="per cent of the pass; by default the model's own")
    parser.add_argument("--smoke", action="store_true", help="a synthetic model, few repeats: shows that this runs")
    options = parser.parse_args(arguments)
    if options.threads or options.smoke:
        torch.set_num_threads(options.threads or 1)
    if options.smoke:
        engine = load_engine("synthetic:vocab_size=3000,order=1,pass_ms=100,context_length=1024")
        options.batch, options.repeats, options.context = [1, 2], 3, 32
    else:
        engine = large_engine() if options.large else demo_engine(options.model)
    limit = options.limit if options.limit is not None else LARGE_LIMIT if options.large else DEMO_LIMIT
    with torch.inference_mode():
        bench = Bench(
            engine,
            text_for(engine, options),
            options.context,
            options.lookahead,
            options.repeats,
            CLOCKS[options.clock],
        )
        results = [result for batch in options.batch for result in bench.run(batch)]
    return 0 if report("large" if options.large else "demo", engine, results, limit) else 1


if __name__ == "__main__":
    sys.exit(main())
