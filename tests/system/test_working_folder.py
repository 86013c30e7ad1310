"""No process that moefw starts imports a module from the working folder, which may be a stranger's."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import moefw
from moefw.commands.doctor.children import ask
from moefw.commands.out_of_memory import memory_note
from small_spec import small_spec

LIBRARIES = ("attr", "attrs", "click", "pluggy", "selectors", "tokenizers", "torch")
"""Modules that processes of moefw import: of the standard library, of others, with and without torch."""
SOURCES = Path(moefw.__file__).parent

POOL = """
from moefw.testing import pool

if __name__ == "__main__":
    ranks = pool.RankPool(1)
    print(ranks.run(len, 1, "seven c"))
    ranks.close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with modules that have the names of libraries, and leave a file when they are imported."""
    path = tmp_path / "stranger"
    path.mkdir()
    for name in LIBRARIES:
        (path / f"{name}.py").write_text("open(__file__ + '.imported', 'w').close()\n")
    return path


def imported(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.imported"))


@pytest.mark.deep
@pytest.mark.fault("the working folder holds modules with the names of libraries", "no rank imports them")
def test_no_rank_imports_a_module_from_the_working_folder(folder: Path) -> None:
    small_spec(folder, ranks=2, steps=1)
    command = [Path(sys.executable).with_name("moefw"), "train", "spec.yaml"]
    (folder / "run.yaml").rename(folder / "spec.yaml")
    environment = {**os.environ, "MOEFW_CACHE": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert imported(folder) == []
    assert done.returncode == 0, done.stderr
    assert (folder / "run" / "checkpoints" / "step-1").is_dir()


def test_nor_does_the_process_that_plans_for_a_run_without_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assembly: Any = SimpleNamespace(
        spec=SimpleNamespace(run=SimpleNamespace(dir="run")), layout=SimpleNamespace(world=1)
    )
    assert memory_note(assembly).startswith("This machine has ")
    assert imported(folder) == []


def test_nor_does_a_probe_of_the_doctor_that_has_it_on_its_own_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", str(folder), *sys.path])  # as `python -c` and `python -m` have it
    (capability,) = ask(["tokenizers"], deadline=time.monotonic() + 60)
    assert imported(folder) == []
    assert capability.state == "available"


def test_nor_do_the_ranks_of_a_pool(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, check=False)
    assert imported(folder) == []
    assert done.stdout == "[7]\n", done.stderr


def test_python_is_started_in_one_place() -> None:
    """Code that starts Python in another way fails here, before somebody finds it in a stranger's folder."""
    assert places("executable") == {"system/python.py", "commands/doctor/machine.py"}, "the doctor prints it"
    assert places("multiprocessing") == {"testing/pool.py"}
    assert places("ProcessPoolExecutor") == set()


def places(word: str) -> set[str]:
    """Return the sources that import a module or a name, or use an attribute, that is called ``word``."""
    sources = {path.relative_to(SOURCES).as_posix(): path.read_text() for path in SOURCES.rglob("*.py")}
    return {name for name, source in sources.items() if word in source and word in set(names_in(source))}


def names_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]
            yield from (alias.name for alias in node.names)
