"""Deviation of runs with ``muon`` under layouts from the run on one rank, with products in fp32 and in bf16.

Runs of a small model for 20 steps on local ranks: the largest relative difference of a loss, and the largest absolute
one of a weight after the last step. Tests hold fp32 to the bounds of the layouts table. bf16 is printed here alone:
where matrices are computed in other batches, or gradients are summed in another order, products round otherwise.

Results go to ``benchmarks/results/muon_layouts.json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

import record
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run

STEPS: Final = 20
LAYOUTS: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "tp x etp": (2, {"dense": {"tp": 2}, "experts": {"etp": 2}}),
    "FSDP": (2, {"dense": {"shard": "all"}, "experts": {"shard": "all"}}),
    "ep": (2, {"experts": {"ep": 2}}),
    "tp x FSDP x ep": (4, {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}),
}


def main() -> None:
    """Train, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="two steps, to see that it runs")
    dry = parser.parse_args().dry
    pool = RankPool(4)
    rows = {dtype: measure(pool, dtype, 2 if dry else STEPS) for dtype in ("fp32", "bf16")}
    pool.close()
    print(f"{'layout':16} {'products':>8} {'loss':>9} {'weights':>9}")
    for dtype, deviations in rows.items():
        for layout, found in deviations.items():
            print(f"{layout:16} {dtype:>8} {found['loss']:9.1e} {found['weights']:9.1e}")
    print(record.write("muon_layouts", {"steps": STEPS, "newton_schulz": rows}, dry=dry))


def measure(pool: RankPool, dtype: str, steps: int) -> dict[str, dict[str, float]]:
    """Return the deviation of each layout from one rank."""
    alone = train(pool, dtype, 1, {}, steps)
    return {layout: deviation(train(pool, dtype, *sizes, steps), alone[0]) for layout, sizes in LAYOUTS.items()}


def train(pool: RankPool, dtype: str, ranks: int, parallel: Mapping[str, Any], steps: int) -> list[Run]:
    """Return the runs of all ranks."""
    optimizer = {"use": "muon", "newton_schulz": dtype, "adamw_eps": 1e-6}
    tree = {
        **SMALL,
        "model": {**SMALL["model"], "vocab_size": 64},
        "parallel": dict(parallel),
        "train": {**SMALL["train"], "optimizer": optimizer},
    }
    return pool.run(short_run, ranks, tree, steps, timeout_s=900.0)


def deviation(runs: list[Run], alone: Run) -> dict[str, float]:
    """Return the largest differences of losses, relative, and of weights, absolute."""
    pairs = zip(runs[0].results, alone.results, strict=True)
    last = {name: weight for run in runs for name, weight in run.last.items()}
    return {
        "loss": max(abs(got.loss / expected.loss - 1) for got, expected in pairs),
        "weights": max((weight - alone.last[name]).abs().max().item() for name, weight in last.items()),
    }


if __name__ == "__main__":
    main()
