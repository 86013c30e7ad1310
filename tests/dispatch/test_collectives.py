"""Collectives are counted, recorded, and delivered between threads, whatever group or interface they come from."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from dispatchers import dispatch_assembly
from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, bare_context
from moefw.core.errors import ContractError
from moefw.testing import threads
from moefw.testing.counting import Counting, Sent, Traffic
from moefw.testing.pool import RankPool
from moefw.testing.suites.dispatch_recording import Recording
from moefw.testing.threads import subgroup, thread_world
from moefw.testing.wire import OneGroup

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def collectives(group, rank: int, size: int) -> tuple[Traffic, list[list[float]]]:
    """Call each collective once; return the counts and the results."""
    group = dist.group.WORLD if group is None else group
    sent, received = list(range(1, size + 1)), [rank + 1] * size
    brought = []

    def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.arange(count * 4) + 100 * rank).view(count, 4).to(dtype)

    with Counting(group, dims=(4,)) as counting:
        with counting.during("dispatch"):
            out = torch.empty(sum(received), 4)
            work = dist.all_to_all_single(out, rows(sum(sent)), received, sent, group=group, async_op=True)
            work.wait()
            brought.append(out)
            out = torch.empty(sum(received), 4, dtype=torch.int64)
            dist.all_to_all_single(out, rows(sum(sent), torch.int64), received, sent, group=group)
            brought.append(out)
            out = torch.empty(size)
            dist.all_to_all_single(out, torch.arange(size) + 10.0 * rank, group=group)
            brought.append(out)
            nothing = torch.empty(0, 4)
            dist.all_to_all_single(nothing, nothing.clone(), [0] * size, [0] * size, group=group)
        with counting.during("plan"):
            out = torch.empty(size * 2, 4)
            all_gather(out, rows(2), group=group)
            brought.append(out)
            listed = [torch.empty(3) for _ in range(size)]
            dist.all_gather(listed, torch.full((3,), float(rank)), group=group)
            brought += listed
            largest = torch.tensor([rank])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            brought.append(largest)
        with counting.during("combine"):
            out = torch.empty(3, 4)
            reduce_scatter(out, rows(3 * size), group=group, async_op=True).wait()
            brought.append(out)
            dist.barrier(group=group)
    return counting.traffic(), [tensor.flatten().tolist() for tensor in brought]


def on_gloo(size: int) -> tuple[Traffic, list[list[float]]]:
    return collectives(None, dist.get_rank(), size)


@pytest.mark.parametrize("size", [2, 4])
def test_counts_are_those_done_by_hand_and_threads_bring_what_gloo_brings(pool8: RankPool, size: int) -> None:
    by_gloo = pool8.run(on_gloo, size, size)
    by_threads = thread_world(size, collectives, size)
    for rank, (traffic, brought) in enumerate(by_gloo):
        for peer in set(range(size)) - {rank}:
            rows = peer + 1
            assert traffic.sent["dispatch"][peer] == Sent(payload=rows * 16, metadata=rows * 32 + 4)
            assert traffic.sent["plan"][peer] == Sent(payload=2 * 16, metadata=3 * 4 + 8)
            assert traffic.sent["combine"][peer] == Sent(payload=3 * 16)
        assert traffic.sent["combine_backward"] == traffic.sent["dispatch_backward"] == (Sent(),) * size
        assert (traffic, brought) == by_threads[rank]


def on_groups_of_its_own() -> Traffic:
    """Exchange rows inside pairs of ranks, send to the next rank, and gather by a functional collective."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    with Counting(dist.group.WORLD, dims=(4,)) as counting:
        with counting.during("dispatch"):
            dist.all_to_all_single(torch.empty(6, 4), torch.ones(6, 4), group=pairs[rank % 2])
        with counting.during("combine"):
            sends = dist.P2POp(dist.isend, torch.ones(2, 4), (rank + 1) % 4)
            receives = dist.P2POp(dist.irecv, torch.empty(2, 4), (rank - 1) % 4)
            for work in dist.batch_isend_irecv([sends, receives]):
                work.wait()
        with counting.during("plan"):
            functional.all_to_all_single(torch.ones(6), None, None, pairs[rank % 2]) + 1
    return counting.traffic()


def test_collectives_of_every_group_and_kind_are_counted(pool8: RankPool) -> None:
    for rank, traffic in enumerate(pool8.run(on_groups_of_its_own, 4)):
        across, after = (rank + 2) % 4, (rank + 1) % 4
        for movement, to, sent in (
            ("dispatch", across, Sent(payload=3 * 16)),
            ("combine", after, Sent(payload=2 * 16)),
            ("plan", across, Sent(metadata=3 * 4)),
        ):
            assert dict(enumerate(traffic.sent[movement])) == {peer: Sent() for peer in range(4)} | {to: sent}


