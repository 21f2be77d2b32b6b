"""What waits for a result that comes with those of others."""

import asyncio
from typing import TypeVar

Result = TypeVar("Result")


def settle(future: "asyncio.Future[Result]", result: Result | Exception) -> None:
    """Hands a result, or the error that it is, to who waits for it; nothing where nobody does any more."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
