"""``train`` writes the page of a run, which costs no run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from command_here import moefw_says
from moefw.commands.report import reported
from moefw.core.errors import RunError
from small_spec import small_spec
from synthetic_run import write_run

QUIET = SimpleNamespace(asked=None)


def test_a_run_that_is_done_gets_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=5)
    with reported(run, QUIET, failures=True):
        assert not (run / "report.html").exists()
    assert capsys.readouterr().out == f"the report is in {run / 'report.html'}\n"
    assert (run / "report.html").exists()


def test_the_page_of_a_run_has_its_numbers(tmp_path: Path) -> None:
    said = moefw_says("train", small_spec(tmp_path))
    page = tmp_path / "run" / "report.html"
    assert f"the report is in {page}" in said
    assert "2 steps" in page.read_text()


@pytest.mark.parametrize("failures", [True, False])
def test_a_run_that_fails_keeps_its_error(tmp_path: Path, failures: bool) -> None:
    run = write_run(tmp_path / "run", steps=5)
    with pytest.raises(RunError, match="a rank died"), reported(run, QUIET, failures=failures):
        raise RunError("a rank died")
    assert (run / "report.html").exists() == failures


def test_a_page_that_fails_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("nothing to divide")

    monkeypatch.setattr("moefw.report.page.write_page", fails)
    with reported(write_run(tmp_path / "run", steps=5), QUIET, failures=True):
        pass
    assert capsys.readouterr().out == "there is no report: nothing to divide\n"


def test_nobody_waits_for_a_page_after_a_signal_or_before_a_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=5)
    with reported(run, SimpleNamespace(asked=15), failures=True):
        pass
    with reported(tmp_path, QUIET, failures=True):
        pass
    assert not list(tmp_path.rglob("report.html"))
