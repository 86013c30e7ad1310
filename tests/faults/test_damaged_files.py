"""A damaged file of a run: it is refused by name, or the resumed run is the same bit for bit."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from attrs import frozen

from command_line import Said, say
from kill_chain import train
from training_process import checkpoints

STEPS, EVERY, BITS = 4, 2, 2
OVERRIDES = (
    f"train.steps={STEPS}",
    f"train.checkpoint_every={EVERY}",
    "train.eval_tokens=640",
    "data.tokenizer=bpe-300",
    "model.vocab_size=300",
)
SHARDS = ("rank-00000.safetensors", "rank-00001.safetensors")
CHECKPOINT = ("manifest.json", *SHARDS, "rank-00000.index.json", "rank-00001.index.json")
FILES = (
    *("run/spec.yaml", "run/metrics.jsonl", "run/tokenizer.json", "run/ledger.json", "run/sample.txt"),
    *("run/tensorboard/*", "run/report.html", "run/events.jsonl", "run/origins.json", "run/expert_load.jsonl"),
    *(f"run/checkpoints/step-{step}/{name}" for step in (EVERY, STEPS) for name in CHECKPOINT),
    *(f"cache/*/{name}" for name in ("CACHEDIR.TAG", "hashes.bin", "heldout.bin", "heldout.raw", "meta.json")),
    *("cache/*/tokenizer.json", "cache/*/train.bin", "cache/*/train.starts", "cache/*/heldout.starts"),
    "cache/plans/*.json",
)
"""Every file of a run, of its prepared data, and of its plan."""

pytestmark = pytest.mark.deep


@frozen
class Finished:
    """A finished run and its prepared data in ``folder``; the weights after one more step, and its evaluation."""

    folder: Path
    spec: Path
    next_weights: Mapping[str, bytes]
    evaluation: str

    def copy(self, to: Path) -> None:
        shutil.rmtree(to, ignore_errors=True)
        for room in ("run", "cache"):
            shutil.copytree(self.folder / room, to / room)

    def check(self, room: Path, name: str) -> None:
        """Resume and evaluate the run in ``room``: both refuse ``name``, or give the results of the intact run."""
        evaluated = say("eval", room / "run", "--json")
        assert evaluated.out == self.evaluation if evaluated.code == 0 else evaluated.refuses(name), evaluated
        resumed = resume(self.spec, room / "run")
        same = resumed.code == 0 and checkpoints(room / "run")[STEPS + 1] == self.next_weights
        assert same or resumed.refuses(name), resumed


def resume(spec: Path, run_dir: Path) -> Said:
    """Train one more step, on one rank."""
    own = [f"run.dir={run_dir}", "parallel={}", f"train.steps={STEPS + 1}"]
    return say("train", spec, "--resume", *OVERRIDES, *own)


@pytest.fixture(scope="module")
def finished(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MOEFW_CACHE", str(folder / "cache"))
        with train(spec, folder / "run", "--ledger", *OVERRIDES) as run:
            assert (ended := run.ended()).code == 0, ended.err
        again = folder / "again"
        shutil.copytree(folder / "run", again)
        evaluated, resumed = say("eval", again, "--json"), resume(spec, again)
    assert (evaluated.code, resumed.code) == (0, 0), evaluated.err + resumed.err
    return Finished(folder, spec, checkpoints(again)[STEPS + 1], evaluated.out)


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for a copy of the run and its data that is damaged."""
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))
    return tmp_path


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def test_every_file_of_a_run_is_here(finished: Finished) -> None:
    listed = {path for pattern in FILES for path in finished.folder.glob(pattern)}
    assert listed == {
        path for name in ("run", "cache") for path in (finished.folder / name).rglob("*") if path.is_file()
    }


@pytest.mark.fault("a bit of {id} flips", "refused by name, or the next weights and the evaluation are the same bits")
@pytest.mark.parametrize("pattern", FILES)
def test_nothing_is_made_of_a_flipped_bit(finished: Finished, room: Path, pattern: str) -> None:
    for seed in range(BITS):
        finished.copy(room)
        (path,) = room.glob(pattern)
        flip(path, random.Random(f"{pattern} {seed}"))
        finished.check(room, path.name)


@pytest.mark.fault(
    "a bit of the tokenizer.json of a run flips, and it is used", "refused, or the evaluation is the same"
)
def test_nothing_is_made_of_a_tokenizer_with_a_flipped_bit(finished: Finished, room: Path) -> None:
    for seed in range(5 * BITS):
        finished.copy(room)
        path = room / "run" / "tokenizer.json"
        flip(path, random.Random(seed))
        said = say("eval", room / "run", "--json", f"data.tokenizer={path}")
        assert said.out == finished.evaluation if said.code == 0 else said.refuses(path.name), said


def exchange(run_dir: Path) -> None:
    folder = run_dir / "checkpoints" / f"step-{STEPS}"
    first, second = (folder / name for name in SHARDS)
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)


def take_an_older(run_dir: Path) -> None:
    older, newer = (run_dir / "checkpoints" / f"step-{step}" / SHARDS[0] for step in (EVERY, STEPS))
    shutil.copy(older, newer)


def lose(run_dir: Path) -> None:
    (run_dir / "checkpoints" / f"step-{STEPS}" / SHARDS[0]).unlink()


@pytest.mark.fault("{id}", "refused by name")
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(exchange, id="two shards of a checkpoint are exchanged"),
        pytest.param(take_an_older, id="a shard is that of another step"),
        pytest.param(lose, id="a shard is missing"),
    ],
)
def test_nothing_is_made_of_other_shards(finished: Finished, room: Path, damage: Callable[[Path], None]) -> None:
    finished.copy(room)
    damage(room / "run")
    for said in (say("eval", room / "run", "--json"), resume(finished.spec, room / "run")):
        assert said.refuses(SHARDS[0]), said
