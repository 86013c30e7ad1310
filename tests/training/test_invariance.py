"""Nothing depends on the layout or on the plugins that only change speed: same weights, same losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispatchers import DISPATCHERS
from moefw.runtime.naming import initialise
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run
from pairwise import each_value

STEPS = 3
FIRST = [-0.041986, -0.007812, -0.114613]


def run(
    pool: RankPool, world: int, dispatch: Any = "alltoall", gemm: str = "grouped", steps: int = STEPS, **parts
) -> list[Run]:
    etp = parts.pop("etp", 1)
    ep = parts.pop("ep", world // etp)
    tree = {
        **SMALL,
        "dispatch": DISPATCHERS[dispatch] if isinstance(dispatch, str) else dispatch,
        "gemm": {"use": gemm},
        "parallel": {"experts": {"ep": ep, "etp": etp}, "ranks_per_node": 2},
        **parts,
    }
    return pool.run(short_run, world, tree, steps)


def merged(runs: list[Run], when: str) -> dict[str, torch.Tensor]:
    return {name: tensor for one in runs for name, tensor in getattr(one, when).items()}


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> Run:
    """One rank with the readable GEMM, with which all others are compared."""
    return run(pool, 1, "allgather", "loop")[0]


def test_initial_weights_are_the_same_in_every_pytorch() -> None:
    """Some of 4,096 numbers are beyond three deviations and are drawn again."""
    linear = torch.nn.Linear(64, 64, bias=False)
    initialise(linear, seed=0, std=lambda _: 0.5)
    assert linear.weight[0, :3].tolist() == pytest.approx(FIRST, abs=1e-6)
    assert linear.weight.abs().max().item() == pytest.approx(1.4866, rel=1e-4)
    assert linear.weight.std().item() == pytest.approx(0.4890, rel=1e-4)


@pytest.mark.parametrize(("world", "dispatch", "gemm"), each_value((1, 2, 4), DISPATCHERS, ("grouped", "loop")))
def test_expert_parallelism_dispatcher_and_gemm_change_nothing_but_speed(
    pool: RankPool, alone: Run, world: int, dispatch: str, gemm: str
) -> None:
    assert_same(run(pool, world, dispatch, gemm), alone)


def assert_same(runs: list[Run], alone: Run) -> None:
    """Compare losses, norms, loads, weights before and after, and router state with one rank's."""
    first, last = merged(runs, "first"), merged(runs, "last")
    assert first.keys() == alone.first.keys()
    assert all(torch.equal(first[name], alone.first[name]) for name in first)
    for got, wanted in zip(runs[0].results, alone.results, strict=True):
        assert got.loss == pytest.approx(wanted.loss, rel=2e-6)
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=2e-5)
        assert got.grad_norms == pytest.approx(wanted.grad_norms, rel=2e-5)
        assert got.router_entropy_L == pytest.approx(wanted.router_entropy_L, rel=1e-5)
        assert got.load_LE == wanted.load_LE
    worst = max((last[name] - alone.last[name]).abs().max().item() for name in last)
    assert worst < 2e-5
    assert all(torch.equal(runs[0].state[name], alone.state[name]) for name in alone.state)


@pytest.mark.parametrize(("dispatch", "gemm"), each_value(DISPATCHERS, ("loop", "grouped")))
def test_experts_in_parts_change_nothing_but_speed(pool: RankPool, alone: Run, dispatch: str, gemm: str) -> None:
    assert_same(run(pool, 4, dispatch, gemm, etp=2), alone)


def budgeted(on_overflow: str) -> dict[str, object]:
    """A budget that the first steps overflow."""
    return {"use": "hybridep", "backend": "torch", "rank_capacity": 0.9, "on_overflow": on_overflow}


def test_a_step_that_overflows_its_budget_is_run_again_without_it(pool: RankPool, alone: Run) -> None:
    runs = run(pool, 2, dispatch=budgeted("rerun"))
    assert_same(runs, alone)
    assert sum(result.counts["overflow"] for result in runs[0].results) > 0


def test_rows_beyond_the_budget_are_dropped_and_counted_where_the_spec_says_so(pool: RankPool, alone: Run) -> None:
    runs = run(pool, 2, dispatch=budgeted("drop"))
    assert runs[0].results[0].counts["dropped_rows"] > 0
    assert runs[0].results[-1].loss != pytest.approx(alone.results[-1].loss, rel=2e-6)


def test_copies_of_experts_on_several_ranks_train_alike(pool: RankPool, alone: Run) -> None:
    runs = run(pool, 4, ep=2)
    for got, wanted in zip(runs[0].results, alone.results, strict=True):
        assert got.loss == pytest.approx(wanted.loss, rel=2e-6)
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=2e-5)
    for name, tensor in runs[0].last.items():
        assert torch.equal(tensor, runs[2].last[name])


def test_ranks_agree_on_every_result(pool: RankPool) -> None:
    runs = run(pool, 2)
    assert runs[0].results == runs[1].results


def test_micro_batches_change_nothing_but_memory(pool: RankPool, alone: Run) -> None:
    train = {**SMALL["train"], "micro_batch": 8}
    (whole,) = run(pool, 1, train=train)
    for got, wanted in zip(whole.results, alone.results, strict=True):
        assert got.loss == pytest.approx(wanted.loss, rel=2e-6)


@pytest.mark.parametrize(
    ("gemm", "regions"),
    each_value(
        ("loop", "grouped"),
        (["layer"], ["attention", "router", "experts", "shared_experts", "dense_mlp"], ["moe_act"]),
    ),
)
def test_recompute_changes_no_bit(pool: RankPool, gemm: str, regions: list[str]) -> None:
    plain = run(pool, 2, gemm=gemm)
    again = run(pool, 2, gemm=gemm, memory=[{"use": "recompute", "regions": regions}])
    assert [r.loss for r in again[0].results] == [r.loss for r in plain[0].results]
    assert all(torch.equal(again[1].last[name], plain[1].last[name]) for name in plain[1].last)


def test_the_same_run_twice_gives_the_same_bits(pool: RankPool) -> None:
    first, second = (run(pool, 2) for _ in range(2))
    assert all(torch.equal(first[0].last[name], second[0].last[name]) for name in first[0].last)


def test_bf16_learns_like_fp32(pool: RankPool, alone: Run) -> None:
    runs = run(pool, 2, precision={"use": "bf16"})
    assert runs[0].results[-1].loss == pytest.approx(alone.results[-1].loss, rel=5e-3)


def test_the_expert_bias_keeps_experts_busy_that_starve_without_it(pool: RankPool) -> None:
    """Skewed tokens: most of them are one of three."""
    loads = {}
    train = {**SMALL["train"], "micro_batch": 8}
    for name, balance in (("on", [{"kind": "expert_bias", "rate": 0.02}]), ("off", [])):
        routing = {"use": "topk", "score": "sigmoid", "balance": balance}
        model = {**SMALL["model"], "vocab_size": 3, "embed_init_std": 1.0, "init_std": 0.1}
        (one,) = run(pool, 1, steps=60, routing=routing, model=model, train=train)
        recent = torch.tensor([result.load_LE for result in one.results[-25:]]).mean(0)
        loads[name] = (recent.max(1).values, recent.min(1).values)
    assert loads["on"][0].max() < 1.5
    assert loads["off"][0].max() > 2.0
    assert loads["off"][1].min() < 0.1
