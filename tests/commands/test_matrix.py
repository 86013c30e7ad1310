"""``moefw matrix``, and the guide on combinations."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import copies
from moefw.cli import cli
from moefw.commands import matrix as command
from moefw.compose.registry import Registry
from moefw.testing.matrix import Matrix, survey
from moefw.testing.variants import OURS, Variant, variants
from must_accept import MUST_ACCEPT

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["matrix", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def listed(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed("--json", *arguments))
    return found


@pytest.fixture(scope="module")
def ours() -> Matrix:
    return survey(Registry())


@pytest.fixture(autouse=True)
def _survey_once(ours: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    """Survey the built-in plugins once for all tests, and third-party plugins once for each test."""
    found = {True: ours}

    def once(registry: Registry, *, ours_only: bool) -> Matrix:
        if ours_only not in found:
            found[ours_only] = survey(registry, ours_only=ours_only)
        return found[ours_only]

    monkeypatch.setattr(command, "survey", once)


def test_the_share_refused_does_not_grow(ours: Matrix, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{ours.summary()}", file=sys.stderr)
    at_most: Any = MUST_ACCEPT["refused_at_most"]
    assert ours.share_refused <= at_most, "a larger share needs an ADR and a new number in must_accept.yaml"
    assert at_most - ours.share_refused < 0.002, "less is refused: lower the number in must_accept.yaml"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plugins of others meet the built-in ones in some of their variants."""

    def some(registry: Registry, *, include: Sequence[str] = ()) -> dict[str, list[Variant]]:
        kept = ("topk capacity, padded", "loop", "grouped")
        return {
            section: [way for n, way in enumerate(ways) if n % 5 == 0 or way.label in kept or way.distribution != OURS]
            for section, ways in variants(registry, include=include).items()
        }

    monkeypatch.setattr("moefw.testing.matrix.variants", some)
    monkeypatch.setattr(command, "survey", survey)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(distribution: str, body: str) -> None:
        info = tmp_path / f"{distribution}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[moefw]\n{distribution} = {distribution}_module\n")
        (tmp_path / f"{distribution}_module.py").write_text(
            "from attrs import frozen\nimport moefw\n"
            f"@frozen\nclass Part(moefw.DispatcherPlugin):\n    name = {distribution!r}\n"
            f"{textwrap.indent(textwrap.dedent(body), '    ')}\n"
            "@moefw.hookimpl\ndef moefw_dispatchers():\n    return [Part]\n"
        )

    yield write
    for name in set(sys.modules) - before:
        if name.endswith("_module"):
            del sys.modules[name]


PAGER = """
    def offers(self, site):
        return moefw.offers(row_alignment=moefw.ANY, rows=("ragged",), counts=("device",))
    def needs(self, site):
        return [moefw.need("package", "pagerlib", reason="it pages"), moefw.need("device", ("cuda",), reason="it pages")]
"""


def test_the_page_in_the_docs_is_up_to_date() -> None:
    assert (DOCS / "matrix.md").read_text() == printed("--markdown"), "run: moefw matrix --markdown > docs/matrix.md"


def test_a_refused_pair_has_its_reason_below_the_table() -> None:
    lines = printed().splitlines()
    row = next(line for line in lines if line.startswith("hybridep library, budget, drop  no [3]"))
    (note,) = {line for line in lines if line.startswith("[3] loop needs counts on the host")}
    assert lines.index(row) < lines.index(note)
    assert "hybridep offers device" in note


def test_the_summary_counts_what_the_tables_hold() -> None:
    found = listed()
    sizes = [len(ways) for ways in found["sections"].values()]
    assert found["pairs"] == sum(one * other for n, one in enumerate(sizes) for other in sizes[n + 1 :])
    assert found["refused"] == len(found["refusals"])
    share = f"{100 * found['refused'] / found['pairs']:.1f} %"
    text = printed()
    assert text.startswith(f"refused: {found['refused']} of {found['pairs']} combinations of two ({share})")
    assert text.count("no [") == found["refused"]


def test_what_needs_a_gpu_or_a_library_is_told_apart_and_refused_nowhere_for_that() -> None:
    found = listed()
    needs = {way["variant"]: way["needs"] for way in found["sections"]["dispatch"]}
    assert needs["deepep library"] == ["deep_ep", "cuda"]
    assert needs["deepep torch"] == []
    assert not any("cuda" in refusal["reason"] for refusal in found["refusals"])


def test_what_only_fails_for_want_of_a_third_part_says_so() -> None:
    (reason,) = {
        refusal["reason"]
        for refusal in listed()["refusals"]
        if refusal["variants"] == {"dispatch": "hybridep library, budget, drop", "memory": "keep moe_act"}
    }
    assert reason.startswith("no gemm goes with hybridep library, budget, drop and keep moe_act.")
    assert "loop needs counts on the host" in reason
    assert "grouped offers moe_act=recompute" in reason


@pytest.mark.usefixtures("few")
def test_other_distributions_are_left_out_by_default(install: Callable[..., None]) -> None:
    before = listed()
    install("pager", PAGER)
    install("broken", "raise RuntimeError('oops')")
    assert listed() == before
    assert "broken_module" not in sys.modules


@pytest.mark.usefixtures("few")
def test_all_shows_the_plugins_of_others(install: Callable[..., None]) -> None:
    install("pager", PAGER)
    install("broken", "raise RuntimeError('oops')")
    found = listed("--all")
    (pager,) = (way for way in found["sections"]["dispatch"] if way["variant"] == "pager")
    assert pager["distribution"] == "pager"
    assert pager["needs"] == ["pagerlib", "cuda"]
    refused = [refusal["variants"] for refusal in found["refusals"] if "pager" in refusal["variants"].values()]
    assert {"dispatch": "pager", "gemm": "loop"} in refused
    assert {"routing": "topk capacity, padded", "dispatch": "pager"} in refused
    assert "oops" in found["problems"][0]["what"]
    assert "broken: " in printed("--all")


@pytest.mark.usefixtures("few")
def test_a_plugin_that_raises_is_refused_with_everything_and_spares_the_others(install: Callable[..., None]) -> None:
    install("nervous", "def offers(self, site):\n    raise ZeroDivisionError('today')")
    found = listed("--all")
    (alone,) = (entry for entry in found["refused_alone"] if entry["variant"] == "nervous")
    assert "ZeroDivisionError: today" in alone["reason"]
    assert found["refused"] == listed()["refused"]


GUIDE = (DOCS / "combinations.md").read_text()


@pytest.mark.parametrize(
    ("left_out", "passed"),
    [("(every_pair or every_other_part)", 4), pytest.param("nothing", 6, marks=pytest.mark.deep)],
)
def test_the_guide_works_as_it_is_written(tmp_path: Path, left_out: str, passed: int) -> None:
    for block in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL):
        name = block.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(block)
    strict = ["-W", "error::pytest.PytestWarning", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    chosen = ["-k", f"not {left_out}"]
    done = copies.run("pytest", "-q", "-p", "no:cacheprovider", *strict, *chosen, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout, done.stdout
