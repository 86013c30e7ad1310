"""A text, a spec of two quick ranks, and an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import kill_chain

WORDS = "the quick brown fox jumps over a lazy dog while expert routers learn to share tokens fairly".split()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 80 KB."""
    path, chance = tmp_path_factory.mktemp("text") / "text.txt", random.Random(0)
    path.write_text(" ".join(chance.choice(WORDS) for _ in range(16_000)))
    return path


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MOEFW_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def spec(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "spec.yaml"
    path.write_text(kill_chain.SPEC % (text, path.with_name("run")))
    return path


@pytest.fixture(scope="session")
def unbroken(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> kill_chain.Unbroken:
    return kill_chain.unbroken(spec, tmp_path_factory.mktemp("unbroken") / "run")
