"""Nothing heavy is imported before it is needed, and nothing knows a plugin by name."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import moefw.testing
from moefw.compose.built_in import built_in
from moefw.compose.registry import Registry
from moefw.core.kinds import CERTIFIED

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("room", ["core", "system", "recording", "runtime", "compose"])
def test_what_plugins_stand_on_knows_none_by_name(room: str) -> None:
    names = {*built_in()} - {"none"}  # a word of several options, and the adapter that is none
    assert len(names) >= 15
    for path in sources(f"moefw/{room}"):
        strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not strings & names, f"{path} names {strings & names}"


def test_the_first_line_of_a_built_in_module_names_its_parts() -> None:
    registry = Registry()
    assert registry.load_all() == []
    declared = {part.name: part.declaration.__module__ for part in registry.parts() if part.distribution == "moefw"}
    assert declared.keys() == built_in().keys()
    assert all(module.startswith(built_in()[name]) for name, module in declared.items())


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_declarations_import_no_torch() -> None:
    code = "import sys, moefw; from moefw.compose.registry import Registry; r = Registry(); p = r.load_all(); print(p, len(r.parts()))"
    found = python(f"{code}; assert 'torch' not in sys.modules")
    assert found.startswith("[] ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", str(QUICKSTART)],
        ["plugins"],
        ["schema"],
        ["--help"],
        ["train", "--help"],
    ],
)
def test_commands_that_only_look_import_no_torch(arguments: list[str]) -> None:
    code = f"""
import sys, moefw.cli
try: moefw.cli.main({arguments!r})
except SystemExit as done: assert not done.code, done.code
assert 'torch' not in sys.modules
"""
    assert python(code)


def test_the_matrix_imports_no_torch() -> None:
    """Of a quarter of the variants: each plugin has one of them."""
    code = """
import sys, moefw.cli, moefw.testing.matrix
whole = moefw.testing.matrix.variants
moefw.testing.matrix.variants = lambda *a, **k: {section: ways[::4] for section, ways in whole(*a, **k).items()}
try: moefw.cli.main(['matrix'])
except SystemExit as done: assert not done.code, done.code
assert 'torch' not in sys.modules
"""
    assert python(code)


def test_help_imports_attrs_and_click_and_nothing_heavier() -> None:
    names = "{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names"
    at_start = python(f"import sys; print(*{names})").split()
    code = f"""
import sys, moefw.cli
try: moefw.cli.main(['--help'])
except SystemExit: print(*{names})
"""
    imported = python(code).splitlines()[-1].split()
    assert {*imported} - {*at_start} == {"attr", "attrs", "click", "moefw"}


def test_transformers_still_finds_its_kernels_package_beside_our_folder() -> None:
    assert python("import transformers; print(transformers.__version__)")


@pytest.mark.parametrize("name", ["moefw", "moefw.testing"])
def test_the_public_names_are_all_there(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(set(module.__all__))
    for public in module.__all__:
        assert getattr(module, public) is not None


def test_type_checkers_read_the_public_names() -> None:
    tree = ast.parse((ROOT / "moefw" / "__init__.pyi").read_text())
    homes = {node.names[0].name: str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert sorted(homes) == sorted(moefw.__all__)
    for name, home in homes.items():
        assert getattr(moefw, name) is getattr(importlib.import_module(home), name)


def test_every_suite_is_a_typed_name() -> None:
    assert {kind.suite for kind in CERTIFIED.values()} <= {*moefw.testing.__all__}


@pytest.mark.parametrize("module", ["records.metrics", "clock", "progress"])
def test_what_a_person_sees_of_a_run_is_imported_without_torch(module: str) -> None:
    code = f"import sys, moefw.training.{module}; print({{'torch', 'bokeh', 'tensorboard'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_ranks_exchange_no_pickled_objects() -> None:
    """Object collectives of ``torch.distributed`` unpickle a peer's message, so a peer could run any code."""
    for path in sources("moefw"):
        called = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        objects = {
            name for name in called if re.search(r"gather_object|object_list|_object_to_tensor|tensor_to_object", name)
        }
        assert not objects, f"{path} calls {objects}"
        assert not any(name.startswith("torch.distributed.checkpoint") for name in imports(path)), path


def test_one_module_alone_asks_for_the_type_of_a_device() -> None:
    """So the code that a counted device runs in tests is what a GPU runs."""
    asks = re.compile(r"""\bis_cuda\b|\.type\s*(?:==|!=|in|not in)\s*["'(]""")
    for path in (*sources("moefw"), *sources("kernels")):
        if path != ROOT / "kernels/moefw_kernels/devices.py":
            assert not asks.search(path.read_text()), f"{path} asks for the type of a device: see moefw_kernels.devices"
