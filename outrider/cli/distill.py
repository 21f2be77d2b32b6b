"""`outrider distill`: makes a small draft for any llama-like target."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from outrider.cli.options import Device, Dtype
from outrider.cli.report import number, percent
from outrider.cli.run import Failure, told
from outrider.cli.system import available_cores
from outrider.lm.engine import ModelRefused

if TYPE_CHECKING:
    from outrider.distill.run import Report


class Kind(StrEnum):
    """What is made."""

    model = "model"
    exit = "exit"
    medusa = "medusa"
    eagle = "eagle"
    eagle3 = "eagle3"

    @property
    def layers(self) -> int:
        """That learn, unless told otherwise."""
        return 2 if self is Kind.model else 1

    @property
    def learning_rate(self) -> float:
        """The highest, unless told otherwise. An EAGLE head of the first kind diverges at a few times its own: what it
        makes is not normed before it takes it again."""
        return {Kind.eagle: 2e-4, Kind.eagle3: 1e-3}.get(self, 2e-3)


_CAPTION = (
    "Rates by position count the blocks in which all before it was accepted. Sampling: at temperature 1, the first "
    "position of a block."
)


def distill(
    target: Annotated[str, typer.Option(help="MODEL that the draft is for.", metavar="MODEL")],
    out: Annotated[Path, typer.Option(help="Directory of the draft.", metavar="DIR")],
    work: Annotated[
        Path | None, typer.Option(help="Directory for texts and checkpoints; DIR/work without it.", metavar="DIR")
    ] = None,
    kind: Annotated[
        Kind,
        typer.Option(
            help="model: a draft of its own layers; exit: the target's first, and an exit; medusa: heads; eagle and "
            "eagle3: a layer that is fed by the target's states."
        ),
    ] = (Kind.model),
    layers: Annotated[
        int, typer.Option(min=0, help="Layers that learn, to begin with the target's; 0: 2, or 1 in an exit.")
    ] = 0,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Medusa heads.")] = 4,
    positions: Annotated[
        int,
        typer.Option(min=1, max=8, help="Of a block, at which an EAGLE head learns, the later ones from its own."),
    ] = 3,
    exit_layers: Annotated[int, typer.Option(min=0, help="Layers of the target that run before the exit.")] = 0,
    kept: Annotated[int, typer.Option(min=2, help="Tokens that the draft can propose, the most frequent.")] = 8192,
    own_head: Annotated[bool, typer.Option(help="Whether the draft's head learns and is stored with it.")] = True,
    begin_with: Annotated[
        Path | None,
        typer.Option(
            help="Draft for MODEL that goes on learning; its layers, tokens and head instead of the options above.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Questions and answers that the target writes.")] = 8192,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Longest answer among them.")] = 192,
    prompts: Annotated[
        Path | None, typer.Option(help="File of questions, one a line, that half of the texts begin with.", exists=True)
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Turns through all texts.")] = 4,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a training step; fewer make more steps of few texts.")
    ] = 2048,
    learning_rate: Annotated[
        float, typer.Option(min=0, help="Highest learning rate; 0: 2e-3, of eagle3 1e-3, of eagle 2e-4.")
    ] = 0.0,
    lookahead: Annotated[int, typer.Option(min=1, help="Block length of the acceptance report.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of all draws.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 is all cores.")] = 0,
) -> None:
    """Make a draft for MODEL from text that MODEL itself writes. A run that was ended goes on when called again.

    The draft shares the target's embeddings: what serves it needs the target's MODEL too (`outrider up` says it).
    """
    with told():
        from outrider.distill.corpus import CorpusOptions
        from outrider.distill.run import DistillOptions, distill
        from outrider.distill.training import TrainingOptions
        from outrider.distill.writer import WriterOptions

        if (kind is Kind.exit) != (exit_layers > 0) and begin_with is None:
            raise Failure("--kind exit needs --exit-layers, and no other kind has them")
        questions = tuple(filter(None, map(str.strip, prompts.read_text().splitlines()))) if prompts else ()
        options = DistillOptions(
            layers=layers or kind.layers,
            exit_layers=exit_layers,
            heads=heads if kind is Kind.medusa else 0,
            eagle={Kind.eagle: 1, Kind.eagle3: 3}.get(kind, 0),
            kept=kept,
            own_head=own_head,
            begin_with=begin_with,
            dtype=dtype,
            device=device,
            threads=threads or available_cores(),
            lookahead=lookahead,
            corpus=CorpusOptions(
                texts=texts, seed=seed, prompts=questions, writer=WriterOptions(answer_tokens=answer_tokens)
            ),
            training=TrainingOptions(
                epochs=epochs,
                batch_tokens=batch_tokens,
                learning_rate=learning_rate or kind.learning_rate,
                seed=seed,
                positions=positions,
            ),
        )
        try:
            with _Bars() as bars:
                report = distill(target, out, work or out / "work", options, bars.show)
        except ModelRefused as error:
            raise Failure(str(error)) from error
        Console().print(_table(report, out))


class _Bars:
    """A bar for each part, as they come."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        left = (TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
        self._progress = Progress(*columns, *left, console=Console(stderr=True))
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "_Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, part: str, done: float, total: float, note: str = "") -> None:
        """As `outrider.distill.run.Progress`."""
        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(part, note="")
        self._progress.update(self._tasks[part], completed=done, total=total, note=note)


def _table(report: "Report", out: Path) -> Table:
    sides = {"before": report.before, "after training": report.after}
    table = Table(title=f"{out}: acceptance on held-out answers", caption=_CAPTION)
    table.add_column()
    for name in sides:
        table.add_column(name, justify="right")
    positions = range(len(report.after.by_position))
    table.add_row("tokens/pass, greedy", *(number(side.tokens_per_pass, 2) for side in sides.values()))
    for position in positions:
        rates = (percent(side.by_position[position]) for side in sides.values())
        table.add_row(f"  accepted at position {position + 1}", *rates)
    table.add_row("accepted when sampling", *(percent(side.overlap) for side in sides.values()))
    return table
