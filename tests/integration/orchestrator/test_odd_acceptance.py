"""I8: drafts that are right always or never, injected; what is then scraped makes the alerts fire."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from orchestrator.metrics import Metrics
from outrider.observe.export import Exporter
from tests.deploy.test_rules import Series, case, firing, promtool
from tests.harness.commands import SECONDS
from tests.harness.orchestrator import Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.scrape import Scrape, scrape
from tests.harness.system import synthetic
from tests.harness.workers import start_draft, start_target

VOCABULARY = 512
# Synthetic laws: greedy output goes in circles soon, as garbled output does.
TARGET = {"vocab_size": VOCABULARY, "seed": 3}
ODD, LOW = "OutriderAcceptanceOdd", "OutriderAcceptanceLow"


@asynccontextmanager
async def exporting(draft: dict[str, object]) -> AsyncIterator[tuple[RunningOrchestrator, str]]:
    """An orchestrator with this draft, and where it exports its metrics."""
    exporter = Exporter("outrider-orchestrator", "127.0.0.1:0")
    metrics = Metrics(exporter.provider)
    try:
        exporter.start(metrics.instruments)
        async with (
            start_target(synthetic(**TARGET)) as target,
            start_draft(synthetic(**{**TARGET, **draft})) as worker,
            start_orchestrator(
                [target.address],
                [worker.address],
                tokenizer=f"synthetic:vocab_size={VOCABULARY}",
                metrics=metrics,
            ) as orchestrator,
        ):
            yield orchestrator, exporter._server.address
    finally:
        await asyncio.to_thread(exporter.close)


def minutely(before: Scrape, after: Scrape) -> Series:
    """The series of an hour in every minute of which as much happened as between the scrapes."""
    told = {name for name in after.families if name.startswith("outrider_")}
    series = {}
    for name, labels, value in after._samples:
        if name.startswith(tuple(told)):
            start = sum(v for n, carried, v in before._samples if (n, carried) == (name, labels))
            written = ",".join(f'{label}="{each}"' for label, each in labels.items())
            series[f"{name}{{{written}}}" if written else name] = f"{start}+{value - start}x60"
    return series


async def injected(draft: dict[str, object]) -> tuple[list[Generation], Series]:
    """What clients of a system with such a draft got, and what its metrics said of them."""
    async with exporting(draft) as (orchestrator, address):
        before = await asyncio.to_thread(scrape, address)
        requests = [ask((number, 1), max_tokens=24, temperature=0) for number in range(5)]
        generations = await asyncio.gather(*(orchestrator.generate(request, SECONDS) for request in requests))
        after = await asyncio.to_thread(scrape, address)
    assert after.sum("outrider_request_acceptance_count") == len(requests)
    return generations, minutely(before, after)


@pytest.mark.parametrize(
    ("draft", "least", "most", "alerts"),
    [
        ({}, 1.0, 1.0, {ODD}),
        ({"seed": 99}, 0.0, 0.01, {ODD, LOW}),
        ({"agree": 0.7}, 0.3, 0.9, set()),
    ],
    ids=["the target itself", "a random one", "a fair one"],
)
async def test_i8_a_draft_that_is_always_or_never_right_raises_the_alarm(
    draft: dict[str, object], least: float, most: float, alerts: set[str], tmp_path: Path
) -> None:
    generations, series = await injected(draft)
    drafted, accepted = (sum(getattr(one, name) for one in generations) for name in ("drafted", "accepted"))
    assert drafted >= 5 * 16
    assert least <= accepted / drafted <= most
    expected = [firing(alert, alert in alerts) for alert in (ODD, LOW)]
    done = promtool(tmp_path, case(series, promql_expr_test=expected))
    assert done.returncode == 0, done.stdout + done.stderr
