"""A step whose loss or gradient is not finite: its first bad tensor is named, and the run stops, skips or repeats it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from faulty_experts import Fault, Faulty, FaultyExperts
from moefw.compose.optimizer import build_optimizer
from moefw.core.errors import RunError
from moefw.runtime.naming import canonical_parameters, state_tensors
from moefw.runtime.parallel.local_shards import local, stored
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.testing.training import SMALL
from moefw.training.engine import Engine, StepResult

ALL = {"dense": {"shard": "all"}, "experts": {"ep": 2, "shard": "all"}}
SPLIT = {"dense": {"dp": 2, "tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}
TENSOR = {"dense": {"dp": 1, "tp": 2}, "experts": {"ep": 2}}
RECOMPUTE = [{"use": "recompute", "regions": ["layer", "router"]}]
EXPERT = "layers.2.moe.experts.5.gate_proj.weight"


@contextmanager
def no_clock(*_: object) -> Iterator[None]:
    yield


class Run:
    """A small model that trains step by step, counted from 1, with the parts of a test."""

    def __init__(self, policy: str, **parts: Any) -> None:
        world = dist.get_world_size()
        parts = {**parts, "train": {**SMALL["train"], "tokens_per_step": 16 * max(world, 2), "micro_batch": 1}}
        layer_case = whole_model(world, parts=parts, plugins=(Faulty,), sizes={"vocab_size": 64})
        self.model, self.assembly, self.layout, self.shared = open_model(layer_case)
        self.optimizer = build_optimizer(self.assembly, self.model, self.layout, torch.device("cpu"), self.shared)
        self.engine = Engine(self.model, self.optimizer, self.layout, clip_norm=1.0, on_bad_step=policy)

    def step(self, number: int) -> StepResult:
        batches = global_batch(self.assembly, self.layout, number)
        return self.engine.step(batches, 1e-3, no_clock, number=number)

    def failure(self, number: int) -> str:
        try:
            self.step(number)
        except RunError as error:
            return str(error)
        return "nothing failed"

    def everything(self) -> list[Tensor]:
        """Return copies of all tensors that a step may change."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *state_tensors(self.model).values(), *states]
        return [local(tensor.detach()).clone() for tensor in tensors]

    def spoil(self, name: str, value: float = torch.nan, *, key: str = "") -> int:
        """Spoil three values of a parameter, or of a state of it, or every row of an embedding.

        Returns how many of them this rank stores.
        """
        for piece in canonical_parameters(self.model):
            if piece.name == name:
                parameter = piece.parameter
                held = self.optimizer.state[parameter][key] if key else parameter.detach()
                marks = torch.zeros(parameter.shape)
                spoiled = torch.zeros_like(piece.of(marks))
                (spoiled.T[0] if name == "embed.weight" else spoiled.view(-1)[:3]).fill_(value)
                piece.of(marks).copy_(spoiled)
                local(held).add_(stored(parameter, marks))
                return int((~stored(parameter, marks).isfinite()).sum())
        return 0


def nan_in_a_weight(name: str, on: int | None, **parts: Any) -> tuple[int, list[str]]:
    run = Run("skip", **parts)
    run.step(1)
    stored_here = run.spoil(name) if on in (None, dist.get_rank()) else 0
    return stored_here, [run.failure(2), run.failure(2)]


@pytest.mark.fault("NaN in a weight ({id})", "named with step and rank; the run stops under any policy")
@pytest.mark.parametrize(
    ("world", "name", "parts"),
    [
        (1, EXPERT, {}),
        (2, EXPERT, {"parallel": {"experts": {"ep": 2}}}),
        (2, EXPERT, {"parallel": ALL, "memory": RECOMPUTE}),
        pytest.param(4, EXPERT, {"parallel": SPLIT}, marks=pytest.mark.deep),
        (2, "embed.weight", {"parallel": TENSOR}),
        pytest.param(4, "embed.weight", {"parallel": SPLIT}, marks=pytest.mark.deep),
        (2, "embed.weight", {"parallel": ALL}),
        (2, EXPERT, {"parallel": {"pp": 2}}),
        (2, "layers.1.moe.experts.0.down_proj.weight", {"gemm": {"use": "loop"}, "parallel": ALL}),
    ],
)
def test_a_weight_that_is_not_finite_is_named_and_no_policy_helps(
    pool: RankPool, world: int, name: str, parts: dict[str, Any]
) -> None:
    told = pool.run(partial(nan_in_a_weight, **parts), world, name, None)
    stored_by = [rank for rank, (values, _) in enumerate(told) if values]
    first, values = stored_by[0], told[stored_by[0]][0]
    for _, messages in told:
        for message in messages:
            assert message.startswith(f"step 2, rank {first}: {name} holds {values} NaN (of ")
            assert message.endswith("It was so before the step, so no other step is better.")
            assert "\n" not in message


