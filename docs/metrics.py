"""Writes docs/metrics.md from the catalogue of instruments: `python docs/metrics.py` (or `make docs`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider.observe.catalogue import CATALOGUE, PROCESS_METRICS, TARGET_INFO, Instrument, Label, Service

PAGE = Path(__file__).with_suffix(".md")

_HEAD = """\
# Metrics

With `--metrics-address HOST:PORT` (`OUTRIDER_METRICS_ADDRESS`) a service answers `GET /metrics` there in Prometheus'
text format or in OpenMetrics, whichever the scraper asks for, from threads of its own: also while the engine or the
event loop is stuck. Port 0 chooses a free one and logs it. Nothing else is served there, and it is served to anyone:
bind it to an address that only the scraper reaches. `outrider up` hands the variable on to all that it starts: use port
0 there.

Numbers are raw; ratios are the query's work:

| wanted | over | under |
| --- | --- | --- |
{recipes}

For example `sum(rate(OVER[5m])) / sum(rate(UNDER[5m]))`; gauges without `rate`. A rate of nothing is 0/0 in a query; no
exported number is NaN. Always: accepted tokens are at most draft tokens; the sum over positions is the sum over rules;
emitted tokens are accepted tokens and one for every round, less the trimmed ones. A histogram NAME has the series
NAME`_bucket`, NAME`_sum` and NAME`_count`. Labels have few values: no session, request or address is one.

This page is written by `make docs` from `outrider/observe/catalogue.py`, from which the services make what they count.
"""

RECIPES = (
    ("acceptance rate", "outrider_accepted_tokens_total", "outrider_draft_tokens_total"),
    (
        "acceptance by position",
        "outrider_accepted_tokens_by_position_total",
        "outrider_draft_tokens_by_position_total",
    ),
    ("tokens per round", "outrider_emitted_tokens_total", "outrider_rounds_total"),
    ("draft-bound seconds of a round", "outrider_round_draft_wait_seconds_sum", "outrider_rounds_total"),
    ("target-bound seconds of a round", "outrider_round_verify_queue_seconds_sum", "outrider_rounds_total"),
    ("drafting-ahead hit rate", "outrider_blocks_ready_total", "outrider_drafts_total"),
    ("target batch fullness", "outrider_target_pass_fullness_sum", "outrider_target_pass_fullness_count"),
    ("sessions of a target pass", "outrider_target_pass_items_sum", "outrider_target_pass_items_count"),
    ("KV pressure", "outrider_target_kv_pages_used", "outrider_target_kv_pages_total"),
    ("prefix hit rate", "outrider_target_prefix_hit_tokens_total", "outrider_target_prefix_tokens_total"),
)

_SERVICES: tuple[tuple[str, tuple[Service, ...]], ...] = (
    ("Orchestrator", ("orchestrator",)),
    ("Target worker", ("target",)),
    ("Draft worker", ("draft",)),
    ("Every service", ("orchestrator", "draft", "target")),
)


def page() -> str:
    """The whole page."""
    process = ", ".join(f"`{name}`" for name in PROCESS_METRICS)
    tail = f"Beside these: {process} (on Linux), and `{TARGET_INFO}` with the service's name and version.\n"
    recipes = "\n".join(f"| {wanted} | `{over}` | `{under}` |" for wanted, over, under in RECIPES)
    return "\n".join([_HEAD.format(recipes=recipes), *(_section(*section) for section in _SERVICES), tail])


def _section(title: str, services: tuple[Service, ...]) -> str:
    rows = [_row(instrument) for instrument in CATALOGUE if instrument.services == services]
    head = ["| Prometheus name | type | labels | unit | meaning |", "| --- " * 5 + "|"]
    return "\n".join([f"## {title}\n", *head, *rows, ""])


def _row(instrument: Instrument) -> str:
    labels = "; ".join(_label(label) for label in instrument.labels) or "none"
    unit = instrument.unit.strip("{}")
    cells = (f"`{instrument.prometheus_name}`", instrument.kind, labels, unit, instrument.meaning)
    return f"| {' | '.join(cells)} |"


def _label(label: Label) -> str:
    return f"`{label.prometheus_name}`: {', '.join(value or 'none' for value in label.values) or label.bound}"


if __name__ == "__main__":
    PAGE.write_text(page())