def to_a_stranger() -> None:
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        refused = pytest.raises(ContractError, match=r"rank 2, which is none of the ranks \[0, 1\] of the experts")
        with Counting(pair, dims=(4,)) as counting, counting.during("plan"), refused:
            dist.send(torch.ones(1), 2)


def test_bytes_to_a_rank_that_holds_no_experts_of_the_layer_are_refused(pool8: RankPool) -> None:
    pool8.run(to_a_stranger, 3)


def late() -> dict[str, Any]:
    x, out = torch.ones(4, 4), torch.zeros(4, 4)
    with Recording(late=True) as recording:
        work = dist.all_to_all_single(out, x, async_op=True)
        before = out.clone()
        work.wait()
        work = dist.all_to_all_single(torch.zeros(2), spoiled := torch.ones(2), async_op=True)
        spoiled.zero_()
        work.wait()
        exchanged = functional.all_to_all_single(torch.ones(4), None, None, dist.group.WORLD)
        under_way = recording.under_way()
        exchanged = exchanged + 1
    found = {"before": before, "after": out, "exchanged": exchanged, "under_way": (under_way, recording.under_way())}
    return {**found, "overwritten": [str(event) for event in recording.overwritten]}


def test_results_come_when_they_are_waited_for_and_what_is_sent_must_stay_until_then(pool8: RankPool) -> None:
    for found in pool8.run(late, 2):
        assert found["before"].isnan().all()
        assert (found["after"] == 1).all()
        assert (found["exchanged"] == 2).all()
        assert found["under_way"] == (1, 0)
        assert found["overwritten"] == ["all-to-all of float32 [2]"]


def alone_and_unseen(group, rank: int) -> None:
    with Counting(group, dims=(4,)) as counting:
        with pytest.raises(ContractError, match="outside every movement"):
            dist.all_reduce(torch.zeros(1), group=group)
        with counting.during("plan"), pytest.raises(ContractError, match="c10d::gather_ is not among"):
            group.gather([[torch.zeros(1)]], [torch.zeros(1)])


def test_nothing_passes_uncounted() -> None:
    thread_world(1, alone_and_unseen)


def leave_after_the_first(group, rank: int, absent: Sequence[int]) -> None:
    dist.barrier(group=group)
    if rank not in absent:
        dist.all_reduce(torch.zeros(1), group=group)


def test_threads_that_return_before_a_collective_are_named() -> None:
    wanted = r"ranks 1, 3 did not come to the all-reduce \(already returned\); waiting there: ranks 0, 2, 4"
    with pytest.raises(ContractError, match=wanted):
        thread_world(5, leave_after_the_first, (1, 3))


def stay_away(group, rank: int, over: threading.Event) -> None:
    if rank == 1:
        over.wait(30.0)
        return
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    finally:
        over.set()


def test_a_thread_that_does_not_come_in_time_is_named() -> None:
    """One other waits: each counts its own time, so that it cannot end before others have come."""
    wanted = r"rank 1 did not come to the all-reduce \(not in 0.3 s\); waiting there: rank 0"
    with pytest.raises(ContractError, match=wanted):
        thread_world(2, stay_away, threading.Event(), timeout_s=0.3)


def compute_on_last(group, rank: int) -> None:
    began = time.thread_time()
    while rank == 1 and time.thread_time() < began + 0.5:
        torch.randn(100, 100).sort()
    dist.barrier(group=group)


def test_a_thread_that_is_late_because_it_computes_is_waited_for() -> None:
    thread_world(2, compute_on_last, timeout_s=0.45)


def test_a_thread_that_computes_for_ever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LOOK_S", 0.05)
    with pytest.raises(ContractError, match=r"rank 1 did not come to the barrier \(not in 0.1 s\)"):
        thread_world(2, compute_on_last, timeout_s=0.1)


def poll(group, rank: int, over: threading.Event, sleep_s: float) -> None:
    while not over.wait(sleep_s):
        pass


@pytest.mark.parametrize("sleep_s", [0.0, 0.002])
def test_threads_that_poll_what_does_not_come_are_named(monkeypatch: pytest.MonkeyPatch, sleep_s: float) -> None:
    """None of them waits in a collective, and each takes time of a processor."""
    monkeypatch.setattr(threads, "LOOK_S", 0.05)
    monkeypatch.setattr(threads, "GRACE_S", 0.05)
    over = threading.Event()
    with pytest.raises(ContractError, match=r"ranks 0, 1 came to no collective, and did not return, in 0.1 s"):
        thread_world(2, poll, over, sleep_s, timeout_s=0.1)
    over.set()