@pytest.mark.fault("NaN in one rank's copy of a weight", "named with that rank")
def test_a_copy_of_a_weight_that_is_bad_on_one_rank_is_named_with_that_rank(pool: RankPool) -> None:
    for _, messages in pool.run(nan_in_a_weight, 4, "embed.weight", 2):
        assert messages[0].startswith("step 2, rank 2: embed.weight holds 64 NaN (of 2,048 values).")


def spoiled_experts(faults: Iterable[Fault], **parts: Any) -> list[str]:
    FaultyExperts.fault = None
    run = Run("stop", gemm={"use": "faulty"}, **parts)
    run.step(1)
    told = []
    for fault in faults:
        FaultyExperts.fault = fault
        told.append(run.failure(2))
    return told


FAULTS: dict[Fault, str] = {
    "activation": "the output of expert 5 of layers.2.moe.experts, in forward",
    "input gradient": "the gradient of the input of expert 5 of layers.2.moe.experts, in backward",
    "weight gradient": "the gradient of layers.2.moe.experts.5.down_proj.weight, in backward",
}


@pytest.mark.fault(
    "a value that is not finite in an activation, then in a gradient ({id})",
    "named with layer, expert, rank and micro-batch",
)
@pytest.mark.parametrize(
    ("world", "rank", "micro_batches", "parts"),
    [
        (1, 0, 2, {}),
        (2, 1, 1, {"parallel": {"experts": {"ep": 2}}, "memory": RECOMPUTE}),
        (2, 1, 1, {"parallel": ALL}),
        (2, 1, 2, {"parallel": {"pp": 2}, "pipeline": {"use": "zero-bubble"}}),
        (2, 1, 2, {"parallel": TENSOR, "memory": [{"use": "recompute", "regions": ["attention", "experts"]}]}),
        pytest.param(4, 1, 2, {"parallel": SPLIT}, marks=pytest.mark.deep),
    ],
)
def test_what_a_broken_part_makes_is_named_with_expert_rank_and_micro_batch(
    pool: RankPool, world: int, rank: int, micro_batches: int, parts: dict[str, Any]
) -> None:
    for told in pool.run(partial(spoiled_experts, **parts), world, list(FAULTS)):
        for message, place in zip(told, FAULTS.values(), strict=True):
            assert message.startswith(f"step 2, rank {rank}: {place} of micro-batch 1 of {micro_batches}, holds 1 inf")
            assert "\n" not in message


