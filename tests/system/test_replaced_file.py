"""A file is replaced as a whole, and no link in its place is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moefw.system.files import replaced_file


def test_a_reader_sees_the_old_content_until_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replaced_file(path) as scratch:
        scratch.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_stays_as_it_was_if_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left"), replaced_file(path):
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_link_is_replaced_and_what_it_names_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("file", ".file.tmp"):
        (folder / name).symlink_to(victim)
    with replaced_file(folder / "file") as scratch:
        scratch.write_text("new")
    assert victim.read_text() == "mine"
    assert (folder / "file").read_text() == "new"
    assert not (folder / "file").is_symlink()
    assert [*folder.iterdir()] == [folder / "file"]


def test_a_pipe_that_nobody_reads_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".file.tmp")
    with replaced_file(tmp_path / "file") as scratch:
        scratch.write_text("new")
    assert (tmp_path / "file").read_text() == "new"
