"""The time of a spec on a cluster, from its plan: what a step takes, why, and how sure that is. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Final

from attrs import evolve, frozen

from moefw.compose.assembly import Assembly
from moefw.core.errors import PlanError
from moefw.planner.cluster import PEAK_OF, Cluster
from moefw.planner.data_files import Figure
from moefw.planner.overhead import fits
from moefw.planner.report import Ledger, Position, Work
from moefw.planner.skew import EVEN, room_for_rows, runs_again
from moefw.planner.time import likeness, software
from moefw.planner.time.costs import Costs, Shapes, is_attention
from moefw.planner.time.figures import figures
from moefw.planner.time.likeness import Bar, Inputs
from moefw.planner.time.nodes import Nodes
from moefw.planner.time.rates import ITEMSIZE, format_of
from moefw.planner.time.scale import Scale, fitted
from moefw.planner.time.schedule import Steady, played
from moefw.planner.time.software import OURS, Software
from moefw.planner.time.step import StepTime, StepWork, seconds_without, step_time, step_work
from moefw.runtime.parallel.meshes import COPIES

TERA: Final = 1e12
HOW_TO_ADD: Final = "Add it to the cluster's file, as docs/clusters.md says, or calibrate the machine again."
"""What to do about a figure that a cluster lacks."""
ONCE: Final = ("once", "gradients", "optimizer")
"""Phases of work that a step has once, for all its micro-batches."""


@frozen(kw_only=True)
class Forecast:
    """The time of a step. ``bar``: how wrong it may be. ``wire_bytes``: sent by a rank in a step, by link.

    ``inputs``: what of it published rows are like or unlike in. ``work_on``: the work on another cluster. ``notes``:
    what the time takes for granted, or leaves out.
    """

    plan: Ledger
    cluster: Cluster
    work: StepWork
    scale: Scale
    step: StepTime
    inputs: Inputs
    bar: Bar
    tokens: int
    wire_bytes: Mapping[str, int]
    work_on: Callable[[Cluster], StepWork]
    notes: tuple[str, ...] = ()

    @cached_property
    def processor_s(self) -> float | None:
        """Seconds of processors that a rank in threads takes in a step, the mean over pp; None: unknown."""
        processors = self.cluster.without_waits
        if processors is None:
            return None
        busy = step_time(self.work_on(processors), self.scale)
        return busy.step_s - busy.bubble_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens a second of a GPU."""
        return self.tokens / self.step.step_s / self.plan.world

    @property
    def model_tflops_per_gpu(self) -> float:
        """TFLOPS that the model asks for of a GPU."""
        return self.tokens_per_s_per_gpu * (self.plan.flops_per_token or 0.0) / TERA

    @property
    def mfu(self) -> float | None:
        """Share of the peak of the format in which the model multiplies most; None: there is none."""
        peak = None if self.plan.dtype is None else self.cluster.peak_tflops(self.plan.dtype)
        return None if peak is None else self.model_tflops_per_gpu / peak

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes by category of the position that needs most memory, and their peak."""
        held = self.plan.held
        return {
            "parameters": held.parameters,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "buffers": held.buffers + held.batch,
            "pools": self.plan.pools,
            "saved": self.plan.totals["saved"],
            "peak": self.plan.peak_bytes or 0,
        }

    def gain(self, category: str) -> float:
        """Share of the step by which it would be shorter if a category cost nothing; 0 if it would not be.

        A shorter backward hides less of the sums of gradients, which may cost more than it gains.
        """
        return max(0.0, 1 - seconds_without(category, self.work, self.scale) / self.step.step_s)

    def to_data(self) -> dict[str, Any]:
        """Plain data."""
        step = self.step.step_s
        return {
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "mfu": self.mfu,
            "step_time_s": step,
            "processor_s": self.processor_s,
            "error_percent": self.bar.percent,
            "extrapolated": list(self.bar.extrapolated),
            "checked_steps": self.bar.checked,
            "notes": list(self.notes),
            "memory_bytes": dict(self.memory_bytes),
            "fits": fits(self.cluster, self.plan),
            "wire_bytes": dict(self.wire_bytes),
            "exposed_communication_fraction": self.step.exposed_s / step,
            "pipeline_bubble_fraction": self.step.bubble_s / step,
            "host_bound_fraction": self.step.waits_for_host_s / step,
            "flops_per_token": self.plan.flops_per_token,
        }


def lacks(cluster: Cluster, plan: Ledger | None = None, runs: Software | None = None) -> list[str]:
    """Figures that a cluster lacks and the time of a step is computed with. ``runs``: the software; None: moefw.

    A plan needs the links on which it sends anything, and the one to the host where anything is offloaded. None: those
    between GPUs.
    """
    if cluster.is_measured:
        together = plan is not None and plan.world > 1
        of_host = ("host_layer_of_ranks_us", "host_step_of_ranks_us") if together else ("host_step_us",)
        needed: dict[str, object] = {
            "gpu.passes": cluster.gpu.passes,
            "host_layer_us": cluster.host_layer_us,
            **{name: getattr(cluster, name) for name in of_host},
        }
    else:
        needed = {
            "gpu.board_power_w": cluster.gpu.board_power_w,
            "gpu.compute_capability": cluster.gpu.compute_capability,
            **_peaks_in_use(cluster, plan, runs),
        }
    links = ("node", "network") if plan is None else _links_in_use(cluster, plan)
    needed |= {f"links.{link}": getattr(cluster.links, link) for link in links}
    if plan is not None and cluster.gpu.threads is None:
        needed |= _needed_of_host(cluster, plan, runs)
    missing = [name for name, figure in needed.items() if not figure]
    return missing if plan is None or not cluster.is_measured else [*missing, *_formats_lacking(cluster, plan)]


def _peaks_in_use(cluster: Cluster, plan: Ledger | None, runs: Software | None) -> dict[str, Figure | None]:
    """Peaks of the formats in which a plan multiplies, of those with published shares."""
    products = () if plan is None else (product for work in _work(plan) for product in work.products)
    formats = {PEAK_OF.get(product.dtype, "") for product in products} & {*ITEMSIZE}
    if runs is not None and runs.fp8_head:
        formats.add("fp8")
    return {f"gpu.peak_tflops.{format}": getattr(cluster.gpu.peak_tflops, format) for format in sorted(formats)}


def _links_in_use(cluster: Cluster, plan: Ledger) -> list[str]:
    """Links on which a plan sends anything."""
    nodes = Nodes.of_plan(cluster, plan)
    routes = [nodes.route(transfer) for work in _work(plan) for transfer in work.transfers]
    return [link for link in ("node", "network") if any(getattr(route, link) for route in routes)]


def _needed_of_host(cluster: Cluster, plan: Ledger, runs: Software | None) -> dict[str, object]:
    """Figures of the host of a GPU with which time is computed."""
    needed: dict[str, object] = {}
    on_host = [work.on_host for work in _work(plan)]
    if any(each.copies for each in on_host) or (runs is not None and runs.offload):
        needed["links.host"] = cluster.links.host
    if any(each.nbytes for each in on_host):
        needed["host_memory_gb_per_s"] = cluster.host_memory_gb_per_s
    return needed


def _formats_lacking(cluster: Cluster, plan: Ledger) -> list[str]:
    """Products and attention of a plan that no measured figure is of."""
    measured: Mapping[str, Container[str]] = {
        "gpu.products": {each.format for each in cluster.gpu.products},
        "gpu.attention": {each.format for each in cluster.gpu.attention},
    }
    missing = []
    for work in _work(plan):
        for product in work.products:
            name = "gpu.attention" if is_attention(product, work.region) else "gpu.products"
            if format_of(product.dtype, measured[name]) is None:
                missing.append(f"{name} of {product.dtype}")
    return list(dict.fromkeys(missing))


def _work(plan: Ledger) -> Iterator[Work]:
    for position in plan.positions:
        yield from position.work


def forecast(assembly: Assembly, plan: Ledger, cluster: Cluster, cluster_name: str, runs: Software) -> Forecast:
    """Time of a spec whose plan is known, of the rank with most rows if its routing is skewed.

    The cluster lacks nothing for it (:func:`lacks`). Raises PlanError if the work is unknown, or if the
    software overlaps transfers of experts and the schedule has no pairs of passes; SpecError if an implementation is
    unknown.
    """
    if plan.unknown or not plan.positions:
        raise PlanError(f"the time of a step is unknown, as its work is: {plan.unknown}.", "Leave out --cluster.")
    runs = _as_the_spec_says(assembly, runs)
    if runs.ep_overlap and not assembly.parts.pipeline.merges:
        name = assembly.parts.pipeline.name
        raise PlanError(
            f"the software overlaps transfers of experts (ep_overlap), and {name} runs no pass beside another.",
            "Use 'pipeline={use: merged}', or interleaved with merged: true; or leave ep_overlap out.",
        )
    shapes = shapes_of(assembly, plan)
    steady = Steady.of(partial(played, assembly.schedule), len(assembly.stages), plan.micro_batches)

    implementation = software.implementation(runs.implementation)

    def run_on(on: Cluster, shapes: Shapes) -> StepWork:
        return step_work(
            plan.positions,
            Costs(on, implementation, runs, shapes, figures(), Nodes.of_plan(on, plan)),
            steady=steady,
            micro_batches=plan.micro_batches,
            ep_overlap=bool(runs.ep_overlap),
        )

    def work_on(on: Cluster) -> StepWork:
        run = run_on(on, shapes)
        if not runs_again(assembly, shapes.skew):
            return run
        return evolve(run, dropped_run=run_on(on, evolve(shapes, skew=shapes.room)))

    work = work_on(cluster)
    scale = Scale.of(fitted(), cluster, figures(), plan.world)
    step = step_time(work, scale)
    busiest = next(position for position in plan.positions if step.busiest in position.at)
    inputs = _inputs(assembly, plan, cluster_name, runs, shapes)
    return Forecast(
        plan=plan,
        cluster=cluster,
        work=work,
        scale=scale,
        step=step,
        inputs=inputs,
        bar=_bar(inputs, cluster),
        tokens=assembly.spec.train.tokens_per_step,
        wire_bytes=_wire(busiest, plan.micro_batches),
        work_on=work_on,
        notes=tuple(_notes(assembly, cluster, runs, shapes)),
    )


def _notes(assembly: Assembly, cluster: Cluster, runs: Software, shapes: Shapes) -> Iterator[str]:
    """Yield what the time of a step takes for granted, or leaves out."""
    precision = assembly.parts.precision
    if precision.emulates and runs.implementation == OURS and cluster.gpu.threads is None:
        yield f"{precision.name} is timed as GPUs multiply its formats; emulated, as the spec has it, it takes longer"
    if shapes.skew > EVEN:
        rank = f"the rank with {shapes.skew:g} times the mean of rows"
        yield f"the time is that of a step that waits for {rank}; the error bar is of even routing"


def _bar(inputs: Inputs, cluster: Cluster) -> Bar:
    """Error bar: of the steps that were checked on the cluster, or of published rows."""
    if cluster.checked:
        return likeness.bar_of_checked(inputs, [(each.inputs, each.error) for each in cluster.checked])
    return likeness.bar(inputs, likeness.held_out())


def _as_the_spec_says(assembly: Assembly, runs: Software) -> Software:
    """Software in which the spec decides what the file leaves open."""
    if runs.graphs is None:
        runs = evolve(runs, graphs="full" if assembly.spec.train.graphs == "step" else "none")
    if runs.ep_overlap is None:
        runs = evolve(runs, ep_overlap=assembly.parts.pipeline.merges)
    return runs


def shapes_of(assembly: Assembly, plan: Ledger) -> Shapes:
    """What of a spec decides the volume of its dispatcher."""
    dims = assembly.site.dims
    groups = getattr(assembly.parts.routing, "groups", None)
    dispatch = assembly.parts.dispatch
    in_library = getattr(dispatch, "backend", "") == "library"
    return Shapes(
        tokens=plan.tokens // (assembly.layout.size("tp") * assembly.layout.size("cp")),
        hidden=dims.model_dim,
        experts=dims.num_experts,
        top_k=dims.top_k,
        ep=assembly.layout.size("ep"),
        etp=assembly.layout.size("etp"),
        dispatcher=assembly.parts.dispatch.name,
        groups=getattr(groups, "count", 1),
        top_groups=getattr(groups, "keep", 1),
        skew=plan.skew or EVEN,
        room=room_for_rows(assembly) or EVEN,
        in_library=in_library,
        is_static=not in_library and getattr(dispatch, "max_tokens", None) is not None,
    )


def _inputs(assembly: Assembly, plan: Ledger, cluster: str, runs: Software, shapes: Shapes) -> Inputs:
    graphs = runs.graphs if isinstance(runs.graphs, str) else "scopes"
    return Inputs(
        implementation=runs.implementation,
        cluster=cluster,
        precision=plan.dtype or "",
        graphs=graphs,
        ep_overlap=bool(runs.ep_overlap),
        dispatcher=shapes.dispatcher,
        gpus=plan.world,
        tp=assembly.layout.size("tp"),
        pp=assembly.layout.size("pp"),
        cp=assembly.layout.size("cp"),
        ep=shapes.ep,
        experts_a_rank=max(1, shapes.experts // shapes.ep),
        hidden=shapes.hidden,
        tokens_a_micro_batch=shapes.tokens,
        tokens_a_sequence=assembly.spec.train.seq_len,
        zero=_zero(assembly),
    )


def _zero(assembly: Assembly) -> str:
    """Highest stage of ZeRO of the meshes that shard anything; 1 if none does."""
    layout: Any = assembly.layout
    sharded = [side for side in COPIES if layout.num_shards(side) > 1]
    return str(max((layout.zero(side) for side in sharded), default=1))


def _wire(position: Position, micro_batches: int) -> Mapping[str, int]:
    """Bytes that a rank of a position sends in a step, inside a node and between nodes."""
    sums = {"node": 0, "network": 0}
    for work in position.work:
        times = work.layers * (1 if work.phase in ONCE else micro_batches)
        for transfer in work.transfers:
            sums["node"] += times * transfer.times * transfer.node
            sums["network"] += times * transfer.times * transfer.network
    return sums