def test_whoever_polls_a_recorded_collective_gets_its_result_when_it_is_told_that_it_is_over() -> None:
    def polled(group, rank: int) -> tuple[float, list[str]]:
        with Recording(late=True) as recording:
            value = torch.ones(1)
            work = dist.all_reduce(value, group=group, async_op=True)
            while not work.is_completed():
                time.sleep(0.0)
            work.wait()
        return value.item(), [event.what for event in recording.events]

    assert thread_world(2, polled) == [(2.0, ["launch", "wait"])] * 2


def alone(group, rank: int, running: list[int]) -> int:
    """Return the most ranks that are seen to run at once."""
    most = 0
    for _ in range(3):
        running.append(rank)
        time.sleep(0.002)
        most = max(most, len(running))
        running.remove(rank)
        dist.barrier(group=group)
    return most


def test_one_thread_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "TURN_S", 60.0)
    assert thread_world(4, alone, []) == [1, 1, 1, 1]


def await_the_last(group, rank: int, came: threading.Event) -> bool:
    if rank == 3:
        came.set()
    return came.wait(30.0)


def test_a_thread_may_wait_for_another_one_without_a_collective() -> None:
    assert thread_world(4, await_the_last, threading.Event()) == [True] * 4


def test_a_thread_that_ran_beside_another_passes_no_turn_that_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threads._Meeting(2, timeout_s=30.0)
    meeting.take_turn(0)
    monkeypatch.setattr(threads, "TURN_S", 0.0)
    meeting.take_turn(1)
    meeting.pass_turn(1)
    assert meeting._turn.locked()
    meeting.pass_turn(0)
    assert not meeting._turn.locked()


def different(group, rank: int) -> None:
    if rank == 1:
        dist.barrier(group=group)
    dist.all_reduce(torch.zeros(1), group=group)


def torn(group, rank: int) -> None:
    out = torch.empty(2 + (rank == 1), 4)
    dist.all_to_all_single(out, torch.zeros(2, 4), [1, 1 + (rank == 1)], [1, 1], group=group)


def failing(group, rank: int) -> None:
    if rank == 2:
        raise ZeroDivisionError("of our own")
    dist.barrier(group=group)


def test_an_error_in_one_thread_ends_all_and_is_raised() -> None:
    threads = torch.get_num_threads()
    with pytest.raises(ContractError, match=r"different collectives: rank 0 all-reduce, rank 1 barrier"):
        thread_world(2, different)
    with pytest.raises(ContractError, match=r"\(1, 4\) torch.float32 is sent from rank 1 to rank 1, which awaits \(2"):
        thread_world(2, torn)
    with pytest.raises(ZeroDivisionError, match="of our own") as caught:
        thread_world(4, failing)
    assert caught.value.__notes__ == ["(on rank 2 of a world of 4 threads)"]
    assert torch.get_num_threads() == threads


def four_ranks() -> Assembly:
    return dispatch_assembly("alltoall", ep=4, num_experts=4, top_k=2, dim=8)


def groups_of(group, rank: int, assembly: Assembly) -> list[tuple[int, ...]]:
    """Sum the ranks over the groups that a dispatcher gets: of its node, across nodes, and of the first three."""
    layout = OneGroup(assembly, group, ranks_per_node=2)
    experts = bare_context(assembly, layout, torch.device("cpu"), Shared()).expert_group()
    opened = [experts.node_group(), experts.across_nodes()]
    opened += [experts.subgroup([0, 1, 2])] if rank < 3 else []
    assert experts.node_group() is opened[0]
    assert experts.ranks == (0, 1, 2, 3)
    found = []
    for each in opened:
        places = torch.zeros(4)
        places[rank] = 1
        dist.all_reduce(places, group=each)
        found.append(tuple(places.nonzero().flatten().tolist()))
    return found


def groups_of_processes() -> list[tuple[int, ...]]:
    return groups_of(dist.group.WORLD, dist.get_rank(), four_ranks())


def test_a_dispatcher_gets_the_groups_of_nodes_and_any_other_on_threads_and_processes(pool8: RankPool) -> None:
    wanted = [[(rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)] for rank in range(4)]
    wanted = [groups + ([(0, 1, 2)] if rank < 3 else []) for rank, groups in enumerate(wanted)]
    assert thread_world(4, groups_of, four_ranks()) == wanted
    assert pool8.run(groups_of_processes, 4) == wanted


def crossed(group, rank: int) -> None:
    dist.barrier(group=subgroup(group, [(0, 1), (1, 2), (0, 2)][rank]))


def test_threads_that_wait_for_each_other_in_different_groups_are_named() -> None:
    with pytest.raises(ContractError, match="the others wait in another group"):
        thread_world(3, crossed, timeout_s=5.0)
