"""The coverage-guided run, over the code that parses and checks what others send: no services, one process.

`pip install -e '.[fuzz]'`, then `python -m tests.fuzz.coverage --seconds 600`. libFuzzer keeps what reaches new code;
the smallest set that reaches all of it replaces `corpus/checks`, which the test suite replays without atheris.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

_KEPT = Path(__file__).parent / "corpus" / "checks"
# Of one input, in bytes and seconds.
_LONGEST, _SLOWEST = 2048, 20
# Of all that is kept.
_MOST_BYTES = 150_000


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # its program, its arguments
    flags = parser.parse_args()
    if flags.worker is not None:
        _fuzz(flags.worker)
        return 0
    _KEPT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        found, fewest, program = (Path(directory, name) for name in ("found", "fewest", "program"))
        found.mkdir()
        fewest.mkdir()
        # libFuzzer starts itself to merge, and what it takes for itself is Python.
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.fuzz.coverage --worker {program} "$@"\n')
        program.chmod(0o700)
        limits = [f"-max_len={_LONGEST}", f"-timeout={_SLOWEST}", "-rss_limit_mb=4096", f"-artifact_prefix={_KEPT}/"]
        code = _run(program, *limits, f"-max_total_time={flags.seconds}", str(found), str(_KEPT))
        if not code:
            code = _run(program, *limits, "-merge=1", str(fewest), str(found), str(_KEPT))
        if not code:
            _replace_kept(fewest)
    return code


def _replace_kept(fewest: Path) -> None:
    """Keeps the shortest of the new ones, as many as may be."""
    shutil.rmtree(_KEPT)
    _KEPT.mkdir()
    size = 0
    for path in sorted(fewest.iterdir(), key=lambda each: each.stat().st_size):
        size += path.stat().st_size
        if size <= _MOST_BYTES:
            shutil.copy(path, _KEPT)


def _run(program: Path, *arguments: str) -> int:
    return subprocess.run([program, *arguments], check=False).returncode


def _fuzz(arguments: list[str]) -> None:
    import atheris

    ours = ["orchestrator", "outrider", "draft_service", "target_service", "google.protobuf"]
    with atheris.instrument_imports(include=ours):
        from tests.fuzz.case import vary
        from tests.fuzz.checks import KINDS, check, draw_check, kind_of

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        dice = Random(seed)
        if data.partition(b"\n")[0].decode("utf-8", "replace") not in KINDS or dice.randrange(16) == 0:
            made = draw_check(dice)
        elif dice.randrange(8) == 0:
            made = bytes(atheris.Mutate(data, max_size))
        else:
            made = vary(dice, data, kind_of)
        return made[:max_size]

    atheris.Setup(arguments, check, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
