"""What others took of the cores: from counts that are given, and from the kernel's beside a process that works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.others import Others

TICKS = os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0

pytestmark = pytest.mark.skipif(not CORES, reason="Linux alone says which cores a process may use")


def write_stat(proc: Path, **seconds: float) -> None:
    """Of every allowed core, by column; a core that is not allowed does nothing but work."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
    counts = " ".join(str(1000 + round(TICKS * seconds.get(name, 0))) for name in names)
    elsewhere = f"cpu99999 {round(TICKS * sum(seconds.values()))} 0 0 0 0 0 0 0 0 0"
    lines = [f"cpu  {counts}", *(f"cpu{core} {counts}" for core in os.sched_getaffinity(0)), elsewhere, "intr 5 0 0"]
    (proc / "stat").write_text("\n".join(lines))


def write_process(proc: Path, pid: int, user: float, system: float) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    counted = f"{round(TICKS * user)} {round(TICKS * system)}"
    (proc / str(pid) / "stat").write_text(f"{pid} (a name) R 5) S 1 1 1 0 -1 4 9 9 9 9 {counted} 7 7 20 0 1 0 99")


def test_what_is_neither_ours_nor_free_was_taken_by_others(tmp_path: Path) -> None:
    write_stat(tmp_path)
    write_process(tmp_path, 7, 3.0, 0.0)
    write_process(tmp_path, 8, 0.0, 4.0)
    others = Others(7, 8, proc=tmp_path)
    # Of 1000 seconds each core works 500, and is lent twice to guests that `user` counts already.
    write_stat(tmp_path, user=200, nice=50, system=100, idle=300, iowait=200, irq=20, softirq=30, steal=100, guest=90)
    assert others.cores() == pytest.approx(0.5 * CORES, abs=0.01)
    write_process(tmp_path, 7, 3.0 + 100 * CORES, 20.0 * CORES)
    write_process(tmp_path, 8, 80.0 * CORES, 4.0)
    assert others.cores() == pytest.approx(0.3 * CORES, abs=0.01)
    write_process(tmp_path, 8, 900.0 * CORES, 4.0)  # what is counted by ticks may be less than what is counted exactly
    assert others.cores() == 0


def test_every_kind_of_work_counts(tmp_path: Path) -> None:
    for kind in ("user", "nice", "system", "irq", "softirq", "steal"):
        write_stat(tmp_path)
        others = Others(proc=tmp_path)
        write_stat(tmp_path, idle=750, **{kind: 250})
        assert others.cores() == pytest.approx(0.25 * CORES, abs=0.01), kind


def test_where_it_is_not_told_nobody_knows(tmp_path: Path) -> None:
    assert Others(proc=tmp_path).cores() is None  # no file
    write_stat(tmp_path)
    assert Others(proc=tmp_path).cores() is None  # counts that stand still
    assert Others(7, proc=tmp_path).cores() is None  # no such process
    started = Others(proc=tmp_path)
    (tmp_path / "stat").write_text("cpu  1 2 3 4 5 6 7 8")
    assert started.cores() is None  # no line of a core
    (tmp_path / "stat").write_text("\n".join(f"cpu{core} 1 2 3" for core in os.sched_getaffinity(0)))
    assert started.cores() is None  # of a kernel that counts less


def test_a_process_that_works_beside_is_others_unless_it_is_ours() -> None:
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    began = os.times().elapsed
    all_others = Others()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        without_it = Others(process.pid)
        assert process.stdout
        process.stdout.readline()
        # In this order whoever else works between the two makes the difference greater, never less.
        without = without_it.cores()
        everybody = all_others.cores()
        seconds = os.times().elapsed - began
        process.communicate(b"\n")
    if without is None or everybody is None:
        pytest.skip("the kernel does not count here")
    # Its half second, less what a tick cannot tell.
    assert (everybody - without) * seconds > 0.3
