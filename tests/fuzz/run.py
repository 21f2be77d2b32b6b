"""Fuzzes every target for a while: `python -m tests.fuzz.run --seconds 600`; `--targets edge,store` takes some of them.

The time is shared by the targets. What fails is made small and put into the corpus, which the test suite replays.
"""

import argparse
import logging
import os
import secrets
import sys
import time

from tests.fuzz.checks import CHECKS
from tests.fuzz.edges import EDGES
from tests.fuzz.files import FILES
from tests.fuzz.peers import PEERS
from tests.fuzz.running import Fuzzed, fuzzed, keep

TARGETS = {**EDGES, **PEERS, **FILES, **CHECKS}
# Of one hypothesis run; each begins with another seed.
_EXAMPLES = 200


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all targets together")
    parser.add_argument("--targets", default=",".join(TARGETS))
    flags = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    names = flags.targets.split(",")
    rows, failures = [], 0
    for name in names:
        with fuzzed(name, TARGETS[name]) as running:
            failed = _explore(name, running, flags.seconds / len(names))
            rows.append((name, running.seen.total(), len(failed), running.seen))
        failures += len(failed)
    print(f"\nload {os.getloadavg()[0]:.0f}; of the statuses the ten most frequent")
    print(f"{'target':<13} {'examples':>8} {'failures':>8}  statuses")
    for name, examples, count, seen in rows:
        statuses = ", ".join(f"{status} {times}" for status, times in seen.most_common(10))
        print(f"{name:<13} {examples:>8} {count:>8}  {statuses}")
    return 1 if failures else 0


def _explore(name: str, running: Fuzzed, seconds: float) -> set[str]:
    """Returns the failures, each by its place in the corpus."""
    deadline, failed, told = time.monotonic() + seconds, set[str](), time.monotonic()
    _noting(name, running, running.replay, failed)
    while time.monotonic() < deadline:
        _noting(name, running, lambda: running.explore(_EXAMPLES, secrets.randbits(32)), failed)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(f"{name}: {running.seen.total()} examples, {len(failed)} failures", flush=True)
    _noting(name, running, running.golden, failed)
    return failed


def _noting(name: str, running: Fuzzed, work: object, failed: set[str]) -> None:
    assert callable(work)
    try:
        work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an exception group of several failures, or a panic of a compiled library
        place = keep(name, running.last)
        failed.add(place)
        print(f"{name}: FAILED, kept as {place}: {type(error).__name__}: {str(error)[:600]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
