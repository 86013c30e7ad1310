"""The stages of a model's pipeline, and what keeps a spec from having them."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from moefw.compose.pipeline_schedule import PAIR, PipelineSchedule, kinds_of_entries
from moefw.compose.spec.sections import TrainSpec
from moefw.core.contracts import LayoutPlan
from moefw.core.errors import PlanError, Problem
from moefw.core.plugin import ModelPlugin, PipelinePlugin
from moefw.runtime.pipeline.placement import Stages, place


def stages_of(pipeline: PipelinePlugin, model: ModelPlugin, layout: LayoutPlan) -> Stages:
    """Stages of each position on pp. Raises PlanError if the layers do not fill them."""
    further = getattr(model, "mtp_layers", 0)
    layers = getattr(model, "num_layers", 0) or max(model.moe_layers(), default=-1) + 1 - further
    return place(pipeline, layout.size("pp"), layers=layers, further=further)


def stage_problems(
    schedule: PipelineSchedule, model: ModelPlugin, layout: LayoutPlan, train: TrainSpec
) -> Iterator[Problem]:
    """Yield why layers do not fill the stages, or micro-batches the schedule. ``Problem.where``: a key."""
    pipeline, ranks = schedule.pipeline, schedule.ranks
    if ranks == 1:
        if pipeline.merges:
            yield from _problems_without_pp(schedule, layout, train)
        return
    yield from layer_problems(pipeline, model, layout)
    if train.packing == "none":
        yield from _problems_of_step(schedule, micro_batches_of(layout, train), delay_wgrads=train.delay_wgrads)
    elif any([*pipeline.check_batches(ranks, count)] for count in range(1, 4 * ranks)):
        what = f"the number of packs differs from step to step, and {pipeline.name} cannot run every number."
        yield Problem(what, "Use train.packing: none, or pipeline: {use: 1f1b}.", "train.packing")


def layer_problems(pipeline: PipelinePlugin, model: ModelPlugin, layout: LayoutPlan) -> Iterator[Problem]:
    """Yield why layers do not fill the stages. ``Problem.where``: a key."""
    try:
        stages_of(pipeline, model, layout)
    except PlanError as error:
        where = "parallel.pp" if pipeline.layout is None else "pipeline.layout"
        yield from (evolve(problem, where=where) for problem in error.problems)


def micro_batches_of(layout: LayoutPlan, train: TrainSpec) -> int:
    """Number of micro-batches of a rank in a step."""
    return max(1, train.tokens_per_step // (train.micro_batch * train.seq_len * layout.size("dp")))


def _problems_without_pp(schedule: PipelineSchedule, layout: LayoutPlan, train: TrainSpec) -> Iterator[Problem]:
    """Yield why a schedule merges nothing on a rank that holds the whole model as one stage."""
    pipeline = schedule.pipeline
    if pipeline.chunks > 1:
        what = f"{pipeline.name} merges passes of {pipeline.chunks} stages a rank, and without pp there is one stage."
        yield Problem(what, "Use pipeline: {use: merged}, or a pp above 1.", "pipeline.use")
    elif train.packing == "none":
        yield from _problems_of_step(schedule, micro_batches_of(layout, train), delay_wgrads=False)


def _problems_of_step(schedule: PipelineSchedule, micro_batches: int, *, delay_wgrads: bool) -> Iterator[Problem]:
    """Yield why a schedule cannot run a step of so many micro-batches, or not as it is asked to."""
    pipeline = schedule.pipeline
    problems = [*pipeline.check_batches(schedule.ranks, micro_batches)]
    yield from (evolve(problem, where=problem.where or "train.tokens_per_step") for problem in problems)
    if problems or not (pipeline.merges or delay_wgrads):
        return
    kinds = kinds_of_entries(schedule, micro_batches)
    if pipeline.merges and PAIR not in kinds:
        yield Problem(
            f"{pipeline.name} runs the backward of a micro-batch beside the forward of a later one, and there is none "
            f"in a step of {micro_batches}.",
            "Use more micro-batches a step: a larger tokens_per_step, or a smaller micro_batch.",
            "train.tokens_per_step",
        )
    if delay_wgrads and "B" not in kinds:
        yield Problem(
            f"delay_wgrads has nothing to delay: {pipeline.name} computes weight gradients in passes of their own.",
            "Leave it out, or use another pipeline, such as 1f1b.",
            "train.delay_wgrads",
        )
