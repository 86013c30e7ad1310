"""What to try against the time of a step: gains respect overlap, and a spec accepts each change that is offered."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from command_line import say
from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks, read_yaml
from moefw.core.errors import MoefwError
from moefw.core.site import Machine
from moefw.planner import cluster
from moefw.planner.time.advice import Change, Option, options, overrides
from moefw.planner.time.costs import Spent
from moefw.planner.time.figures import figures
from moefw.planner.time.scale import Scale, fitted
from moefw.planner.time.schedule import Played, Steady
from moefw.planner.time.step import Passes, StepWork, seconds_without, step_time
from moefw.plugins.pipelines.merged import Merged
from moefw.plugins.pipelines.one_stage import OneForwardOneBackward
from small_spec import small_spec

H100 = cluster.read("h100")
SCALE = Scale.of(fitted(), H100, figures())
CATEGORIES = {
    *("products", "experts", "attention", "memory passes", "kernel gaps", "expert transfers", "other transfers"),
    *("offloading", "host launches", "sums of gradients", "optimizer", "pipeline bubble", "dropped runs"),
}
COMPUTED = {"products": 0.2, "experts": 0.3, "attention": 0.1, "passes": 0.1, "launches": 100.0}


def work_of(ranks: int = 2, micro_batches: int = 8, merged: bool = False, **spent: float) -> StepWork:
    """A step of a pipeline whose passes all spend the same. ``merged``: in pairs, on one rank."""
    each = Spent(**{**COMPUTED, **spent})
    pipeline = Merged() if merged else OneForwardOneBackward()
    steady = Steady.of(lambda count: Played.of(pipeline.order(ranks, count)), ranks, micro_batches)
    passes = Passes(forward=each, backward=each, outside_forward=Spent(), outside_backward=Spent())
    return StepWork(
        passes=(passes,) * ranks,
        spent={(at, kinds): each.times(len(kinds)) for at, kinds in steady.kinds},
        steady=steady,
        micro_batches=micro_batches,
        once_s=0.2,
        sums_s=0.1,
    )


def gain(category: str, work: StepWork) -> float:
    return step_time(work, SCALE).step_s - seconds_without(category, work, SCALE)


def test_what_costs_nothing_shortens_a_step_by_no_more_than_it_took() -> None:
    work = evolve(
        work_of(expert_transfers=0.3, tensor_transfers=0.2, gathers=0.3, stores=2.0), stores_s=0.3, fetches_s=0.5
    )
    categories = step_time(work, SCALE).categories
    assert set(categories) == CATEGORIES - {"dropped runs"}
    for category in set(categories) - {"pipeline bubble"}:
        # A pipeline that fills and empties plays a pass more for each eight.
        assert -1e-9 <= gain(category, work) <= categories[category] * 9 / 8 + 1e-9, category
    assert gain("experts", work_of()) > 0
    assert gain("offloading", work) > 0.5
    assert gain("pipeline bubble", work) == pytest.approx(categories["pipeline bubble"])
    assert gain("no category", work) == 0


def test_a_run_that_a_step_drops_takes_what_its_micro_batches_take_and_no_ends_of_a_step() -> None:
    once = evolve(work_of(experts=0.3), stores_s=0.3, fetches_s=0.5)
    twice = evolve(once, dropped_run=once)
    dropped = step_time(twice, SCALE).categories["dropped runs"]
    assert gain("dropped runs", twice) == pytest.approx(dropped)
    ends = step_time(once, SCALE).step_s - step_time(once.micro_batches_alone, SCALE).step_s
    assert 0 < ends == pytest.approx(step_time(once, SCALE).step_s - dropped)


def test_no_category_saves_what_a_dropped_run_took_beside_it() -> None:
    once = evolve(
        work_of(ranks=1, experts=0.3, expert_transfers=0.3, tensor_transfers=0.2), stores_s=0.3, fetches_s=0.5
    )
    twice = evolve(once, dropped_run=once)
    categories = step_time(twice, SCALE).categories
    for category in set(categories) - {"dropped runs"}:
        assert gain(category, twice) == pytest.approx(gain(category, once), abs=1e-9), category
        assert gain(category, twice) <= categories[category] + 1e-9, category


def test_transfers_that_are_hidden_gain_little_and_computation_beside_longer_ones_nothing() -> None:
    alone = gain("expert transfers", work_of(ranks=1, micro_batches=32, expert_transfers=0.3))
    in_pairs = work_of(ranks=1, micro_batches=32, merged=True, expert_transfers=0.3)
    assert gain("expert transfers", in_pairs) < 0.2 * alone
    bound = work_of(ranks=1, gathers=50.0)
    assert gain("products", bound) == pytest.approx(0, abs=0.01 * step_time(bound, SCALE).step_s)
    assert gain("products", work_of(ranks=1)) > 0.1


def test_without_the_host_kernels_still_pause() -> None:
    work = work_of(launches=1e6)
    after = seconds_without("host launches", work, SCALE)
    assert after < step_time(work, SCALE).step_s
    assert seconds_without("kernel gaps", work, SCALE) < step_time(work, SCALE).step_s
    assert after > seconds_without("host launches", work_of(launches=0.0), SCALE)


SPEC = {
    "model": {"preset": "qwen3-30b-a3b-tiny", "num_layers": 8},
    "precision": {"use": "bf16"},
    "train": {"seq_len": 64, "micro_batch": 2, "tokens_per_step": 2 * 64 * 64},
    "run": {"device": "cuda"},
}
SHARDED = {"dense": {"shard": "all"}, "experts": {"ep": 4, "shard": "all"}, "ranks_per_node": 2}
BASES: dict[str, dict[str, Any]] = {
    "plain": {"parallel": {"experts": {"ep": 8}}},
    "tp": {"parallel": {"dense": {"tp": 2}, "experts": {"ep": 4}}},
    "coupled": {"parallel": {"use": "coupled", "tp": 2, "ep": 2, "shard": 4}},
    "copies": {"parallel": {"experts": {"ep": 2}}},
    "coupled copies": {"parallel": {"use": "coupled", "ep": 2}},
    "coupled, sharded over nodes": {"parallel": {"use": "coupled", "ep": 4, "shard": "all", "ranks_per_node": 2}},
    "sharded": {"parallel": SHARDED},
    "sharded experts": {"parallel": {"experts": {"ep": 4, "shard": "all"}}},
    "sharded attention": {"parallel": {"dense": {"shard": "all"}, "experts": {"ep": 8}}},
    "pipeline": {"parallel": {"pp": 2, "experts": {"ep": 4}}},
    "blockwise": {"precision": {"use": "fp8-blockwise", "backend": "torch"}, "parallel": {"experts": {"ep": 8}}},
    "blockwise, sharded": {
        "model": {**SPEC["model"], "dim": 1024, "expert_dim": 128},
        "precision": {"use": "fp8-blockwise", "backend": "torch"},
        "parallel": {"experts": {"ep": 4, "shard": "all"}},
    },
    "mxfp8, sharded": {"precision": {"use": "mxfp8", "backend": "emulate"}, "parallel": SHARDED},
    "budget": {"dispatch": {"use": "alltoall", "rank_capacity": 1.5, "on_overflow": "rerun"}},
    "loop": {"gemm": {"use": "loop"}, "parallel": {"experts": {"ep": 8}}},
    "recomputed": {"memory": [{"use": "recompute", "regions": ["attention"]}]},
    "allgather": {"dispatch": {"use": "allgather"}, "parallel": {"experts": {"ep": 8}}},
    "one rank": {"parallel": {}},
}


@cache
def assembled(base: str, capability: str, asked: tuple[str, ...] = ()) -> Assembly:
    """A base with overrides, whose values replace what is there."""
    tree: dict[str, Any] = json.loads(json.dumps({**SPEC, **BASES[base]}))
    for override in asked:
        key, _, value = override.partition("=")
        *outer, last = key.split(".")
        holder = tree
        for name in outer:
            holder = holder.setdefault(name, {})
        holder[last] = read_yaml(f"value: {value}", Marks("override"), [])["value"]
    machine = Machine(device="cuda", num_devices=8, capability=capability)
    return assemble_tree(tree, Marks("spec"), defaults=defaults(), world=8, machine=machine)


def is_accepted(changes: tuple[Change, ...], base: str, capability: str) -> bool:
    """Whether a base takes these changes, perhaps where a package is installed that is not here."""
    asked = overrides(changes, assembled(base, capability))
    if asked is None:
        return False
    try:
        assembled(base, capability, asked)
    except MoefwError as error:
        return all(" needs package " in problem.what for problem in error.problems)
    return True


WAYS = [
    pytest.param(each, way, id=f"{each.because}, {number}")
    for each in options()
    for number, way in enumerate(each.ways)
]


@pytest.mark.parametrize(("option", "changes"), WAYS)
def test_some_spec_accepts_each_change_that_moefw_knows(option: Option, changes: tuple[Change, ...]) -> None:
    assert set(option.against) <= CATEGORIES
    assert option.source.startswith(("https://", "docs/"))
    capability = "10.0" if option.gpus == ("blackwell",) else "9.0"
    assert any(is_accepted(changes, base, capability) for base in BASES)


def test_a_change_that_a_spec_has_made_or_has_no_key_for_is_none() -> None:
    assert overrides((Change(key="gemm", value="{use: grouped}"),), assembled("plain", "9.0")) is None
    assert overrides((Change(key="gemm", value="{use: grouped}"),), assembled("loop", "9.0")) == (
        "gemm={use: grouped}",
    )
    assert overrides((Change(key="parallel.tp", times=0.5),), assembled("tp", "9.0")) is None
    assert overrides((Change(key="parallel.dense.tp", times=0.5),), assembled("tp", "9.0")) == ("parallel.dense.tp=1",)
    assert overrides((Change(key="parallel.dense.tp", times=0.5),), assembled("plain", "9.0")) is None


@pytest.mark.parametrize(
    ("given", "key", "never"),
    [
        ({"precision": {"use": "mxfp8", "backend": "emulate"}}, "precision", "fp8"),
        ({"dispatch": {"use": "hybridep", "backend": "torch"}}, "dispatch", "ep"),
        ({"pipeline": {"use": "dualpipe-v", "merged": True}, "parallel": {"pp": 2}}, "pipeline", "interleaved"),
        ({"parallel": {"dense": {"shard": "all", "zero": 1}}}, "parallel.dense.zero", "2"),
    ],
    ids=["precision", "dispatch", "pipeline", "zero"],
)
def test_nothing_is_advised_that_is_no_better_than_what_a_spec_has(given: dict[str, Any], key: str, never: str) -> None:
    machine = Machine(device="cuda", num_devices=8, capability="9.0")
    assembly = assemble_tree({**SPEC, **given}, Marks("spec"), defaults=defaults(), world=8, machine=machine)
    asked = [overrides(way, assembly) or () for option in options() for way in option.ways]
    of_key = [override for each in asked for override in each if override.startswith(f"{key}=")]
    assert not [override for override in of_key if never in override]


QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def test_a_plan_says_what_to_try_and_takes_it() -> None:
    data = json.loads(say("plan", QUICKSTART, "--cluster", "h100", "--json").out)
    (first, *others) = data["try"]
    assert first["category"] == "host launches"
    assert [each["gain"] for each in (first, *others)] == sorted((each["gain"] for each in data["try"]), reverse=True)
    asked = first["trials"][0]["overrides"]
    assert "train.graphs=step" in asked
    shown = say("plan", QUICKSTART, "--cluster", "h100").out
    assert shlex.join(asked) in shown
    after = json.loads(say("plan", QUICKSTART, *asked, "--cluster", "h100", "--json").out)
    assert after["time"]["step_time_s"] < data["time"]["step_time_s"]
    assert all("train.graphs=step" not in trial["overrides"] for each in after["try"] for trial in each["trials"])
    assert "try" not in json.loads(say("plan", QUICKSTART, "--json").out)


SLOW_ROWS = ("run.device=cuda", "train.tokens_per_step=2097152", "train.micro_batch=128")
"""So many rows that their transfers are worth advice."""
TO_NODES = "a row goes once to each node that has an expert of its token"
TO_RANKS = "a row goes once to each rank that has an expert of its token, also if it has several"
NOT_TO_ALL = "a row goes to those ranks alone that have an expert of its token"


@pytest.mark.parametrize(
    ("use", "ep", "experts", "advised"),
    [
        ("alltoall", 8, 16, {"deepep": TO_RANKS}),
        ("alltoall", 8, 8, {}),
        ("allgather", 8, 8, {"deepep": NOT_TO_ALL}),
        ("deepep, backend: torch", 8, 16, {}),
        ("alltoall", 16, 16, {"hybridep": TO_NODES}),
        ("deepep, backend: torch", 16, 16, {"hybridep": TO_NODES}),
    ],
)
def test_a_dispatcher_is_advised_where_it_sends_fewer_rows(
    use: str, ep: int, experts: int, advised: Mapping[str, str]
) -> None:
    """A node of an H100 cluster has 8 GPUs. A library would be advised, too, where it is installed."""
    given = (f"parallel.experts.ep={ep}", f"dispatch={{use: {use}}}", f"model.num_experts={experts}")
    data = json.loads(say("plan", QUICKSTART, *given, *SLOW_ROWS, "--cluster", "h100", "--json").out)
    (rows,) = [each for each in data["try"] if each["category"] == "expert transfers"]
    trials = {trial["overrides"][0]: trial["because"] for trial in rows["trials"]}
    assert {
        dispatcher: because
        for dispatcher in ("deepep", "hybridep")
        for override, because in trials.items()
        if override.startswith(f"dispatch={{use: {dispatcher}, backend: torch")
    } == advised


def test_a_plan_without_a_cluster_says_how_to_ask_for_time(tmp_path: Path) -> None:
    asked = "--cluster NAME says how long a step takes and what to try."
    assert asked in say("plan", small_spec(tmp_path)).out
    assert asked not in say("plan", small_spec(tmp_path), "--cluster", "h100").out
