"""Checks of what several sections of a spec say together. What one part says of itself is in its ``check``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import islice

from moefw.compose.assembly import LayerAssembly
from moefw.compose.batches import batch_problems
from moefw.compose.graphs import aligned_rows_problems, graph_problems
from moefw.compose.local_files import file_problems
from moefw.compose.pipeline_schedule import PipelineSchedule
from moefw.compose.registry import Registry
from moefw.compose.resolution.chosen import Chosen, Placed
from moefw.compose.resolution.problems import Problems
from moefw.compose.routes import route_problems
from moefw.compose.spec.sections import Spec, TrainSpec
from moefw.compose.spec.source import key_path
from moefw.compose.spec.unknown import UNKNOWN
from moefw.compose.stages import layer_problems, stage_problems
from moefw.core.contracts import LayoutPlan
from moefw.core.errors import PlanError, Problem
from moefw.core.plugin import OPTIMIZER, DataSourcePlugin, ModelPlugin, OptimizerMemoryPolicyPlugin

MAX_LAYERS = 1000


def check_regions(problems: Problems, chosen: Chosen) -> None:
    """Report regions named twice. One policy may treat a region, or one per mechanism if the policies join.

    Of those that store states in another format, there is one. The optimizer's states have policies of their own.
    """
    owners: dict[tuple[str, str], tuple[Placed, int]] = {}
    rounders: dict[str, Placed] = {}
    for placed in chosen.policies:
        with problems.asking(placed.path, placed.part, "regions"):
            mechanism = placed.part.mechanism if placed.part.joins else ""
            rounds = placed.part.rounds
            for index, region in enumerate(placed.part.regions):
                if region is UNKNOWN:
                    continue
                place = (*placed.path, "regions", index)
                if region == OPTIMIZER and not isinstance(placed.part, OptimizerMemoryPolicyPlugin):
                    what = f"{placed} treats what forward saves, and the optimizer's states are not."
                    fix = "Leave the region out, and use a policy for these states, such as optimizer-offload."
                    problems.tell(place, Problem(what, fix))
                    continue
                owner = owners.setdefault((region, mechanism), (placed, index))
                if owner != (placed, index):
                    what = f"{placed} and {owner[0]} both treat region {region!r}."
                    problems.tell(place, Problem(what, "Name it once."))
                    continue
                rounder = rounders.setdefault(region, placed) if rounds else placed
                if rounder != placed:
                    what = f"{placed} and {rounder} both store region {region!r} in a format of their own."
                    problems.tell(place, Problem(what, "Name one of them."))


def check_phases(problems: Problems, chosen: Chosen, train: TrainSpec) -> None:
    """Report policies that turn the phases of a layer into one, where something runs these one by one."""
    pipeline = chosen.find("pipeline")
    who: list[str] = []
    with problems.asking(("train", "delay_wgrads")):
        who += ["train.delay_wgrads"] if train.delay_wgrads else []
    if pipeline:
        with problems.asking(pipeline.path, pipeline.part, "merges"):
            who += [f"the pipeline {pipeline.part.name}"] if pipeline.part.merges else []
    if not who:
        return
    for placed in chosen.policies:
        with problems.asking(placed.path, placed.part, "regions"):
            if "layer" in placed.part.regions:
                what = f"{placed} makes the layer one phase, and {who[-1]} runs the phases of a layer one by one."
                fix = "Name regions inside of it instead, such as attention, router and experts."
                problems.tell((*placed.path, "regions", placed.part.regions.index("layer")), Problem(what, fix))


def check_freeze(problems: Problems, chosen: Chosen, train: TrainSpec) -> None:
    """Report weights that are to stay those of a folder where none is named."""
    adapter = chosen.find("adapter")
    with problems.asking(("train", "weights")):
        if adapter and adapter.part.freezes and train.weights is None:
            what = f"{adapter} trains beside the weights of a folder, and train.weights names none."
            problems.tell((*adapter.path, "use"), Problem(what, "Name one."))
            return
    with problems.asking(("train", "freeze")):
        if train.freeze and train.weights is None:
            what = "frozen weights stay those of a folder, and train.weights names none."
            problems.tell(("train", "freeze"), Problem(what, "Name one, or leave freeze out."))
    with problems.asking(("train", "frozen_weights")):
        freezes = train.freeze or (adapter and adapter.part.freezes)
        if train.frozen_weights == "as_stored" and not freezes:
            what = "only frozen weights are held as their folder has them, and none is frozen."
            fix = "Name some in train.freeze, choose an adapter, or leave frozen_weights out."
            problems.tell(("train", "frozen_weights"), Problem(what, fix))


def check_clip(problems: Problems, chosen: Chosen, train: TrainSpec) -> None:
    """Report frozen weights beside a clip of logits, which scales weights."""
    optimizer = chosen.find("optimizer")
    adapter = chosen.find("adapter")
    if optimizer:
        with problems.asking(optimizer.path, optimizer.part, "qk_clipping()"):
            freezes = train.freeze or (adapter and adapter.part.freezes)
            if freezes and optimizer.part.qk_clipping() is not None:
                what = f"{optimizer} scales weights of attention to clip logits (QK-Clip), and weights are frozen."
                problems.tell((*optimizer.path, "use"), Problem(what, "Leave the clip out, or train all weights."))


def check_batches(problems: Problems, chosen: Chosen, layout: LayoutPlan, train: TrainSpec) -> None:
    """Report why the tokens of a step do not make equal batches on all ranks."""
    with problems.asking(()):
        for problem in batch_problems(train, layout, partial(_other_world, chosen)):
            problems.tell(("train", "tokens_per_step"), problem)


def _other_world(chosen: Chosen, world: int) -> LayoutPlan | None:
    """The layout plan of another world, None if the layout has none for it."""
    placed = chosen.find("parallel")
    try:
        return placed.part.plan(world) if placed else None
    except PlanError:
        return None


def check_stages(problems: Problems, chosen: Chosen, registry: Registry, layout: LayoutPlan, train: TrainSpec) -> None:
    """Report why there are no pipeline stages, or none that can run the step."""
    pipeline = chosen.find("pipeline")
    model = chosen.find("model")
    if pipeline and model:
        with problems.asking(pipeline.path, pipeline.part, "check_batches()"):
            schedule = PipelineSchedule(pipeline.part, layout.size("pp"), registry)
            for problem in stage_problems(schedule, model.part, layout, train):
                problems.tell(key_path(problem.where), problem)


def check_layers(problems: Problems, chosen: Chosen, layout: LayoutPlan) -> None:
    """Report why the layers do not fill the pipeline stages of a layout."""
    pipeline = chosen.find("pipeline")
    model = chosen.find("model")
    if pipeline and model and layout.size("pp") > 1:
        with problems.asking(pipeline.path, pipeline.part):
            for problem in layer_problems(pipeline.part, model.part, layout):
                problems.tell(key_path(problem.where), problem)


def check_graphs(
    problems: Problems,
    chosen: Chosen,
    layout: LayoutPlan,
    train: TrainSpec,
    layers: Mapping[int, LayerAssembly],
) -> None:
    """Report why steps are not replayed, beside what parts offer."""
    pipeline = chosen.find("pipeline")
    if pipeline:
        with problems.asking(("train", "graphs")):
            facts = [layer.facts for layer in layers.values()]
            for problem in (*graph_problems(train, layout, pipeline.part), *aligned_rows_problems(facts)):
                problems.tell(key_path(problem.where), problem)


def check_routes(problems: Problems, chosen: Chosen, spec: Spec) -> None:
    """Report why routes can be neither recorded nor replayed."""
    model = chosen.find("model")
    if model:
        with problems.asking(model.path, model.part, "moe_layers()"):
            for problem in route_problems(spec, moe_layers_of(model.part)):
                problems.tell(key_path(problem.where), problem)


def check_files(problems: Problems, chosen: Chosen, spec: Spec) -> None:
    """Report files that this machine lacks, of data and others, and a folder that cannot hold the run."""
    with problems.asking(()):
        for problem in file_problems(spec.train.weights, spec.train.replay_routes, spec.run.dir):
            problems.tell(key_path(problem.where), problem)
    for placed in chosen.everything:
        if isinstance(placed.part, DataSourcePlugin):
            for problem in problems.listed(placed, "check_files", Problem):
                problems.tell((*placed.path, *key_path(problem.where)), problem)


def moe_layers_of(model: ModelPlugin) -> list[int]:
    """Numbers of the MoE layers of a model. Raises PlanError if there are too many."""
    layers = list(islice(model.moe_layers(), MAX_LAYERS + 1))
    if len(layers) > MAX_LAYERS:
        raise PlanError(f"{model.name} has more than {MAX_LAYERS} MoE layers.", "Use fewer layers.")
    return layers
