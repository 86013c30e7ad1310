"""Optimizer states of one process: updates, rounding to bf16, buckets, bytes, and the order of copies and updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fake_cuda import FakeCuda
from moefw.compose.optimizer import OptimizerUnderPolicies, TorchStates
from moefw.core.errors import ContractError
from moefw.plugins.memory.offload.buffers import STATES, host_memory
from moefw.plugins.memory.offload.states import HostStates, StatesUpdatedThere, StreamedStates
from moefw.plugins.memory.offload.streams import CudaTransfers, PlainTransfers
from moefw.plugins.memory.optimizer_bf16.states import BF16Policy, BF16States, rounded
from moefw.plugins.optimizers.adamw import AdamW
from moefw.runtime.naming import by_parameter, canonical_parameters
from moefw.runtime.optimizer_states import OptimizerStates, StatePart, buckets, draws, local_rows
from moefw.runtime.parallel.boxes import boxes, numbers
from moefw.runtime.parallel.local_shards import local
from moefw.runtime.parallel.trained import trained_parameters
from moefw.testing.suites.watch import same_bits

CPU = torch.device("cpu")


def treated(model: nn.Module, states: Any, **options: Any) -> OptimizerUnderPolicies:
    """Return an optimizer of a model with the states ``states(inner)``."""
    inner = AdamW(**options).build(trained_parameters(model), 1e-2)
    return OptimizerUnderPolicies(inner, states(TorchStates(inner)), AdamW().states(), dict(by_parameter(model)), 0)


def stochastic(inner: OptimizerStates) -> OptimizerStates:
    return BF16Policy(stochastic=True).treat(inner)


def nearest(inner: OptimizerStates) -> OptimizerStates:
    return BF16Policy(stochastic=False).treat(inner)


@pytest.mark.parametrize("states", [stochastic, nearest])
def test_an_update_is_that_of_adamw_in_fp64(states: Any) -> None:
    """Parameters to two units in the last place of fp32, states to a neighbour in bf16, or the nearest one."""
    torch.manual_seed(0)
    model = nn.Linear(67, 33, bias=False)
    optimizer = treated(model, states, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)
    p, m, v = model.weight.detach().double(), 0.0, 0.0
    for step in range(1, 6):
        g = torch.randn(33, 67)
        model.weight.grad = g.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g.double(), 0.99 * v + 0.01 * g.double().square()
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-6)
        # the last bit of the update is that of numbers of about 1e-2, of a parameter that of about 0.1
        assert ((model.weight - p).abs() <= 2.0**-23 * p.abs() + 1e-2 * 2.0**-21).all()
        for key, exact in (("exp_avg", m), ("exp_avg_sq", v)):
            got = optimizer.state[model.weight][key]
            share = 2.0**-8 if states is nearest else 2.0**-7
            assert ((got.double() - exact).abs() <= exact.abs() * share * (1 + 1e-4) + 1e-9).all()
        p = model.weight.detach().double()
        m, v = (optimizer.state[model.weight][key].double() for key in ("exp_avg", "exp_avg_sq"))


def test_states_that_no_plugin_names_are_refused_before_they_are_lost() -> None:
    model = nn.Linear(4, 4, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    optimizer = OptimizerUnderPolicies(inner, TorchStates(inner), (), dict(by_parameter(model)), 0)
    model.weight.grad = torch.ones(4, 4)
    with pytest.raises(ContractError, match="SGD keeps states that its plugin does not name: momentum_buffer"):
        optimizer.step()


def part_of(shape: tuple[int, ...], *, step: int = 0) -> StatePart:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(shape))
    pieces = list(canonical_parameters(model))
    rows = local_rows(pieces[0].parameter)
    return StatePart(group=0, parameter=rows, grad=rows, states={}, boxes=boxes(pieces), step=step, seed=0)


def test_rounding_at_random_goes_to_a_neighbour_and_is_right_on_average() -> None:
    x = torch.tensor([1.0, -3.0, 1.0 + 2**-9, -(1.0 + 3 * 2**-10), 3e-5, 1e-39, 7.0 + 2**-12]).repeat(1 << 14, 1)
    got = rounded(x, draws(part_of(tuple(x.shape)), 0)).float()
    below = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    above = (below.view(torch.int32) + 0x10000).view(torch.float32)
    assert ((got == below) | (got == above)).all()
    assert (got == x)[:, :2].all()
    share = ((x - below) / (above - below)).double().mean(0)
    rose = (got == above).double().mean(0)
    deviation = (share * (1 - share) / len(x)).sqrt()
    assert ((rose - share).abs() <= 4 * deviation + 1e-12).all()


def test_rounding_keeps_what_is_not_finite() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan")]).repeat(64, 1)
    x = torch.cat([x, torch.full((64, 1), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)], 1)
    got = rounded(x, draws(part_of(tuple(x.shape)), 0)).float()
    assert same_bits(got.isnan(), x.isnan())
    assert torch.equal(got[:, :2], x[:, :2])


def test_no_two_states_steps_or_elements_share_their_draws() -> None:
    first = draws(part_of((64, 64)), 0)
    assert len(first.unique()) == first.numel()
    for other in (draws(part_of((64, 64)), 1), draws(part_of((64, 64), step=1), 0), first >> 16):
        agree = ((first ^ other) & 0xFFFF == 0).double().mean()
        assert agree < 5e-3


@pytest.mark.parametrize(("states", "frozen_at"), [(nearest, 1.0), (stochastic, None)])
def test_to_nearest_a_second_moment_that_should_fade_stays(states: Any, frozen_at: float | None) -> None:
    """With beta2 0.999 it decays by a thousandth a step, less than half of bf16's last place."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = treated(model, states, beta2=0.999)
    optimizer.state[model.weight]["exp_avg_sq"].fill_(1.0)
    for _ in range(100):
        model.weight.grad = torch.zeros(64, 64)
        optimizer.step()
    mean = optimizer.state[model.weight]["exp_avg_sq"].double().mean().item()
    assert mean == pytest.approx(0.999**100 if frozen_at is None else frozen_at, rel=2e-3)


