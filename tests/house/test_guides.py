"""The guides are correct: every block of code is written or run as a reader would, with the shown output."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import copies
from moefw.planner import cluster as clusters
from moefw.planner.cluster import THIS_MACHINE

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
OF_PLUGINS = sorted(GUIDES.glob("write-*.md"))
SLOW = (
    *("write-a-context-parallelism", "write-a-layout", "write-a-pipeline", "write-an-adapter", "write-an-attention"),
    "write-an-optimizer",
)
"""Guides whose suites take long, which only ``make test-deep`` follows: the suites and ``moefw new`` have tests of their own."""
BLOCK = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?( append)?\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@dataclass
class Reader:
    """Follows a guide in an empty folder. An installation writes metadata next to it instead of calling pip.

    Its commands are copies of a warm process.
    """

    folder: Path
    site: Path
    plugins: str
    """Options of pytest that load its plugins."""
    written: dict[str, str] = field(default_factory=dict)

    def follow(self, guide: str) -> None:
        blocks = BLOCK.findall(guide)
        assert len(blocks) == guide.count("\n```") // 2, "a block that is not understood"
        for _, title, _, text in (block for block in blocks if block[1] and block[0] == "yaml"):
            self.written[title] = text
        for language, title, append, text in blocks:
            if language == "console":
                self.run(text)
            elif title:
                path = self.folder / title
                path.write_text((path.read_text() + "\n" if append else "") + text)
            else:
                assert language == "text" or self.shows(text), f"no file says so:\n{text}"

    def shows(self, text: str) -> bool:
        """Return whether a file of the package contains an excerpt."""
        return any(text in path.read_text() for path in self.folder.rglob("*.*") if path.is_file())

    def run(self, console: str) -> None:
        for command, shown in commands(console):
            words = shlex.split(command)
            if words[0] == "cd":
                self.folder = self.folder / words[1]
                for title, text in self.written.items():
                    (self.folder / title).write_text(text)
            elif words[:2] == ["pip", "install"]:
                self.install()
            else:
                self.expect(command, shown)

    def expect(self, command: str, shown: list[str]) -> None:
        exit_code = 0
        if shown and (found := re.fullmatch(r"\(exit (\d)\)", shown[-1])):
            exit_code, shown = int(found[1]), shown[:-1]
        done = self.done(command)
        said = done.stdout + done.stderr
        assert done.returncode == exit_code, f"{command}\n{said}"
        lines = iter(said.splitlines())
        for line in shown:
            pattern = line.replace("[", "[[]").replace("...", "*")
            assert line == "..." or any(fnmatch.fnmatchcase(said, pattern) for said in lines), f"{line}\n{said}"

    def done(self, command: str) -> subprocess.CompletedProcess[str]:
        """A command that has ended."""
        path = os.pathsep.join(map(str, (Path(sys.executable).parent, os.environ["PATH"])))
        modules = os.pathsep.join([str(self.site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        env = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": modules,
            "PYTEST_ADDOPTS": f"-q -p no:cacheprovider {self.plugins}",
        }
        words = shlex.split(command)
        if words[0] in ("moefw", "pytest"):
            return copies.run(*words, cwd=self.folder, env=env)
        return subprocess.run(["bash", "-c", command], cwd=self.folder, env=env, capture_output=True, text=True)

    def install(self) -> None:
        project = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        info = self.site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True, exist_ok=True)  # a guide may install its package again
        head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(head)
        entries = "".join(f"{name} = {module}\n" for name, module in project["entry-points"]["moefw"].items())
        (info / "entry_points.txt").write_text(f"[moefw]\n{entries}")
        for package in self.folder.glob("moefw_*"):
            if not (self.site / package.name).exists():
                (self.site / package.name).symlink_to(package)


def commands(console: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command with the output lines shown below it."""
    command, shown = "", []
    for line in console.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        else:
            shown.append(line)
    yield command, shown


@pytest.mark.parametrize(
    ("guide", "plugins"),
    [
        *(pytest.param(path, "-p two_ranks", id=f"{path.stem}-two") for path in OF_PLUGINS if path.stem not in SLOW),
        *(pytest.param(path, "", id=f"{path.stem}-all", marks=pytest.mark.deep) for path in OF_PLUGINS),
    ],
)
def test_a_guide_leads_from_an_empty_folder_to_a_certified_plugin(guide: Path, plugins: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    reader = Reader(tmp_path / "work", tmp_path / "site", plugins)
    reader.follow(guide.read_text())
    (package,) = (tmp_path / "work").iterdir()
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", str(GUIDES.parent.parent / "pyproject.toml"), "."]
        done = subprocess.run(ruff, cwd=package, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.deep
def test_the_guide_of_a_calibration_measures_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    reader = Reader(tmp_path / "work", tmp_path / "site", "")
    reader.follow((GUIDES / "calibrate-a-machine.md").read_text())
    measured = clusters.read(THIS_MACHINE)
    node = measured.links.node
    assert node is not None
    assert len(node.collectives.all_gather) == 3
    assert node.gpus is not None
    assert node.gpus.value == 2
    assert "2 ranks at once" in measured.about


@pytest.mark.deep
def test_the_guide_of_tuning_ends_with_a_step_that_fits_and_is_an_eighth_faster(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    reader = Reader(tmp_path / "work", tmp_path / "site", "")
    guide = (GUIDES / "tune-by-bottleneck.md").read_text()
    reader.follow(guide)
    plans = [command for text in re.findall(r"```console\n(.*?)```", guide, re.DOTALL) for command, _ in commands(text)]
    first, last = (json.loads(reader.done(f"{plans[place]} --json").stdout)["time"] for place in (0, 3))
    assert last["tokens_per_s_per_gpu"] > 9 / 8 * first["tokens_per_s_per_gpu"]
    assert (first["fits"], last["fits"]) == (False, True)


def test_a_guide_links_to_what_is_there() -> None:
    for guide in GUIDES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", guide.read_text()):
            assert (GUIDES / target).exists(), f"{guide.name} links to {target}"
