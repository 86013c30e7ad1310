"""What `moefw bench calibrate` measures: how much, of what, and what becomes of it in a cluster's file."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moefw.core.errors import RunError
from moefw.planner.calibration import alone, links, readings
from moefw.planner.calibration.alone import (
    BACKWARD,
    COPY,
    FORWARD,
    FROM_HOST,
    HOST_COPY,
    LAUNCH,
    LAYER,
    LAYER_OF_RANKS,
    SMALL_TO_HOST,
    STEP,
    STEP_OF_RANKS,
    TO_HOST,
    Heads,
    Measurement,
    Shape,
    Sizes,
    measurements,
    of_host_link,
)
from moefw.planner.calibration.clocks import GpuClock, HostClock, calls_of_a_repeat
from moefw.planner.calibration.links import groups_of, link_measurements, opened
from moefw.planner.calibration.ranks import Readings, measured
from moefw.planner.calibration.readings import LEAST, LIMIT_S, Reading, of_all_ranks, reading
from moefw.planner.calibration.result import Surroundings, cluster_of
from moefw.testing.counting import Counting
from moefw.testing.pool import RankPool
from pairwise import deep

CPU = torch.device("cpu")
EVENT = torch.cuda.Event
SHAPES = (Shape(rows=8, columns=4, depth=16), Shape(rows=2, columns=3, depth=5))
HEADS = Heads(sequences=2, heads=3, keys=5, width=8)
SIZES = Sizes(
    shapes=SHAPES, shapes_of_dgrads=SHAPES, heads=(HEADS,), spread=0, copied=4096, operands=(4096,), operators=10
)
ATTENTION = "2 x 3 heads of 8, 5 tokens"


def test_a_reading_is_the_median_of_its_repeats_and_says_how_much_its_halves_differ() -> None:
    times = iter([100.0, 1.0, 2.0, 1.0, 4.0, 3.0, 3.0])  # the first warms up
    made = reading(lambda: next(times), figure=lambda seconds: 10.0 / seconds, repeats=6)
    # In turn 1, 1, 3 and 2, 4, 3: medians of 1 and 3, of all 2.5.
    assert made == Reading(value=4.0, spread=2.0 / 2.5, repeats=6)


def test_a_measurement_that_takes_long_has_fewer_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(readings.time, "perf_counter", lambda: now)

    def slow(seconds: float) -> Callable[[], float]:
        def measure() -> float:
            nonlocal now
            now += seconds
            return seconds

        return measure

    assert reading(slow(LIMIT_S), figure=float, repeats=20).repeats == LEAST
    assert reading(slow(LIMIT_S / 8), figure=float, repeats=20).repeats == 8
    assert reading(slow(LIMIT_S / 128), figure=float, repeats=20).repeats == 20


def test_moments_have_one_reading_which_says_how_much_they_differ() -> None:
    moments = [
        Reading(value=value, spread=spread, repeats=4) for value, spread in ((10.0, 0.1), (12.0, 0.0), (15.0, 0.2))
    ]
    assert readings.of_moments(moments) == Reading(value=12.0, spread=5 / 12, repeats=12)
    assert readings.of_moments(moments[:1]) == moments[0]


def test_a_measurement_of_several_moments_is_read_at_each() -> None:
    values = iter([1.0, 2.0, 9.0])
    read = Measurement(name="a", unit="us", read=lambda: Reading(value=next(values), spread=0.0, repeats=4))
    other = Measurement(name="b", unit="us", read=lambda: Reading(value=5.0, spread=0.0, repeats=4))
    lines: list[str] = []
    found = measured([read, other, read, read], None, on_cpu=False, tell=lines.append)
    assert {name: each.value for name, each in found.of.items()} == {"a": 2.0, "b": 5.0}
    assert [line.split(":")[0] for line in lines] == ["[1/4] a", "[2/4] b", "[3/4] a", "[4/4] a"]


def test_ranks_that_measure_at_once_have_one_reading() -> None:
    of_ranks = [
        Reading(value=value, spread=spread, repeats=repeats)
        for value, spread, repeats in ((1.0, 0.1, 20), (5.0, 0.3, 8), (2.0, 0.2, 20))
    ]
    assert of_all_ranks(of_ranks) == Reading(value=2.0, spread=0.3, repeats=8)


class Seconds:
    """A clock for which each call takes a second."""

    most = 3

    def __init__(self, *_: object) -> None:
        self.calls: list[int] = []

    def seconds(self, call: Callable[[], Any], times: int) -> float:
        self.calls.append(times)
        for _ in range(times):
            call()
        return float(times)

    def wait(self) -> None:
        """Nothing is under way."""


class Seen(TorchDispatchMode):
    """Counts operators by name and the sizes of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = tuple(tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor))
        dtypes = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        self.of[func.overloadpacket.__name__, *sizes, *dtypes] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def a_second_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call take a second."""
    monkeypatch.setattr(alone, "clock_of", Seconds)
    monkeypatch.setattr(alone, "HostClock", Seconds)


def read_on_a_cpu() -> dict[str, tuple[Reading | None, Counter[tuple[Any, ...]]]]:
    found = {}
    for each in measurements(CPU, SIZES, 4):
        with Seen() as seen:
            found[each.name] = (each.read(), seen.of)
    return found


@pytest.mark.usefixtures("a_second_each")
def test_figures_are_what_was_computed_over_the_time_that_it_took() -> None:
    found = read_on_a_cpu()
    value = {name: made.value for name, (made, _) in found.items() if made}
    for format in ("fp32", "bf16"):
        assert value[f"products of {format}, 8 x 4 x 16"] == pytest.approx(2 * 8 * 4 * 16 / 1e12)
        assert value[f"products of {format}, 2 x 3 x 5"] == pytest.approx(2 * 2 * 3 * 5 / 1e12)
        scores = 2 * 3 * 5 * 6 // 2
        for phase, products in (("forward", 2), ("backward", 5)):
            flops = products * 2 * 8 * scores
            assert value[f"attention of {format}, {phase}, {ATTENTION}"] == pytest.approx(flops / 1e12)
        assert value[f"gradients of inputs, products of {format}, 8 x 16 x 4"] == pytest.approx(2 * 8 * 4 * 16 / 1e12)
        assert value[f"gradients of weights, products of {format}, 4 x 16 x 8"] == pytest.approx(2 * 8 * 4 * 16 / 1e12)
    assert value["passes over 4 KiB"] == pytest.approx(9.5 * 4096 / 1e12)
    assert value[COPY] == pytest.approx(2 * 4096 / 1e12)
    assert value[LAUNCH] == value[FORWARD] == pytest.approx(1e6)
    assert value[BACKWARD] == pytest.approx(1e6 / 10)  # all ten in one call
    assert len(value) == 21


# Each measurement calls twice for the number of calls, and then five times as many.
CALLS = 1 + 1 + 5


@pytest.mark.usefixtures("a_second_each")
def test_the_link_to_the_host_is_measured_both_ways_by_copies_that_the_host_does_not_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned = []
    zeros = torch.zeros
    monkeypatch.setattr(alone, "is_gpu", lambda _: True)
    monkeypatch.setattr(
        torch, "zeros", lambda *size, pin_memory=False, **of: (pinned.append(pin_memory), zeros(*size))[1]
    )
    copies = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *tensors, non_blocking=False: copies.append(non_blocking))
    value = {each.name: each.read().value for each in of_host_link(Seconds(), CPU, 4096, 4)}
    assert value[TO_HOST] == value[FROM_HOST] == pytest.approx(4096 / 1e9)
    assert value[SMALL_TO_HOST] == pytest.approx(1e6)
    assert value[HOST_COPY] == pytest.approx(2 * 4096 / 1e9)
    assert pinned == 3 * [False, True]  # on the GPU, and on its host
    assert copies == [True] * 3 * CALLS + [False] * CALLS


@pytest.mark.usefixtures("a_second_each")
def test_what_is_computed_is_what_the_name_says() -> None:
    of = {name: seen for name, (_, seen) in read_on_a_cpu().items()}
    for format, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        assert of[f"products of {format}, 8 x 4 x 16"]["mm", (8, 16), (16, 4), dtype] == CALLS
        assert of[f"gradients of inputs, products of {format}, 8 x 16 x 4"]["mm", (8, 4), (4, 16), dtype] == CALLS
        gradients = of[f"gradients of weights, products of {format}, 4 x 16 x 8"]
        # Sums stay fp32. Dtypes are a set, whose order is that of hashes.
        added = [key for key in gradients if key[:4] == ("add_wgrad", (4, 16), (8, 4), (8, 16))]
        assert [(gradients[key], {*key[4:]}) for key in added] == [(CALLS, {torch.float32, dtype})]
        query = ((2, 3, 5, 8),) * 3
        attention = of[f"attention of {format}, forward, {ATTENTION}"]
        assert attention["_scaled_dot_product_flash_attention_for_cpu", *query, dtype] == CALLS + 1  # one for backward
        backward = of[f"attention of {format}, backward, {ATTENTION}"]
        name = "_scaled_dot_product_flash_attention_for_cpu_backward"
        assert sum(times for (operator, *_), times in backward.items() if operator == name) == CALLS
    rows = ((4, 256), torch.float32)
    passes = of["passes over 4 KiB"]
    assert passes["mul", (4, 256), *rows] == passes["silu", *rows] == passes["_to_copy", *rows] == CALLS
    assert passes["sum", *rows] == CALLS
    assert of[COPY]["copy_", (1024,), (1024,), torch.float32] == CALLS
    few = ("mul", (16,), (16,), torch.float32)
    assert of[LAUNCH][few] == of[FORWARD][few] == 5 * 10
    assert of[BACKWARD][few] == 2 * 5 * 10  # as many again in backward


@pytest.mark.usefixtures("a_second_each")
def test_calls_of_a_product_take_operands_in_turn_that_lie_apart() -> None:
    """Weights of a layer come from memory, which other work has passed over since their last use."""
    operands = set()

    class Addresses(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten.mm:
                operands.add(args[0].data_ptr())
            return func(*args, **(kwargs or {}))

    sizes = evolve(SIZES, shapes=SHAPES[:1], spread=3 * SHAPES[0].nbytes)
    with Addresses():
        next(measurements(CPU, sizes, 4)).read()
    assert len(operands) == 3


def test_a_repeat_has_calls_until_it_is_long_enough() -> None:
    assert calls_of_a_repeat(Seconds(), lambda: None) == 1

    class Short(Seconds):
        most = 50

        def seconds(self, call: Callable[[], Any], times: int) -> float:
            return 0.004 * times

    assert calls_of_a_repeat(Short(), lambda: None) == 5
    Short.most = 2
    assert calls_of_a_repeat(Short(), lambda: None) == 2


def test_a_rank_of_one_thread_is_timed_by_what_the_thread_had_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    waits = lambda: time.sleep(0.05)  # noqa: E731
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert HostClock(CPU).seconds(waits, 1) < 0.04
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert HostClock(CPU).seconds(waits, 1) >= 0.05
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert HostClock(torch.device("cuda")).seconds(waits, 1) >= 0.05  # backward launches in a thread of its own


class Gpu:
    """Events of a GPU, and the log of what it is given. Its milliseconds are the operators between events."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def Event(self, *args: Any, **kwargs: Any) -> Event:
        asked = inspect.signature(EVENT.__new__).bind(EVENT, *args, **kwargs)
        assert asked.arguments["enable_timing"]
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at = -1

    def record(self) -> None:
        self.at = len(self.gpu.log)
        self.gpu.log.append("event")

    def synchronize(self) -> None:
        self.gpu.log.append("host waits")

    def elapsed_time(self, end: Event) -> float:
        assert self.gpu.log[-1] == "host waits"
        return float(end.at - self.at - 1)


