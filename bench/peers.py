"""Our speculative and plain decoding beside those of others, on the same pair, in one run, taking turns.

    python -m bench.peers [--target MODEL --draft MODEL] [--openai URL]...

transformers' assisted and plain generation run in this process on the same checkpoints and threads. Any server that
speaks OpenAI's HTTP API can stand beside them: docs/benchmark.md says how to start vLLM's CPU build in an environment
of its own. Prints the table; --output also writes the report of `outrider bench`.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.made_model import tiny_model
from bench.measured import measured
from outrider.bench.demo_pair import PROPOSERS, demo_drafted, demo_system
from outrider.bench.job import Compared, Job
from outrider.bench.page import page
from outrider.bench.prompts import built_in
from outrider.bench.runner import Plan
from outrider.bench.sample import Asked
from outrider.bench.tables import facts, summary_table
from outrider.cli.options import ProposerName
from outrider.cli.run import told
from outrider.cli.system import SystemOptions


def job_of(options: argparse.Namespace) -> Job:
    proposer = ProposerName(options.proposer) if options.proposer else None
    job = Job(
        plan=Plan(built_in(tuple(options.prompts)), (1,), options.repeats, 0, options.tokens),
        asked=Asked(options.tokens),
        lookahead=options.lookahead,
        proposer=proposer,
        compared=Compared(transformers=True, endpoints=tuple(options.openai), openai_model=options.openai_model),
    )
    if not options.target:
        system = demo_system()
        drafted = {} if proposer else demo_drafted(options.lookahead)
        job = replace(job, system=system, proposer=proposer or PROPOSERS[0], drafted=drafted)
    else:
        proposer = proposer or ProposerName.model
        system = SystemOptions(options.target, options.draft or options.target, proposers=(proposer.value,))
        job = replace(job, system=system, proposer=proposer)
    started = replace(
        system,
        lookahead=options.lookahead or system.lookahead,
        dtype=options.dtype or system.dtype,
        target_threads=options.threads,
        draft_threads=options.threads,
        port=0,
    )
    return replace(job, system=started)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="", help="MODEL; the demo's pair without it")
    parser.add_argument("--draft", default="", help="MODEL")
    parser.add_argument("--proposer", choices=("model", "prompt_lookup"), help="what makes the blocks")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--threads", type=int, default=0, help="of each model; 0 is half of the cores")
    parser.add_argument("--lookahead", type=int)
    parser.add_argument("--prompts", nargs="+", default=["chat", "code", "quoting"], help="built-in prompt sets")
    parser.add_argument("--tokens", type=int, default=64, help="most of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--openai", action="append", default=[], help="base URL of an OpenAI-compatible endpoint")
    parser.add_argument("--openai-model", default="", help="asked for there; the first listed without it")
    parser.add_argument("--output", type=Path, help="directory for report.json and report.html")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model: shows that this runs")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        if options.smoke:
            options.target = options.draft = tiny_model(directory)
            options.repeats, options.tokens, options.dtype = 1, 8, "float32"
        with told():
            job = job_of(options)
        report = measured(job)
    for name, value in facts(report):
        print(f"{name:<9} {value}")
    Console(width=200).print(summary_table(report))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "report.json").write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (options.output / "report.html").write_text(page(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
