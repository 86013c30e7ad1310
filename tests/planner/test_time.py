"""The time of a step: closed forms are the planner's numbers, schedules are played as they are, and causes have effects."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
import pytest
from attrs import evolve
from click.testing import CliRunner

import closed_form
from closed_form import Layout, Rows, Sizes
from full_size import Compared
from moefw.commands.plan import plan
from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.records import Order
from moefw.core.site import Machine
from moefw.planner import Ledger, cluster, ledger
from moefw.planner.cluster import Cluster, HostLink, Links
from moefw.planner.data_files import Figure
from moefw.planner.report import Position, Product, Transfer, Work
from moefw.planner.time import likeness, software
from moefw.planner.time.costs import EXPERT_REGIONS, Costs, Shapes, distinct, places_of_token, quantized_weights
from moefw.planner.time.figures import figures, generation_name
from moefw.planner.time.forecast import forecast, lacks
from moefw.planner.time.nodes import Nodes
from moefw.planner.time.scale import GLOBAL, Scale, fitted
from moefw.planner.time.schedule import Played, Steady
from moefw.planner.time.software import Software
from moefw.planner.time.step import BESIDE, Passes, StepTime, StepWork, step_time, step_work
from moefw.plugins.pipelines.interleaved import Interleaved
from moefw.plugins.pipelines.merged import Merged
from moefw.plugins.pipelines.one_stage import OneForwardOneBackward
from moefw.runtime.pipeline.timeline import one_by_one, timeline
from published_rows import Predictor, read
from step_times import inputs_of, predict

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
ONES = 8
"""Columns of ones of a product that sums the gradient of a bias."""
KEYS = {
    "tokens_per_s_per_gpu",
    "model_tflops_per_gpu",
    "mfu",
    "step_time_s",
    "processor_s",
    "error_percent",
    "extrapolated",
    "checked_steps",
    "notes",
    "memory_bytes",
    "fits",
    "wire_bytes",
    "exposed_communication_fraction",
    "pipeline_bubble_fraction",
    "host_bound_fraction",
    "flops_per_token",
}


H100 = evolve(cluster.read("h100"), host_launch_us=Figure(value=6.0, estimated="for a test"))
NOTHING = Work(layer=0, layers=1, region="layer", phase="forward", products=(), transfers=(), operators=0, nbytes=0)
IN_PARTS = {"tp": 2, "ep": 2, "expert_tp": 2}
"""A layout in which two ranks share an expert."""


def planned(model: str, world: int, *, mtp: int = 0, **spec: Any) -> Ledger:
    tree = {
        "model": {"preset": model, "mtp_layers": mtp},
        "precision": {"use": "bf16"},
        "dispatch": {"use": "alltoall"},
        "train": {"seq_len": 64, "micro_batch": 2, "tokens_per_step": 2 * 64 * world},
        "run": {"device": "cpu"},
        **spec,
    }
    machine = Machine(device="cpu")
    return ledger(assemble_tree(tree, Marks("spec"), defaults=defaults(), world=world, machine=machine))


def products(work: Any) -> Counter[tuple[Any, ...]]:
    """Products of a micro-batch: what each multiplies, in which region, and how often.

    Gradients of experts' biases are sums that run as products with ones, which Megatron's count does not have.
    """
    found: Counter[tuple[Any, ...]] = Counter()
    for each in work:
        for product in each.products if each.phase in ("forward", "backward") else ():
            if product.during == "wgrad" and product.shape[1] == ONES:
                continue
            key = each.region, product.dtype, product.shape, product.groups, product.during, product.scores
            found[key] += each.layers * product.times
    return found


@pytest.mark.parametrize(
    ("model", "mtp", "layout", "spec"),
    [
        ("qwen3-30b-a3b-tiny", 0, {"ep": 4}, {"experts": {"ep": 4}}),
        ("qwen3-30b-a3b-tiny", 0, {"tp": 2, "ep": 2}, {"dense": {"tp": 2}, "experts": {"ep": 2}}),
        ("deepseek-v3-tiny", 1, {"ep": 4}, {"experts": {"ep": 4}}),
        ("deepseek-v3-tiny", 1, {"tp": 2, "ep": 2}, {"dense": {"tp": 2}, "experts": {"ep": 2}}),
        ("qwen3-30b-a3b-tiny", 0, IN_PARTS, {"dense": {"tp": 2}, "experts": {"ep": 2, "etp": 2}}),
        ("gpt-oss-20b-tiny", 0, {"ep": 2}, {"experts": {"ep": 2}}),
    ],
)
def test_products_in_closed_form_are_those_that_the_planner_measures(
    model: str, mtp: int, layout: Mapping[str, int], spec: Mapping[str, Any]
) -> None:
    measured = planned(model, 4, mtp=mtp, parallel={**spec, "ranks_per_node": 4})
    rows = Rows(
        sizes=Sizes.of(model, mtp=mtp), layout=Layout(gpus=4, **layout), sequences=2, length=64, dtype="bfloat16"
    )
    (position,) = rows.positions()
    (measured_position,) = measured.positions
    assert products(position.work) == products(measured_position.work)


@pytest.mark.parametrize("layout", [{"ep": 4}, IN_PARTS])
def test_rows_of_experts_in_closed_form_are_those_that_the_planner_measures(layout: Mapping[str, int]) -> None:
    experts = {"ep": layout["ep"], "etp": layout.get("expert_tp", 1)}
    parallel = {"dense": {"tp": layout.get("tp", 1)}, "experts": experts, "ranks_per_node": 4}
    measured = planned("qwen3-30b-a3b-tiny", 4, parallel=parallel)
    sizes = Sizes.of("qwen3-30b-a3b-tiny")
    rows = Rows(sizes=sizes, layout=Layout(gpus=4, **layout), sequences=2, length=64, dtype="bfloat16")

    def sent(work: Sequence[Work], phase: str) -> int:
        of_phase = [each for each in work if each.phase == phase and each.region in EXPERT_REGIONS]
        return sum(each.layers * sum(moved.times * moved.node for moved in each.transfers) for each in of_phase)

    for phase in ("forward", "backward"):
        planned_bytes = sent(measured.positions[0].work, phase)
        # Counts of rows are sent, too.
        assert sent(rows.positions()[0].work, phase) == pytest.approx(planned_bytes, rel=0.01), phase


@pytest.mark.parametrize(
    ("region", "phase", "kind"),
    [
        ("attention", "forward", "all-gather"),
        ("experts", "forward", "all-gather"),
        ("attention", "backward", "reduce-scatter"),
        ("experts", "backward", "reduce-scatter"),
    ],
)
def test_sharded_weights_in_closed_form_travel_as_the_planner_measures(region: str, phase: str, kind: str) -> None:
    sides = {"dense": {"shard": "all", "zero": 3}, "experts": {"ep": 2, "shard": "all", "zero": 3}}
    measured = planned("qwen3-30b-a3b-tiny", 4, parallel={**sides, "ranks_per_node": 2})
    layout = Layout(gpus=4, ep=2, zero=3, node_gpus=2)
    rows = Rows(sizes=Sizes.of("qwen3-30b-a3b-tiny"), layout=layout, sequences=2, length=64, dtype="bfloat16")

    def sent(work: Sequence[Work], link: str) -> int:
        here = [each for each in work if (each.region, each.phase) == (region, phase)]
        moved = [(each.layers, moved) for each in here for moved in each.transfers if moved.kind == kind]
        return sum(layers * each.times * getattr(each, link) for layers, each in moved)

    for link in ("node", "network"):
        # Plans gather routers, 4 % of a layer's weights outside of experts, with the norms, outside of layers.
        planned_bytes = sent(measured.positions[0].work, link)
        assert sent(rows.positions()[0].work, link) == pytest.approx(planned_bytes, rel=0.05), link
    in_backward = [each for each in rows.positions()[0].work if (each.region, each.phase) == (region, "backward")]
    assert {moved.kind for each in in_backward for moved in each.transfers} == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize(
    ("ranks", "chunks", "micro_batches", "merged"), [(4, 1, 12, False), (4, 2, 16, False), (2, 4, 8, True)]
)
def test_a_schedule_as_a_graph_ends_when_its_timeline_does(
    ranks: int, chunks: int, micro_batches: int, merged: bool
) -> None:
    pipeline = OneForwardOneBackward() if chunks == 1 else Interleaved(chunks=chunks, merged=merged)
    order = pipeline.order(ranks, micro_batches)
    last = ranks * chunks - 1

    def cost(kind: str, stage: int) -> float:
        return (1.0 if kind == "F" else 2.0) * (1.7 if stage == last else 1.0)

    expected = timeline(order, lambda action: cost(action.kind, action.stage))
    played = Played.of(order)
    durations = [sum(cost(*each) for each in kinds) for _, kinds in played.kinds]
    at_once, later = ([way] * len(durations) for way in (0.0, 0.5))
    assert played.end(durations, at_once) == pytest.approx(max(entries[-1][1] for entries in expected))
    assert played.end(durations, later) > played.end(durations, at_once)
    steady = Steady.of(lambda count: Played.of(pipeline.order(ranks, count)), ranks, micro_batches)
    assert steady.end(lambda key: sum(cost(*each) for each in key[1]), lambda key: 0.0) == pytest.approx(
        played.end(durations, at_once)
    )


def test_a_long_step_is_as_long_as_its_timeline_although_few_micro_batches_are_played() -> None:
    pipeline = Interleaved(chunks=2)

    def cost(kind: str, stage: int) -> float:
        return (1.0 if kind == "F" else 2.0) * (1.3 if stage == 7 else 1.0)

    steady = Steady.of(lambda count: Played.of(pipeline.order(4, count)), 4, 64)
    assert steady.longer is not None
    expected = timeline(pipeline.order(4, 64), lambda action: cost(action.kind, action.stage))
    told_end = steady.end(lambda key: sum(cost(*each) for each in key[1]), lambda key: 0.0)
    assert told_end == pytest.approx(max(entries[-1][1] for entries in expected))


def test_tokens_go_to_as_many_ranks_as_published() -> None:
    assert distinct(8, 256, 8) == pytest.approx(5.30, abs=0.01)
    grouped = Shapes(tokens=1, hidden=1, experts=256, top_k=8, ep=64, dispatcher="deepep", groups=8, top_groups=4)
    assert places_of_token(grouped, 64) == pytest.approx(7.36, abs=0.01)
    assert places_of_token(grouped, 8) == pytest.approx(3.63, abs=0.01)


DEEPSEEK = Shapes(
    tokens=4096, hidden=7168, experts=256, top_k=8, ep=64, dispatcher="alltoall", groups=8, top_groups=4, itemsize=2.0
)
ROWS = 4096 * 7168 * 2
"""Bytes of a row for each token."""
TO_RANKS = Transfer("all-to-all", "ep", 64, round(ROWS * 8 * 7 / 64), round(ROWS * 8 * 56 / 64))
"""One for each rank, of which a plan's token has eight, on eight nodes."""
TO_NODES = Transfer("all-to-all", "ep", 64, 0, round(ROWS * 8 * 7 / 8))
INSIDE = Transfer("all-to-all", "ep", 64, round(ROWS * 8 * 7 / 8), 0)
"""From where a row lands in a node to its ranks there."""
IN_NODE, OVER_NETWORK = 450e9, 50e9
"""Bytes a second of the links of an H100."""


