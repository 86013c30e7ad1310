"""Agents of torchrun on several nodes: a node joins, another one is lost, and the run ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import held_steps
from copies import Copy, run
from moefw.training.records.events import EVENTS, STARTS, read_events
from training_process import last_step, newest, step_losses

STEPS = 30
AGENT = ("torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=127.0.0.1")
TIMES = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10"
"""Seconds that agents wait for more nodes, and ten without a sign of life after which a node is lost."""


class Nodes:
    """A run whose nodes are agents of one rank each, all on this machine."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        meeting = [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", f"--rdzv-conf={TIMES}", "--rdzv-id=job"]
        self._command = [
            *AGENT,
            *meeting,
            "-m",
            "moefw",
            "train",
            held_steps.spec(folder, steps=STEPS, checkpoint_every=5),
        ]
        self._environment = held_steps.environment(folder) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._agents: list[Copy] = []

    def add(self) -> Copy:
        """Start the agent of one more node."""
        self._agents.append(Copy(self._command, env=self._environment))
        return self._agents[-1]

    def lose(self, agent: Copy) -> None:
        """Kill an agent and its rank at once, as a machine that loses power."""
        ranks = [int(child) for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]
        for pid in (agent.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
        self._agents.remove(agent)

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 200
        while not true():
            assert time.monotonic() < deadline_s, "the run did not get that far"
            for agent in self._agents:
                assert agent.poll() is None, agent.communicate(1)
            time.sleep(0.01)

    def step(self) -> int:
        return last_step(self.run_dir / "metrics.jsonl")

    def starts(self) -> list[tuple[int, int]]:
        """Number of ranks of each start of the run, and the step after which it went on."""
        events = read_events(self.run_dir / EVENTS)
        return [(event["ranks"], event["step"]) for event in events if event["event"] in STARTS]

    def close(self) -> None:
        for agent in [*self._agents]:
            if agent.poll() is None:
                self.lose(agent)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses by step of a run on one rank that nothing happens to."""
    folder = tmp_path_factory.mktemp("unbroken")
    done = run(
        "moefw", "train", held_steps.spec(folder, steps=STEPS, checkpoint_every=5), env=held_steps.environment(folder)
    )
    assert done.returncode == 0, done.stderr
    return step_losses(folder / "run")


@pytest.mark.deep
@pytest.mark.fault(
    "a node joins a run under torchrun, and is then lost", "the run goes on twice by itself; losses of an unbroken run"
)
def test_a_run_ends_with_the_losses_of_an_unbroken_one_after_a_node_has_joined_and_was_lost(
    nodes: Nodes, unbroken: dict[int, float], tmp_path: Path
) -> None:
    held_steps.hold(tmp_path, 7)
    held_steps.hold(tmp_path, 18)
    first = nodes.add()
    nodes.wait_until(lambda: nodes.step() == 7)
    second = nodes.add()
    nodes.wait_until(lambda: "closing signal SIGTERM" in first._wrote("err"))
    held_steps.go_on(tmp_path, 7)
    nodes.wait_until(lambda: nodes.step() == 18)
    assert nodes.starts() == [(1, 0), (2, 8)]
    assert newest(nodes.run_dir) == 15
    nodes.lose(second)
    held_steps.go_on(tmp_path, 18)
    _, errors = first.communicate(200)
    assert first.returncode == 0, errors
    assert nodes.starts() == [(1, 0), (2, 8), (1, 15)]
    assert step_losses(nodes.run_dir) == pytest.approx(unbroken, rel=1e-6)
    assert not nodes.run_dir.with_name("run.1").exists()
