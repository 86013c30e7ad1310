"""An override that is written like an option of the command is answered with the override."""

from __future__ import annotations

from pathlib import Path

import pytest

from moefw.cli import main


@pytest.mark.parametrize("command", ["check", "train", "plan"])
@pytest.mark.parametrize(
    ("words", "override"),
    [
        (["--train.lr", "1e-3"], "train.lr=1e-3"),
        (["--train.lr=1e-3"], "train.lr=1e-3"),
        (["train.steps=2", "--data.path", "my text"], "'data.path=my text'"),
        (["--train.lr"], "train.lr=value"),
    ],
)
def test_it_is_named(command: str, words: list[str], override: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "spec.yaml", *words])
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(f"Write {override}\n")


def test_it_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text("model: {preset: qwen3-moe-tiny}")
    for word in ("--train.lr=1e-3", "train.lr=1e-3"):
        with pytest.raises(SystemExit) as left:
            main(["check", "spec.yaml", word])
    assert left.value.code == 0
    assert "is sound" in capsys.readouterr().out


def test_other_options_are_answered_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["check", "spec.yaml", "--jsno"], ["schema", "--a.b", "c"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "No such option" in capsys.readouterr().err


def test_data_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text("data: {path: txt}")
    Path("text").mkdir()
    with pytest.raises(SystemExit) as left:
        main(["check", "spec.yaml"])
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith("txt does not exist. Did you mean 'text'?\n")
