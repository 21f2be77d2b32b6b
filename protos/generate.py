"""Generates the Python stubs and lints the protos.

    python protos/generate.py [--out DIR]    write outrider/v1/*_pb2*.py[i] below DIR (default: the repository root)
    python protos/generate.py --lint         buf lint (STANDARD + COMMENTS, see buf.yaml)

google/rpc/status.proto comes from the installed googleapis-common-protos package, so nothing is vendored; buf cannot
see installed packages, hence it lints a descriptor image that protoc made.
"""

import argparse
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import google.rpc.status_pb2 as status_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
SOURCES = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "outrider" / "v1").glob("*.proto"))
BIN = Path(sys.executable).parent  # an environment's programs, whether or not it is activated
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
INCLUDES = (PROTOS, Path(status_pb2.__file__).parents[2], files("grpc_tools") / "_proto")


def run_protoc(*options: str) -> None:
    """Runs protoc over all sources. Raises SystemExit when it fails."""
    arguments = ["protoc", *(f"-I{path}" for path in INCLUDES), *options, *SOURCES]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed")


def generate(out: Path) -> None:
    """Writes messages, services and their type stubs below `out`."""
    run_protoc(
        *(f"--plugin={name}={BIN / name}" for name in PLUGINS),
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
    )


def lint() -> None:
    """Lints the protos with buf. Raises SystemExit when it finds something."""
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "image.binpb"
        run_protoc("--include_imports", "--include_source_info", f"--descriptor_set_out={image}")
        buf = BIN / "buf"
        config = PROTOS.parent / "buf.yaml"
        sys.exit(subprocess.run([buf, "lint", image, "--config", config], check=False).returncode)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PROTOS.parent)
    parser.add_argument("--lint", action="store_true")
    arguments = parser.parse_args()
    lint() if arguments.lint else generate(arguments.out)
