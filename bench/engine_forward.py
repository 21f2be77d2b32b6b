"""What the engine's ragged forward costs beside a bare dense one, and how near both come to the memory's speed.

    python -m bench.engine_forward [--model MODEL] [--made] [--device cuda [--attention gather] [--graphs off]]

A pass over `batch` sessions with `positions` new ones each, after a context of 512. *Bare* is a plain loop over the
same packed weights with a dense cache of exactly the right length for every case: no pages, no sequences, no checks;
its attention is the faster of two products and torch's fused kernel. Both take turns, and the median of the
ratios counts. At one position a pass is reading its weights once: their bytes over the time stand beside what this
machine reaches when it only reads as many bytes. Without options the demo's target and a random model of 0.4B
parameters are measured. Exits with 1 when a ratio is above its limit, 1.05 at one session and 1.15 at more. On
a GPU both passes are waited for.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from bench.made_model import made_model, tiny_model
from outrider.cli.weights import fetch
from outrider.lm.causal_lm import CausalLm
from outrider.lm.engine import Segment, SequenceState
from outrider.lm.fused import FusedDecoder
from outrider.lm.load import EngineOptions, load_engine

SINGLE_LIMIT, LIMIT = 1.05, 1.15
# Between two paths that round in another order, L2 over the logits.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


class Bare:
    """The loop. Reaches into the engine for its weights and, once, for the context's keys and values."""

    def __init__(self, engine: CausalLm, sequences: Sequence[SequenceState], context: int, positions: int) -> None:
        self._decoder = cast(FusedDecoder, engine.run)
        first, device = self._decoder.layers[0], engine.device
        self._heads, self._kv_heads, self._dim = first.heads, first.kv_heads, first.dim
        self._batch, self._context, self._positions = len(sequences), context, positions
        self._cache = [self._dense(engine, layer, sequences) for layer in range(len(self._decoder.layers))]
        seen = torch.ones(positions, context + positions, dtype=torch.bool).tril_(context)
        mask = torch.zeros(seen.shape, dtype=self._cache[0].dtype).masked_fill_(~seen, float("-inf")).to(device)
        self._mask = mask.repeat(self._heads // self._kv_heads, 1)  # [group * positions, context + positions]
        self._places = torch.arange(context, context + positions).repeat(self._batch).to(device)

    def _dense(self, engine: CausalLm, layer: int, sequences: Sequence[SequenceState]) -> torch.Tensor:
        """Keys, then values of a layer, [2 * kv_heads * batch, context + positions, dim]."""
        slots = torch.cat([self._slots(engine, sequence) for sequence in sequences]).to(engine.device)
        dense = engine.storage.layers[layer][:, slots]
        return dense.view(2 * self._kv_heads * self._batch, -1, self._dim)

    def _slots(self, engine: CausalLm, sequence: SequenceState) -> torch.Tensor:
        size = engine._pool.page_size
        pages = torch.tensor(sequence.pages)  # type: ignore[attr-defined]
        return (pages[:, None] * size + torch.arange(size)).flatten()[: self._context + self._positions]

    @torch.inference_mode()
    def run(self, tokens: torch.Tensor, *, products: bool) -> torch.Tensor:
        """Tokens [batch * positions] to logits [batch * positions, vocab]."""
        decoder, heads, kv_heads, dim = self._decoder, self._heads, self._kv_heads, self._dim
        batch, count, group = self._batch, self._positions, heads // kv_heads
        hidden = decoder.embeddings(tokens)
        first = decoder.layers[0]
        cos, sin = first.rotations(*(it[:, None] for it in decoder.factors(hidden, self._places)))
        for layer, cache in zip(decoder.layers, self._cache, strict=True):
            parts = layer.query_key_value(layer.before_attention(hidden)).view(len(tokens), heads + 2 * kv_heads, dim)
            turned = torch.addcmul(parts * cos, parts.roll(dim // 2, -1), sin)
            new = turned[:, heads:].view(batch, count, 2 * kv_heads, dim).permute(2, 0, 1, 3)
            cache.view(2 * kv_heads, batch, -1, dim)[:, :, self._context :] = new
            query = turned[:, :heads].view(batch, count, kv_heads, group, dim).permute(2, 0, 3, 1, 4)
            query = query.reshape(kv_heads * batch, group * count, dim)
            keys, values = cache.chunk(2)
            if products:
                scores = torch.add(self._mask, torch.bmm(query, keys.transpose(1, 2)), alpha=dim**-0.5)
                attended = torch.bmm(scores.softmax(-1), values)
            else:
                attended = scaled_dot_product_attention(query[None], keys[None], values[None], self._mask)[0]
            attended = attended.view(kv_heads, batch, group, count, dim).permute(1, 3, 0, 2, 4)
            hidden = hidden + layer.output(attended.reshape(len(tokens), heads * dim))
            gate, up = layer.gate_up(layer.before_mlp(hidden)).chunk(2, -1)
            hidden = hidden + layer.down(silu(gate) * up)
        logits: torch.Tensor = decoder.head(decoder.norm(hidden))
        return logits


@dataclass(frozen=True)
class Result:
    """Median seconds, and the median of the ratios."""

    batch: int
    positions: int
    ours: float
    bare: float
    ratio: float


class Bench:
    """Sessions with a context, of which each case takes the first few."""

    def __init__(self, engine: CausalLm, context: int, most: int, room: int, repeats: int) -> None:
        random = np.random.default_rng(0)
        size = (most, context + room)
        self._engine, self._context, self._repeats = engine, context, repeats
        self._texts = random.integers(0, engine.info.vocab_size, size).astype(np.int32)
        self._sequences = [self._prefilled(text[:context]) for text in self._texts]

    def _prefilled(self, tokens: np.ndarray) -> SequenceState:
        sequence = self._engine.open(tokens[:1])
        self._engine.forward([Segment(sequence, tokens, 0)])
        return sequence

    def case(self, batch: int, positions: int) -> Result:
        """Raises SystemExit when the two paths do not compute the same."""
        sequences = self._sequences[:batch]
        new = self._texts[:batch, self._context : self._context + positions]
        tokens = torch.from_numpy(new.astype(np.int64).ravel()).to(self._engine.device)

        def ours() -> torch.Tensor:
            for sequence in sequences:
                sequence.truncate(self._context)
            segments = [Segment(it, text, positions) for it, text in zip(sequences, new, strict=True)]
            return torch.cat(self._engine.forward(segments))

        logits = ours()
        bare = Bare(self._engine, sequences, self._context, positions)
        products, kernel = (lambda: bare.run(tokens, products=True)), (lambda: bare.run(tokens, products=False))
        for each in (products, kernel):
            error = float((each()[:, : logits.shape[1]] - logits).norm() / logits.norm())
            if not error <= TOLERANCE[logits.dtype]:
                raise SystemExit(f"the bare loop computes something else: its logits differ by {error:.2g}")
        return Result(batch, positions, *self._turns(ours, products, kernel))

    def _turns(self, ours: Callable[[], object], *bare: Callable[[], object]) -> tuple[float, float, float]:
        turns = [[seconds(action) for action in (ours, *bare)] for _ in range(self._repeats)]
        mine, *others = zip(*turns, strict=True)
        best = min(others, key=median)
        ratios = [first / second for first, second in zip(mine, best, strict=True)]
        return median(mine), median(best), median(ratios)


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def weight_bytes(engine: CausalLm) -> int:
    """Of the linear layers: what every pass reads."""
    decoder = cast(FusedDecoder, engine.run)
    linears = [decoder.head, *(linear for layer in decoder.layers for linear in layer.linears)]
    return sum(it.in_features * it.out_features for it in linears) * getattr(torch, engine.info.dtype).itemsize


def reading_speed(size: int, repeats: int, device: torch.device) -> float:
    """Bytes a second of reading `size` bytes with torch's threads, or the device: the greatest of the repeats."""
    numbers = torch.ones(size // 4, device=device)
    return size / min(seconds(numbers.sum) for _ in range(repeats + 1))


def report(engine: CausalLm, options: argparse.Namespace) -> bool:
    """Measures one model and prints its table; whether every case keeps within its limit."""
    size, limits = weight_bytes(engine), {True: options.single_limit, False: options.limit}
    speed = reading_speed(size, options.repeats, engine.device)
    name, dtype, threads = engine.info.model_id, engine.info.dtype, torch.get_num_threads()
    print(f"{name}: {dtype}, {threads} threads, {size / 1e6:.0f} MB of weights, context {options.context}")
    print(f"reading as many bytes: {speed / 1e9:.1f} GB/s, {1e3 * size / speed:.2f} ms")
    print(f"{'batch':>5} {'positions':>9} {'ours ms':>9} {'bare ms':>9} {'ratio':>6} {'GB/s':>6} {'of reading':>10}")
    bench = Bench(engine, options.context, max(options.batch), max(options.positions), options.repeats)
    missed = []
    for batch in options.batch:
        for positions in options.positions:
            it = bench.case(batch, positions)
            reached = size / it.ours
            print(
                f"{batch:>5} {positions:>9} {1e3 * it.ours:>9.2f} {1e3 * it.bare:>9.2f} {it.ratio:>6.3f} "
                f"{reached / 1e9:>6.1f} {reached / speed:>10.0%}",
                flush=True,
            )
            if it.ratio > limits[batch == 1]:
                missed.append(f"batch {batch}, {positions} positions: {it.ratio:.3f} is above {limits[batch == 1]:g}")
    for line in missed:
        print(f"MISSED: {line}")
    return not missed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="MODEL in the demo target's place")
    parser.add_argument("--made", action="store_true", help="only the random model of 0.4B parameters")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--positions", type=int, nargs="+", default=[1, 5, 9])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0 leaves them")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--attention", default="auto", help="auto, gather or flex")
    parser.add_argument("--graphs", default="auto", help="auto, on or off")
    parser.add_argument("--single-limit", type=float, default=SINGLE_LIMIT, help="greatest ratio at one session")
    parser.add_argument("--limit", type=float, default=LIMIT, help="greatest ratio at more")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model: shows that this runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.dtype, options.batch, options.context, options.repeats = "float32", [1, 2], 32, 2
        options.threads = options.threads or 1
    kept = True
    with tempfile.TemporaryDirectory() as directory:
        if options.smoke:
            models = [tiny_model(directory)]
        elif options.model:
            models = [options.model]
        else:
            models = [made_model(directory)] if options.made else [f"gguf:{fetch()}", made_model(directory)]
        for model in models:
            pages = max(options.batch) * -(-(options.context + max(options.positions)) // 16)
            settings = EngineOptions(
                dtype=options.dtype,
                device=options.device,
                threads=options.threads,
                kv_pages=pages + 4,
                attention=options.attention,
                graphs=options.graphs,
            )
            engine = load_engine(model, settings)
            assert isinstance(engine, CausalLm)
            kept &= report(engine, options)
            del engine
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
