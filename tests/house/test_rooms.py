"""Imports go only to lower packages and are acyclic, including those for types and those inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    {"core"},
    {"system"},
    {"runtime"},
    {"moefw"},
    {"plugins", "models"},
    {"recording"},
    {"tracing"},
    {"compose"},
    {"planner"},
    {"training"},
    {"report"},
    {"testing"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
"""Packages in order: each imports only itself and those before it. ``moefw`` is the file with the public names."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "moefw").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "templates" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(module: str) -> Iterator[str]:
    """Yield the modules of ours that a module imports, and the names of others."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in MODULES else str(node.module)


@cache
def graph() -> dict[str, set[str]]:
    return {module: set(imports(module)) - {module} for module in MODULES}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def floor(module: str) -> int:
    return next(number for number, rooms in enumerate(ROOMS) if room(module) in rooms)


def test_imports_run_down() -> None:
    up = [(one, other) for one in graph() for other in graph()[one] & graph().keys() if floor(other) > floor(one)]
    assert not up


def test_imports_make_no_circle() -> None:
    TopologicalSorter({one: others & graph().keys() for one, others in graph().items()}).prepare()


def folder_in_room(module: str) -> str | None:
    """The folder of a room in which a module is; None if the module lies in the room itself."""
    folder = ".".join(module.split(".")[:3])
    is_folder = module.count(".") > 2 or MODULES[module].name == "__init__.py"
    return folder if module.count(".") > 1 and is_folder else None


def test_folders_inside_a_room_make_no_circle() -> None:
    """Files that lie in the room itself may use all of its folders, and be used by them."""
    arrows: dict[str, set[str]] = {}
    for module, others in graph().items():
        folder = folder_in_room(module)
        if folder is not None:
            inside = {folder_in_room(other) for other in others & graph().keys() if room(other) == room(module)}
            arrows.setdefault(folder, set()).update(inside - {folder, None})  # type: ignore[arg-type]
    assert any(arrows.values())
    TopologicalSorter(arrows).prepare()


def test_the_kernels_stand_alone() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "moefw" for name in names), path


def test_a_spec_is_read_by_a_room_that_needs_only_errors_and_choices() -> None:
    for module in (one for one in graph() if one.startswith("moefw.compose.spec")):
        ours = {other for other in graph()[module] & graph().keys() if not other.startswith("moefw.compose.spec")}
        assert ours <= {"moefw.core.errors", "moefw.core.choice"}


@pytest.mark.parametrize("plugin", [one for one in MODULES if one.startswith("moefw.plugins.") and one.count(".") > 2])
def test_a_plugin_imports_no_other_plugin(plugin: str) -> None:
    """Code that several plugins of a hook point share is a file next to them."""
    family, own = plugin.split(".")[2:4]
    for other in graph()[plugin]:
        if other.startswith("moefw.plugins."):
            beside = MODULES[other].name != "__init__.py" and other.count(".") == 3
            assert other.split(".")[2] == family
            assert beside or other.split(".")[3] == own
