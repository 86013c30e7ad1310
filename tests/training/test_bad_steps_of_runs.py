"""A run reports a bad step, counts it in its metrics and skips its batch from then on; it reports jumps of the loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moefw.commands import specs
from moefw.core.errors import RunError
from moefw.training import feed, trainer
from moefw.training.engine import Engine
from moefw.training.faults.loss_spike import WARM_UP, LossSpikes
from moefw.training.records.events import EVENTS, read_events
from moefw.training.records.metrics import read_metrics
from moefw.training.resume import Which
from moefw.training.world import Place
from run_cases import end, environment_in
from run_cases import train as train_process
from small_spec import small_spec


@pytest.fixture
def spec(write_spec: Callable[..., Path]) -> Path:
    return write_spec(steps=4, tokens_per_step=128, seq_len=32)


@pytest.fixture
def bad_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 3 has a non-finite embedding in every repetition."""

    class Bad(Engine):
        def step(self, *args: Any, number: int = 0) -> Any:
            model: Any = self.model
            hook = model.embed.register_forward_hook(lambda *_: _[-1] * torch.nan if number == 3 else None)
            try:
                return super().step(*args, number=number)
            finally:
                hook.remove()

    monkeypatch.setattr(trainer, "Engine", Bad)


def train(spec: Path, *overrides: str, resume: Which | None = None) -> list[dict[str, Any]]:
    trainer.train(specs.read(str(spec), overrides), Place(0, 1, 0, 1), resume=resume)
    return list(read_metrics(spec.parent / "run" / "metrics.jsonl"))


def recorded(spec: Path, event: str) -> list[int]:
    """Steps of the events of a kind."""
    return [one["step"] for one in read_events(spec.parent / "run" / EVENTS) if one["event"] == event]


@pytest.mark.fault("a bad batch is skipped, and the run resumed", "it is counted in the metrics and not met again")
@pytest.mark.usefixtures("bad_step")
def test_a_skipped_batch_is_counted_and_not_met_again(
    spec: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    met: list[int] = []
    seeds = feed.sequence_seeds

    def watched(seed: int, numbers: Any) -> Any:
        met.extend(numbers.tolist())
        return seeds(seed, numbers)

    monkeypatch.setattr(feed, "sequence_seeds", watched)
    train(spec, "train.on_bad_step=skip", "train.steps=3")
    records = train(spec, "train.on_bad_step=skip", "train.steps=5", resume="last")
    assert met == list(range(5 * 4))
    assert [record["loss"] is None for record in records] == [False, False, True, False, False]
    assert [record.get("skipped_steps") for record in records] == [None, None, 1, None, None]
    assert recorded(spec, "skipped_step") == [3]
    assert "step 3, rank 0: the output of embed, in forward of micro-batch 1 of 2, holds " in capsys.readouterr().out


@pytest.mark.fault("a step is bad in a run", "exit code 1; the first bad tensor is named")
@pytest.mark.usefixtures("bad_step")
def test_a_run_stops_at_a_bad_step_unless_told_otherwise(spec: Path) -> None:
    with pytest.raises(RunError, match="step 3, rank 0: the output of embed") as caught:
        train(spec)
    assert caught.value.exit_code == 1
    assert len(list(read_metrics(spec.parent / "run" / "metrics.jsonl"))) == 2


@pytest.mark.fault("a step is bad on two ranks", "exit code 1; one message")
def test_a_step_that_is_bad_on_every_rank_is_told_once(tmp_path: Path) -> None:
    path = small_spec(tmp_path, ranks=2, steps=9)
    code, said, _ = end(train_process(environment_in(tmp_path), path, "train.lr=1e30"))
    assert code == 1
    (line,) = said
    assert "step 2, rank 0: the gradient of" in line


@pytest.mark.fault("the loss jumps", "a warning, and a flag in the metrics")
def test_a_loss_above_the_mean_of_recent_ones_is_told_and_flagged(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = train(spec, "train.steps=26", "train.lr=1e-9", "train.loss_spike=1.0001")
    losses = [record["loss"] for record in records]
    spikes = [n for n in range(WARM_UP, 26) if losses[n] > 1.0001 * sum(losses[:n]) / n]
    assert spikes
    assert [n for n, record in enumerate(records) if record.get("loss_spikes") == 1] == spikes
    assert recorded(spec, "loss_spike") == [n + 1 for n in spikes]
    told = [line for line in capsys.readouterr().out.splitlines() if "is a spike" in line]
    assert [line.split(":")[0] for line in told] == [f"step {n + 1}" for n in spikes]


def test_a_fall_of_the_loss_its_noise_and_what_is_not_finite_are_no_spikes() -> None:
    spikes = LossSpikes(2.0)
    falling = [8 * 0.97**step * (1.3 if step % 7 == 0 else 1) for step in range(200)]
    losses = [falling[0], float("nan"), *falling, float("inf"), 2 * falling[-1]]
    assert [spikes.warning(0, loss) for loss in losses] == [""] * len(losses)
    assert spikes.warning(9, 3.0).startswith("step 9: the loss 3 is a spike: the mean of the last 50 steps is 0.0")
    assert LossSpikes(None).warning(1, 5.0) == ""
