"""The time of a step on a machine that was measured, as a laptop: what is measured decides it, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, fields
from click.testing import CliRunner

from moefw.commands.plan import plan
from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.planner import Ledger, cluster, ledger
from moefw.planner.cluster import (
    Attention,
    Checked,
    Cluster,
    Collective,
    Collectives,
    Gpu,
    Link,
    Links,
    Pass,
    Peaks,
    Product,
)
from moefw.planner.data_files import Figure
from moefw.planner.report import Product as Multiplied
from moefw.planner.sheets import step_in_words
from moefw.planner.time.figures import figures
from moefw.planner.time.forecast import Forecast, forecast, lacks
from moefw.planner.time.least_squares import costs_of
from moefw.planner.time.likeness import Inputs
from moefw.planner.time.rates import MeasuredRates
from moefw.planner.time.scale import Scale, fitted
from moefw.planner.time.software import Software

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
CALL_S = 5e-6
FLOPS = {"fp32": 8e10, "bf16": 2e11}
VALUE_S = 4e-10


def figure(value: float) -> Figure:
    return Figure(value=value, estimated="for a test")


def product(format: Any, rows: int, columns: int, depth: int) -> Product:
    """A product that takes what a call, its operations and its values cost."""
    flops = 2 * rows * columns * depth
    values = rows * depth + depth * columns + rows * columns
    seconds = CALL_S + flops / FLOPS[format] + VALUE_S * values
    return Product(format=format, rows=rows, columns=columns, depth=depth, tflops=figure(flops / seconds / 1e12))


def attention(format: str, width: int) -> Attention:
    tflops = figure(0.02 + 0.0002 * width)
    return Attention(
        format=format, sequences=4, heads=4, keys=256, width=width, forward_tflops=tflops, backward_tflops=tflops
    )


def collective(gb_per_s: float, latency_us: float = 200.0) -> tuple[Collective, ...]:
    """A collective that takes a latency, and its bytes over a rate."""
    return tuple(
        Collective(nbytes=nbytes, us=figure(latency_us + nbytes / gb_per_s * 1e-3)) for nbytes in (1, 1 << 20, 1 << 23)
    )


LAPTOP = Cluster(
    about="two ranks",
    gpu=Gpu(
        names=("a processor, 1 thread",),
        peak_tflops=Peaks(bf16=figure(0.2), fp32=figure(0.08)),
        memory_gib=figure(8.0),
        memory_tb_per_s=figure(0.02),
        threads=figure(1.0),
        products=tuple(
            product(format, *shape)
            for format in FLOPS
            for shape in ((2048, 2048, 2048), (256, 256, 256), (32, 32, 32), (8, 512, 512))
        ),
        attention=tuple(attention(format, width) for format in FLOPS for width in (16, 64)),
        passes=(Pass(nbytes=1 << 16, tb_per_s=figure(0.04)), Pass(nbytes=1 << 26, tb_per_s=figure(0.02))),
    ),
    links=Links(
        node=Link(
            gb_per_s=figure(1.5),
            gpus=figure(2.0),
            latency_us=figure(150.0),
            collectives=Collectives(
                all_to_all=collective(1.2),
                all_gather=collective(0.9),
                reduce_scatter=collective(0.6),
                all_reduce=collective(0.7),
            ),
        )
    ),
    host_layer_us=figure(16.0),
    host_step_us=figure(3000.0),
    host_layer_of_ranks_us=figure(24.0),
    host_step_of_ranks_us=figure(9000.0),
)
TREE = {
    "model": {"vocab_size": 256, "dim": 128, "num_layers": 2, "num_experts": 8, "top_k": 2, "expert_dim": 64},
    "attention": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32},
    "train": {"micro_batch": 2, "seq_len": 64, "tokens_per_step": 512},
    "run": {"device": "cpu"},
}


@cache
def planned(ranks: int = 2, *, shard: bool = False, pp: int = 1, **sections: str) -> tuple[Assembly, Ledger]:
    """A spec and its plan. ``shard``: whether weights are gathered. ``sections``: the choices of others, as words."""
    parallel: dict[str, Any] = {"pp": pp, "experts": {"ep": ranks // pp}}
    if shard:
        parallel["dense"] = {"shard": "all"}
    tree = {**TREE, "parallel": parallel, **{name: {"use": use} for name, use in sections.items()}}
    machine = Machine(device="cpu")
    assembly = assemble_tree(tree, Marks("spec"), defaults=defaults(), world=ranks, machine=machine)
    return assembly, ledger(assembly)


def forecast_of(on: Cluster, ranks: int = 2, **spec: Any) -> Forecast:
    assembly, found = planned(ranks, **spec)
    assert lacks(on, found) == []
    return forecast(assembly, found, on, "laptop", Software())


def halved(value: Figure) -> Figure:
    return evolve(value, value=value.value / 2)


def with_node(**collectives: tuple[Collective, ...]) -> Cluster:
    node = LAPTOP.links.node
    assert node is not None
    return evolve(LAPTOP, links=Links(node=evolve(node, collectives=evolve(node.collectives, **collectives))))


def with_processors(share: float) -> Cluster:
    """The laptop, of whose processors collectives take a share of their time."""
    assert LAPTOP.links.node is not None
    measured = LAPTOP.links.node.collectives
    return with_node(
        **{
            kind.name: tuple(
                evolve(each, processor_us=figure(share * each.us.value)) for each in getattr(measured, kind.name)
            )
            for kind in fields(Collectives)
        }
    )


def with_gpu(**figures_of_it: Any) -> Cluster:
    return evolve(LAPTOP, gpu=evolve(LAPTOP.gpu, **figures_of_it))


PLANTED = {
    "products": (
        with_gpu(products=tuple(evolve(each, tflops=halved(each.tflops)) for each in LAPTOP.gpu.products)),
        {"products": 2.0, "experts": 2.0},
    ),
    "attention": (
        with_gpu(
            attention=tuple(
                evolve(each, forward_tflops=halved(each.forward_tflops), backward_tflops=halved(each.backward_tflops))
                for each in LAPTOP.gpu.attention
            )
        ),
        {"attention": 2.0},
    ),
    "passes": (
        with_gpu(passes=tuple(evolve(each, tb_per_s=halved(each.tb_per_s)) for each in LAPTOP.gpu.passes)),
        {"memory passes": 2.0, "optimizer": 2.0},
    ),
    "all-to-all": (
        with_node(all_to_all=collective(0.6, 400.0)),
        {"expert transfers": 2.0},
    ),
    "all-reduce": (
        with_node(all_reduce=collective(0.35, 400.0)),
        {"sums of gradients": 2.0},
    ),
    "launches": (
        evolve(LAPTOP, host_layer_us=figure(8.0), host_layer_of_ranks_us=figure(12.0)),
        {"host launches": 0.5},
    ),
    "steps": (evolve(LAPTOP, host_step_of_ranks_us=figure(4500.0)), {"batch and log": 0.5}),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_halves_in_a_machine_moves_its_category_and_no_other(what: str) -> None:
    changed, expected = PLANTED[what]
    before = forecast_of(LAPTOP).step.categories
    after = forecast_of(changed).step.categories
    assert before.keys() == after.keys() >= expected.keys()
    for name, seconds in before.items():
        assert after[name] / seconds == pytest.approx(expected.get(name, 1.0), rel=0.01), name


def test_a_step_of_ranks_that_train_together_takes_their_host_what_was_measured_of_such() -> None:
    twice = evolve(LAPTOP, host_step_us=figure(6000.0))
    assert forecast_of(twice).step == forecast_of(LAPTOP).step
    before, after = (forecast_of(on, 1).step.categories["batch and log"] for on in (LAPTOP, twice))
    assert after == pytest.approx(2 * before)


@pytest.mark.parametrize("on", [LAPTOP, evolve(LAPTOP, gpu=evolve(LAPTOP.gpu, threads=None))], ids=["threads", "gpu"])
def test_the_last_micro_batch_takes_the_host_what_was_measured_with_sums_over_ranks(on: Cluster) -> None:
    like_others, longer, longest = (evolve(on, host_layer_of_ranks_us=figure(us)) for us in (16.0, 24.0, 32.0))
    steps = [forecast_of(each).step for each in (like_others, longer, longest)]
    of_launches = [step.categories["host launches"] for step in steps]
    of_both = [16.0 + last for last in (16.0, 24.0, 32.0)]  # a step has two micro-batches
    assert of_launches == pytest.approx([of_launches[0] / 32.0 * us for us in of_both])
    assert steps[0].step_s < steps[1].step_s < steps[2].step_s
    assert steps[0].waits_for_host_s < steps[1].waits_for_host_s < steps[2].waits_for_host_s


def test_where_nothing_is_summed_over_ranks_the_last_micro_batch_is_like_all_others() -> None:
    longer = evolve(LAPTOP, host_layer_of_ranks_us=figure(48.0))
    assert forecast_of(longer, 1).step == forecast_of(LAPTOP, 1).step
    whole, halves = (forecast_of(LAPTOP, pp=pp).work.sums_s for pp in (1, 2))
    assert whole > 0 == halves
    assert forecast_of(longer, pp=2).step == forecast_of(LAPTOP, pp=2).step


def test_an_error_bar_is_that_of_steps_that_were_checked_on_the_machine() -> None:
    # Of 10 ms each: errors of 0 %, 20, 25, 5 and 50. The quantile 0.8 * 10 / 9 of nine is the largest but one.
    measured = (10.0, 12.5, 8.0, 10.5, 20.0, 10.0, 10.0, 10.0, 10.0)
    published = forecast_of(LAPTOP)

    def told_with(inputs: Inputs) -> Forecast:
        steps = (Checked(layout="a", inputs=inputs, predicted_ms=10.0, measured_ms=figure(taken)) for taken in measured)
        return forecast_of(evolve(LAPTOP, checked=tuple(steps)))

    like = told_with(evolve(published.inputs, cluster="this-machine"))
    assert like.step == published.step
    assert (like.bar.percent, like.bar.extrapolated, like.bar.checked) == (pytest.approx(25.0), (), 9)
    assert "that is from the errors of 9 small steps which were measured there" in step_in_words(like)
    unlike = told_with(evolve(published.inputs, hidden=2 * published.inputs.hidden))
    assert (unlike.bar.percent, unlike.bar.extrapolated) == (pytest.approx(25.0 * 1.25), ("hidden",))
    assert "extrapolated, as none of these steps is near in: hidden" in step_in_words(unlike)
    assert (published.bar.checked, published.to_data()["checked_steps"]) == (0, 0)
    assert "cluster" in published.bar.extrapolated


def test_everything_that_a_rank_does_takes_its_threads_one_after_the_other() -> None:
    for ranks, shard in ((1, False), (2, False), (2, True)):
        step = forecast_of(LAPTOP, ranks, shard=shard).step
        assert ("other transfers" in step.categories) is shard
        assert step.step_s == pytest.approx(sum(step.categories.values()))
        assert "kernel gaps" not in step.categories


def test_a_step_takes_of_processors_what_collectives_do_not_wait() -> None:
    half = forecast_of(with_processors(0.5))
    assert half.step == forecast_of(LAPTOP).step
    sent = ("expert transfers", "other transfers", "sums of gradients")
    waits = sum(half.step.categories.get(name, 0.0) for name in sent) / 2
    assert waits > 0
    assert half.processor_s == pytest.approx(half.step.step_s - waits)
    assert forecast_of(with_processors(1.0)).processor_s == pytest.approx(half.step.step_s)
    assert f"a rank takes {half.processor_s:.4g} s of processors" in "\n".join(step_in_words(half))


def test_what_a_step_takes_of_processors_is_unknown_where_that_was_not_measured() -> None:
    assert forecast_of(LAPTOP).processor_s is None
    on_gpu = evolve(with_processors(0.5), gpu=evolve(LAPTOP.gpu, threads=None))
    assert forecast_of(on_gpu).processor_s is None
    assert "of processors" not in "\n".join(step_in_words(forecast_of(on_gpu)))


def test_what_a_laptop_offloads_is_copied_in_its_own_memory() -> None:
    tree = {**TREE, "memory": [{"use": "offload", "regions": ["attention"], "min_bytes": 1}]}
    assembly = assemble_tree(tree, Marks("spec"), defaults=defaults(), world=1, machine=Machine(device="cpu"))
    plan_of_one = ledger(assembly)
    on = with_gpu(passes=(Pass(nbytes=1 << 16, tb_per_s=figure(0.02)),))
    assert lacks(on, plan_of_one) == []
    step = forecast(assembly, plan_of_one, on, "laptop", Software()).step
    read_and_written = 2 * plan_of_one.totals["offloaded"]
    ways = 2 * plan_of_one.micro_batches
    assert step.categories["offloading"] == pytest.approx(ways * read_and_written / 0.02e12)
    assert step.step_s == pytest.approx(sum(step.categories.values()))


def test_a_gpu_that_was_measured_computes_beside_its_host_and_its_links() -> None:
    gpu = with_gpu(threads=None)
    step = forecast_of(gpu).step
    assert step.categories["kernel gaps"] > 0
    assert step.step_s < sum(step.categories.values())
    assert step.categories["products"] == forecast_of(LAPTOP).step.categories["products"]


def test_published_shares_and_what_was_fitted_to_them_do_not_count_where_figures_were_measured() -> None:
    other = evolve(fitted(), products=2.0, grouped=2.0, passes=2.0, host=9.0, transfers=9.0, power=9.0, merged=9.0)
    assert Scale.of(fitted(), LAPTOP, figures()) == Scale.of(other, LAPTOP, figures())
    assert (
        forecast_of(with_gpu(memory_tb_per_s=figure(9.0), peak_tflops=Peaks(bf16=figure(9.0)))).step
        == forecast_of(LAPTOP).step
    )


def test_more_of_anything_never_shortens_a_step() -> None:
    base = forecast_of(LAPTOP).step.step_s
    for number, ranks in ((1, 1), (2, 2)):
        longer = {**TREE, "train": {"micro_batch": 2, "seq_len": 128, "tokens_per_step": 1024}}
        parallel = {"experts": {"ep": number}} if number > 1 else {}
        assembly = assemble_tree(
            {**longer, "parallel": parallel},
            Marks("spec"),
            defaults=defaults(),
            world=ranks,
            machine=Machine(device="cpu"),
        )
        more = forecast(assembly, ledger(assembly), LAPTOP, "laptop", Software()).step.step_s
        assert more > forecast_of(LAPTOP, ranks).step.step_s
    assert (
        forecast_of(LAPTOP, gemm="loop").step.categories["host launches"]
        > forecast_of(LAPTOP).step.categories["host launches"]
    )
    assert forecast_of(LAPTOP, 1).step.step_s > base / 2  # the sequences of both, and no transfers


def rates(on: Cluster = LAPTOP) -> MeasuredRates:
    return MeasuredRates(on, figures())


def multiplied(rows: int, columns: int, depth: int, **of: Any) -> Multiplied:
    return Multiplied(**{"operator": "mm", "dtype": "float32", "shape": (rows, columns, depth), "groups": 1, **of})  # type: ignore[arg-type]


def test_a_product_of_another_shape_takes_what_its_call_its_operations_and_its_values_cost() -> None:
    for rows, columns, depth in ((64, 48, 700), (1, 4096, 16), (5000, 32, 32)):
        flops = 2 * rows * columns * depth
        values = rows * depth + depth * columns + rows * columns
        expected = CALL_S + flops / FLOPS["fp32"] + VALUE_S * values
        found = rates().product(multiplied(rows, columns, depth, during="fprop"), is_grouped=False)
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("slower", "others"), [("dgrad", ("fprop", "wgrad")), ("wgrad", ("fprop", "dgrad"))])
def test_gradients_cost_what_was_measured_of_them_in_their_format(slower: str, others: Sequence[str]) -> None:
    halves = tuple(evolve(each, tflops=halved(each.tflops)) for each in LAPTOP.gpu.products[:4])
    slow = with_gpu(**{f"{slower}s": halves})
    for dtype, ratio in (("float32", 2.0), ("bfloat16", 1.0)):
        gradient = multiplied(256, 256, 512, during=slower, dtype=dtype)
        expected = ratio * rates().product(gradient, is_grouped=False)
        assert rates(slow).product(gradient, is_grouped=False) == pytest.approx(expected)
    for during in others:
        product = multiplied(256, 256, 512, during=during)
        assert rates(slow).product(product, is_grouped=False) == rates().product(product, is_grouped=False)


def test_groups_of_few_rows_reach_less() -> None:
    whole = rates().product(multiplied(1024, 256, 256, during="fprop"), is_grouped=False)
    groups = rates().product(multiplied(1024, 256, 256, during="fprop", **{"groups": 64}), is_grouped=True)
    assert groups - whole == pytest.approx(63 * (CALL_S + VALUE_S * 256 * 256), rel=1e-6)
    gradients = rates().product(multiplied(256, 256, 1024, during="wgrad", **{"groups": 64}), is_grouped=True)
    assert gradients - whole == pytest.approx(63 * (CALL_S + VALUE_S * 256 * 256), rel=1e-6)


def test_a_format_that_was_not_measured_is_multiplied_as_a_wider_one() -> None:
    codes = multiplied(256, 256, 256, during="fprop", dtype="float8_e4m3fn")
    wide = multiplied(256, 256, 256, during="fprop", dtype="bfloat16")
    assert rates().product(codes, is_grouped=False) == rates().product(wide, is_grouped=False)


def test_passes_are_slower_beyond_caches_and_between_measured_sizes_between_them() -> None:
    mib = 1 << 20
    assert rates().passes(2 * mib, 32) == pytest.approx(2 * mib / 0.04e12)
    assert rates().passes(64 * mib, 1) == pytest.approx(64 * mib / 0.02e12)
    assert 2 * mib / 0.04e12 < rates().passes(2 * mib, 1) < 2 * mib / 0.02e12
    assert rates().passes(1e12, 1) == pytest.approx(50.0)
    assert rates().passes(0.0, 0) == 0.0


def test_costs_explain_times_and_none_is_negative() -> None:
    assert costs_of([[1, 0], [1, 1], [1, 2]], [2.0, 5.0, 8.0]) == pytest.approx((2.0, 3.0))
    assert costs_of([[1, 1], [1, 2], [1, 4]], [1.0, 2.2, 4.8])[0] == 0.0
    alike = costs_of([[1, 2], [2, 4]], [2.0, 4.0])
    assert [one + 2 * other for one, other in (alike,)] == [pytest.approx(2.0)]


def test_a_collective_of_another_size_lies_between_those_measured() -> None:
    measured = [Collective(nbytes=nbytes, us=figure(us)) for nbytes, us in ((8000, 500.0), (64, 100.0), (1000, 400.0))]
    on = rates(with_node(all_to_all=tuple(measured)))
    for nbytes, us in ((8, 100.0), (64, 100.0), (532, 250.0), (1000, 400.0), (4500, 450.0), (80000, 5000.0)):
        assert on.movement(nbytes, 0.0, "alltoall") == pytest.approx(1e-6 * us)
    assert on.movement(0.0, 0.0, "alltoall") == 0.0
    messages = rates(with_node(all_to_all=()))
    assert messages.movement(1.5e9, 0.0, "alltoall") == pytest.approx(1.0 + 150e-6)


def test_a_cluster_needs_the_links_on_which_a_plan_sends() -> None:
    alone = evolve(LAPTOP, links=Links())
    assert lacks(alone, planned(1)[1]) == []
    assert forecast_of(alone, 1).step.exposed_s == 0.0
    assert lacks(alone, planned(2)[1]) == ["links.node"]
    assert lacks(alone) == ["links.node", "links.network"]
    assert lacks(LAPTOP, planned(2)[1]) == []
    h100 = cluster.read("h100")
    assert lacks(evolve(h100, links=Links(node=h100.links.node)), planned(2)[1]) == []
    unlike_any = evolve(h100.gpu, board_power_w=None, compute_capability=None)
    assert lacks(evolve(h100, gpu=unlike_any, links=Links()), planned(1)[1]) == [
        "gpu.board_power_w",
        "gpu.compute_capability",
    ]


def test_a_cluster_without_a_network_is_one_node_whatever_a_spec_says() -> None:
    tree = {**TREE, "parallel": {"experts": {"ep": 2}, "ranks_per_node": 1}}
    machine = Machine(device="cpu")
    assembly = assemble_tree(tree, Marks("spec"), defaults=defaults(), world=2, machine=machine)
    found = ledger(assembly)
    assert lacks(LAPTOP, found) == []
    assert forecast(assembly, found, LAPTOP, "laptop", Software()).step.step_s == pytest.approx(
        forecast_of(LAPTOP).step.step_s
    )


def test_what_was_not_measured_is_named() -> None:
    _, plan_of_two = planned(2)
    less = evolve(with_gpu(attention=(), passes=()), host_layer_of_ranks_us=None, host_step_of_ranks_us=None)
    host = ["host_layer_of_ranks_us", "host_step_of_ranks_us"]
    assert lacks(less, plan_of_two) == ["gpu.passes", *host, "gpu.attention of float32"]
    _, plan_of_one = planned(1)
    assert lacks(less, plan_of_one) == ["gpu.passes", "gpu.attention of float32"]
    narrow = with_gpu(products=tuple(each for each in LAPTOP.gpu.products if each.format == "bf16"))
    assert lacks(narrow, plan_of_two) == ["gpu.products of float32"]


def test_a_plan_on_a_laptop_has_the_time_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "laptop.yaml"
    path.write_text(cluster.written(LAPTOP))
    assert cluster.read(str(path)) == LAPTOP
    shown = CliRunner().invoke(plan, [str(QUICKSTART), "--cluster", str(path)], standalone_mode=False).output
    assert "a step spends on" in shown
    assert "extrapolated, as no published run is near in: implementation, cluster" in shown
    asked = [str(QUICKSTART), "--cluster", str(path), "--json"]
    data = json.loads(CliRunner().invoke(plan, asked, standalone_mode=False).output)
    assert data["time"]["step_time_s"] == pytest.approx(sum(data["seconds"].values()))
    path.write_text(cluster.written(evolve(LAPTOP, links=Links())))
    refused = CliRunner().invoke(plan, [str(QUICKSTART), "--cluster", str(path)], standalone_mode=False).output
    assert "The time of a step is not predicted: the cluster has no links.node." in refused
