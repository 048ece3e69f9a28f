"""How the files depend on each other: no import circle, wherever the import stands, and lpes_eval without search."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("lpes_eval", "search", "benchmarks")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imported(name):
    """The project's modules that a module imports, at its top, in a function, or for its types alone."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (full if full in MODULES else node.module for full in named if node.module in MODULES)


def test_no_import_circle():
    TopologicalSorter({name: imported(name) for name in MODULES}).prepare()  # CycleError names the circle


@pytest.mark.parametrize(
    ("package", "never"), [("lpes_eval", "search"), ("lpes_eval", "benchmarks"), ("search", "benchmarks")]
)
def test_imports_point_down(package, never):
    found = {name: set(imported(name)) for name in MODULES if name.split(".")[0] == package}
    assert not {name: names for name, names in found.items() if any(one.split(".")[0] == never for one in names)}
