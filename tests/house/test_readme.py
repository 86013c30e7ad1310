"""The commands and code of the README work."""

from __future__ import annotations

import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moefw.cli import COMMANDS, cli
from moefw.commands import specs
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble
from moefw.core.errors import MoefwError

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def in_order(*said: str) -> bool:
    """Whether the README says each for the first time behind the one before."""
    places = [README.index(text) for text in said]
    return places == sorted(places)


def rows(text: str) -> int:
    """Number of rows of a text on a terminal of 80 columns."""
    return sum(max(1, -(-len(line) // 80)) for line in text.splitlines())


def test_the_first_screen_says_what_it_is_for_whom_how_it_differs_and_what_ran_where() -> None:
    assert in_order(
        "Mixture-of-Experts training for PyTorch",
        "It is for people who",
        "What is different",
        "docs/images/",
        "| where | what ran there |",
        "## Installation",
    )
    assert rows(README[: README.index("## Installation")]) <= 50


def test_the_second_screen_installs_it_and_shows_a_layer_and_two_commands() -> None:
    assert in_order("## Installation", "pip install .", "```py\n", "make train ", "make test ")
    assert rows(README[README.index("## Installation") : README.index("make test ")]) <= 50


def test_the_first_spec_is_sound(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    path = tmp_path / "first.yaml"
    path.write_text(text)
    assembly = assemble(path, defaults=defaults())
    assert assembly.layout.world == 2
    assert set(assembly.layers) == {0, 1, 2}


def test_the_layer_in_a_loop_of_ones_own_trains() -> None:
    (code,) = blocks("py")
    assert len([line for line in code.splitlines() if line]) == 10, "the heading says ten lines"
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec", dont_inherit=True), names)
    assert names["output"].losses > 0
    assert all(parameter.grad is not None for parameter in names["layer"].parameters())


def test_the_mistake_is_told_as_shown(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^error: (.*)$", README, flags=re.MULTILINE)
    path = tmp_path / "spec.yaml"
    path.write_text("model: {preset: qwen3-moe-tiny}")
    with pytest.raises(MoefwError) as caught:
        assemble(path, ["dispatch.use=altoall"], defaults=defaults())
    assert str(caught.value) == shown


def test_the_plugin_of_20_lines_registers_and_is_chosen_by_a_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = blocks("python")
    module = types.ModuleType("moefw_ring")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "README.md", "exec", dont_inherit=True), module.__dict__)
    registry = Registry(extra=[module])
    path = tmp_path / "ring.yaml"
    path.write_text(
        "model: {preset: qwen3-moe-tiny}\ndispatch: {use: ring, both_ways: false}\nparallel: {experts: {ep: 2}}"
    )
    assembly = assemble(path, defaults=defaults(), registry=registry)
    assert assembly.parts.dispatch.both_ways is False


def test_every_command_has_a_row_and_help() -> None:
    for command in COMMANDS:
        assert f"`moefw {command} " in README or f"`moefw {command}`" in README
        assert CliRunner().invoke(cli, [command, "--help"]).exit_code == 0


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_runs_that_are_shown_are_sound(monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    monkeypatch.chdir(ROOT)
    shown = re.findall(r"^moefw (?:train|plan) (examples/\S+)(.*)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    assert shown
    for spec, overrides in shown:
        specs.read(spec, [word for word in shlex.split(overrides) if word != "--resume"])
