"""A text, a spec of two quick ranks, and an undisturbed run."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import kill_chain
from kill_chain import EVERY, RANKS, SHIM, compiled, preloaded, train

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


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    return compiled(SHIM, tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def points(shim: Path, spec: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, int]:
    """Number of points, by rank, at which a save that also drops an old checkpoint can be killed."""
    folder = tmp_path_factory.mktemp("points")
    run_dir, log, last = folder / "run", folder / "log", 3 * EVERY
    with train(spec, run_dir, f"train.steps={last}", environment=preloaded(shim, run_dir, last, log)) as run:
        assert (ended := run.ended()).code == 0, ended.err
    counted = {rank: len(Path(f"{log}-{rank}").read_text().splitlines()) for rank in range(RANKS)}
    assert counted[0] >= 20
    assert counted[1] >= 6
    return counted
