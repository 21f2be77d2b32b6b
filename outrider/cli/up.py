"""`outrider up`: the whole system on one machine, kept running."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.drafts import shipped_draft
from outrider.cli.options import (
    DEFAULT_ADDRESS,
    DEFAULT_PORT,
    Device,
    Dtype,
    Eagle,
    EarlyExit,
    EarlyExitLayers,
    LogLevel,
    Lookahead,
    MeasureThreads,
    Medusa,
    ProposerName,
    Threads,
    offered,
)
from outrider.cli.report import counted
from outrider.cli.run import run
from outrider.cli.startup import StartupView
from outrider.cli.system import System, SystemOptions, running_system
from outrider.cli.threads import with_threads
from outrider.net.address import is_loopback


def up(
    target: Annotated[str, typer.Option(help="MODEL that decides what is said.", metavar="MODEL")],
    draft: Annotated[
        str,
        typer.Option(
            help="MODEL that proposes where `model` is a proposer; the one in models/ for the target.",
            metavar="MODEL",
        ),
    ] = "",
    store: Annotated[
        str,
        typer.Option(
            help="Session store, redis://... or memory://; without it one is started.",
            metavar="URL",
            envvar="OUTRIDER_STORE",
        ),
    ] = "",
    lookahead: Lookahead = None,
    proposer: Annotated[
        list[ProposerName] | None,
        typer.Option(help="What makes the blocks; again for more: sessions get what pays; auto: the model and copies."),
    ] = None,
    early_exit_layers: EarlyExitLayers = 0,
    early_exit: EarlyExit = "",
    medusa: Medusa = "",
    eagle: Eagle = "",
    ahead_blocks: Annotated[
        int, typer.Option(min=0, max=8, help="Blocks drafted ahead; takes cores from the target on one machine.")
    ] = 0,
    dtype: Dtype = "",
    device: Device = "",
    context_length: Annotated[int, typer.Option(min=0, help="Longest sequence in tokens; 0 is the model's own.")] = 0,
    target_threads: Threads = 0,
    draft_threads: Threads = 0,
    measure_threads: MeasureThreads = True,
    host: Annotated[str, typer.Option(help="Address that the orchestrator listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Its port; 0 takes a free one.")] = DEFAULT_PORT,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe record that the services log.")] = LogLevel.info,
    load_timeout: Annotated[float, typer.Option(min=1, help="Seconds that starting may take.")] = 600.0,
) -> None:
    """Start store, draft worker, target worker and orchestrator, and keep them running until Ctrl-C.

    MODEL is a Hugging Face id, a local directory, gguf:FILE, or synthetic:KEY=VALUE,... (a model without weights).
    """
    proposers = offered(proposer or [ProposerName.model])
    if ProposerName.model.value in proposers and not draft:
        draft = shipped_draft(target)
        if not draft:
            raise typer.BadParameter("the proposer `model` needs one", param_hint="--draft")
    options = SystemOptions(
        target=target,
        draft=draft or target,
        store=store,
        lookahead=lookahead,
        proposers=proposers,
        early_exit_layers=early_exit_layers,
        early_exit=early_exit,
        medusa=medusa,
        eagle=eagle,
        ahead_blocks=ahead_blocks,
        dtype=dtype,
        device=device,
        context_length=context_length,
        target_threads=target_threads,
        draft_threads=draft_threads,
        host=host,
        port=port,
        log_level=log_level.value,
        load_seconds=load_timeout,
    )
    if not is_loopback(host):
        print(f"warning: whoever reaches {host} can use this system, it asks for no token", file=sys.stderr, flush=True)
    run(_up(options, measure=measure_threads), interrupted=0, farewell="stopped")


async def _up(options: SystemOptions, *, measure: bool) -> None:
    options, words = await with_threads(options, measure=measure)
    if words:
        print(words, file=sys.stderr, flush=True)
    async with running_system(options, StartupView(Console(stderr=True), logs=True)) as system:
        _announce(system, options)
        await system.supervisor.until_death()


def _announce(system: System, options: SystemOptions) -> None:
    reasons = {worker.address: worker.reason for worker in system.info.workers if not worker.usable}
    threads = {"target": options.target_threads, "draft": options.draft_threads}
    for name, address in system.addresses.items():
        count = f"  {counted(threads[name], 'thread')}" if name in threads else ""
        unused = f"  not in use: {reasons[address]}" if address in reasons else ""
        print(f"{name:<12} {address}{count}{unused}")
    elsewhere = "" if system.address == DEFAULT_ADDRESS else f" --address {system.address}"
    print(f'ready: outrider generate{elsewhere} "Once upon a time"', flush=True)
