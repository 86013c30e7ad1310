"""Launcher and ranks killed at once, at random moments: the run resumes as if nothing had happened."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from kill_chain import EVERY, RANKS, KillChain, Unbroken

CHANCE = random.Random(16)
STARTING_S = [CHANCE.uniform(0, 4) for _ in range(3)]
STEPS = [CHANCE.uniform(1, 2 * EVERY) for _ in range(17)]

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def chain(spec: Path, unbroken: Unbroken, tmp_path_factory: pytest.TempPathFactory) -> KillChain:
    return KillChain(spec, tmp_path_factory.mktemp("chain") / "run", unbroken)


@pytest.mark.fault(
    "launcher and ranks are killed {id} steps after a start", "no torn checkpoint is there, no rank is left"
)
@pytest.mark.parametrize("steps", STEPS, ids="{:.2f}".format)
def test_a_run_killed_while_it_trains_leaves_whole_checkpoints(chain: KillChain, steps: float) -> None:
    with chain.start() as run:
        chain.at(run, steps)
        run.signal_all(signal.SIGKILL)
        assert run.ended().code == -signal.SIGKILL
        chain.check(run)


@pytest.mark.fault(
    "launcher and ranks are killed {id} s after they are there", "no torn checkpoint is there, no rank is left"
)
@pytest.mark.parametrize("seconds", STARTING_S, ids="{:.2f}".format)
def test_a_run_killed_while_it_starts_leaves_whole_checkpoints(chain: KillChain, seconds: float) -> None:
    with chain.start() as run:
        run.wait_for_ranks(RANKS)
        time.sleep(seconds)
        run.signal_all(signal.SIGKILL)
        assert run.ended().code == -signal.SIGKILL
        chain.check(run)


@pytest.mark.fault(
    "20 kills of launcher and ranks", "losses of all steps and the last weights bit-equal to an unbroken run"
)
def test_a_run_killed_again_and_again_ends_as_an_unbroken_one(chain: KillChain) -> None:
    chain.check_end()