@pytest.mark.parametrize(
    ("changes", "transfers", "network", "node"),
    [
        pytest.param({}, [TO_RANKS], 8 * 7 / 8, 0.0, id="to each expert"),
        pytest.param({"dispatcher": "deepep"}, [TO_RANKS], 7.36 * 7 / 8, 0.0, id="to each rank"),
        pytest.param({"dispatcher": "deepep", "in_library": True}, [TO_RANKS], 3.63 * 7 / 8, 0.0, id="by DeepEP"),
        pytest.param({"dispatcher": "hybridep"}, [TO_NODES, INSIDE], 3.63 * 7 / 8, 7.36 * 7 / 8, id="to each node"),
        pytest.param(
            {"dispatcher": "hybridep", "in_library": True},
            [TO_NODES, INSIDE],
            3.63 * 7 / 8,
            0.0,
            id="over both links at once",
        ),
        pytest.param(
            {"dispatcher": "hybridep", "is_static": True}, [TO_NODES, INSIDE], 8 * 7 / 8, 8 * 7 / 8, id="whole rooms"
        ),
    ],
)
def test_rows_of_moefw_go_once_to_each_expected_place_of_a_token(
    changes: Mapping[str, Any], transfers: Sequence[Transfer], network: float, node: float
) -> None:
    """``network`` and ``node``: rows of each token, one link after the other."""
    shapes = evolve(DEEPSEEK, **changes)
    costs = Costs(H100, software.implementation("moefw"), Software(), shapes, figures(), Nodes.of(H100, 8))
    work = evolve(NOTHING, transfers=tuple(transfers))
    shares = figures().transfers
    found = costs.of(work).expert_transfers
    expected = network * ROWS / OVER_NETWORK / shares.network[shapes.dispatcher].value
    expected += node * ROWS / IN_NODE / shares.node[shapes.dispatcher].value
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("ranks_per_node", "nodes"), [(2, 4), (4, 2)])
def test_a_plan_has_a_row_for_as_many_places_of_a_token_as_there_can_be(ranks_per_node: int, nodes: int) -> None:
    """What is expected is a share of that."""
    model = "qwen3-30b-a3b-tiny"

    def largest(use: str) -> Sequence[float]:
        parallel = {"experts": {"ep": 8}, "ranks_per_node": ranks_per_node}
        found = planned(model, 8, dispatch={"use": use, "backend": "torch"}, parallel=parallel)
        of_rows = [each for each in found.positions[0].work if each.region in EXPERT_REGIONS]
        moved = [transfer for each in of_rows for transfer in each.transfers]
        row = found.tokens * Sizes.of(model).dim * 2
        return max(each.node for each in moved) / row, max(each.network for each in moved) / row

    ranks = min(Sizes.of(model).top_k, 8)
    inside, outside = (ranks_per_node - 1) / 8, (8 - ranks_per_node) / 8
    assert largest("deepep") == pytest.approx((ranks * inside, ranks * outside))
    to_nodes = min(Sizes.of(model).top_k, nodes) * (nodes - 1) / nodes
    assert largest("hybridep") == pytest.approx((ranks * (ranks_per_node - 1) / ranks_per_node, to_nodes))


