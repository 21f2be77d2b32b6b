"""`outrider bench`: speculative and plain decoding side by side, and other ways beside them."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.bench.demo_pair import PROPOSERS, demo_drafted, demo_system
from outrider.bench.job import Compared, Job
from outrider.bench.prompts import BUILT_IN, PromptSet, built_in, read_prompts
from outrider.bench.runner import Plan
from outrider.bench.sample import Asked
from outrider.cli.bench_view import BenchView, show
from outrider.cli.generate import ACCEPTANCE, AcceptanceName
from outrider.cli.options import (
    LONGEST_LOOKAHEAD,
    Device,
    Dtype,
    EarlyExit,
    EarlyExitLayers,
    LogLevel,
    ProposerName,
    Threads,
    offered,
)
from outrider.cli.run import Failure, run, told
from outrider.cli.startup import StartupView
from outrider.cli.system import SystemOptions

_NEEDED = ("httpx2", "jinja2", "matplotlib")
_OPENAI = "openai="


def bench(
    address: Annotated[
        str, typer.Option(help="HOST:PORT of a running orchestrator; without it one is started.", metavar="HOST:PORT")
    ] = "",
    target: Annotated[
        str, typer.Option(help="MODEL to start as the target; without it and --address the demo's.", metavar="MODEL")
    ] = "",
    draft: Annotated[str, typer.Option(help="MODEL to start as the draft.", metavar="MODEL")] = "",
    store: Annotated[str, typer.Option(help="Session store of a started system, as for up.", metavar="URL")] = "",
    proposer: Annotated[
        ProposerName | None, typer.Option(help="What makes the blocks; the worker's default without it.")
    ] = None,
    early_exit_layers: EarlyExitLayers = 0,
    early_exit: EarlyExit = "",
    lookahead: Annotated[
        int | None, typer.Option(min=1, max=LONGEST_LOOKAHEAD, help="Longest block; the orchestrator's without it.")
    ] = None,
    acceptance: Annotated[AcceptanceName | None, typer.Option(help="Rule that keeps draft tokens.")] = None,
    dtype: Dtype = "",
    device: Device = "",
    context_length: Annotated[int, typer.Option(min=0, help="Longest sequence in tokens; 0 is the model's own.")] = 0,
    target_threads: Threads = 0,
    draft_threads: Threads = 0,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `prompt` or `messages`, and `set`.", metavar="FILE")
    ] = None,
    prompt_set: Annotated[
        list[str] | None, typer.Option(help=f"Only this set; again for more. Built in: {', '.join(BUILT_IN)}.")
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Requests under way at once, one level after the other.", metavar="N,N,...")
    ] = "1,4,16",
    requests: Annotated[int, typer.Option(min=0, help="Of each run; 0 asks each prompt, and one a place.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each way in each cell.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each answer.")] = 64,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every answer has exactly --max-tokens.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes sampled answers repeatable.")] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="loop, transformers or openai=URL; again for more.", metavar="WAY"),
    ] = None,
    openai_model: Annotated[str, typer.Option(help="Asked for at openai=URL; the first listed without it.")] = "",
    openai_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent to openai=URL.")] = "",
    output: Annotated[Path, typer.Option(help="Directory for report.json and report.html.")] = Path("bench-report"),
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one answer may take.")] = 600.0,
) -> None:
    """Measure speculative beside plain decoding, in turns and in one run, and write a report.

    Measures a running system (--address), or starts one: of --target and --draft as `outrider up` does, or the demo's.
    """
    with told():
        _check_output(output)
        chosen = _sets(prompts, prompt_set or [])
        asked = Asked(max_tokens, ignore_eos, temperature, seed)
        compared = _compared(compare or [], asked, address=address, model=openai_model, key=openai_key)
        job = Job(
            plan=Plan(chosen, _levels(concurrency), repeats, requests, max_tokens),
            asked=asked,
            address=address,
            lookahead=lookahead,
            proposer=proposer,
            acceptance=ACCEPTANCE[acceptance] if acceptance else None,
            compared=compared,
            seconds=timeout,
        )
        if address and (target or draft):
            raise Failure("--address measures a running system, --target and --draft start one: choose")
        if not address:
            started = SystemOptions(
                target=target,
                draft=draft or target,
                store=store,
                lookahead=lookahead,
                proposers=offered([proposer or ProposerName.model]),
                early_exit_layers=early_exit_layers,
                early_exit=early_exit,
                dtype=dtype,
                device=device,
                context_length=context_length,
                target_threads=target_threads,
                draft_threads=draft_threads,
                port=0,
                log_level=LogLevel.info.value,
            )
            job = _own_pair(job, started, draft) if target else _demo_pair(job, started)
    run(_bench(job, output), farewell="interrupted: everything that was started has ended, and no report was written")


def _own_pair(job: Job, started: SystemOptions, draft: str) -> Job:
    """With the models that were named. Raises Failure when one is missing."""
    if ProposerName.model in offered([job.proposer or ProposerName.model]) and not draft:
        raise Failure("the proposer `model` needs a model: give --draft, or another --proposer")
    return replace(job, system=started, proposer=job.proposer or ProposerName.model)


def _demo_pair(job: Job, started: SystemOptions) -> Job:
    """With the demo's models, and its drafts where none is chosen."""
    pair = demo_system()
    system = replace(
        started,
        target=pair.target,
        draft=pair.draft,
        proposers=pair.proposers,
        early_exit_layers=started.early_exit_layers or (0 if started.early_exit else pair.early_exit_layers),
        dtype=started.dtype or pair.dtype,
    )
    if job.proposer is not None:
        return replace(job, system=system)
    return replace(job, system=system, proposer=PROPOSERS[0], drafted=demo_drafted(job.lookahead))


