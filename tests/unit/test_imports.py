"""Imports go one way, and nothing that comes from a peer is unpickled or run (FAILURES L6)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes import ROOT

SERVICES = {"draft_service", "target_service", "orchestrator"}
MAY_IMPORT = {"outrider": {"outrider"}} | {service: {"outrider", service} for service in SERVICES}
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "yaml"}
RUN_TEXT = {"eval", "exec", "compile", "os.system", "os.popen", "asyncio.create_subprocess_shell"}


def sources(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).rglob("*.py")) if path.parent.name != "v1"]


def imported(tree: ast.AST) -> Iterator[str]:
    """First parts of all imported names, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            yield node.module.partition(".")[0]


def unsafe_calls(tree: ast.AST) -> Iterator[str]:
    """`torch.load(...)` without weights_only=True, `np.load(..., allow_pickle=...)`, and what runs text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (
            ast.unparse(node.func) in RUN_TEXT
            or any(keyword.arg == "shell" and ast.unparse(keyword.value) != "False" for keyword in node.keywords)
        ):
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            owner = ast.unparse(node.func.value)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if owner == "torch" and given.get("weights_only") != "True":
                yield ast.unparse(node)
            if owner in ("np", "numpy") and given.get("allow_pickle", "False") != "False":
                yield ast.unparse(node)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_go_one_way(package: str) -> None:
    ours = SERVICES | {"outrider"}
    for path in sources(package):
        wrong = (set(imported(ast.parse(path.read_text()))) & ours) - MAY_IMPORT[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_l6_nothing_is_unpickled(package: str) -> None:
    for path in sources(package):
        tree = ast.parse(path.read_text())
        assert not set(imported(tree)) & UNPICKLERS, path
        assert list(unsafe_calls(tree)) == [], path


def test_l6_check_sees_what_it_looks_for() -> None:
    imports = "import pickle.sub\nfrom dill import x\n"
    bad = imports + "torch.load(f)\ntorch.load(f, weights_only=False)\nnp.load(f, allow_pickle=True)"
    assert set(imported(ast.parse(bad))) == {"pickle", "dill"}
    assert len(list(unsafe_calls(ast.parse(bad)))) == 3
    assert len(list(unsafe_calls(ast.parse("eval(x)\nexec(x)\nos.system(x)\nrun(x, shell=True)")))) == 4
    assert (
        list(unsafe_calls(ast.parse("torch.load(f, weights_only=True); np.load(f); json.load(f); re.compile(x)"))) == []
    )