def test_bytes_between_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 takes four bytes a parameter for both moments; with offload, the device holds none, and in a step two buckets."""
    made: list[int] = []
    host = host_memory(pinned=False, words=STATES)
    model = nn.Linear(128, 256, bias=False)
    count = model.weight.numel()

    def offloaded(inner: OptimizerStates) -> OptimizerStates:
        states = StreamedStates(inner, PlainTransfers(CPU), host, bucket_bytes=1 << 14)
        monkeypatch.setattr(
            states, "_memory", lambda nbytes: made.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8)
        )
        return states

    assert held(treated(model, stochastic)) == 4 * count
    assert held(treated(model, lambda inner: inner)) == 8 * count
    for states, width in ((offloaded, 8), (lambda inner: offloaded(stochastic(inner)), 4)):
        del made[:]
        optimizer = treated(model, states)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        assert isinstance(optimizer._states, HostStates)
        assert held(optimizer) == width * count
        assert len(made) == 2
        assert sum(made) <= 2 * ((1 << 14) + 256)


def held(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    storages = {local(tensor).untyped_storage().data_ptr(): local(tensor).untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def test_widened_states_are_few_at_a_time() -> None:
    seen = []

    class Watching(OptimizerStates):
        dtype = torch.float32

        def room(self, parameter: Tensor) -> Tensor:
            return torch.zeros_like(parameter)

        def update(self, parts: Sequence[StatePart]) -> None:
            seen.append(sum(part.parameter.numel() for part in parts))

    model = nn.Linear(128, 256, bias=False)
    optimizer = treated(model, lambda inner: BF16States(Watching(), stochastic=False, elements=1 << 12))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert seen == [1 << 12] * 8


@pytest.mark.parametrize("elements", [1, 64, 100, 1000, 1 << 20])
def test_buckets_hold_all_rows_in_order_and_cut_where_vectors_are_full(elements: int) -> None:
    parts = [part_of(shape) for shape in ((7, 3), (5,), (9, 64), (1, 130), (200, 2, 8))]
    for part in parts:
        part.parameter = torch.arange(part.parameter.numel()).view(part.parameter.shape)
    found = list(buckets(parts, elements))
    flat = torch.cat([part.parameter.flatten() for bucket in found for part in bucket])
    assert torch.equal(flat, torch.cat([part.parameter.flatten() for part in parts]))
    for bucket in found:
        assert len(bucket) == 1 or sum(part.parameter.numel() for part in bucket) <= elements
        for part in bucket:
            (box,) = part.boxes
            assert same_bits(numbers(box, CPU), part.parameter)
            assert part.parameter.flatten()[0] % 64 == 0


class Logging(OptimizerStates):
    """Logs when an update is queued on the device, or runs on the host."""

    def __init__(self, inner: OptimizerStates, log: list[tuple[Any, ...]]) -> None:
        self.inner, self.dtype, self.log = inner, inner.dtype, log

    def room(self, parameter: Tensor) -> Tensor:
        return self.inner.room(parameter)

    def update(self, parts: Sequence[StatePart]) -> None:
        self.log.append(("update",))
        self.inner.update(parts)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None, raising=False)
    return fake


def streamed_log(cuda: FakeCuda, kind: type[HostStates], bucket_bytes: int) -> list[tuple[Any, ...]]:
    model = nn.Linear(64, 8, bias=False)

    def states(inner: OptimizerStates) -> OptimizerStates:
        transfers = CudaTransfers(CPU, cuda)
        return kind(Logging(inner, cuda.log), transfers, host_memory(pinned=False), bucket_bytes=bucket_bytes)

    optimizer = treated(model, states)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return cuda.log


def last_record(log: Sequence[tuple[Any, ...]], stream: str, before: int) -> int:
    return next(entry[2] for entry in reversed(log[:before]) if entry[:2] == ("record", stream))


def test_a_bucket_arrives_beside_the_update_of_the_one_before(cuda: FakeCuda) -> None:
    """Four buckets of two rows, two states each: two buckets are on their way before the first update."""
    log = streamed_log(cuda, StreamedStates, 1024)
    shown = [entry[-1] for entry in log if entry[0] in ("copy", "update")]
    up, down = ["back"] * 2, ["out"] * 2
    assert shown == [*up, *up, "update", *down, *up, "update", *down, *up, "update", *down, "update", *down]


def test_copies_of_states_are_ordered_against_updates_and_each_other(cuda: FakeCuda) -> None:
    log = streamed_log(cuda, StreamedStates, 1024)
    updates = [place for place, entry in enumerate(log) if entry == ("update",)]
    copies = {name: [place for place, entry in enumerate(log) if entry == ("copy", name)] for name in ("back", "out")}
    for number, place in enumerate(updates):
        arrived = log[copies["back"][2 * number + 1] + 1]
        assert arrived[:2] == ("record", "back")
        assert ("wait", "compute", arrived[2]) in log[:place]
        left = copies["out"][2 * number]
        queued = last_record(log, "compute", left)
        assert queued > place
        assert ("wait", "out", queued) in log[:left]
    for number in (2, 3):  # the slot is free once its previous content has left
        left = log[copies["out"][2 * number - 3] + 1]
        assert left[:2] == ("record", "out")
        assert ("wait", "back", left[2]) in log[: copies["back"][2 * number]]
    assert [entry for entry in log if entry[0] == "host waits"] == [
        ("host waits", log[copies["out"][place] + 1][2]) for place in (5, 7)
    ]


def test_gradients_come_down_beside_the_update_of_the_bucket_before(cuda: FakeCuda) -> None:
    log = streamed_log(cuda, StatesUpdatedThere, 1024)
    shown = [entry[-1] for entry in log if entry[0] in ("copy", "update")]
    down = ["out"] * 2
    assert shown == [*down, *down, "update", "back", *down, "update", "back", *down, "update", "back", "update", "back"]
    copies = {name: [place for place, entry in enumerate(log) if entry == ("copy", name)] for name in ("back", "out")}
    updates = [place for place, entry in enumerate(log) if entry == ("update",)]
    for number, place in enumerate(updates):
        assert ("host waits", log[copies["out"][2 * number + 1] + 1][2]) in log[:place]
    for number in (2, 3):
        gone = log[copies["back"][number - 2] + 1]
        assert ("wait", "out", gone[2]) in log[: copies["out"][2 * number]]
    assert log[-1] == ("wait", "compute", log[copies["back"][-1] + 1][2])
