"""A new folder appears whole or not at all, and nothing of anybody else is touched on the way."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from moefw.core.errors import CheckpointError
from moefw.system.folders import new_folder

WAITS = """
import signal, sys
from pathlib import Path
from moefw.system.folders import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "file").touch()
    print("begun", flush=True)
    signal.pause()
"""


def waiting(target: Path) -> subprocess.Popen[str]:
    """Start a process that has begun to write a folder."""
    process = subprocess.Popen([sys.executable, "-c", WAITS, target], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def hidden(parent: Path) -> list[Path]:
    return [*parent.glob(".moefw.*")]


def test_a_folder_is_private_until_it_has_its_name(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with new_folder(tmp_path / "out") as folder:
            (folder / "file").write_text("whole")
            assert not (tmp_path / "out").exists()
            (private,) = hidden(tmp_path)
            assert stat.S_IMODE(private.stat().st_mode) == 0o700
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    assert (tmp_path / "out" / "file").read_text() == "whole"
    assert [*tmp_path.iterdir()] == [tmp_path / "out"]


def test_nothing_is_left_of_a_folder_that_fails(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="out cannot be written: no space left"), new_folder(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert [*tmp_path.iterdir()] == []


def test_the_first_of_two_that_ends_has_the_name_and_the_other_fails(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with ExitStack() as late, ExitStack() as early:
        for stack, text in ((late, "late"), (early, "early")):
            (stack.enter_context(new_folder(target)) / "file").write_text(text)
        early.close()
        with pytest.raises(CheckpointError, match="out is there and is no empty folder"):
            late.close()
    assert (target / "file").read_text() == "early"
    assert [*tmp_path.iterdir()] == [target]


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    with new_folder(tmp_path / "link") as folder:
        (folder / "file").touch()
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["file"]


@pytest.mark.fault("a process that writes a folder is killed", "the next one removes what it left, and nothing else")
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    living, killed = waiting(tmp_path / "living"), waiting(tmp_path / "killed")
    others = [
        tmp_path / "out.tmp",
        tmp_path / ".moefw",
        tmp_path / f".moefw.another-host.{'0' * 16}",
        tmp_path / f".moefw.{socket.gethostname()}.mine",
    ]
    for folder in others:
        folder.mkdir()
    link = tmp_path / f".moefw.{socket.gethostname()}.{'0' * 16}"
    link.symlink_to(others[0])
    assert len(hidden(tmp_path)) == 5
    try:
        killed.kill()
        killed.wait()
        with new_folder(tmp_path / "out"):
            pass
        assert len(hidden(tmp_path)) == 4
        living.send_signal(signal.SIGINT)
        living.wait()
    finally:
        living.kill()
        killed.communicate()
        living.communicate()
    assert sorted(tmp_path.iterdir()) == sorted([*others, link, tmp_path / "out"])
