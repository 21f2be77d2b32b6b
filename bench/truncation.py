"""What it costs in accepted tokens that the draft draws from its m likeliest tokens only, for every acceptance rule.

The target says texts at temperature 1; along them both models' laws are taken, and acceptance follows in closed form
(acceptance_law.py), so that the rows of the table differ by truncation and by nothing else.

    python -m bench.truncation                     # the demo target and its own first layers as the draft
    python -m bench.truncation --target DIRECTORY --draft DIRECTORY
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bench.acceptance_law import Place, survival_block, survival_coupled, survival_ratio
from outrider.cli.weights import fetch
from outrider.law.draft import point_mass, truncate
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.law.rows import Sample, sample_rows
from outrider.law.sparse import Int32Array
from outrider.law.transforms import RowContext, law_probs
from outrider.lm.engine import Engine, Segment
from outrider.lm.load import EngineOptions, load_engine
from outrider.lm.tokenizer import load_tokenizer

LAW = LawParams(temperature=1.0)
PROMPTS = (
    "Why is the sky blue? Answer in a few sentences.",
    "Tell me a short story about a lighthouse keeper and a lost dog.",
    "Write a Python function that checks whether a number is prime.",
    "Explain to a child how a bicycle stays upright.",
    "List the steps to bake a loaf of bread.",
    "What should a traveller know before a winter visit to Norway?",
    "Summarise the causes of the French Revolution in one paragraph.",
    "Write an e-mail that asks a colleague to review a draft by Friday.",
)
SMOKE = {
    "target": "synthetic:vocab_size=50,seed=3,order=2",
    "draft": "synthetic:vocab_size=50,seed=3,order=2,noise=0.7",
    "tokens": 12,
    "tops": [2, 8, 0],
}


@dataclass(frozen=True)
class Text:
    """A prompt and what the target said after it, with both laws: [said, vocab_size] float32 each."""

    said: Int32Array
    target_probs: torch.Tensor
    draft_probs: torch.Tensor


@dataclass(frozen=True)
class Line:
    """One law of the draft: [texts] means of each figure."""

    name: str
    figures: npt.NDArray[np.float64]  # [texts, len(COLUMNS)]


COLUMNS = ("mass", "1: ratio", "1: coupled", "K: ratio", "K: block", "K: coupled")


def prompt_ids(model: str) -> list[Int32Array]:
    tokenizer = load_tokenizer(model)
    if model.startswith("synthetic:"):
        return [np.arange(index, index + 3, dtype=np.int32) for index in range(4)]
    texts = list(PROMPTS)
    if tokenizer.chat_template:
        texts = [
            str(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": it}], tokenize=False, add_generation_prompt=True
                )
            )
            for it in PROMPTS
        ]
    return [np.array(tokenizer.encode(it, add_special_tokens=False), np.int32) for it in texts]


def say(engine: Engine, prompts: Sequence[Int32Array], tokens: int, seed: int) -> list[Int32Array]:
    """What the target says after each prompt, all in one batch; a text ends before an end-of-sequence token."""
    sequences = [engine.open(prompt) for prompt in prompts]
    told, fresh = [prompt.tolist() for prompt in prompts], list(prompts)
    alive = list(range(len(prompts)))
    while alive and len(told[alive[0]]) - len(prompts[alive[0]]) < tokens:
        rows = engine.forward([Segment(sequences[it], fresh[it][sequences[it].length :], 1) for it in alive])
        probs = law_probs(torch.cat(rows), [RowContext(LAW, fresh[it]) for it in alive], engine.info.vocab_size)
        drawn = sample_rows(probs, [Sample(RoundNoise(seed + it, len(told[it])), 1) for it in alive])
        for it, token in zip(list(alive), np.concatenate(drawn).tolist(), strict=True):
            if token in engine.info.eos_token_ids:
                alive.remove(it)
                continue
            told[it].append(token)
            fresh[it] = np.array(told[it], np.int32)
    for sequence in sequences:
        sequence.free()
    return [np.array(whole[len(prompt) :], np.int32) for whole, prompt in zip(told, prompts, strict=True)]


def laws(engine: Engine, prompt: Int32Array, said: Int32Array) -> torch.Tensor:
    """The law before each token of `said`: [said, vocab_size] float32 on the CPU."""
    whole = np.concatenate([prompt, said[:-1]])
    sequence = engine.open(whole)
    sequence.truncate(min(sequence.length, len(prompt) - 1))
    (logits,) = engine.forward([Segment(sequence, whole[sequence.length :], len(said))])
    sequence.free()
    contexts = [RowContext(LAW, whole[: len(prompt) + index]) for index in range(len(said))]
    return law_probs(logits, contexts, engine.info.vocab_size).cpu()


def places(text: Text, top: int) -> Iterator[Place]:
    """Every position of a text with the draft law cut to its `top` likeliest; 0 cuts nothing, -1 says the argmax."""
    vocab_size = text.draft_probs.shape[1]
    for token, target, draft in zip(text.said.tolist(), text.target_probs, text.draft_probs, strict=True):
        if top < 0:
            ids, probs = point_mass(int(draft.argmax()))
        else:
            ((ids, probs),) = truncate(draft[None], top or vocab_size)
        law, shipped = target.double().numpy(), probs.astype(np.float64)
        yield Place(token, law / law.sum(), ids, shipped / shipped.sum())


def figures(text: Text, top: int, lookahead: int) -> list[float]:
    """The mean of each column over a text: single tokens at every position, blocks at every start."""
    at = list(places(text, top))
    mass = np.mean(
        [float(row[torch.from_numpy(it.token_ids).long()].sum()) for it, row in zip(at, text.draft_probs, strict=True)]
    )
    blocks = [at[start : start + lookahead] for start in range(len(at) - lookahead + 1)]
    kept = [
        np.mean([survival(block).sum() for block in blocks])
        for survival in (survival_ratio, survival_block, survival_coupled)
    ]
    singles = np.mean([it.ratio_rate for it in at]), np.mean([it.coupled_rate for it in at])
    return [float(mass), *map(float, singles), *map(float, kept)]


def name_of(top: int) -> str:
    return "argmax, no law" if top < 0 else f"m = {top}" if top else "full"


def measure(target: Engine, draft: Engine, prompts: Sequence[Int32Array], options: argparse.Namespace) -> list[Line]:
    if target.info.vocab_size != draft.info.vocab_size:
        raise SystemExit("error: the two models have different vocabularies")
    found: dict[int, list[list[float]]] = {top: [] for top in [*options.tops, -1]}
    for prompt, said in zip(prompts, say(target, prompts, options.tokens, options.seed), strict=True):
        if len(said) < options.lookahead:
            continue
        text = Text(said, laws(target, prompt, said), laws(draft, prompt, said))
        for top, rows in found.items():
            rows.append(figures(text, top, options.lookahead))
    return [Line(name_of(top), np.array(rows)) for top, rows in found.items()]


def table(lines: Sequence[Line], lookahead: int) -> str:
    """Means over texts, and how far a mean may be off: the texts differ more than the lines do."""
    heads = [it.replace("K:", f"{lookahead}:") for it in COLUMNS]
    out = [f"{'draft law':<15}" + "".join(f"{it:>12}" for it in heads)]
    out += [f"{it.name:<15}" + "".join(f"{figure:>12.4f}" for figure in it.figures.mean(axis=0)) for it in lines]
    errors = lines[-2].figures.std(axis=0, ddof=1) / np.sqrt(len(lines[-2].figures))
    return "\n".join([*out, f"{'(std. error)':<15}" + "".join(f"{figure:>12.4f}" for figure in errors)])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.truncation", description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="MODEL; the demo's by default")
    parser.add_argument("--draft", help="MODEL; the target's first layers by default")
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 26, 28], help="of the early-exit draft")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=96, help="that each text has at most")
    parser.add_argument("--tops", type=int, nargs="+", default=[8, 16, 32, 64, 0], help="values of m; 0 is full")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="synthetic models, seconds")
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE)
    return options


def main(arguments: Sequence[str] = ()) -> None:
    options = parse(arguments)
    model = options.target or f"gguf:{fetch()}"
    target = load_engine(model, EngineOptions(dtype=options.dtype, threads=options.threads, context_length=1024))
    prompts = prompt_ids(model)
    for layers in [0] if options.draft else options.layers:
        settings = EngineOptions(dtype=options.dtype, threads=options.threads, context_length=1024, layers=layers)
        draft = load_engine(options.draft or model, settings)
        who = options.draft or f"its first {layers} layers"
        lines = measure(target, draft, prompts, options)
        print(f"target {target.info.model_id} ({target.info.dtype}), draft {who}, temperature 1,", end=" ")
        print(f"{len(lines[0].figures)} texts of at most {options.tokens} tokens, lookahead {options.lookahead}")
        print("columns: mass of the draft law kept; chance that one draft token is accepted; accepted tokens a block")
        print(table(lines, options.lookahead), flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
