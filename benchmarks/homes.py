"""Homes of the matrices of two models on 1,024 ranks, by arithmetic: what the busiest computes, and what a rank sends.

The model of a rank is built on tensors without memory, sharded as it trains. Costs are those of the products of
Newton-Schulz iterations. Results go to ``benchmarks/results/homes.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

import record
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.ruled_optimizer import stored_parameters
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.recording.fake_tensors import fake_world
from moefw.runtime.parallel.homes import FP32_BYTES, GroupPlan, plan_homes
from moefw.runtime.parallel.trained import trained_parameters

WORLD: Final = 1024
PEERS: Final = ("edp", "etp")
"""The axes of the ranks that hold the same experts."""
FSDP: Final = {"dense": {"shard": "all"}, "experts": {"ep": 64, "shard": "all"}}
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen3-30B-A3B": {"model": {"preset": "qwen3-30b-a3b"}},
    "DeepSeek-V3": {"model": {"preset": "deepseek-v3", "mtp_layers": 1}},
}
LAYOUTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "FSDP over all, ep 64": FSDP,
    "FSDP over 64, ep 64": {"dense": {"shard": 64}, "experts": {"ep": 64, "shard": "all"}},
    "copies, ep 8": {"experts": {"ep": 8}},
    "tp 8, ep 32, etp 2, FSDP": {
        "dense": {"tp": 8, "shard": "all"},
        "experts": {"ep": 32, "etp": 2, "shard": "all"},
    },
    "pp 16, FSDP, ep 16": {"pp": 16, "dense": {"shard": "all"}, "experts": {"ep": 16, "shard": "all"}},
}


def main() -> None:
    """Count, print and record."""
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'model and layout':44} {'a home':>7} {'by choice':>10} {'busiest / mean':>15} {'sent, GiB':>10}")
    for model, spec in MODELS.items():
        for layout, parallel in LAYOUTS.items():
            name = f"{model}, {layout}"
            row = rows[name] = count({**spec, "parallel": parallel}, WORLD)
            print(
                f"{name:44} {row['matrices']:7.1f} {row['by_choice']:10.1f} {row['busiest_over_mean']:15.2f} "
                f"{row['sent_bytes'] / 2**30:10.2f}",
                flush=True,
            )
    print(record.write("homes", {"world": WORLD, "rows": rows}))


def count(spec: Mapping[str, Any], world: int) -> dict[str, float]:
    """Return the figures of the second stage of a pipeline, or of the only one.

    ``matrices`` a home, and those of them that several ranks store, so that there is a choice of a home. The cost of
    the busiest home over the mean of all. The bytes that the stage's first rank sends in a step, to homes and back.
    """
    train = {"micro_batch": 1, "seq_len": 4096, "tokens_per_step": 4096 * 16 * world, "optimizer": {"use": "muon"}}
    tree = {**spec, "precision": {"use": "bf16"}, "train": train, "run": {"device": "cpu"}}
    machine = Machine(device="cpu")
    assembly = assemble_tree(tree, Marks("homes"), defaults=defaults(), world=world, machine=machine)
    rule = assembly.parts.optimizer.rule()
    assert rule is not None
    plan = assembly.layout
    stages = plan.sizes["pp"]
    rank = world // stages if stages > 1 else 0
    with fake_world(rank, world):
        layout = open_layout(assembly, "cpu")
        shared = Shared()
        model = build_model(assembly, layout, torch.device("cpu"), shared)
        trained = trained_parameters(model)
        stored = stored_parameters(model)
        with unset_fake_temporarily():
            taken = [stored[name] for name in trained if rule.takes(trained.facts[name])]
            dense, experts = plan_homes(taken, plan, rank, cost=rule.cost)
            # The homes of experts that have most beside dense matrices are the busiest ones.
            costs = _costs(dense)
            busiest = max(dense.ranks, key=lambda other: sum(costs[peer] for peer in plan.group(other, PEERS)))
            _, worst = plan_homes(taken, plan, busiest, cost=rule.cost)
            sent = FP32_BYTES * sum(_sent(group, rank, rule.bucket_bytes) for group in (dense, experts))
        shared.close()
    return {
        "matrices": sum(len(group.matrices) / len(group.ranks) for group in (dense, experts)),
        "by_choice": sum(_num_by_choice(group) / len(group.ranks) for group in (dense, experts)),
        "busiest_over_mean": max(worst.loads) / sum(_cost(group) / len(group.ranks) for group in (dense, experts)),
        "sent_bytes": sent,
    }


def _costs(group: GroupPlan) -> dict[int, float]:
    """Return the cost of the matrices at home on each rank of a group."""
    costs = dict.fromkeys(group.ranks, 0.0)
    for matrix, home in zip(group.matrices, group.homes, strict=True):
        costs[group.ranks[home]] += matrix.cost
    return costs


def _num_by_choice(group: GroupPlan) -> int:
    return sum(len(matrix.spread.stored_by) > 1 for matrix in group.matrices)


def _cost(group: GroupPlan) -> float:
    return sum(matrix.cost for matrix in group.matrices)


def _sent(group: GroupPlan, rank: int, bucket_bytes: int) -> int:
    """Return the elements that a rank of a group sends in a step."""
    position = group.ranks.index(rank)
    extents = {matrix.name: matrix.spread.extents[position] for matrix in group.matrices}
    elements = 0
    for bucket in group.buckets(position, bucket_bytes):
        given = [extents[name] for names in bucket.given.values() for name in names]
        returned = [extent for parts in bucket.returned.values() for _, extent in parts]
        elements += sum(extent.elements for extent in [*given, *returned] if extent is not None)
    return elements


if __name__ == "__main__":
    main()
