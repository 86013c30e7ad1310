"""One rank killed, at random moments and inside saves: the run ends, names it, and resumes as if nothing had happened."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from attrs import frozen

from kill_chain import EVERY, RANKS, KillChain, Unbroken, preloaded
from training_process import newest

pytestmark = pytest.mark.deep


@frozen
class WhileTraining:
    """Kills a rank ``steps`` steps after a start."""

    rank: int
    steps: float

    def __str__(self) -> str:
        return f"rank {self.rank} is killed {self.steps:.2f} steps after a start"


@frozen
class InASave:
    """Kills a rank after this share of the system calls of the ``save``-th save of a start."""

    rank: int
    save: int
    share: float

    def __str__(self) -> str:
        return f"rank {self.rank} is killed inside a save, {self.share:.0%} of its system calls done"


def draw(chance: random.Random) -> list[WhileTraining | InASave]:
    """Return twenty kills; those inside saves are spread evenly over a save, for either rank."""
    training = [WhileTraining(rank, chance.uniform(1, 2 * EVERY)) for rank in range(RANKS) for _ in range(5)]
    saving = [
        InASave(rank, chance.choice((1, 2)), (fifth + chance.random()) / 5)
        for rank in range(RANKS)
        for fifth in range(5)
    ]
    return chance.sample([*training, *saving], 20)


@pytest.fixture(scope="module")
def chain(spec: Path, unbroken: Unbroken, tmp_path_factory: pytest.TempPathFactory) -> KillChain:
    return KillChain(spec, tmp_path_factory.mktemp("chain") / "run", unbroken)


@pytest.mark.fault("{id}", "the run ends and names it; no torn checkpoint is there, no rank is left after 5 s")
@pytest.mark.parametrize("kill", draw(random.Random(1)), ids=str)
def test_a_killed_rank_is_named(
    chain: KillChain, kill: WhileTraining | InASave, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if isinstance(kill, WhileTraining):
        with chain.start() as run:
            chain.at(run, kill.steps)
            run.signal_rank(kill.rank, signal.SIGKILL)
            ended = run.ended()
            chain.check(run)
    else:
        point = 1 + int(kill.share * request.getfixturevalue("points")[kill.rank])
        step, log = newest(chain.run_dir) + kill.save * EVERY, tmp_path / "log"
        counted = preloaded(request.getfixturevalue("shim"), chain.run_dir, step, log)
        with chain.start({**counted, "FAULT_RANK": str(kill.rank), "FAULT_AT": str(point)}) as run:
            ended = run.ended()
            chain.check(run)
        assert len(Path(f"{log}-{kill.rank}").read_text().splitlines()) == point
    assert ended.code == 1, ended.err
    assert f"rank {kill.rank} was ended by SIGKILL" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.fault(
    "20 kills of one rank, 10 inside saves", "losses of all steps and the last weights bit-equal to an unbroken run"
)
def test_a_run_killed_again_and_again_ends_as_an_unbroken_one(chain: KillChain) -> None:
    chain.check_end()
