"""The times of one request, as its client sees them."""

import time
from types import TracebackType

from orchestrator.ending import error_type
from orchestrator.metrics import Metrics

CHAT, COMPLETION, RESUME = "chat", "text_completion", "resume"


class RequestTimes:
    """Begins with the request's arrival; as a context manager, ends with it.

    Args:
        operation: CHAT, COMPLETION or RESUME.
    """

    def __init__(self, metrics: Metrics, operation: str) -> None:
        self._metrics, self._operation = metrics, operation
        self._began = time.perf_counter()
        # By choice: when its first round came, and the tokens of that one.
        self._first: dict[int, tuple[float, int]] = {}

    def __enter__(self) -> "RequestTimes":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        self._metrics.request_ended(self._operation, time.perf_counter() - self._began, error_type(error))

    def emitted(self, choice: int, generated: int) -> None:
        """So many tokens were generated for a choice so far."""
        if choice in self._first:
            return
        now = time.perf_counter()
        if not self._first:
            self._metrics.first_token(self._operation, now - self._began)
        self._first[choice] = now, generated

    def generated(self, choice: int, prompt: int, tokens: int) -> None:
        """A choice came to its end; `emitted` was told of every round."""
        first, early = self._first[choice]
        later = tokens - early
        per_token = (time.perf_counter() - first) / later if later else None
        self._metrics.generated(self._operation, prompt, tokens, per_token)