def _levels(text: str) -> list[int]:
    """ "1,4" as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise Failure(f"--concurrency {text!r}: numbers of 1 or more are expected, separated by commas")
    return list(dict.fromkeys(int(part) for part in parts))


def _sets(path: Path | None, names: list[str]) -> list[PromptSet]:
    """The built-in sets or those of a file; of these the named ones."""
    sets = read_prompts(path) if path else built_in()
    known = [each.name for each in sets]
    for name in names:
        if name not in known:
            raise Failure(f"there is no prompt set {name!r}, only {', '.join(known)}")
    return [each for each in sets if not names or each.name in names]


def _compared(ways: list[str], asked: Asked, *, address: str, model: str, key: str) -> Compared:
    unknown = [way for way in ways if way not in ("loop", "transformers") and not way.startswith(_OPENAI)]
    if unknown:
        raise Failure(f"--compare {unknown[0]!r} is none of loop, transformers and openai=URL")
    if address and ("loop" in ways or "transformers" in ways):
        raise Failure("--compare loop and transformers load the models themselves: name them instead of --address")
    if "loop" in ways and asked.temperature > 0:
        raise Failure("--compare loop decodes greedily: leave --temperature at 0")
    urls = dict.fromkeys(way.removeprefix(_OPENAI) for way in ways if way.startswith(_OPENAI))
    return Compared("loop" in ways, "transformers" in ways, tuple(urls), model, key)


def _check_output(output: Path) -> None:
    """Before anything is measured: whether the report can be written afterwards, and what writes it is there."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise Failure(f"{' and '.join(missing)} cannot be imported: install outrider[bench]")
    above = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise Failure(f"cannot write a report to {output}: {above} is no directory that can be written")


async def _bench(job: Job, output: Path) -> None:
    # Here, because other commands must not wait for what these bring along.
    from outrider.bench.measuring import run_job
    from outrider.bench.page import page

    console = Console(stderr=True)
    with BenchView(console) as view:
        report = await run_job(job, StartupView(console, logs=False), view.begin, view.run)
    written = _write(output, {"report.json": report.model_dump_json(indent=2) + "\n", "report.html": page(report)})
    show(report)
    print(f"written: {', '.join(written)}")


def _write(output: Path, files: dict[str, str]) -> list[str]:
    """Writes the files; returns their names. Raises Failure."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (output / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot write the report to {output}: {error.strerror}") from None
    return [str(output / name) for name in files]