def test_a_gpu_is_held_until_the_host_has_launched_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.Event)
    monkeypatch.setattr(F, "linear", lambda *_: gpu.log.append("long product"))
    monkeypatch.setattr(GpuClock, "_HELD", 2)
    assert GpuClock(CPU).seconds(lambda: gpu.log.append("call"), 3) == pytest.approx(3e-3)
    assert gpu.log == ["long product", "event", "call", "call", "call", "event", "host waits"]


@pytest.mark.parametrize(("capability", "found"), [((8, 0), 2), ((8, 9), 3), ((9, 0), 3), ((10, 0), 3)])
def test_a_gpu_is_asked_for_fp8_if_it_offers_it(
    capability: tuple[int, int], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert alone.formats(torch.device("cuda")) == ["fp32", "bf16", "fp8"][:found]
    assert alone.formats(CPU) == ["fp32", "bf16"]


def test_the_product_in_fp8_is_one_that_torch_takes_on_a_gpu() -> None:
    with FakeTensorMode():
        call = alone._fp8_product(torch.randn(256, 512, device="cuda"), torch.randn(128, 512, device="cuda"))
        out = call()
    assert (out.shape, out.dtype) == ((256, 128), torch.bfloat16)


HOSTS = {
    "one node": (["a", "a", "a"], {0: {"node": [0, 1, 2]}, 2: {"node": [0, 1, 2]}}),
    "two nodes": (
        ["a", "a", "b", "b"],
        {1: {"node": [0, 1], "network": [1, 3]}, 2: {"node": [2, 3], "network": [0, 2]}},
    ),
    "two of one": (["a", "b"], {0: {"network": [0, 1]}}),
    "uneven": (["a", "a", "b"], {0: {"node": [0, 1], "network": [0, 2]}, 1: {"node": [0, 1]}, 2: {"network": [0, 2]}}),
    "alone": (["a"], {0: {}}),
}


@pytest.mark.parametrize("case", HOSTS)
def test_a_rank_reaches_its_node_and_its_likes_on_others(case: str) -> None:
    hosts, expected = HOSTS[case]
    for rank, groups in expected.items():
        assert {group.link: group.ranks for group in groups_of(rank, hosts)} == groups


NBYTES = 1 << 12


def sent_and_counted(hosts: Sequence[str]) -> dict[str, tuple[float, int]]:
    """By measurement its value, where a message and a collective take a second each, and the bytes that were seen.

    What is computed between two collectives takes a second, too.
    """
    rank = dist.get_rank()
    groups = [groups_of(each, hosts) for each in range(len(hosts))]
    found = {}
    now = 0.0
    launched = links._launch

    def tick() -> None:
        nonlocal now
        now += 1.0

    def launch(*asked: Any) -> Callable[[], Any]:
        call = launched(*asked)
        return lambda: (tick(), call())[1]

    def seconds(call: Callable[[], Any], times: int, *_: Any) -> float:
        begun = now
        for _ in range(times):
            call()
        return now - begun or float(times)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_seconds", seconds)
        patch.setattr(links, "_launch", launch)
        patch.setattr(links, "work_of_a_layer", lambda _: tick)
        for link, group in opened(groups, rank).items():
            for each in link_measurements(link, group, CPU, nbytes=NBYTES, repeats=3):
                with Counting(group, dims=()) as counting, counting.during("dispatch"):
                    made = each.read()
                if made is None:
                    continue
                assert made.repeats == 3
                seen = sum(sent.metadata for sent in counting.traffic().sent["dispatch"])
                found[each.name] = (made.value, seen)
    return found


@pytest.mark.parametrize("hosts", [*deep("aaa"), "aabb"])
def test_a_link_moves_the_bytes_that_its_figure_is_of(hosts: str, pool: RankPool) -> None:
    for rank, found in enumerate(pool.run(sent_and_counted, len(hosts), list(hosts))):
        reached = {"node": 3} if hosts == "aaa" else {"node": 2, "network": 2}
        expected: dict[str, tuple[float, int]] = {}
        calls = {"small": 20, "medium": 10, "large": 4}
        repeats = 4  # three, and one that connects
        for link, ranks in reached.items():
            for kind in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"):
                for size, times in calls.items():
                    to_others = links.bytes_sent(kind, ranks, NBYTES, size)
                    of_each = (1e6, repeats * times * to_others)
                    expected[links.link_name(link, kind, size)] = of_each
                    expected[links.processor_name(link, kind, size)] = of_each
            if hosts == "aabb" or rank > 0:
                expected[f"small messages over the {link}"] = (1e6, repeats * calls["small"] * 64)
                expected[f"large messages over the {link}"] = (NBYTES / 1e9, repeats * calls["large"] * NBYTES)
        assert found == {name: (pytest.approx(value), seen) for name, (value, seen) in expected.items()}


def test_medium_messages_lie_between_small_and_large_ones() -> None:
    assert [links.bytes_sent("all_to_all", 2, 1 << 24, size) for size in links.SIZES] == [64, 1 << 18, 1 << 23]
    assert links.bytes_sent("all_reduce", 2, 1 << 24, "large") == 1 << 24


def test_a_collective_that_adds_less_than_its_noise_is_not_measured(pool: RankPool) -> None:
    assert pool.run(added_in_vain, 1) == ["it adds less than the same work differs without it"]


def added_in_vain() -> str:
    """What a link says of a collective that takes no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_seconds", lambda *_: 1.0)
        *_, last = link_measurements("node", dist.group.WORLD, CPU, nbytes=NBYTES, repeats=2)
        with pytest.raises(RuntimeError) as refused:
            last.read()
    return str(refused.value)


ONE = Reading(value=1.0, spread=0.0, repeats=4)


def with_a_failure() -> tuple[Readings, list[str]]:
    """Readings of two ranks, of which the second one cannot measure something and has something else as well."""
    rank = dist.get_rank()

    def fails() -> Reading:
        raise RuntimeError("no such product\nException raised from somewhere")

    own = [
        Measurement(name="a", unit="GB/s", read=lambda: Reading(value=1.0 + rank, spread=0.5 * rank, repeats=4)),
        Measurement(name="b", unit="us", read=fails if rank == 1 else lambda: ONE),
        Measurement(name="c", unit="us", read=lambda: ONE if rank == 0 else None),
    ]
    if rank == 1:
        own.append(Measurement(name="d", unit="us", read=lambda: ONE))
    said: list[str] = []
    made = measured(own, dist.group.WORLD, on_cpu=True, tell=said.append)
    return made, said


def test_ranks_agree_on_readings_and_a_failure_is_named(pool: RankPool) -> None:
    for made, said in pool.run(with_a_failure, 2):
        assert made.of == {"a": Reading(value=1.5, spread=0.5, repeats=4), "c": ONE, "d": ONE}
        assert made.failed == {"b": "rank 1: no such product"}
        assert made.share.keys() == {"a", "c", "d"}
        assert said == [
            "[1/4] a: 1.5 GB/s (4 repeats, A/A spread 50.0 %)",
            "[2/4] b: failed: rank 1: no such product",
            "[3/4] c: 1 us (4 repeats, A/A spread 0.0 %)",
            "[4/4] d: 1 us (4 repeats, A/A spread 0.0 %)",
        ]


AROUND = Surroundings(
    about="two ranks",
    name="a GPU",
    memory_bytes=3 << 30,
    cores=4,
    capability=9.0,
    board_power_w=700.0,
    threads=None,
    ranks={"node": 2},
    message_bytes=NBYTES,
)


def values(*, failed: Sequence[str] = ()) -> Readings:
    """Readings of 1, 2, 3 ... in the order of the measurements, without those that failed."""
    names = [
        f"products of {format}, {shape.rows} x {shape.columns} x {shape.depth}"
        for format in ("fp32", "bf16")
        for shape in SHAPES
    ]
    names += [COPY, "passes over 4 KiB", LAYER, LAUNCH, FORWARD, BACKWARD]
    names += [links.link_name("node", "messages", size) for size in ("small", "large")]
    names += [links.link_name("node", kind, size) for kind in links.COLLECTIVES for size in links.SIZES]
    names += [LAYER_OF_RANKS, STEP_OF_RANKS, STEP, "gradients of weights, products of bf16, 4 x 16 x 8"]
    names += [
        f"attention of {format}, {phase}, {ATTENTION}"
        for format in ("fp32", "bf16")
        for phase in ("forward", "backward")
    ]
    names += [FROM_HOST, TO_HOST, SMALL_TO_HOST, HOST_COPY]
    names += ["gradients of inputs, products of bf16, 8 x 16 x 4"]
    names += [links.processor_name("node", "reduce_scatter", size) for size in links.SIZES[:2]]
    return Readings(
        of={
            name: Reading(value=float(n), spread=0.0123, repeats=n)
            for n, name in enumerate(names, 1)
            if name not in failed
        },
        failed=dict.fromkeys(failed, "rank 0: it is broken"),
        share={},
    )


def test_readings_become_figures_that_say_how_they_were_measured() -> None:
    cluster = cluster_of(values(), AROUND, sizes=SIZES, by="measured by moefw 1.2 on 2026-11-28")
    gpu = cluster.gpu
    by = "measured by moefw 1.2 on 2026-11-28"
    assert gpu.names == ("a GPU",)
    assert [(product.format, product.rows, product.tflops.value) for product in gpu.products] == [
        ("fp32", 8, 1.0),
        ("fp32", 2, 2.0),
        ("bf16", 8, 3.0),
        ("bf16", 2, 4.0),
    ]
    assert gpu.peak_tflops.bf16.source == f"{by}, 4 repeats, A/A spread 1.2 %, 2 x 3 x 5, the fastest"
    assert (gpu.peak_tflops.bf16.value, gpu.peak_tflops.fp8) == (4.0, None)
    assert cluster.peak_tflops("float32") == 2.0
    assert gpu.memory_tb_per_s.value == 5.0
    assert [(each.nbytes, each.tb_per_s.value) for each in gpu.passes] == [(7782, 6.0)]
    alone = (cluster.host_layer_us, cluster.host_step_us)
    together = (cluster.host_layer_of_ranks_us, cluster.host_step_of_ranks_us)
    assert [figure and figure.value for figure in (*alone, *together)] == [7.0, 27.0, 25.0, 26.0]
    attention = [(each.format, each.forward_tflops.value, each.backward_tflops.value) for each in gpu.attention]
    assert attention == [("fp32", 29.0, 30.0), ("bf16", 31.0, 32.0)]
    assert [(each.format, each.rows, each.columns, each.depth) for each in gpu.dgrads] == [("bf16", 8, 16, 4)]
    assert [(each.format, each.rows, each.columns, each.depth) for each in gpu.wgrads] == [("bf16", 4, 16, 8)]
    assert gpu.attention[0].scores == 2 * 3 * 5 * 6 // 2
    assert gpu.threads is None
    assert gpu.capability == "9.0"
    assert (gpu.memory_gib.value, gpu.memory_gib.source) == (3.0, f"{by}: the system says so")
    host = (cluster.host_launch_us, cluster.host_forward_us, cluster.host_backward_us, cluster.host_cores)
    assert [figure and figure.value for figure in host] == [8.0, 9.0, 10.0, 4.0]
    node = cluster.links.node
    assert cluster.links.network is None
    assert node is not None
    assert [figure and figure.value for figure in (node.latency_us, node.gb_per_s, node.gpus)] == [11.0, 12.0, 2.0]
    scatters = [
        (each.nbytes, each.us.value, each.processor_us and each.processor_us.value)
        for each in node.collectives.reduce_scatter
    ]
    assert scatters == [(64, 19.0, 38.0), (64, 20.0, 39.0), (2048, 21.0, None)]
    to_host = cluster.links.host
    assert to_host is not None
    of_host = (to_host.gb_per_s, to_host.latency_us, cluster.host_memory_gb_per_s)
    assert [figure and figure.value for figure in of_host] == [33.0, 35.0, 36.0]  # the slower direction is 33


def test_what_could_not_be_measured_is_left_out() -> None:
    failed = ["products of bf16, 2 x 3 x 5", LAUNCH, "large all-gather over the node", "small messages over the node"]
    cluster = cluster_of(values(failed=failed), AROUND, sizes=SIZES, by="measured by moefw 1.2 on 2026-11-28")
    assert cluster.gpu.peak_tflops.bf16.value == 3.0
    assert cluster.host_launch_us is None
    assert cluster.links.node is not None
    assert cluster.links.node.latency_us is None
    assert [each.us.value for each in cluster.links.node.collectives.all_gather] == [16.0, 17.0]
    assert len(cluster.links.node.collectives.all_to_all) == 3


def test_a_cluster_without_products_or_without_memory_is_none() -> None:
    for failed in ([COPY, LAUNCH], [f"products of bf16, {size}" for size in ("8 x 4 x 16", "2 x 3 x 5")]):
        with pytest.raises(RunError) as refused:
            cluster_of(values(failed=failed), AROUND, sizes=SIZES, by="measured by moefw 1.2 on 2026-11-28")
        said = [problem.what for problem in refused.value.problems]
        assert said == [f"{name} could not be measured: rank 0: it is broken." for name in failed]
