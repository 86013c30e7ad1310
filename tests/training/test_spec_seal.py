"""The spec of a run is unchanged since the run wrote it: a flipped digit would give another model unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_steps import fake_assembly
from moefw.commands import specs
from moefw.core.errors import MoefwError, SpecError
from moefw.testing.training import SMALL
from moefw.training.resolved_spec import write_resolved


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """The spec.yaml of a run."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "text.txt").write_text("a fox\n")
    run = {**SMALL["run"], "dir": str(tmp_path)}
    model = {**SMALL["model"], "vocab_size": 256}
    data = {"use": "text", "path": str(tmp_path / "text.txt")}
    write_resolved(fake_assembly({**SMALL, "model": model, "run": run, "data": data}, 1), tmp_path)
    return tmp_path / "spec.yaml"


def readings(spec: Path) -> list[str]:
    """Return the errors of the two ways to read a run's spec; empty if it is read."""
    said = []
    for read in (lambda: specs.read_run(str(spec.parent), []), lambda: specs.read(str(spec), [])):
        try:
            read()
            said.append("")
        except MoefwError as error:
            said.append(str(error))
    return said


@pytest.mark.fault("a bit of a run's spec.yaml flips, as in a digit", "eval and train refuse the file by name")
def test_a_spec_with_another_digit_is_refused(spec: Path) -> None:
    whole = spec.read_bytes()
    seal = whole.rindex(b"# sha256")
    for at in (at for at, byte in enumerate(whole) if chr(byte).isdigit() and at < seal):
        spec.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert all("spec.yaml has changed since the run wrote it" in said for said in readings(spec)), at


def test_a_seal_that_is_damaged_changes_nothing(spec: Path) -> None:
    whole, wanted = spec.read_bytes(), specs.read(str(spec), []).resolved()
    for at in range(whole.rindex(b"# sha256"), len(whole), 6):
        spec.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert all("spec.yaml" in said for said in readings(spec)) or specs.read(str(spec), []).resolved() == wanted


def test_a_spec_may_be_changed_by_who_drops_its_seal_or_copies_it(spec: Path, tmp_path: Path) -> None:
    changed = spec.read_text().replace("seed: 3", "seed: 4")
    copy = tmp_path / "new" / "spec.yaml"
    copy.parent.mkdir()
    copy.write_text(changed)
    assert specs.read(str(copy), []).spec.run.seed == 4
    spec.write_text(changed)
    with pytest.raises(SpecError, match=r"spec\.yaml has changed since the run wrote it.*delete that line"):
        specs.read_run(str(tmp_path), [])
    spec.write_text(changed[: changed.rindex("# sha256")])
    assert specs.read_run(str(tmp_path), []).spec.run.seed == 4
