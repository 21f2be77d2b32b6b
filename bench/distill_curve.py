"""How drafts learned: the loss of `outrider distill` over its steps, from the reports that it wrote.

    python -m bench.distill_curve REPORT... --output FILE.svg

REPORT is the report.json of a draft, or its directory. Losses of two kinds of drafts are no measure of which is better:
they are sums of other terms. Prints tokens a pass before and after training for each.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Learned:
    """One draft's report.

    Attributes:
        curve: (steps, running mean of the loss).
        sides: tokens, passes and rates by position, before and after.
    """

    name: str
    curve: list[tuple[int, float]]
    sides: dict[str, dict[str, Any]]

    @staticmethod
    def read(path: Path) -> "Learned":
        """From a report or the directory that it lies in. Raises SystemExit with one line when it has no curve."""
        path = path / "report.json" if path.is_dir() else path
        report = json.loads(path.read_text(encoding="utf-8"))
        if not report.get("curve"):
            raise SystemExit(f"{path} has no curve: an older `outrider distill` wrote it")
        sides = {side: report[side] for side in ("before", "after")}
        return Learned(path.resolve().parent.name, report["curve"], sides)


def table(drafts: list[Learned]) -> Table:
    made = Table()
    for title in ("draft", "steps", "loss", "tokens a pass before", "after"):
        made.add_column(title, justify="left" if title == "draft" else "right")
    for draft in drafts:
        passes = (f"{side['tokens'] / side['passes']:.2f}" for side in draft.sides.values())
        made.add_row(draft.name, str(draft.curve[-1][0]), f"{draft.curve[-1][1]:.3f}", *passes)
    return made


def plot(drafts: list[Learned], output: Path) -> None:
    """A panel for each draft: their losses have no common scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(drafts), 3.0), layout="constrained")
    for axis, draft in zip(figure.subplots(1, len(drafts), squeeze=False)[0], drafts, strict=True):
        axis.plot(*zip(*draft.curve, strict=True))
        axis.set_xlabel("steps")
        axis.set_ylabel("loss")
        before, after = (side["tokens"] / side["passes"] for side in draft.sides.values())
        axis.set_title(f"{draft.name}: {before:.2f} to {after:.2f} tokens a pass", fontsize=9)
    figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="picture, .svg or .png")
    options = parser.parse_args()
    drafts = [Learned.read(path) for path in options.reports]
    plot(drafts, options.output)
    Console().print(table(drafts))


if __name__ == "__main__":
    main()
