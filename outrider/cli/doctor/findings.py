"""What a check found: one line, and for a fault what to do about it."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from enum import StrEnum

_LONGEST = 400


class Level(StrEnum):
    """How a check came out.

    `unseen` is what cannot be looked at from here, or not with the rights that were given: no fault of the system.
    """

    ok = "ok"
    warning = "warning"
    broken = "broken"
    unseen = "unseen"


@dataclass(frozen=True)
class Finding:
    """One check of one part.

    Attributes:
        check: what was looked at: dns, tcp, tls, token, health, ...
        subject: of what: "target 10.0.0.1:7801".
        seen: what was seen, for people.
        advice: what to do; empty where nothing is to be done.
    """

    check: str
    subject: str
    level: Level
    seen: str
    advice: str = ""

    def __post_init__(self) -> None:
        # Peers choose some of the words: one line of printable ones, and not without end.
        for name in ("subject", "seen", "advice"):
            object.__setattr__(self, name, _tame(getattr(self, name)))


def ok(check: str, subject: str, seen: str) -> Finding:
    """As it should be."""
    return Finding(check, subject, Level.ok, seen)


def warning(check: str, subject: str, seen: str, advice: str) -> Finding:
    """It works, and will not for long, or not well."""
    return Finding(check, subject, Level.warning, seen, advice)


def broken(check: str, subject: str, seen: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(check, subject, Level.broken, seen, advice)


def unseen(check: str, subject: str, seen: str, advice: str = "") -> Finding:
    """Could not be looked at."""
    return Finding(check, subject, Level.unseen, seen, advice)


async def within(seconds: float, check: str, subject: str, work: Awaitable[list[Finding]]) -> list[Finding]:
    """What `work` finds; a check that takes longer, or fails in a way that nobody thought of, is itself a finding."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        advice = "look at its load and at the network between; --timeout and --round-timeout give it longer"
        return [broken(check, subject, f"the check did not end within {seconds:g} s", advice)]
    except Exception as error:
        seen = f"the check itself failed: {type(error).__name__}: {error}"
        return [broken(check, subject, seen, "please report it: this is a fault of `outrider doctor`")]


def _tame(text: str) -> str:
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]} ..."
