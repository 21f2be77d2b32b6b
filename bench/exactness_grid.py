"""The demo target in float32 against transformers' `generate`, over the services: layer 5 of exactness.

    python -m bench.exactness_grid

20 prompts (chat, code, many scripts, lists) x 64 tokens x lookahead 1, 2, 4, 8 x three drafts: the target itself, its
early exit, and one that is always wrong. Prints a table; a line for every mismatch, with the margin between the two
largest logits there. Exits with 1 when a mismatch has a margin of 1e-5 or more.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outrider.cli.weights import fetch
from tests.harness.grid import KINDS, LOOKAHEADS, PROMPTS, Case, load_reference, save, start_grid

console = Console()


async def main(tokens: int, prompts: Sequence[int]) -> int:
    weights = fetch()
    console.print("loading")
    reference = load_reference(weights)
    with tempfile.TemporaryDirectory() as directory:
        model = save(weights, reference, Path(directory))
        async with start_grid(model, reference, target=f"gguf:{weights}") as grid:
            for prompt in prompts:
                grid.expected(prompt, tokens)
                console.print(f"generate: prompt {prompt}", highlight=False)
            table = Table(
                "draft", "lookahead", "tokens", "accepted", "identical", "near-ties", "unexplained", "seconds"
            )
            unexplained = 0
            for kind in KINDS:
                for lookahead in LOOKAHEADS:
                    console.print(f"{kind}, lookahead {lookahead}", highlight=False)
                    start = time.perf_counter()
                    cases = await grid.run(kind, lookahead, prompts, tokens)
                    unexplained += add_row(table, kind, lookahead, cases, time.perf_counter() - start)
    console.print(table)
    return 1 if unexplained else 0


def add_row(table: Table, kind: str, lookahead: int, cases: Sequence[Case], seconds: float) -> int:
    """Returns the number of unexplained mismatches, all of which it prints."""
    mismatches = [(case, case.mismatch) for case in cases if case.mismatch is not None]
    for case, mismatch in mismatches:
        console.print(f"{kind}, lookahead {lookahead}, prompt {case.prompt}: {mismatch}", highlight=False)
    generations = [case.generation for case in cases]
    drafted, accepted = sum(one.drafted for one in generations), sum(one.accepted for one in generations)
    excused = sum(mismatch.excused for _, mismatch in mismatches)
    counts = (len(cases) - len(mismatches), excused, len(mismatches) - excused)
    said = sum(len(one.ids) for one in generations)
    table.add_row(kind, *map(str, (lookahead, said, f"{accepted / drafted:.0%}", *counts, f"{seconds:.0f}")))
    return len(mismatches) - excused


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each output")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts")
    flags = parser.parse_args()
    sys.exit(asyncio.run(main(flags.tokens, range(len(PROMPTS))[: flags.prompts])))
