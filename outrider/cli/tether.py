"""Runs a command that dies with its parent: `python -m outrider.cli.tether PARENT -- COMMAND...`

Between fork and exec of a threaded process nothing but exec is safe, so the parent-death signal is asked for here, by a
fresh interpreter, which then becomes the command. The signal comes when the *thread* that started the process ends:
start tethered processes from a thread that lives as long as the program, such as the main one.
"""

import ctypes
import os
import signal
import sys

# Only Linux has such a signal; elsewhere the command runs, but outlives a parent that was killed.
AVAILABLE = sys.platform == "linux"

_PR_SET_PDEATHSIG = 1


def tethered(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command line that runs `command` as a child which is killed when this process ends, however it ends."""
    return (sys.executable, "-m", "outrider.cli.tether", str(os.getpid()), "--", *command)


def tie_to(parent: int) -> None:
    """Asks the kernel to kill this process with its parent. Exits at once when that parent is gone already."""
    if not AVAILABLE:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("error: the parent died before its child was tied to it")


def main(arguments: list[str]) -> None:
    """Ties this process to its parent and becomes the command; exits with 2 when the command cannot be run."""
    parent, separator, command = arguments[0], arguments[1], arguments[2:]
    assert separator == "--"
    tie_to(int(parent))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
