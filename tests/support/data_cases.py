"""Corpora, and the messages of preparing them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from moefw import DataError
from moefw.plugins.data.text import Text

EOT = "<|endoftext|>"


examples = settings(max_examples=60, deadline=None)


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def all_of(stream) -> list[int]:
    return stream.read(0, len(stream)).tolist()


def prepared_folders(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def message(path: str | Path | None, cache: Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        Text(path=path and str(path), **options).prepare(cache)
    (problem,) = caught.value.problems
    assert problem.fix, "an error says what to do"
    return str(problem)


def python(code: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
