"""``moefw doctor --ranks`` measures between every two ranks of a group and names those that are slow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import copies
from command_line import say
from moefw.commands import specs
from moefw.commands.doctor.ranks import groups_of, measured_pairs
from moefw.commands.doctor.slow_pairs import Pair, complaints, kinds_of
from moefw.compose.build import open_layout
from moefw.runtime.communication.pair_times import num_rounds, partner_in
from moefw.testing.pool import RankPool
from run_cases import TORCHRUN
from small_spec import small_spec


@pytest.mark.parametrize("size", range(2, 10))
def test_in_the_rounds_every_two_ranks_meet_once(size: int) -> None:
    met = []
    for number in range(num_rounds(size)):
        partners = [partner_in(number, position, size) for position in range(size)]
        assert all(partner is None or partners[partner] == position for position, partner in enumerate(partners))
        met += [(position, other) for position, other in enumerate(partners) if other is not None and position < other]
    assert sorted(met) == [*combinations(range(size), 2)]


def pair(first: int, second: int, *, us: float = 10.0, gb_per_s: float = 20.0, machine: int = 4) -> Pair:
    """A pair of a group of ep; a machine has some ranks each."""
    hosts = (f"node{first // machine}", f"node{second // machine}")
    return Pair(axes="ep", ranks=(first, second), hosts=hosts, latency_us=us, gb_per_s=gb_per_s)


def named(pairs: Sequence[Pair]) -> list[str]:
    """What each complaint is about."""
    return [line.partition(" in ep")[0] for line in complaints(kinds_of(pairs))]


def test_a_slow_pair_is_named_with_its_machines_and_the_medians() -> None:
    slow = pair(0, 5, us=11.0, gb_per_s=4.0, machine=3)
    pairs = [pair(*ranks, machine=3) for ranks in combinations(range(6), 2) if ranks != (0, 5)]
    assert complaints(kinds_of([*pairs, slow])) == [
        "ranks 0 (node0) and 5 (node1) are slow in ep, across machines: 11.0 microseconds and 4.00 GB/s, "
        "where 10.0 microseconds and 20.00 GB/s is the median"
    ]


def test_a_rank_that_is_slow_with_all_others_is_named_alone() -> None:
    pairs = [pair(*ranks, us=25.0 if 2 in ranks else 10.0) for ranks in combinations(range(4), 2)]
    assert named(pairs) == ["rank 2 (node0) is slow with 3 of 3 others"]


def test_pairs_across_machines_are_not_compared_with_those_within() -> None:
    pairs = [pair(*ranks, us=50.0 if ranks[0] // 4 != ranks[1] // 4 else 5.0) for ranks in combinations(range(8), 2)]
    assert named(pairs) == []


def test_up_to_twice_the_median_nothing_is_slow() -> None:
    pairs = [pair(*ranks, us=10.0 + ranks[1], gb_per_s=20.0 - ranks[1]) for ranks in combinations(range(6), 2)]
    assert named(pairs) == []


def write_spec(folder: Path) -> Path:
    path = small_spec(folder, ranks=4)
    tree = json.loads(path.read_text())
    tree["attention"] |= {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    tree["parallel"] = {"dense": {"tp": 2}, "experts": {"ep": 4}}
    path.write_text(json.dumps(tree))
    return path


TWO_OF_TWO = ("parallel.dense.dp=2", "parallel.experts.ep=2")


def test_axes_that_lie_along_the_same_ranks_are_measured_once(tmp_path: Path) -> None:
    plan = specs.read(str(write_spec(tmp_path)), TWO_OF_TWO).layout
    assert groups_of(plan) == {"dp, edp": [(0, 2), (1, 3)], "tp, ep": [(0, 1), (2, 3)]}


SENT_LATE_S = 0.01


def measured_with_a_slow_rank(spec: str) -> list[str]:
    """Complaints where rank 2 begins each exchange late."""
    assembly = specs.read(spec, [], 4)
    exchange = dist.batch_isend_irecv

    def late(operations: list[dist.P2POp]) -> Any:
        time.sleep(SENT_LATE_S)
        return exchange(operations)

    sends = late if dist.get_rank() == 2 else exchange
    with mock.patch.object(dist, "batch_isend_irecv", sends):
        pairs = measured_pairs(open_layout(assembly, "cpu"), torch.device("cpu"), large_bytes=1 << 16)
    assert len(pairs) == 2 + 2 + 6
    return complaints(kinds_of(each for each in pairs if each.axes == "ep"))


def test_a_slow_rank_is_named_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    told = pool.run(measured_with_a_slow_rank, 4, str(write_spec(tmp_path)))
    assert told == [told[0]] * 4
    (slow_rank,) = (line for line in told[0] if line.startswith("rank "))
    assert slow_rank.startswith("rank 2 (")
    assert ") is slow with 3 of 3 others in ep, within a machine: " in slow_rank


def test_the_command_starts_the_ranks_of_a_spec_and_prints_a_table(tmp_path: Path) -> None:
    done = copies.run("moefw", "doctor", "--ranks", write_spec(tmp_path), *TWO_OF_TWO)
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert lines[2:5] == ["axes", "dp, edp", "tp, ep"]
    assert not (tmp_path / "run").exists()


def test_under_torchrun_the_first_rank_alone_prints_json(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = copies.run(*TORCHRUN, "doctor", "--json", "--ranks", small_spec(tmp_path, ranks=2), env=environment)
    assert done.returncode == 0, done.stderr
    (kind,) = json.loads(done.stdout)["kinds"]
    (only,) = kind["pairs"]
    assert (kind["axes"], only["ranks"]) == ("dp, ep", [0, 1])
    assert kind["latency_us"] == only["latency_us"] > 0
    assert kind["gb_per_s"] == only["gb_per_s"] > 0


def test_one_rank_has_nobody_to_reach(tmp_path: Path) -> None:
    said = say("doctor", "--ranks", small_spec(tmp_path))
    assert (said.code, said.err) == (
        2,
        f"error: the layout of {tmp_path / 'run.yaml'} has one rank. Start several under torchrun, or set parallel.\n",
    )


def test_an_override_needs_a_spec() -> None:
    said = say("doctor", "train.steps=2")
    assert said.code == 2
    assert "moefw doctor --ranks SPEC key=value" in said.err
