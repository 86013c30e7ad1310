"""Steps that are replayed equal eager ones bit for bit, on the counted device; what a graph cannot hold is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moefw.core.stages import Batch
from moefw.runtime.naming import canonical_parameters
from moefw.testing.host_waits import HostWaits, available
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.replays import CountedModel, compared, untimed
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.testing.tape import TapeGraphs
from moefw.testing.training import SMALL
from moefw.training.engine import Engine
from moefw.training.graphed_run import MOST_SHAPES, WARM_UP, GraphedRun
from moefw.training.step_sums import Tally
from pairwise import deep, pairwise, quick

pytestmark = pytest.mark.skipif(not available(), reason="this torch has no devices that are written in Python")

SIZES = {"vocab_size": 64, "num_layers": 2, "num_dense_layers": 1, "shared_expert_dim": 16}
MICRO_BATCHES = 2
REPLAYS = 4
REPLAYS_OF_A_STASH = 10
"""So many that a page shows that is not given back, or given back twice."""
STATIC = {"use": "alltoall", "rank_capacity": 1.5, "on_overflow": "rerun", "max_tokens": 64}
HOPS = {**STATIC, "use": "hybridep", "backend": "torch", "rank_capacity": 2.0}
STASH = {"use": "paged-stash", "regions": ["experts"], "factor": 1.5, "page_rows": 4}
"""A pool that is nearly full, of which ranks that share experts take another number of pages at every step."""

SHARING_PAGES = {"num_layers": 4}
"""Three layers whose rows are in the pages of a pool at the same time."""

Parts = Mapping[str, Any]
ROUTING: Mapping[str, Parts] = {
    "bias": {
        "routing": {
            "use": "topk",
            "score": "sigmoid",
            "balance": [{"kind": "expert_bias", "rate": 0.02}, {"kind": "aux_loss", "coeff": 0.01}],
        }
    },
    "sequence": {"routing": {"use": "topk", "balance": [{"kind": "aux_loss", "coeff": 0.01, "over": "sequence"}]}},
    "z-loss": {"routing": {"use": "topk", "balance": [{"kind": "z_loss", "coeff": 0.01}]}},
    "quantile": {"routing": {"use": "topk", "score": "sigmoid", "balance": [{"kind": "quantile"}]}},
    "whole model": {"routing": {"use": "topk", "balance": [{"kind": "aux_loss", "coeff": 0.01, "over": "model"}]}},
    "capacity": {"routing": {"use": "topk", "capacity": {"factor": 1.0}}},
    "forced": {"routing": {"use": "forced"}},
}
MODEL: Mapping[str, Parts] = {
    "gqa": {},
    "mla": {"attention": {"use": "mla", "num_heads": 2, "q_rank": 8, "kv_rank": 8, "nope_dim": 8, "rope_dim": 8}},
    "two tokens ahead": {"model": {"mtp_layers": 1}},
    "loss in chunks": {"model": {"loss_chunk": 4}},
}
MEMORY: Mapping[str, Parts] = {
    "keep": {},
    "recompute layers": {"memory": [{"use": "recompute", "regions": ["layer"]}]},
    "recompute parts": {"memory": [{"use": "recompute", "regions": ["router", "moe_act", "mlp_norm", "dispatch"]}]},
    "stash": {"memory": [STASH], "dispatch": STATIC, "model": SHARING_PAGES},
}
DISPATCH: Mapping[str, Parts] = {
    "alltoall": {},
    "budget": {"dispatch": STATIC},
    "allgather": {"dispatch": {"use": "allgather"}},
    "deepep": {"dispatch": {"use": "deepep", "backend": "torch"}},
    "hybridep": {"dispatch": {"use": "hybridep", "backend": "torch"}},
}
AMONG_RANKS: Mapping[str, Parts] = {
    "data": {},
    "experts": {"parallel": {"experts": {"ep": 2}}},
    "experts, on two nodes": {"dispatch": HOPS, "parallel": {"experts": {"ep": 2}, "ranks_per_node": 1}},
    "experts, on a node, stashed": {
        "dispatch": HOPS,
        "parallel": {"experts": {"ep": 2}},
        "memory": [STASH],
        "model": SHARING_PAGES,
    },
    "experts, stashed": {"parallel": {"experts": {"ep": 2}}, "memory": [STASH], "model": SHARING_PAGES},
    "matrices": {"parallel": {"dense": {"tp": 2}, "experts": {"etp": 2}}},
    "sequences, exchanged": {
        "parallel": {"dense": {"cp": 2}, "experts": {"ep": 2}},
        "context_parallel": {"use": "ulysses"},
    },
    "sequences, around a ring": {
        "parallel": {"dense": {"cp": 2}},
        "context_parallel": {"use": "ring_attention"},
    },
    "sequences, gathered": {
        "parallel": {"dense": {"cp": 2}},
        "context_parallel": {"use": "allgather_kv"},
    },
}


def case_of(world: int, *each: Parts) -> LayerCase:
    parts: dict[str, Any] = {"precision": {"use": "bf16"}}
    sizes = dict(SIZES)
    for some in each:
        parts |= some
        sizes |= parts.pop("model", {})
    return whole_model(world, parts=parts, plugins=(), micro_batch=1, sizes=sizes)


def covering() -> list[Any]:
    """Every two values of routing, model, memory and dispatch. ``make test`` runs as few as have every value."""
    factors = (ROUTING, MODEL, MEMORY, DISPATCH)
    names = [list(factor) for factor in factors]
    longest = max(map(len, names))
    in_quick = [tuple(each[turn % len(each)] for each in names) for turn in range(longest)]
    in_pairs = [param.values for param in pairwise(*factors) if not param.marks]
    more = [values for values in in_pairs if values not in in_quick]
    return [*in_quick, *(pytest.param(*values, marks=pytest.mark.deep) for values in more)]


@pytest.mark.parametrize(("routing", "model", "memory", "dispatch"), covering())
def test_replayed_steps_have_the_bits_of_eager_ones(
    own_pool: RankPool, routing: str, model: str, memory: str, dispatch: str
) -> None:
    case = case_of(1, ROUTING[routing], MODEL[model], DISPATCH[dispatch], MEMORY[memory])
    (found,) = own_pool.run(compared, 1, case, REPLAYS_OF_A_STASH if memory == "stash" else REPLAYS)
    assert found.failure == ""
    assert found.differing == []
    assert len(found.operators) > 500


def test_steps_with_frozen_experts_are_replayed(own_pool: RankPool) -> None:
    frozen = {"weights": "of-no-folder", "freeze": ["layers.*.moe.experts.*", "embed.weight"]}
    train = {**SMALL["train"], "micro_batch": 1, **frozen}
    (found,) = own_pool.run(compared, 1, case_of(1, ROUTING["bias"], {"train": train}), REPLAYS)
    assert (found.failure, found.differing) == ("", [])


@pytest.mark.parametrize("adapter", [{"use": "lora", "rank": 8, "dropout": 0.25}, *deep({"use": "dora"})], ids=str)
def test_steps_with_adapters_are_replayed(own_pool: RankPool, adapter: dict[str, Any]) -> None:
    """What dropout drops depends on the batch, and not on the step that was recorded."""
    train = {**SMALL["train"], "micro_batch": 1, "weights": "of-no-folder"}
    case = case_of(1, ROUTING["bias"], {"train": train, "adapter": adapter})
    (found,) = own_pool.run(compared, 1, case, REPLAYS)
    assert (found.failure, found.differing) == ("", [])


def collectives(operators: Sequence[str]) -> list[str]:
    """Collectives among operators. Others may depend on the rank, such as those of its place in a sequence."""
    return [operator for operator in operators if operator.startswith("c10d")]


@pytest.mark.parametrize("way", quick(AMONG_RANKS, "experts, on two nodes", "sequences, around a ring"))
def test_ranks_replay_the_same_collectives(own_pool: RankPool, way: str) -> None:
    case = case_of(2, {"dispatch": {**STATIC, "rank_capacity": 2.0}}, AMONG_RANKS[way])
    first, second = own_pool.run(compared, 2, case, REPLAYS_OF_A_STASH if "stashed" in way else REPLAYS)
    assert (first.failure, first.differing, second.differing) == ("", [], [])
    met = collectives(first.operators)
    assert met == collectives(second.operators)
    assert (met == []) == (way == "data"), "ranks that share nothing meet behind the graph"


def read_from_outside(case: LayerCase) -> list[tuple[int, ...]]:
    """Shapes of what a graph reads, and neither makes nor finds in the model or in its own batches."""
    with CountedModel(case=case, is_graphed=True) as counted:
        for step in range(WARM_UP + 1):
            counted.step(counted.batches(step))
        (tape,) = counted.graphs.tapes
        (captured,) = counted.run._captured.values()
        held = [*counted.model.parameters(), *counted.model.buffers(), *tree_leaves([*captured.batches])]
        known = {storage(getattr(tensor, "held", tensor)) for tensor in held if isinstance(tensor, Tensor)}
        return [tuple(tensor.shape) for tensor in tape.made_outside() if storage(tensor) not in known]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def test_a_graph_reads_the_model_and_its_own_batches_alone(own_pool: RankPool) -> None:
    assert own_pool.run(read_from_outside, 1, case_of(1, ROUTING["bias"], MEMORY["recompute parts"])) == [[]]


def test_a_graph_keeps_the_pages_of_a_stash_from_step_to_step(own_pool: RankPool) -> None:
    (found,) = own_pool.run(read_from_outside, 1, case_of(1, MEMORY["stash"]))
    counters, ring, pages = found[:3]
    assert counters == (2, 2)
    assert ring == pages[:1]
    assert len(found) == 3 * 2, "the inputs of both projections have pools"


REFUSED: Mapping[str, tuple[int, Parts]] = {
    "loop": (1, {"gemm": {"use": "loop"}}),
    "fp32": (1, {"precision": {"use": "fp32"}}),
    "fp8-blockwise, emulated": (1, {"precision": {"use": "fp8-blockwise", "backend": "emulate"}}),
    "sinkhorn": (1, {"routing": {"use": "sinkhorn"}}),
    "alltoall": (2, {}),
    "allgather": (2, {"dispatch": {"use": "allgather"}}),
    "deepep": (2, {"dispatch": {"use": "deepep", "backend": "torch"}}),
    "hybridep": (2, {"dispatch": {"use": "hybridep", "backend": "torch"}}),
    "a budget without max_tokens": (2, {"dispatch": {**STATIC, "max_tokens": None}}),
    "hops without max_tokens": (2, {"dispatch": {**HOPS, "max_tokens": None}}),
    "pages in host memory": (1, {"memory": [{**STASH, "factor": 0.3, "spill": "host"}], "dispatch": STATIC}),
    "padded rows": (2, {"routing": {"use": "topk", "capacity": {"factor": 1.0, "pad": True}}}),
}


@pytest.mark.parametrize("way", quick(REFUSED, "loop", "sinkhorn", "alltoall", "a budget without max_tokens"))
def test_what_resolve_refuses_waits_for_values(own_pool: RankPool, way: str) -> None:
    world, parts = REFUSED[way]
    shared = {"parallel": {"experts": {"ep": 2}}} if world == 2 else {}
    for found in own_pool.run(compared, world, case_of(world, shared, parts), 1):
        assert "a step cannot be captured as a graph: a graph holds no wait of the host" in found.failure
        assert ".py:" in found.failure
        assert "Use train.graphs: none, or train.on_failed_capture: eager" in found.failure


def going_on() -> tuple[bool, list[str]]:
    case = case_of(1, {"gemm": {"use": "loop"}})
    with CountedModel(case=case, is_graphed=False) as counted:
        eager = [counted.step(counted.batches(step)) for step in range(WARM_UP + 2)]
    with CountedModel(case=case, is_graphed=True, on_failure="eager") as counted:
        found = [counted.step(counted.batches(step)) for step in range(WARM_UP + 2)]
    same = all(torch.equal(a[name], b[name]) for a, b in zip(eager, found, strict=True) for name in a)
    return same, counted.told


def test_a_run_goes_on_without_graphs_if_it_is_asked_to(own_pool: RankPool) -> None:
    ((same, told),) = own_pool.run(going_on, 1)
    assert same
    (line,) = told
    assert line.startswith("a step cannot be captured as a graph: ")
    assert line.endswith("; the run goes on without graphs")


def other_shapes() -> tuple[list[int], list[str]]:
    """The number of graphs after each kind of step, each run often enough to be captured."""
    counts = []
    with CountedModel(case=case_of(1), is_graphed=True) as counted:
        for micro_batches in (2, 1, 3, 2):
            for step in range(WARM_UP + 2):
                counted.step(counted.batches(step, micro_batches))
            counts.append(len(counted.graphs.tapes))
        counted.step([replace(batch, dropless=True) for batch in counted.batches(0)])
        counts.append(len(counted.graphs.tapes))
    return counts, counted.told


def test_two_shapes_are_captured_and_the_third_is_told_once(own_pool: RankPool) -> None:
    ((counts, told),) = own_pool.run(other_shapes, 1)
    assert counts == [1, 2, 2, 2, 2]
    assert told == [
        f"steps have more than {MOST_SHAPES} shapes of micro-batches: those of the others run without a graph"
    ]


def trained(case: LayerCase, is_graphed: bool) -> dict[str, Tensor]:
    """Parameters, state and losses after some steps of an engine."""
    model, assembly, layout, shared = open_model(case)
    with HostWaits() as waits:
        waits.move(model)
        graphs = TapeGraphs(waits) if is_graphed else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        engine = Engine(model, optimizer, layout, clip_norm=1.0, graphs=graphs)
        losses = []
        for step in range(WARM_UP + REPLAYS):
            own = global_batch(assembly, layout, step)[:MICRO_BATCHES]
            own = [replace(batch, loss_mask_BS=batch.labels_BS % 3 > 0) for batch in own]  # not all tokens have a loss
            losses.append(engine.step([waits.on_device(batch) for batch in own], 0.1, untimed).loss)
        assert graphs is None or len(graphs.tapes) == 1
        found = {piece.name: waits.on_host(piece.of(piece.parameter.detach())) for piece in canonical_parameters(model)}
        found |= {name: waits.on_host(value) for name, value in model.named_buffers() if value is not None}
    shared.close()
    return {**found, "losses": torch.tensor(losses)}


def apart(case: LayerCase) -> list[str]:
    eager, replayed = (trained(case, is_graphed) for is_graphed in (False, True))
    return [name for name in eager if not torch.equal(eager[name], replayed[name])]


@pytest.mark.parametrize("world", [1, *deep(2)])
def test_a_run_that_replays_its_steps_trains_the_same_weights(own_pool: RankPool, world: int) -> None:
    shared = {"parallel": {"experts": {"ep": 2}}, "dispatch": {**STATIC, "rank_capacity": 2.0}} if world == 2 else {}
    assert own_pool.run(apart, world, case_of(world, ROUTING["bias"], shared)) == [[]] * world


def test_a_run_that_replays_its_steps_clips_the_same_logits(own_pool: RankPool) -> None:
    """The engine clips behind the replay, by maxima in memory that the graph writes."""
    clip = {"use": "muon", "qk_clip": 0.02}
    clipped: Parts = {
        "attention": {"use": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": "none"},
        "train": {**SMALL["train"], "micro_batch": 1, "optimizer": clip},
    }
    assert own_pool.run(apart, 1, case_of(1, clipped)) == [[]]


class _NoMemory:
    """Graphs of a device that has no memory for one."""

    def capture(self, function: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")


def test_a_lack_of_memory_is_told_as_one() -> None:
    layer = nn.Linear(2, 2)
    batch = Batch(ids_BS=torch.zeros(1, 2, dtype=torch.int64), labels_BS=torch.zeros(1, 2, dtype=torch.int64))
    run = GraphedRun(lambda *_: Tally(torch.device("cpu")), layer.parameters(), _NoMemory(), tell=print)
    for _ in range(WARM_UP):
        run([batch], untimed)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        run([batch], untimed)
