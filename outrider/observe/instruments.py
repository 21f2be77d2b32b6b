"""Instruments that cost a fraction of a microsecond: they count in plain Python, and are read when somebody asks.

One `add` or `record` of the OpenTelemetry SDK takes some ten microseconds, and a round would need twenty. So counters
and gauges are observable instruments of OpenTelemetry over numbers that are kept here. There are no observable
histograms: these are Prometheus collectors.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, product
from typing import TypeVar

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outrider import __version__
from outrider.observe.catalogue import Instrument, Kind, Service, of

# Values of labels, in the catalogue's order.
Values = tuple[str | int, ...]

# Series that are there, at 0, before anything was counted: a rate needs two points.
_MOST_SEEDED = 32


class Counter:
    """A counter. One thread adds, any thread reads."""

    def __init__(self, listed: Instrument) -> None:
        self._names = tuple(label.name for label in listed.labels)
        self._sums: dict[Values, float] = dict.fromkeys(_seeds(listed), 0)

    def add(self, amount: float, *values: str | int) -> None:
        """Counts `amount`, which is not negative, for these values of the labels."""
        self._sums[values] = self._sums.get(values, 0) + amount

    def read(self, _: CallbackOptions) -> list[Observation]:
        """All series."""
        return _observations(self._names, self._sums.copy())


class PositionCounter:
    """A counter by position, of what comes in runs that all begin at position 0. One thread adds, any thread reads."""

    def __init__(self, listed: Instrument) -> None:
        (label,) = listed.labels
        self._name = label.name
        self._runs: dict[int, int] = {}

    def add(self, length: int) -> None:
        """Counts one at each of the first `length` positions."""
        self._runs[length] = self._runs.get(length, 0) + 1

    def read(self, _: CallbackOptions) -> list[Observation]:
        """All series."""
        runs = self._runs.copy()
        positions = range(max(runs, default=0))
        return [
            Observation(sum(count for length, count in runs.items() if length > position), {self._name: position})
            for position in positions
        ]


class Histogram:
    """A histogram. One thread records, any thread reads."""

    def __init__(self, listed: Instrument) -> None:
        self._listed = listed
        # By values of the labels: a count for each bucket, and last the sum.
        self._series: dict[Values, list[float]] = {values: self._empty() for values in _seeds(listed)}

    def record(self, value: float, *values: str | int) -> None:
        """Counts one value."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._empty()
        series[bisect_left(self._listed.bounds, value)] += 1
        series[-1] += value

    def family(self) -> HistogramMetricFamily:
        """All series."""
        listed = self._listed
        labels = [label.prometheus_name for label in listed.labels]
        family = HistogramMetricFamily(listed.prometheus_name, listed.meaning, labels=labels)
        bounds = [*map(floatToGoString, listed.bounds), "+Inf"]
        for values, series in self._series.copy().items():
            *counts, total = series.copy()
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([str(value) for value in values], buckets, total)
        return family

    def _empty(self) -> list[float]:
        return [0.0] * (len(self._listed.bounds) + 2)


C = TypeVar("C", Counter, PositionCounter)


class Instruments(Collector):
    """The instruments of one service, each as the catalogue lists it. As a Prometheus collector: its histograms.

    Args:
        provider: where counters and gauges go; None: nowhere.
    """

    def __init__(self, service: Service, provider: metrics.MeterProvider | None = None) -> None:
        # Not OpenTelemetry's global one: that keeps what was made before it is set, and with it whatever gauges read.
        self._meter = (provider or metrics.NoOpMeterProvider()).get_meter("outrider", __version__)
        self._listed = of(service)
        self._histograms: list[Histogram] = []

    def counter(self, name: str) -> Counter:
        """Raises KeyError when the service has no such counter."""
        return self._counted(name, Counter)

    def position_counter(self, name: str) -> PositionCounter:
        """As `counter`, for one whose only label is a position."""
        return self._counted(name, PositionCounter)

    def histogram(self, name: str) -> Histogram:
        """Raises KeyError when the service has no such histogram."""
        histogram = Histogram(self._find(name, "histogram"))
        self._histograms.append(histogram)
        return histogram

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """A number that is read from what lives, in the scraper's thread. Raises KeyError as `counter` does."""
        self.gauges(name, lambda: {(): read()})

    def gauges(self, name: str, read: Callable[[], Mapping[Values, float]]) -> None:
        """As `gauge`, by values of the labels."""
        listed = self._find(name, "gauge")
        names = tuple(label.name for label in listed.labels)

        def observe(_: CallbackOptions) -> list[Observation]:
            return _observations(names, read())

        self._meter.create_observable_gauge(name, [observe], listed.unit, listed.meaning)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The histograms as Prometheus wants them."""
        for histogram in self._histograms:
            yield histogram.family()

    def _counted(self, name: str, make: Callable[[Instrument], C]) -> C:
        listed = self._find(name, "counter")
        counter = make(listed)
        self._meter.create_observable_counter(name, [counter.read], listed.unit, listed.meaning)
        return counter

    def _find(self, name: str, kind: Kind) -> Instrument:
        listed = self._listed[name]
        if listed.kind != kind:
            raise KeyError(f"{name} is a {listed.kind}")
        return listed


def _seeds(listed: Instrument) -> Iterable[Values]:
    """Values that are few and known; none where they are not."""
    seeds = list(product(*(label.values for label in listed.labels)))
    return seeds if len(seeds) <= _MOST_SEEDED else ()


def _observations(names: tuple[str, ...], series: Mapping[Values, float]) -> list[Observation]:
    return [Observation(value, dict(zip(names, values, strict=True))) for values, value in series.items()]
