"""What another vocabulary costs a draft: how much is accepted, by rule and by way of translation.

    python -m bench.vocabularies [--prompts N --tokens N --lookahead K] [--size N] [--draft MODEL]

The target is the demo's. Its drafts: itself, which has every token of a greedy block accepted; itself again with a
tokenizer of `--size` tokens (the first ones of its own and their rows of embedding and head: the same model, which has
to spell in smaller tokens than it was trained with); and `--draft MODEL`, any other. Prints a table of accepted over
drafted tokens, tokens a target pass, and draft passes a round, and JSON with `--json FILE`.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draft_service.config import DraftConfig, TranslationWay
from draft_service.loading import translated
from outrider.cli.weights import fetch
from outrider.lm.engine import Engine
from outrider.lm.load import EngineOptions, load_engine
from outrider.lm.quiet import quiet
from outrider.lm.tokenizer import load_tokenizer
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_GREEDY,
    ACCEPTANCE_RATIO,
    Acceptance,
    GenerateRequest,
)
from tests.harness.grid import PROMPTS, chat_tokens, load_reference, save
from tests.harness.orchestrator import Generation, ask, start_orchestrator
from tests.harness.workers import start_draft, start_target

CONTEXT = 512
RULES = {"greedy": ACCEPTANCE_GREEDY, "coupled": ACCEPTANCE_COUPLED, "ratio": ACCEPTANCE_RATIO}
WAYS = {"greedy": ("string", "intersection"), "coupled": ("string", "intersection"), "ratio": ("intersection",)}
console = Console()


@dataclass(frozen=True)
class Cell:
    """What one draft gave by one rule and one way."""

    draft: str
    rule: str
    way: str
    drafted: int
    accepted: int
    tokens: int
    passes: int

    @property
    def accepted_share(self) -> float:
        """Of the drafted tokens."""
        return self.accepted / max(1, self.drafted)

    @property
    def tokens_a_pass(self) -> float:
        """Of the target."""
        return self.tokens / self.passes


def with_fewer_tokens(reference: PreTrainedModel, model: str, size: int, directory: Path) -> str:
    """The model with the first `size` tokens of its byte-level BPE; returns its MODEL."""
    tokenizer = load_tokenizer(model)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = {token: index for token, index in state["model"]["vocab"].items() if index < size}
    merges = (merge if isinstance(merge, list) else merge.split(" ") for merge in state["model"]["merges"])
    kept = [list(pair) for pair in merges if {*pair, "".join(pair)} <= vocab.keys()]
    state["model"] |= {"vocab": vocab, "merges": kept}
    backend = Tokenizer.from_str(json.dumps(state))
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos).save_pretrained(directory)  # type: ignore[no-untyped-call]
    with quiet(lambda _fraction, _what: None):
        reference.resize_token_embeddings(size, mean_resizing=False)
        reference.save_pretrained(directory)
    return str(directory)


async def main(options: argparse.Namespace) -> list[Cell]:
    """All cells, as they come."""
    weights = fetch()
    with tempfile.TemporaryDirectory() as directory:
        console.print("loading")
        reference = load_reference(weights)
        model = save(weights, reference, Path(directory) / "target")
        smaller = with_fewer_tokens(reference, model, options.size, Path(directory) / "smaller")
        del reference
        drafts = {"itself": model, f"itself, {options.size} tokens": smaller}
        drafts |= {options.draft: options.draft} if options.draft else {}
        prompts = chat_tokens(load_tokenizer(model), PROMPTS[:: len(PROMPTS) // options.prompts][: options.prompts])
        cells: list[Cell] = []
        async with start_target(lambda: load(model)) as target:
            for name, draft in drafts.items():
                kept = cache(lambda draft=draft: load(draft))
                for way in ("string", "intersection") if name != "itself" else ("none",):
                    config = DraftConfig(model=draft, target_model=model, translation=_way(way))
                    engine = partial(_translated, kept, config)
                    cells += await measure(options, target.address, name, engine, config, prompts)
        return cells


def load(model: str) -> Engine:
    """In the thread that runs the engine."""
    return load_engine(model, EngineOptions(dtype="bfloat16", context_length=CONTEXT, threads=os.cpu_count() or 1))


def _way(name: str) -> TranslationWay:
    return TranslationWay.OFF if name == "none" else TranslationWay(name)


def _translated(kept: Callable[[], Engine], config: DraftConfig) -> Engine:
    return translated(kept(), config)


async def measure(
    options: argparse.Namespace,
    target: str,
    name: str,
    engine: Callable[[], Engine],
    config: DraftConfig,
    prompts: Sequence[Sequence[int]],
) -> list[Cell]:
    """The cells of one draft and way; all prompts at once."""
    cells, way = [], config.translation.value.replace("off", "none")
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(start_draft(engine, translation=config.translation, ahead_blocks=0))
        orchestrator = await stack.enter_async_context(
            start_orchestrator([target], [worker.address], tokenizer=config.target_model, draft_timeout=60.0)
        )
        for rule, acceptance in RULES.items():
            if way not in ("none", *WAYS[rule]):
                continue
            requests = [request(prompt, options, acceptance) for prompt in prompts]
            calls = (orchestrator.generate(one, deadline=3600.0) for one in requests)
            cells.append(cell_of(name, rule, way, await asyncio.gather(*calls)))
            console.print(cells[-1], highlight=False)
    return cells


def request(prompt: Sequence[int], options: argparse.Namespace, rule: Acceptance.ValueType) -> GenerateRequest:
    """Temperature 0 where the rule is greedy, 1 elsewhere; a seed of its own for each prompt's length."""
    temperature = 0.0 if rule == ACCEPTANCE_GREEDY else 1.0
    settings = {"max_tokens": options.tokens, "lookahead": options.lookahead, "seed": len(prompt)}
    return ask(prompt, acceptance=rule, temperature=temperature, **settings)


def cell_of(name: str, rule: str, way: str, generations: Sequence[Generation]) -> Cell:
    """Sums; the first round of each has no block and is left out."""
    rounds = [each for one in generations for each in one.rounds if each.drafted]
    drafted, accepted = sum(each.drafted for each in rounds), sum(each.accepted for each in rounds)
    return Cell(name, rule, way, drafted, accepted, accepted + len(rounds), len(rounds))


def table_of(cells: Sequence[Cell]) -> Table:
    """For people."""
    table = Table("draft", "rule", "way", "drafted", "accepted", "tokens a pass")
    for cell in cells:
        share = f"{cell.accepted_share:.0%}"
        table.add_row(cell.draft, cell.rule, cell.way, str(cell.drafted), share, f"{cell.tokens_a_pass:.2f}")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10, help="how many prompts")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each output")
    parser.add_argument("--lookahead", type=int, default=4, help="tokens of a block")
    parser.add_argument("--size", type=int, default=16_384, help="tokens of the smaller vocabulary")
    parser.add_argument("--draft", default="", help="MODEL of one more draft")
    parser.add_argument("--json", type=Path, help="where the cells go")
    flags = parser.parse_args()
    measured = asyncio.run(main(flags))
    console.print(table_of(measured))
    if flags.json:
        flags.json.write_text(json.dumps([asdict(cell) for cell in measured], indent=2))
