"""A scrape as Prometheus reads it."""

import asyncio
import math
import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """One answer of /metrics.

    Attributes:
        families: type of each family, by the name of its series (a counter's ends in `_total`).
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: dict[str, str] = {}
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for family in text_string_to_metric_families(text):
            self.families[family.name + ("_total" if family.type == "counter" else "")] = family.type
            self._samples += [(sample.name, sample.labels, sample.value) for sample in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        """Over the series of this name that carry these labels; fails the test when there is none."""
        found = [
            value for series, carried, value in self._samples if series == name and labels.items() <= carried.items()
        ]
        assert found, f"no series {name} {labels}"
        return sum(found)

    def values_of(self, label: str) -> set[str]:
        """Every value that a label has."""
        return {labels[label] for _, labels, _ in self._samples if label in labels}

    def check_numbers(self) -> None:
        """Fails the test where a number is NaN, infinite or negative, or a series stands twice (FAILURES I4)."""
        assert self._samples
        wrong = [sample for sample in self._samples if not (math.isfinite(sample[2]) and sample[2] >= 0)]
        assert not wrong
        series = [(name, *sorted(labels.items())) for name, labels, _ in self._samples]
        assert len(series) == len(set(series))


def scrape(address: str, accept: str = "text/plain") -> Scrape:
    """Asks HOST:PORT; blocks."""
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return Scrape(answer.read().decode())


async def until(address: str, wanted: Callable[[Scrape], bool]) -> Scrape:
    """Asks until the answer is as wanted; the test's own timeout ends it."""
    while not wanted(answer := await asyncio.to_thread(scrape, address)):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return answer
