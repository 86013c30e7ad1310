"""The stages of a model's pipeline, and what keeps a spec from having them."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from moefw.compose.spec.sections import TrainSpec
from moefw.core.contracts import LayoutPlan
from moefw.core.errors import PlanError, Problem
from moefw.core.plugin import ModelPlugin, PipelinePlugin
from moefw.runtime.pipeline.placement import Stages, place


def stages_of(pipeline: PipelinePlugin, model: ModelPlugin, layout: LayoutPlan) -> Stages:
    """Stages of each position on pp. Raises PlanError if the layers do not fill them."""
    further = getattr(model, "mtp_layers", 0)
    layers = getattr(model, "num_layers", 0) or max(model.moe_layers(), default=-1) + 1 - further
    return place(pipeline, layout.sizes.get("pp", 1), layers=layers, further=further)


def stage_problems(
    pipeline: PipelinePlugin, model: ModelPlugin, layout: LayoutPlan, train: TrainSpec
) -> Iterator[Problem]:
    """Yield why layers do not fill the stages, or micro-batches the schedule. ``Problem.where``: a key."""
    ranks = layout.sizes.get("pp", 1)
    if ranks == 1:
        return
    try:
        stages_of(pipeline, model, layout)
    except PlanError as error:
        where = "parallel.pp" if pipeline.layout is None else "pipeline.layout"
        yield from (evolve(problem, where=where) for problem in error.problems)
    where = "train.tokens_per_step"
    if train.packing == "none":
        count = train.tokens_per_step // (train.micro_batch * train.seq_len * layout.sizes.get("dp", 1))
        yield from (evolve(problem, where=where) for problem in pipeline.check_batches(ranks, max(1, count)))
    elif any([*pipeline.check_batches(ranks, count)] for count in range(1, 4 * ranks)):
        what = f"the number of packs differs from step to step, and {pipeline.name} cannot run every number."
        yield Problem(what, "Use train.packing: none, or pipeline: {use: 1f1b}.", "train.packing")
