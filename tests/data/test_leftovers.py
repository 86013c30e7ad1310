"""A preparation removes the folder that a killed one left, but not the folder of a running one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from data_cases import all_of, prepared_folders, python
from moefw.plugins.data import source
from moefw.plugins.data.prepared import new_folder, open_prepared
from moefw.plugins.data.text import Text

STOP_WHILE_FILLING = """
import os, signal, sys
from pathlib import Path
import moefw.plugins.data.source as source
from moefw.plugins.data.text import Text
fill = source._fill
def fill_and_wait(folder, *args):
    fill(folder, *args)
    print("filled", flush=True)
    signal.pause()
source._fill = fill_and_wait
Text(path=sys.argv[1]).prepare(Path(sys.argv[2]))
"""


@pytest.mark.fault("the preparation of data is killed", "the next one cleans up")
def test_a_killed_preparation_is_cleaned_up_by_the_next_and_a_living_one_is_not(corpus, cache):
    living, killed = (python(STOP_WHILE_FILLING, corpus, cache) for _ in range(2))
    for process in (living, killed):
        assert process.stdout is not None
        assert process.stdout.readline() == "filled\n"
    assert len(prepared_folders(cache)) == 2
    killed.kill()
    killed.communicate(timeout=60)
    expected = all_of(Text(path=str(corpus)).prepare(cache).train)
    names = [folder.name for folder in prepared_folders(cache)]
    assert len(names) == 2
    assert [name.startswith(".") for name in names] == [True, False], "the living one's folder is there"
    living.kill()
    living.communicate(timeout=60)
    assert all_of(Text(path=str(corpus)).prepare(cache).train) == expected
    Text(path=str(corpus), heldout=0.4).prepare(cache)
    assert [folder.name[0] == "." for folder in prepared_folders(cache)] == [False, False], "of another corpus, too"


def test_folders_of_another_machine_or_of_somebody_else_stay(corpus, cache):
    cache.mkdir(parents=True)
    token = "0" * 16
    others = [f".moefw.another-host.{token}", ".git", f".{'a' * 32}", "text"]
    for name in others:
        (cache / name).mkdir()
    ours = cache / f".moefw.{socket.gethostname()}.{token}"
    ours.mkdir()
    Text(path=str(corpus)).prepare(cache)
    assert not ours.exists()
    assert all((cache / name).is_dir() for name in others)


def test_a_folder_that_was_taken_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    """Another process may act between the creation of a folder and its lock."""
    mkdir, met = Path.mkdir, []

    def mkdir_and_meet(self: Path, *args: object, **options: object) -> None:
        mkdir(self, *args, **options)
        if self.name.startswith(".") and not met:
            met.append(self)
            self.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir_and_meet)
    with new_folder(tmp_path / ("a" * 32)) as partial:
        assert partial.is_dir()
        assert partial.parent != met[0]


def test_what_another_process_has_prepared_meanwhile_stays(corpus, cache, monkeypatch):
    fill = source._fill

    def fill_slowly(folder: Path, *args: object) -> None:
        fill(folder, *args)
        monkeypatch.setattr(source, "_fill", fill)
        Text(path=str(corpus)).prepare(cache)
        (first,) = (path for path in prepared_folders(cache) if not path.name.startswith("."))
        inode.append(first.stat().st_ino)

    inode: list[int] = []
    monkeypatch.setattr(source, "_fill", fill_slowly)
    Text(path=str(corpus)).prepare(cache)
    (folder,) = prepared_folders(cache)
    assert [folder.stat().st_ino] == inode
    assert open_prepared(folder)