LAYOUT = Layout(gpus=256, pp=4, chunks=2, ep=64, node_gpus=8)
MODEL = Rows(
    sizes=Sizes.of("qwen3-235b-a22b"),
    layout=LAYOUT,
    sequences=1,
    length=4096,
    dtype="float8_e4m3fn",
    dispatcher="hybridep",
)


def costs_on(on: Cluster, runs: Software, model: Rows = MODEL, skew: float = 1.0) -> Costs:
    sizes = model.sizes
    shapes = Shapes(
        tokens=model.stream,
        hidden=sizes.dim,
        experts=sizes.experts,
        top_k=sizes.top_k,
        ep=model.layout.ep,
        dispatcher=model.dispatcher,
        skew=skew,
    )
    nodes = Nodes.of(on, model.layout.node_gpus)
    return Costs(on, software.implementation(runs.implementation), runs, shapes, figures(), nodes)


def work_of(
    on: Cluster, runs: Software | None = None, model: Rows = MODEL, micro_batches: int = 16, skew: float = 1.0
) -> StepWork:
    runs = runs or Software(implementation="megatron", graphs="none", ep_overlap=False)
    pp, chunks = model.layout.pp, model.layout.chunks

    def order(count: int) -> Order:
        if pp == 1:
            return Merged().order(1, count) if runs.ep_overlap else [one_by_one(count)]
        return Interleaved(chunks=chunks, merged=bool(runs.ep_overlap)).order(pp, count)

    return step_work(
        model.positions(),
        costs_on(on, runs, model, skew),
        steady=Steady.of(lambda count: Played.of(order(count)), pp, micro_batches),
        micro_batches=micro_batches,
        ep_overlap=bool(runs.ep_overlap),
    )


def step(on: Cluster, **changes: Any) -> StepTime:
    return step_time(work_of(on, **changes), Scale.of(fitted(), on, figures()))


def with_launches(on: Cluster, us: float) -> Cluster:
    return evolve(on, host_launch_us=Figure(value=us, estimated="for a test"))


def halved(figure: Figure) -> Figure:
    return evolve(figure, value=figure.value / 2)


