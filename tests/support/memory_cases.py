"""Whole models on ranks under memory policies, and their results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fake_steps import fake_assembly
from moefw.compose.assembly import Assembly
from moefw.plugins.memory.paged_stash.stash import Stash
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.memory_policy_case import Observed, observed
from moefw.testing.suites.runs import whole_model
from moefw.testing.suites.watch import same_bits

PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"use": "fp32"},
    "bf16": {"use": "bf16"},
    "fp8-blockwise": {"use": "fp8-blockwise", "backend": "emulate"},
}


def offload(*regions: str, **options: Any) -> dict[str, Any]:
    return {"use": "offload", "regions": list(regions), "min_bytes": 0, **options}


def recompute(*regions: str) -> dict[str, Any]:
    return {"use": "recompute", "regions": list(regions)}


def model_case(world: int, memory: Sequence[Mapping[str, Any]], **parts: Any) -> LayerCase:
    return whole_model(world, parts={"parallel": {"experts": {"ep": world}}, "memory": memory, **parts}, plugins=())


def run(
    pool: RankPool, memory: Sequence[Mapping[str, Any]], *, in_flight: bool = False, **parts: Any
) -> list[Observed]:
    """Run two ranks. A run without policies, with which many are compared, is run once."""
    key = repr((in_flight, parts))
    if memory or key not in _PLAIN:
        found = list(pool.run(observed, 2, model_case(2, memory, **parts), in_flight, 1.0))
        return found if memory else _PLAIN.setdefault(key, found)
    return _PLAIN[key]


_PLAIN: dict[str, list[Observed]] = {}


def assert_same(plain: Sequence[Observed], treated: Sequence[Observed]) -> None:
    for one, other in zip(plain, treated, strict=True):
        for before, after in ((one.values, other.values), (one.grads, other.grads)):
            assert before.keys() <= after.keys()
            assert [name for name in before if not same_bits(before[name], after[name])] == []


class Allocations(TorchDispatchMode):
    """Remembers the bytes of every storage that an operator allocates, except those in ``apart``."""

    def __init__(self, apart: Collection[StorageWeakRef] = ()) -> None:
        super().__init__()
        self.apart, self.made = apart, dict[StorageWeakRef, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = set(storages((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        new = {ref: nbytes for ref, nbytes in storages(result).items() if ref not in before}
        self.made |= new
        return result

    def live_bytes(self) -> int:
        return sum(nbytes for ref, nbytes in self.made.items() if ref not in self.apart and not ref.expired())


def storages(tree: Any) -> dict[StorageWeakRef, int]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {StorageWeakRef(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in tensors}


def qwen3_235b(num_layers: int) -> Assembly:
    """Return one rank of 256, with ``num_layers`` of its layers."""
    world, tp, seq_len = 256, 4, 4096
    tree = {
        "model": {"preset": "qwen3-235b-a22b", "num_layers": num_layers},
        "precision": {"use": "bf16"},
        "parallel": {"dense": {"tp": tp, "shard": "all"}, "experts": {"ep": 32, "shard": "all"}},
        "train": {"micro_batch": 1, "seq_len": seq_len, "tokens_per_step": seq_len * world // tp},
        "run": {"device": "cpu"},
    }
    return fake_assembly(tree, world)


def num_taken(held: Stash) -> int:
    """Return the number of pages taken, after dead tensors have returned theirs."""
    held.settle()
    pools = [pool for pools in held.pools.values() for pool in pools]
    return sum(
        len(pool.pages.ring) - int((pool.pages.counters[:, 1] - pool.pages.counters[:, 0]).sum()) for pool in pools
    )
