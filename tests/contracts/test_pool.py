"""The rank pool: it reports the error of a function, and retries a world that does not connect."""

from __future__ import annotations

import ctypes
import os
import re
import time
from typing import Any

import pytest
import torch.distributed as dist

from moefw.core.errors import ContractError
from moefw.testing import pool as pools
from moefw.testing.pool import RankPool


def where() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def fail_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("mine")


def leave_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(3)


def crash_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        ctypes.string_at(0)


def wait_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(60)


def compute_on_last() -> int:
    began = time.process_time()
    while dist.get_rank() == dist.get_world_size() - 1 and time.process_time() < began + 1.5:
        sum(range(10_000))
    return dist.get_rank()


def unconnected_once(pool: RankPool, times: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the pool find, the first ``times`` times, that its ranks have not connected."""
    collect, seen = pool._collect, []

    def collecting(*args: Any) -> list[Any]:
        answers = collect(*args)
        seen.append(len(answers))
        if len(seen) <= times:
            pool.close()
            raise pools._UnconnectedError("rank 0: closed by peer")
        return answers

    monkeypatch.setattr(pool, "_collect", collecting)
    return seen


def test_each_rank_answers_or_is_named_with_what_became_of_it() -> None:
    pool = RankPool(2)
    assert [answer[:2] for answer in pool.run(where, 2)] == [(0, 2), (1, 2)]
    with pytest.raises(ContractError, match="rank 1: ValueError: mine") as failed:
        pool.run(fail_on_last, 2)
    sentence, frame, code = str(failed.value).splitlines()
    assert sentence == "rank 1: ValueError: mine"
    assert frame.endswith("in fail_on_last"), "the author's own line, without those of the pool"
    assert code.strip() == 'raise ValueError("mine")'
    with pytest.raises(ContractError, match="rank 1: the process died with exit code 3"):
        pool.run(leave_on_last, 2)
    with pytest.raises(ContractError, match="rank 1: the process died of SIGSEGV") as failed:
        pool.run(crash_on_last, 2)
    crashed = re.search(
        r"Current thread .*\n(?:  File .*\n)*?  File .*test_pool.py\", line \d+ in crash_on_last", str(failed.value)
    )
    assert crashed, f"the stack of the thread that crashed is told: {failed.value}"
    with pytest.raises(ContractError, match="rank 1: no answer in time"):
        pool.run(wait_on_last, 2, timeout_s=2.0)
    assert [answer[:2] for answer in pool.run(where, 2)] == [(0, 2), (1, 2)]
    pool.close()


def test_processes_start_with_the_first_job_that_needs_them() -> None:
    pool = RankPool(3)
    first = pool.run(where, 1)
    assert len(pool._workers) == 1
    assert [answer[:2] for answer in pool.run(where, 2)] == [(0, 2), (1, 2)]
    assert pool.run(where, 1)[0][2] == first[0][2]
    assert len(pool._workers) == 2
    pool.close()


def test_a_rank_that_is_late_because_it_computes_is_waited_for() -> None:
    pool = RankPool(2)
    assert pool.run(where, 2)
    assert pool.run(compute_on_last, 2, timeout_s=1.4) == [0, 1]
    pool.close()


def test_a_world_that_does_not_come_about_is_tried_again_in_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RankPool(2)
    first = {answer[2] for answer in pool.run(where, 2)}
    seen = unconnected_once(pool, 1, monkeypatch)
    assert first.isdisjoint(answer[2] for answer in pool.run(where, 2))
    assert len(seen) == 2
    pool.close()


def test_ranks_that_never_connect_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RankPool(2)
    unconnected_once(pool, pools.CONNECTS, monkeypatch)
    with pytest.raises(ContractError, match=r"2 ranks do not connect, tried 3 times.\n(.*\n)*.*closed by peer"):
        pool.run(where, 2)
    pool.close()