GPU = H100.gpu
OFFLOADS = Software(implementation="megatron", graphs="none", ep_overlap=False, offload=("expert_fc1", "moe_act"))
PLANTED = {
    "a peak": (
        evolve(H100, gpu=evolve(GPU, peak_tflops=evolve(GPU.peak_tflops, fp8=halved(GPU.peak_tflops.fp8)))),  # type: ignore[arg-type]
        {"experts": 1.93},  # tiles begin and end in the time that they took
    ),
    "the link between nodes": (
        evolve(
            H100,
            links=evolve(H100.links, network=evolve(H100.links.network, gb_per_s=halved(H100.links.network.gb_per_s))),
        ),
        {"expert transfers": 2.0},
    ),
    "memory": (evolve(H100, gpu=evolve(GPU, memory_tb_per_s=halved(GPU.memory_tb_per_s))), {"memory passes": 2.0}),
    "the launch cost": (with_launches(H100, 3.0), {"host launches": 0.5}),
    "the link to the host": (
        evolve(H100, links=evolve(H100.links, host=evolve(H100.links.host, gb_per_s=halved(H100.links.host.gb_per_s)))),
        {"offloading": 2.0},
    ),
}
MAY_MOVE = {
    "a peak": {"experts", "products"},
    "the link between nodes": {"expert transfers", "sums of gradients", "other transfers"},
    "memory": {"memory passes", "optimizer", "products", "experts"},
    "the launch cost": {"host launches"},
    "the link to the host": {"offloading"},
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_halves_in_a_cluster_moves_its_category_and_no_other(what: str) -> None:
    changed, expected = PLANTED[what]
    before = step(H100, runs=OFFLOADS)
    after = step(changed, runs=OFFLOADS)
    for name, seconds in before.categories.items():
        ratio = after.categories[name] / seconds
        if name in expected:
            assert ratio == pytest.approx(expected[name], rel=0.02), name
        elif name not in MAY_MOVE[what] and name != "pipeline bubble":  # bubbles are made of all of them
            assert ratio == pytest.approx(1.0, rel=0.01), name
    assert (after.step_s > before.step_s) is (what != "the launch cost")


@pytest.mark.parametrize("ep_overlap", [False, True])
def test_what_categories_add_is_the_step(ep_overlap: bool) -> None:
    """Without stages no position waits. What is hidden adds nothing: only its rest and the waiting do."""
    one_stage = evolve(MODEL, layout=evolve(LAYOUT, pp=1, chunks=1))
    found = step(H100, model=one_stage, runs=evolve(OFFLOADS, ep_overlap=ep_overlap))
    assert sum(found.added_s.values()) == pytest.approx(found.step_s)
    assert found.added_s.keys().isdisjoint(BESIDE)
    hidden = sum(found.categories.get(name, 0.0) for name in BESIDE)
    assert found.added_s["exposed transfers"] + found.added_s["waits for the host"] < hidden


def test_more_of_anything_never_shortens_a_step() -> None:
    scale = Scale.of(fitted(), H100, figures())
    work = work_of(H100)
    base = step_time(work, scale).step_s
    for name in ("passes", "launches", "expert_transfers", "tensor_transfers", "gathers", "experts", "stores"):
        more = {key: evolve(spent, **{name: 1.1 * getattr(spent, name) + 1e-3}) for key, spent in work.spent.items()}
        assert step_time(evolve(work, spent=more), scale).step_s >= base, name
    assert step_time(evolve(work, way=work.way + 1e-3), scale).step_s >= base
    fewer_chunks = evolve(MODEL, layout=evolve(LAYOUT, chunks=4))
    assert step(H100, model=fewer_chunks).bubble_s <= step(H100).bubble_s


def test_graphs_take_launches_from_the_host_scope_by_scope() -> None:
    steps = [
        step(
            cluster.read("gb300"),
            runs=Software(implementation="megatron", graphs=graphs, ep_overlap=False),
            model=evolve(MODEL, length=512),
        )
        for graphs in ("none", ("moe_router", "moe_preprocess"), ("attn", "moe_router", "moe_preprocess"), "full")
    ]
    launches = [each.categories.get("host launches", 0.0) for each in steps]
    assert launches == sorted(launches, reverse=True)
    assert launches[-1] == 0.0
    assert steps[-1].step_s < steps[0].step_s


def test_a_graph_of_the_counts_before_a_dispatch_launches_once_where_there_are_any() -> None:
    def launches(graphs: tuple[str, ...]) -> Sequence[float]:
        runs = Software(implementation="megatron", graphs=graphs)
        costs = costs_on(H100, runs)
        return [costs.of(work).launches for work in MODEL.layer(0, 1, is_dense=False)]

    of_regions = {work.region: work for work in MODEL.layer(0, 1, is_dense=False)}
    fewer = [many - few for many, few in zip(launches(()), launches(("moe_preprocess",)), strict=True)]
    of_dispatch = software.implementation("megatron").regions["dispatch"]
    assert sorted(fewer)[-2:] == [of_dispatch.backward.preprocess - 1, of_dispatch.forward.preprocess - 1]
    assert fewer.count(0.0) == 2 * len(of_regions) - 2


def test_graphs_never_make_a_step_longer_not_even_one_that_waits_for_links() -> None:
    network = H100.links.network
    assert network is not None
    slow = evolve(network, gb_per_s=Figure(value=1.0, estimated="slow"))
    for on in (H100, evolve(H100, links=evolve(H100.links, network=slow))):
        none, full = (
            step(on, runs=Software(implementation="megatron", graphs=graphs, ep_overlap=False))
            for graphs in ("none", "full")
        )
        assert full.step_s <= none.step_s


def test_a_scale_for_each_tensor_costs_passes_and_launches_where_products_are_in_8_bits() -> None:
    of_blocks = Software(implementation="megatron", graphs="none", ep_overlap=False)
    of_tensors = evolve(of_blocks, tensor_scales=True)
    before, after = (step(H100, runs=runs).categories for runs in (of_blocks, of_tensors))
    slower = {name for name, seconds in before.items() if after[name] > 1.001 * seconds}
    assert slower - {"pipeline bubble"} == {"memory passes", "host launches", "kernel gaps"}
    wide = evolve(MODEL, dtype="bfloat16")
    assert step(H100, runs=of_tensors, model=wide) == step(H100, runs=of_blocks, model=wide)


def test_overlap_hides_no_more_than_what_it_runs_beside() -> None:
    none = Software(implementation="megatron", graphs="full", ep_overlap=False)
    both = evolve(none, ep_overlap=True)
    hidden = step(H100, runs=none).exposed_s - step(H100, runs=both).exposed_s
    assert hidden > 0
    slow = evolve(
        H100, links=evolve(H100.links, network=evolve(H100.links.network, gb_per_s=Figure(value=1.0, estimated="slow")))
    )
    told_slow = step(slow, runs=both)
    assert told_slow.step_s > told_slow.categories["expert transfers"]


def test_the_first_forward_and_the_last_backward_of_one_stage_hide_no_transfers() -> None:
    one_stage = evolve(MODEL, layout=evolve(LAYOUT, pp=1, chunks=1))
    runs = Software(implementation="megatron", graphs="full", ep_overlap=True)
    few, more = (step(H100, runs=runs, model=one_stage, micro_batches=count) for count in (4, 8))
    of_one = few.categories["expert transfers"] / 4
    in_pairs = (more.exposed_s - few.exposed_s) / 4
    assert 0 < in_pairs < 0.5 * of_one
    # What a step of one micro-batch more has in pairs adds as much again: the rest ran without a partner.
    assert few.exposed_s - 4 * in_pairs == pytest.approx(of_one - in_pairs, rel=0.02)
    assert few.bubble_s == 0


GB300 = cluster.read("gb300")
BETWEEN_RACKS = evolve(MODEL, layout=evolve(LAYOUT, gpus=1024, ep=32, node_gpus=64))
"""Stages are in different racks of GB300, and the ranks of experts in one."""


def test_pairs_send_beside_their_last_kernels_where_rows_of_experts_take_another_link() -> None:
    runs = Software(implementation="megatron", graphs="full", ep_overlap=True)
    apart = work_of(GB300, runs=runs, model=BETWEEN_RACKS)
    assert apart.way > 0
    assert apart.way_of_pairs == 0
    scale = Scale.of(fitted(), GB300, figures())
    assert step_time(apart, scale).step_s < step_time(evolve(apart, way_of_pairs=apart.way), scale).step_s
    ours = work_of(GB300, runs=evolve(runs, implementation="moefw"), model=BETWEEN_RACKS)
    beside_rows = work_of(H100, runs=runs)
    for waits in (ours, beside_rows):
        assert waits.way_of_pairs == waits.way > 0


def test_a_head_in_8_bits_is_faster_and_nothing_else_is() -> None:
    runs = Software(implementation="megatron", graphs="full", ep_overlap=False)
    in_16_bits = evolve(BETWEEN_RACKS, dtype="bfloat16")
    wide, narrow = (work_of(GB300, runs=evolve(runs, fp8_head=value), model=in_16_bits) for value in (False, True))
    last = wide.passes[-1].outside_forward, narrow.passes[-1].outside_forward
    assert last[1].products < 0.6 * last[0].products
    assert last[1].passes > last[0].passes, "what is read is quantized"
    for before, after in zip(wide.passes, narrow.passes, strict=True):
        assert (after.forward, after.backward) == (before.forward, before.backward)


def test_skewed_routing_is_slower_than_forced_balance_and_only_where_experts_are() -> None:
    even, skewed = step(H100), step(H100, skew=1.5)
    for name in ("experts", "expert transfers"):
        assert skewed.categories[name] == pytest.approx(1.5 * even.categories[name], rel=0.01)
    for name in ("products", "attention", "host launches"):
        assert skewed.categories[name] == pytest.approx(even.categories[name])


def test_a_step_with_more_rows_than_its_budget_takes_the_time_of_two_runs() -> None:
    base = [
        "--cluster",
        "h100",
        "--json",
        "parallel.experts.ep=2",
        "train.micro_batch=64",
        "train.tokens_per_step=65536",
    ]

    def planned(skew: str, *budget: str) -> dict[str, Any]:
        time: dict[str, Any] = json.loads(run(*base, "--skew", skew, *budget).output)
        return {**time["seconds"], "step": time["time"]["step_time_s"]}

    budget = ("dispatch={use: alltoall, rank_capacity: 1.25, on_overflow: rerun}",)
    even, within, beyond = (planned(skew, *budget) for skew in ("1", "1.25", "1.5"))
    without_budget = planned("1.5", "dispatch={use: alltoall}")
    assert within["expert transfers"] == even["expert transfers"], "rows are static"
    assert within["memory passes"] == even["memory passes"]
    assert within["experts"] == pytest.approx(1.25 * even["experts"])
    assert "dropped runs" not in within
    assert beyond["dropped runs"] == pytest.approx(within["step"] - within["optimizer"], rel=0.02)
    for name in ("expert transfers", "experts", "memory passes"):
        assert beyond[name] == pytest.approx(without_budget[name], rel=0.15), name
    assert beyond["step"] > 1.9 * without_budget["step"]


def test_a_skew_makes_passes_over_rows_longer_and_the_peak_larger() -> None:
    even, skewed = (json.loads(run("--cluster", "h100", "--skew", skew, "--json").output) for skew in ("1", "1.5"))
    assert even["time"]["notes"] == []
    (note,) = skewed["time"]["notes"]
    assert "waits for the rank with 1.5 times the mean of rows; the error bar is of even routing" in note
    assert "notes" not in even
    more = skewed["peak_bytes"] - even["peak_bytes"]
    assert f"its peak is {more / 2**20:.3f} MiB more than with even routing" in skewed["notes"][0]
    saved = [sum(region["saved"] for region in plan["regions"]) for plan in (even, skewed)]
    assert more > 0.9 * (saved[1] - saved[0]) > 0
    longer = skewed["seconds"]["memory passes"] - even["seconds"]["memory passes"]
    passes = dict.fromkeys(("experts", "around"), 0.0)
    for work in even["work"]:
        if work["phase"] in ("forward", "backward", "recompute"):
            if work["region"].startswith("expert_"):
                passes["experts"] += work["layers"] * work["nbytes"]
            elif work["region"] in EXPERT_REGIONS:
                passes["around"] += work["layers"] * work["nbytes"]
    rate = cluster.read("h100").gpu.memory_tb_per_s.value * 1e12 * figures().passes.value * fitted().passes
    more = (0.5 * passes["experts"] + 0.25 * passes["around"]) / rate
    assert longer == pytest.approx(even["micro_batches"] * more, rel=0.01)


def test_bars_are_as_wide_as_the_errors_of_like_rows_and_name_what_is_far() -> None:
    rows = likeness.held_out()
    own = rows[0].inputs
    found = likeness.bar(own, rows)
    assert found.extrapolated == ()
    assert likeness.LEAST <= found.percent < 40
    far = evolve(own, cluster="mine", ep=4096)
    told_far = likeness.bar(far, rows)
    assert told_far.extrapolated == ("cluster", "ep")
    assert told_far.percent > found.percent


def test_a_bar_beside_one_row_is_made_of_others_too_and_not_of_the_worst_of_all() -> None:
    own = likeness.held_out()[0].inputs
    beside = likeness.HeldOut("beside", own, 0.01)
    others = [likeness.HeldOut(f"{number}", evolve(own, gpus=own.gpus << 10, tp=8), 0.08) for number in range(12)]
    worst = likeness.HeldOut(
        "worst", evolve(own, cluster="another", precision="other", graphs="?", gpus=own.gpus << 40), 0.6
    )
    assert likeness.bar(own, [beside, *others, worst]).percent == pytest.approx(8.0)


def test_no_published_layout_has_a_bar_that_is_far_wider_than_its_error() -> None:
    rows = likeness.held_out()
    largest: dict[str, float] = {}
    for row in rows:
        largest[row.layout] = max(largest.get(row.layout, 0.0), 100 * abs(row.error))
    wide = {row.layout for row in rows if likeness.bar(row.inputs, rows).percent > 25 > largest[row.layout]}
    assert wide == set()


def test_a_bar_holds_a_further_row_and_not_only_a_share_of_the_known_ones() -> None:
    """The quantile 0.8 (n + 1) / n of n rows alike: the last of 5, the last but one of 10."""
    own = likeness.held_out()[0].inputs
    for number, expected in ((4, 4), (5, 5), (9, 8), (10, 9)):
        rows = [likeness.HeldOut(str(place), own, place / 10) for place in range(1, number + 1)]
        assert likeness.bar(own, rows).percent == pytest.approx(10.0 * expected)


def test_at_most_seven_numbers_are_fitted_for_all_rows() -> None:
    assert len(GLOBAL) <= 7
    assert {field.name for field in attrs.fields(type(fitted()))} == {*GLOBAL, "software_2025", "stacks"}


def test_held_out_rows_are_the_scored_ones() -> None:
    scored = [row for row in read() if row.is_scored]
    assert [row.inputs for row in likeness.held_out()] == [inputs_of(row) for row in scored]
    assert all(row["why_not"] for row in read() if not row.is_scored)


def test_a_row_is_predicted_from_its_fields_alone() -> None:
    row = next(row for row in read() if row["id"] == "p144")
    unseen = evolve(row, fields={**row.fields, "model": "mixtral-8x7b", "id": "new", "layout": "", "truth_tflops": ""})
    predictor = Predictor.empty()
    assert predictor.step_time(unseen, fitted()).step_s > 0
    assert abs(predictor.tokens_per_s(row, fitted()) / row.tokens_per_s - 1) < 0.25


def test_operations_a_token_in_closed_form_are_those_of_published_rows() -> None:
    for row in {row["model_printed"] + row["stack"]: row for row in read() if row.is_scored}.values():
        assert row.work.flops_per_token / 1e9 == pytest.approx(row.flops_per_token, rel=0.005), row["id"]
        if row["tokens_per_s_per_gpu"]:
            assert row.tokens_per_s == pytest.approx(float(row["tokens_per_s_per_gpu"]), rel=0.02), row["id"]


def run(*args: str) -> Any:
    return CliRunner().invoke(plan, [str(QUICKSTART), *args], standalone_mode=False)


def test_a_plan_on_a_cluster_has_the_time_of_a_step() -> None:
    data = json.loads(run("--cluster", "h100", "--json").output)
    time = data["time"]
    assert set(time) == KEYS
    assert time["fits"] is True
    assert "implementation" in time["extrapolated"]
    assert time["tokens_per_s_per_gpu"] * time["flops_per_token"] / 1e12 == pytest.approx(time["model_tflops_per_gpu"])
    shown = run("--cluster", "h100").output
    assert "a step spends on" in shown
    assert "tokens/s" in shown
    as_megatron = json.loads(run("--cluster", "h100", "--as", "megatron", "--json").output)["time"]
    assert as_megatron["step_time_s"] != time["step_time_s"]


def test_shards_that_travel_once_a_step_take_time() -> None:
    once = {"shard": "all", "zero": 1}
    tree = {
        "model": {"preset": "qwen3-30b-a3b-tiny"},
        "precision": {"use": "bf16"},
        "dispatch": {"use": "alltoall"},
        "parallel": {"dense": once, "experts": {"ep": 2, **once}, "ranks_per_node": 4},
        "train": {"seq_len": 64, "micro_batch": 1, "tokens_per_step": 2 * 64 * 4},
        "run": {"device": "cpu"},
    }
    assembly = assemble_tree(tree, Marks("spec"), defaults=defaults(), world=4, machine=Machine(device="cpu"))
    found = forecast(assembly, ledger(assembly), H100, "h100", Software(implementation="megatron"))
    assert found.step.categories["sums of gradients"] > 0


def test_megatron_sums_gradients_and_gathers_weights_in_bf16_once_a_step() -> None:
    in_fp32 = [Transfer(kind, "dp", 8, 7 * 10**9, 0) for kind in ("reduce-scatter", "all-gather")]
    work = Work(
        layer=None,
        layers=1,
        region="outside",
        phase="once",
        products=(),
        transfers=tuple(in_fp32),
        operators=1,
        nbytes=10**9,
    )
    as_planned, as_megatron = (costs_on(H100, Software(implementation=name)) for name in ("moefw", "megatron"))
    assert as_megatron.sums([work]) == pytest.approx(as_planned.sums([work]) / 2, rel=0.01)
    assert as_planned.once([work]) > 0
    assert as_megatron.once([work]) == 0.0  # there are no weights that products read in 8 bits


def test_ranks_that_share_an_expert_get_its_rows_each() -> None:
    def moved(ep: int, etp: int) -> float:
        shapes = evolve(costs_on(H100, Software()).shapes, tokens=10**6, ep=ep, etp=etp)
        costs = evolve(costs_on(H100, Software(implementation="megatron")), shapes=shapes)
        return costs.deduplicated()

    # A row goes to both ranks of each expert, less to this rank than with four ranks in all.
    assert moved(4, 2) == pytest.approx(moved(4, 1) * 2 * (7 / 8) / (3 / 4), rel=0.001)


def test_the_update_of_megatron_is_one_pass_over_parameters_and_their_states() -> None:
    def update(policy: str) -> tuple[float, float]:
        memory = [{"use": policy}] if policy else []
        (position,) = planned("qwen3-30b-a3b-tiny", 1, memory=memory).positions
        (work,) = [each for each in position.work if each.phase == "optimizer"]
        of_state = {"": 4, "optimizer-bf16": 2}[policy]
        assert work.updated.states == pytest.approx(2 * of_state * work.updated.parameters, rel=1e-4)
        as_megatron, as_planned = (costs_on(H100, Software(implementation=name)) for name in ("megatron", "moefw"))
        return as_megatron.once([work]), as_planned.once([work])

    (in_fp32, planned_in_fp32), (in_bf16, planned_in_bf16) = update(""), update("optimizer-bf16")
    assert in_bf16 == pytest.approx(in_fp32 * (18 + 2 * 4) / (18 + 2 * 8), rel=0.02)
    assert planned_in_bf16 > 2 * planned_in_fp32  # moefw widens and rounds states in kernels of their own


def test_software_runs_its_kernels_where_a_plan_has_nothing_to_do() -> None:
    def without_dispatch(position: Position) -> Position:
        work = (each for each in position.work if (each.region, each.phase) != ("dispatch", "forward"))
        return evolve(position, work=tuple(work))

    positions = evolve(MODEL, dispatcher="alltoall").positions()
    launched = []
    for each in (positions, [without_dispatch(position) for position in positions]):
        costs = costs_on(H100, Software(implementation="megatron", graphs="none"))
        launched.append([Passes.of(position.work, costs).forward.launches for position in each])
    assert launched[0] == launched[1]


def test_weights_that_products_read_in_8_bits_are_quantized_once_a_step() -> None:
    sizes = MODEL.sizes
    of_layer = sizes.attention_weights + 3 * sizes.dim * sizes.expert_dim * sizes.experts // LAYOUT.ep
    first = MODEL.positions()[0].work  # eleven layers, and twelve
    assert quantized_weights(first) == 23 * of_layer
    assert quantized_weights(evolve(MODEL, dtype="bfloat16").positions()[0].work) == 0


def offloading(policy: dict[str, Any]) -> tuple[Assembly, Ledger]:
    """A spec of two micro-batches with a policy that offloads, and its plan."""
    tree = {
        "model": {"preset": "qwen3-30b-a3b-tiny"},
        "precision": {"use": "bf16"},
        "memory": [policy],
        "train": {"seq_len": 64, "micro_batch": 1, "tokens_per_step": 2 * 64},
        "run": {"device": "cpu"},
    }
    assembly = assemble_tree(tree, Marks("spec"), defaults=defaults(), world=1, machine=Machine(device="cpu"))
    return assembly, ledger(assembly)


def with_host(gb_per_s: float, memory_gb_per_s: float = 70.0) -> Cluster:
    """An H100 with a link to its host, whose copies take their bytes alone."""
    known = H100.links.host
    assert known is not None
    link = HostLink(gb_per_s=evolve(known.gb_per_s, value=gb_per_s), latency_us=evolve(known.latency_us, value=1e-9))
    memory = Figure(value=memory_gb_per_s, estimated="for a test")
    return evolve(H100, links=evolve(H100.links, host=link), host_memory_gb_per_s=memory)


def test_activations_that_a_spec_offloads_take_their_bytes_over_the_link_to_the_host_and_hide_as_they_fit() -> None:
    assembly, plan = offloading({"use": "offload", "regions": ["attention"], "min_bytes": 1})
    nbytes = plan.totals["offloaded"]
    assert nbytes > 0

    def told_with(gb_per_s: float) -> StepTime:
        return forecast(assembly, plan, with_host(gb_per_s), "h100", Software(graphs="full")).step

    fast, slow, slower = (told_with(rate) for rate in (1e6, 1e-3, 5e-4))
    for rate, found in ((1e6, fast), (1e-3, slow)):  # two micro-batches, there and back
        assert found.categories["offloading"] == pytest.approx(2 * 2 * nbytes / (rate * 1e9))
    exposed = software.implementation("moefw").offload_exposed
    assert exposed is not None
    assert fast.exposed_s == pytest.approx(exposed.value * fast.categories["offloading"])
    more = slower.categories["offloading"] - slow.categories["offloading"]
    assert slower.step_s - slow.step_s == pytest.approx(more)  # all that the computation had room for is taken
    assert slow.step_s < fast.step_s + slow.categories["offloading"]


@pytest.mark.parametrize("update", ["device", "host"])
def test_states_that_a_spec_offloads_travel_while_others_are_updated(update: str) -> None:
    assembly, plan = offloading({"use": "optimizer-offload", "update": update})
    states = plan.held.host
    weights = plan.held.parameters
    # An update there reads the gradient, and reads and writes the weight and both moments, all in fp32.
    out, back, updated = (2 * weights, weights, 7 * weights) if update == "host" else (states, states, 0)

    def told_on(on: Cluster) -> StepTime:
        return forecast(assembly, plan, on, "h100", Software()).step

    link_bound, memory_bound = told_on(with_host(1e-2)), told_on(with_host(1e6, 1e-3))
    assert link_bound.categories["offloading"] == pytest.approx((out + back) / 1e7)
    if update == "device":
        assert memory_bound.categories["optimizer"] == link_bound.categories["optimizer"]
    else:
        assert memory_bound.categories["optimizer"] == pytest.approx(updated / (0.7 * 1e6), rel=0.01)
    unhidden = max(out, back) / 1e7 - link_bound.categories["optimizer"]
    assert link_bound.exposed_s == pytest.approx(unhidden, rel=0.01)


def test_a_cluster_without_a_host_link_has_no_time_of_what_is_offloaded(tmp_path: Path) -> None:
    bare = evolve(H100, links=evolve(H100.links, host=None), host_memory_gb_per_s=None)
    assert lacks(bare, offloading({"use": "offload", "regions": ["attention"], "min_bytes": 1})[1]) == ["links.host"]
    _, on_host = offloading({"use": "optimizer-offload", "update": "host"})
    assert lacks(bare, on_host) == ["links.host", "host_memory_gb_per_s"]
    path = tmp_path / "mine.yaml"
    path.write_text(cluster.written(bare))
    assert "time" in json.loads(run("--cluster", str(path), "--json").output)  # it offloads nothing
    shown = run("--cluster", str(path), "memory=[{use: optimizer-offload}]").output
    assert "the cluster has no links.host." in shown
    assert "docs/clusters.md" in shown


@pytest.mark.deep
@pytest.mark.parametrize("name", ["p012", "p116", "p144", "p151"])
def test_a_plan_of_a_published_row_takes_as_long_as_its_closed_form(name: str) -> None:
    """Of a row in FP8, in a pipeline with one expert a rank, on many micro-batches, and of four layers."""
    compared = Compared.of(next(row for row in read() if row["id"] == name))
    assert abs(compared.apart) < 0.005
    for category in ("products", "experts", "attention"):
        planned_s, closed_s = compared.categories[category]
        assert planned_s == pytest.approx(closed_s, rel=0.001), category


@pytest.mark.parametrize("skew", ["nan", "inf", "0.5"])
def test_a_skew_is_a_number_of_one_or_more(skew: str) -> None:
    refused = CliRunner().invoke(plan, [str(QUICKSTART), "--cluster", "h100", "--skew", skew])
    assert refused.exit_code == 2
    assert "Invalid value for '--skew'" in refused.output


def test_software_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "runs.yaml"
    file.write_text("implementation: megatron\ngraphs: [attn, moe_router]\nep_overlap: true\nfp8_attention: true\n")
    assert software.read(str(file)) == Software(
        implementation="megatron", graphs=("attn", "moe_router"), ep_overlap=True, fp8_attention=True
    )
    in_pairs = ("pipeline={use: merged}", "train.micro_batch=2")
    data = json.loads(run(*in_pairs, "--cluster", "h100", "--as", str(file), "--json").output)
    assert data["ok"]
    (alone,) = json.loads(run("--cluster", "h100", "--as", str(file), "--json").output)["problems"]
    assert "and 1f1b runs no pass beside another" in alone["what"]
    assert "pipeline={use: merged}" in alone["fix"]
    file.write_text("implementation: megatron\noffload: [moe_act, core]\n")
    (unknown,) = json.loads(run("--cluster", "h100", "--as", str(file), "--json").output)["problems"]
    assert "megatron offloads no 'core'" in unknown["what"]
    assert "moe_act" in unknown["fix"]
    file.write_text("implementation: megatron\noffload: [core]\ngraphs: [attn, foo, bar]\n")
    several = json.loads(run("--cluster", "h100", "--as", str(file), "--json").output)["problems"]
    assert [problem["what"].split(": ")[1] for problem in several] == [
        "megatron offloads no 'core'.",
        "megatron has no graph of 'foo'.",
        "megatron has no graph of 'bar'.",
    ]
    file.write_text("implementation: moefw\ngraphs: [attn]\n")
    (whole,) = json.loads(run("--cluster", "h100", "--as", str(file), "--json").output)["problems"]
    assert whole["fix"] == "Say none or full: graphs hold whole steps there."
    file.write_text("implementation: megatron\ngraphs: half\nfused: true\n")
    wrong = json.loads(run("--cluster", "h100", "--as", str(file), "--json").output)
    assert [problem["what"].split()[0] for problem in wrong["problems"]] == ["'fused'", "'half'"]


def test_time_without_a_cluster_is_refused() -> None:
    data = json.loads(run("--as", "megatron", "--json").output)
    assert data["problems"][0]["fix"] == "Add --cluster NAME."


def test_a_cluster_that_lacks_figures_has_no_time_which_a_plan_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(cluster.written(evolve(cluster.read("h100"), links=Links())))
    asked = [str(QUICKSTART), "--cluster", str(path)]
    lacking = "the cluster has no links.node."
    assert lacking in CliRunner().invoke(plan, asked).output
    assert "time" not in json.loads(CliRunner().invoke(plan, [*asked, "--json"]).output)
    (problem,) = json.loads(CliRunner().invoke(plan, [*asked, "--as", "megatron", "--json"]).output)["problems"]
    assert "has no links.node, which time needs" in problem["what"]


def test_every_figure_of_time_has_a_source_or_says_how_it_was_estimated() -> None:
    def all_figures(value: Any) -> list[Figure]:
        if isinstance(value, Figure):
            return [value]
        if isinstance(value, Mapping):
            return [each for item in value.values() for each in all_figures(item)]
        return [each for field in attrs.fields(type(value)) for each in all_figures(getattr(value, field.name))]

    found = all_figures(figures())
    assert len(found) > 40
    for figure in found:
        assert ("https://" in figure.source) is not bool(figure.estimated), figure
    assert software.names() == ["megatron", "moefw"]


MEASURED_PRODUCTS: dict[tuple[str, str], tuple[float, list[tuple[float, int, int | None]]]] = {
    ("hopper", "dense_bf16"): (989.4, [(714.0, 8192, None)]),
    ("hopper", "dense_fp8"): (1978.9, [(1204.0, 2048, None), (1470.0, 16384, None)]),
    ("hopper", "grouped_bf16"): (
        989.4,
        [(628.0, 2048, 4096), (651.0, 2048, 4096), (554.0, 2048, 2048), (637.0, 2048, 2048)],
    ),
    ("hopper", "grouped_fp8"): (1978.9, [(776.0, 5120, 512), (1346.0, 7168, 8192)]),
    ("blackwell", "grouped_fp8"): (5000.0, [(2672.0, 7168, None)]),
}
"""By generation and figure, the peak, and what sources measured: TFLOPS, the width of the sum, and the rows of a group."""


@pytest.mark.parametrize("figure", MEASURED_PRODUCTS, ids="-".join)
def test_a_share_of_products_is_without_what_its_source_lost_to_short_sums_and_small_groups(
    figure: tuple[str, str],
) -> None:
    generation, name = figure
    peak, measured = MEASURED_PRODUCTS[figure]
    overhead, half_a_tile = figures().tile_overhead.value, figures().tile_rows.value / 2
    shares = []
    for tflops, summed, rows in measured:
        of_whole_tiles = tflops if rows is None else tflops * (rows + half_a_tile) / rows
        shares.append(of_whole_tiles * summed / (summed - overhead * of_whole_tiles) / peak)
    found = getattr(figures().generations[generation], name).value
    assert found == pytest.approx(fmean(shares), abs=0.01)


def test_short_sums_cost_a_faster_format_more_of_its_rate() -> None:
    def share(dtype: str) -> float:
        """Rate of a short sum beside that of a long one."""
        short, long = (Product("mm", dtype, (8192, 8192, summed), 1, "fprop") for summed in (1024, 16384))
        rates = costs_on(H100, Software()).rates
        return rates.product(long, is_grouped=False) / rates.product(short, is_grouped=False) / 16

    assert share("float8_e4m3fn") < share("bfloat16") < 1


DENSE = Product("mm", "bfloat16", (8192, 8192, 1 << 20), 1, "fprop")
"""A product of a sum so long that tiles cost nothing."""


def dense_share(on: Cluster) -> float:
    """Share of its peak of bf16 that a GPU reaches in a long product."""
    seconds = Scale.of(fitted(), on, figures()).products * costs_on(on, Software()).rates.product(
        DENSE, is_grouped=False
    )
    return DENSE.flops / seconds / 1e12 / on.gpu.peak_tflops.bf16.value


def gpu_like(name: str, *, capability: float, watts: float, tflops: float) -> Cluster:
    on = cluster.read(name)

    def figure(value: float) -> Figure:
        return Figure(value=value, estimated="for a test")

    peaks = evolve(on.gpu.peak_tflops, bf16=figure(tflops))
    gpu = evolve(on.gpu, peak_tflops=peaks, compute_capability=figure(capability), board_power_w=figure(watts))
    return evolve(on, gpu=gpu)


@pytest.mark.parametrize("name", cluster.names())
def test_the_generation_of_a_gpu_follows_from_its_compute_capability_and_not_from_what_it_multiplies(name: str) -> None:
    on = cluster.read(name)
    for fp4 in (None, Figure(value=1979.0, estimated="for a test")):
        other = evolve(on, gpu=evolve(on.gpu, peak_tflops=evolve(on.gpu.peak_tflops, fp4=fp4)))
        assert dense_share(other) == dense_share(on)
        assert generation_name(other) == ("hopper" if name in ("h100", "h200") else "blackwell")


def test_a_gpu_with_more_power_for_its_peak_comes_nearer_to_it_and_none_gets_there() -> None:
    h100 = dense_share(cluster.read("h100"))
    assert dense_share(gpu_like("h100", capability=9.0, watts=350, tflops=756)) < 0.8 * h100
    # As much power for each operation, as in a GPU of twice the size, is as much of a peak.
    assert dense_share(gpu_like("h100", capability=9.0, watts=1400, tflops=1978.8)) == pytest.approx(h100, rel=0.01)
    a100 = gpu_like("h100", capability=8.0, watts=400, tflops=312)
    h20 = gpu_like("h100", capability=9.0, watts=500, tflops=148)
    assert h100 < 0.75
    for on in (a100, h20):
        assert dense_share(on) == pytest.approx(0.9, abs=0.01)


def test_a_node_of_a_cluster_is_a_power_of_two() -> None:
    assert closed_form.node_of(cluster.read("gb200")) == 64
    assert closed_form.node_of(cluster.read("h100")) == 8


WRONG_FIELDS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "no tokens": ({"seq_len": "", "gpus": ""}, "gpus is missing; seq_len is missing"),
    "words": (
        {"dispatcher": "flex", "ep_overlap": "yes", "precision": "fp16"},
        "precision is 'fp16', and not one of bf16, fp8, fp8block, mxfp8, nvfp4; dispatcher is 'flex', and not one of "
        "alltoall, deepep, hybridep; ep_overlap is 'yes', and not one of true, false",
    ),
    "numbers": ({"tp": "0", "micro_batch": "0.5"}, "micro_batch is '0.5', and no whole number above 0; tp is '0', and"),
    "a layout without GPUs": (
        {"pp": "7", "ep": "48"},
        "GPUs, which do not divide 1024; ep, etp and pp are 336 GPUs, which do not divide 1024; ep is 48, which does "
        "not divide 256 experts",
    ),
}


@pytest.mark.parametrize("what", WRONG_FIELDS)
def test_rows_that_are_wrong_are_told_with_every_reason_and_others_are_predicted(what: str, capsys) -> None:
    fields, reasons = WRONG_FIELDS[what]
    (right,) = (row for row in read() if row["id"] == "p109")
    predict([evolve(right, fields={**right.fields, **fields}), right])
    _, wrong, predicted = capsys.readouterr().out.splitlines()
    assert wrong.startswith('p109,,,,,"not predicted, ')
    assert reasons in wrong
    assert float(predicted.split(",")[1]) > 0