class Hiccup:
    """Turns one token's embedding into NaN, in the next ``forwards`` forwards, on one rank."""

    def __init__(self, model: Any, rank: int, *, forwards: int) -> None:
        self.left = forwards if dist.get_rank() == rank else 0
        model.embed.register_forward_hook(self.spoil)

    def spoil(self, module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        if not self.left:
            return None
        self.left -= 1
        return out.masked_fill(torch.arange(len(out)).unsqueeze(1) == 3, torch.nan)


def trained(policy: str, forwards: int, rank: int = 0, **parts: Any) -> tuple[list[StepResult], list[Tensor]]:
    """Run three steps with a fault in the second; return results and all tensors."""
    run = Run(policy, **parts)
    results = [run.step(1)]
    Hiccup(run.model, rank, forwards=forwards)
    results += [run.step(2), run.step(3)]
    return results, run.everything()


DELAYED = {"use": "fp8-tensor", "backend": "emulate", "scaling": "delayed"}
EVERY_PART = [
    (1, {}),
    (2, {"parallel": ALL, "memory": RECOMPUTE}),
    (2, {"parallel": TENSOR, "precision": DELAYED}),
    pytest.param(4, {"parallel": SPLIT, "precision": DELAYED}, marks=pytest.mark.deep),
    (
        2,
        {
            "dispatch": {"use": "hybridep", "backend": "torch", "rank_capacity": 4.0, "on_overflow": "rerun"},
            "parallel": {"experts": {"ep": 2}},
        },
    ),
]


@pytest.mark.fault(
    "NaN in an input, once; on_bad_step: rerun ({id})", "the second run counts; the weights are those without the fault"
)
@pytest.mark.parametrize(("world", "parts"), EVERY_PART)
def test_a_fault_that_does_not_repeat_itself_leaves_no_trace_where_the_step_is_run_again(
    pool: RankPool, world: int, parts: dict[str, Any]
) -> None:
    told = pool.run(partial(trained, **parts), world, "rerun", 1, world - 1)
    unbroken = pool.run(partial(trained, **parts), world, "rerun", 0)
    for (results, last), (others, other_last) in zip(told, unbroken, strict=True):
        assert [result.counts.get("rerun_steps") for result in results] == [None, 1.0, None]
        assert "does not repeat itself. The second run counts." in results[1].note
        assert [result.loss for result in results] == [result.loss for result in others]
        assert all(torch.equal(one, other) for one, other in zip(last, other_last, strict=True))


def skipped(**parts: Any) -> tuple[bool, list[StepResult], list[StepResult]]:
    run = Run("skip", **parts)
    run.step(1)
    before = run.everything()
    Hiccup(run.model, 0, forwards=2 * len(global_batch(run.assembly, run.layout, 2)))
    results = [run.step(2)]
    same = all(torch.equal(one, other) for one, other in zip(before, run.everything(), strict=True))
    results.append(run.step(3))
    other = Run("skip", **parts)
    return same, results, [other.step(1), other.step(3)]


@pytest.mark.fault("NaN in an input; on_bad_step: skip ({id})", "the step changes nothing, and the next ones go on")
@pytest.mark.parametrize(("world", "parts"), EVERY_PART[:4])
def test_a_skipped_step_changes_nothing_and_the_next_ones_go_on(
    pool: RankPool, world: int, parts: dict[str, Any]
) -> None:
    for same, (bad, after), (_, without) in pool.run(partial(skipped, **parts), world):
        assert same
        assert bad.counts["skipped_steps"] == 1.0
        assert "skipped_steps" not in after.counts
        assert bad.note.startswith("step 2, rank 0: the output of embed, in forward of micro-batch 1 of ")
        assert bad.note.endswith(" It is skipped.")
        assert after == without


def stopped(policy: str, forwards: int) -> list[str]:
    run = Run(policy)
    run.step(1)
    before = run.everything()
    Hiccup(run.model, 0, forwards=forwards)
    message = run.failure(2)
    assert all(torch.equal(one, other) for one, other in zip(before, run.everything(), strict=True))
    return message


@pytest.mark.fault("NaN in an input; on_bad_step: stop", "named; nothing has changed")
def test_a_run_stops_where_its_policy_says_so_and_says_what_was_tried(pool: RankPool) -> None:
    (message,) = pool.run(stopped, 1, "stop", 1)
    assert "run again, it is finite: the fault does not repeat itself. Use train.on_bad_step: rerun" in message
    (message,) = pool.run(stopped, 1, "stop", 1000)
    assert "step 2, rank 0: the output of embed, in forward of micro-batch 1 of 2, holds 32 NaN" in message
    (message,) = pool.run(stopped, 1, "rerun", 1000)
    assert "It is reproducible" in message


def bad_for_ever() -> tuple[list[str], str]:
    run = Run("skip")
    Hiccup(run.model, 0, forwards=10**6)
    return [run.step(number).note for number in range(1, 10)], run.failure(10)


@pytest.mark.fault("every step is bad; on_bad_step: skip", "the run stops after ten")
def test_skipping_ends_where_nothing_is_learned_any_more(pool: RankPool) -> None:
    ((notes, message),) = pool.run(bad_for_ever, 1)
    assert all(note.endswith("It is skipped.") for note in notes)
    assert message.endswith("10 steps in a row are bad: look at what the message names.")


def bad_moments(value: float) -> list[str]:
    run = Run("rerun", parallel=ALL)
    run.step(1)
    run.spoil(EXPERT, value, key="exp_avg_sq")
    if value == value:  # an infinite second moment freezes its weight, which no loss shows
        run.step(2)
        Hiccup(run.model, 0, forwards=1)
        return [run.failure(3)]
    run.step(2)
    return [run.failure(3)]


@pytest.mark.fault("NaN or infinity in an optimizer's state", "named with step and rank")
def test_a_moment_that_is_not_finite_is_named_as_what_it_is_or_as_the_weight_that_it_spoiled(pool: RankPool) -> None:
    for messages in pool.run(bad_moments, 2, float("nan")):
        assert messages[0].startswith(f"step 3, rank 1: {EXPERT} holds 3 NaN (of 512 values).")
    for messages in pool.run(bad_moments, 2, float("inf")):
        assert messages[0].startswith(
            f"step 3, rank 1: the optimizer's exp_avg_sq of {EXPERT} holds 3 inf (of 512 values)."
        )
        assert messages[0].endswith("It was so before the step, so no other step is better.")
