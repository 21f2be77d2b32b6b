"""Counters as a test reads them."""

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader


class Meters:
    """A meter provider whose counters can be read.

    Attributes:
        provider: to be given to the metrics of a service.
    """

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])

    def count(self, name: str, **attributes: object) -> int:
        """Sum of a counter over all series that carry these attributes; 0 when there is none."""
        data = self._reader.get_metrics_data()
        if data is None:
            return 0
        metrics = [
            one for resource in data.resource_metrics for scope in resource.scope_metrics for one in scope.metrics
        ]
        points = [point for metric in metrics if metric.name == name for point in metric.data.data_points]
        return sum(
            int(point.value)  # type: ignore[union-attr]
            for point in points
            if attributes.items() <= dict(point.attributes or {}).items()
        )
