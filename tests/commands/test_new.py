"""``moefw new`` writes complete packages, or nothing if it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import copies
from moefw.cli import cli, main
from moefw.commands.new import LONGEST_NAME, TEMPLATES
from moefw.compose.spec.sections import over
from moefw.compose.spec.source import Marks, read_yaml
from moefw.core.kinds import CERTIFIED

ROOT = Path(__file__).parents[2]
LONG = "a" * (LONGEST_NAME - 6) + "-sampl"


def called(kind: str) -> str:
    return f"my-{kind.replace('_', '-')}"


def new(kind: str, name: str, into: Path) -> Path:
    result = CliRunner().invoke(cli, ["new", kind, name, "--into", str(into)], catch_exceptions=False)
    assert result.exit_code == 0
    (made,) = (path for path in into.iterdir() if result.output.startswith((f"{path} holds a ", f"{path} holds an ")))
    return made


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A package of each kind, called my-KIND."""
    into = tmp_path_factory.mktemp("packages")
    return {kind: new(kind, called(kind), into) for kind in CERTIFIED}


@pytest.fixture(scope="module")
def installed(packages: dict[str, Path]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command in an environment that has all of them installed."""
    for kind, package in packages.items():
        info = package / f"moefw_my_{kind}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: moefw-{called(kind)}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[moefw]\n{called(kind)} = moefw_my_{kind}\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages.values()))}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return copies.run(*command, cwd=next(iter(packages.values())).parent, env=env)

    return run


@pytest.mark.parametrize("kind", CERTIFIED)
def test_a_package_has_its_names_and_no_others(packages: dict[str, Path], kind: str) -> None:
    package = packages[kind]
    files = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*") if path.is_file()}
    own = {"pyproject.toml", "README.md", f"tests/test_my_{kind}.py", f"moefw_my_{kind}/__init__.py"}
    runtime = set() if kind in ("layout", "pipeline", "schedule") else {f"moefw_my_{kind}/{kind}.py"}
    assert own | runtime <= files.keys()
    assert all(f"`{name}`" in files["README.md"] for name in runtime or {f"moefw_my_{kind}/__init__.py"})
    for path, text in files.items():
        if "dist-info" not in path:
            assert not any(word in path + text for word in ("sample", "Sample", "{kind}", "{spec}", "{changes}"))
    assert f'{called(kind)} = "moefw_my_{kind}"' in files["pyproject.toml"]
    assert "    plugin = My\n" in files[f"tests/test_my_{kind}.py"]
    one = f"{'An' if kind in ('adapter', 'attention', 'optimizer') else 'A'} {CERTIFIED[kind].noun}"
    assert f'description = "{one} for moefw"' in files["pyproject.toml"]
    assert f"{one} for moefw. " in files["README.md"]
    assert len(files[f"tests/test_my_{kind}.py"].split("class ")[1].splitlines()) <= 3


@pytest.mark.parametrize(("name", "declaration"), [("hash-router", "Hash"), ("hash", "Hash")])
def test_a_router_that_is_called_one_is_not_a_router_router(tmp_path: Path, name: str, declaration: str) -> None:
    (module,) = new("router", name, tmp_path).glob("moefw_*/__init__.py")
    assert f"class {declaration}(moefw.RouterPlugin):" in module.read_text()


@pytest.mark.parametrize("name", ["x", "a-b-c", LONG])
def test_packages_are_clean(tmp_path: Path, name: str) -> None:
    for kind in CERTIFIED:
        new(kind, f"{name}-{kind.replace('_', '-')}"[-LONGEST_NAME:].strip("-"), tmp_path)
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml")]
        for package in tmp_path.iterdir():
            done = subprocess.run([*ruff, "."], cwd=package, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


def test_all_are_listed_and_one_spec_takes_them_all(
    installed: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    listed = installed("moefw", "plugins").stdout
    for kind in CERTIFIED:
        assert f"{called(kind)} " in listed
        assert f"moefw-{called(kind)} 0.1.0" in listed
    assert "broken" not in listed
    spec = tmp_path / "spec.yaml"
    tree: dict[str, Any] = {"model": {"preset": "qwen3-moe-tiny"}}
    for kind in CERTIFIED:
        chosen = (TEMPLATES / kind / "spec.yaml").read_text().replace("sample", called(kind))
        tree = over(tree, read_yaml(chosen, Marks(kind), []))
    spec.write_text(json.dumps(tree))
    (only,) = installed("moefw", "check", str(spec)).stderr.splitlines()
    assert "train.weights: a-folder does not exist." in only
    done = installed("moefw", "check", str(spec), "adapter={use: none}", "train.weights=null")
    assert done.returncode == 0, done.stderr
    assert "is sound: 2 ranks" in done.stdout
    assert "routing: my-router  dispatch: my-dispatcher  gemm: my-gemm  precision: my-precision" in done.stdout


@pytest.mark.deep
def test_each_passes_its_suite_as_generated(
    installed: Callable[..., subprocess.CompletedProcess[str]], packages: dict[str, Path]
) -> None:
    tests = [str(package / "tests") for package in packages.values()]
    done = installed("pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("passed") == 1


NAMES = {
    "My_Router": "my-router",
    "moefw-mine": "mine",
    "a.b": "a-b",
}
REFUSED = {
    "alltoall": "an installed plugin is called 'alltoall' already.",
    "cosine": "an installed plugin is called 'cosine' already.",
    "kernels": "a package moefw_kernels is installed already.",
    "../x": "'../x' cannot be the name",
    "2d": "'2d' cannot be the name",
    "": "'' cannot be the name",
    "é": "'é' cannot be the name",
    "x" * (LONGEST_NAME + 1): "cannot be the name",
    "null": "'null' is a word of YAML or Python.",
    "none": "'none' is a word of YAML or Python.",
    "sequence": "the dispatcher needs the name Sequence for something else.",
    "taken": "moefw-taken exists already.",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_normalised_as_package_indexes_do(name: str, tmp_path: Path) -> None:
    assert new("router", name, tmp_path).name == f"moefw-{NAMES[name]}"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_said_and_nothing_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "moefw-taken").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["new", "dispatcher", name, "--into", str(tmp_path)])
    assert REFUSED[name] in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["moefw-taken"]


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["new", "dispatcher", "ring", "--into", str(tmp_path / "no")])
    assert f"--into {tmp_path / 'no'} is not a folder." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_failure_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Path.write_text
    written: list[Path] = []

    def full(path: Path, text: str, **kwargs: str) -> int:
        written.append(path)
        if len(written) > 2:
            raise OSError(28, "No space left on device")
        return write(path, text, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SystemExit, match="2"):
        main(["new", "gemm", "mine", "--into", str(tmp_path)])
    assert "moefw-mine cannot be written: No space left on device." in capsys.readouterr().err
    assert len(written) == 3
    assert not list(tmp_path.iterdir())


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    result = CliRunner().invoke(cli, ["new", "dispatch", "x"])
    assert result.exit_code == 2
    assert all(kind in result.output for kind in CERTIFIED)


def test_writing_a_package_imports_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys, moefw.cli
try: moefw.cli.main(["new", "router", "quick", "--into", {str(tmp_path)!r}])
except SystemExit as done: assert not done.code, done.code
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_templates_are_packaged() -> None:
    assert TEMPLATES.is_relative_to(ROOT / "moefw")
    assert {path.name for path in TEMPLATES.iterdir()} == {"package", *CERTIFIED}
