"""What ``train.graphs`` asks of the other sections of a spec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, get_args

from attrs import frozen

from moefw.compose.spec.sections import TrainSpec
from moefw.core.contracts import LayoutPlan
from moefw.core.errors import Problem
from moefw.core.facts import Need, need
from moefw.core.plugin import PipelinePlugin
from moefw.core.records import Side

OPTION: Final = "graphs"
OFF: Final = "Use train.graphs: none."


@frozen
class Asker:
    """What needs something of parts and is none, named in an error as a part is. Without another name: graphs."""

    name: str = "train.graphs: step"


def graph_needs(layout: LayoutPlan) -> list[Need]:
    """Needs of graphs of a step."""
    shares_experts = any(layout.size(axis) > 1 for axis in ("ep", "etp"))
    value, who = ("shared", "ranks share the experts") if shares_experts else ("alone", "a rank has all experts")
    fix = f"{OFF} Or use other parts: docs/graphs.md lists them."
    if shares_experts:
        fix += " Among dispatchers: alltoall or hybridep with rank_capacity, on_overflow: rerun and max_tokens."
    return [
        need(
            "replays",
            (value,),
            reason=f"every later step replays what one step ran, on other values; here {who}",
            fix=fix,
            option=OPTION,
        ),
        need(
            "device",
            ("cuda",),
            reason="PyTorch has graphs of CUDA GPUs only",
            fix=f"{OFF} Or check the spec for a machine with a GPU: run.device=cuda.",
            option=OPTION,
        ),
    ]


def graph_problems(train: TrainSpec, layout: LayoutPlan, pipeline: PipelinePlugin) -> Iterator[Problem]:
    """Yield why steps of this layout, pipeline and data are not replayed. ``Problem.where``: a key."""
    for side in get_args(Side):
        shards = layout.num_shards(side)
        if shards > 1:
            what = f"FSDP shards parameters ({side}) over {shards} ranks, and gathers them on streams of its own, which"
            yield Problem(f"{what} no graph holds.", f"{OFF} Or use shard: 1.", f"train.{OPTION}")
    if layout.size("pp") > 1 or pipeline.merges:
        what = f"the passes of the pipeline {pipeline.name} are not captured: only micro-batches one by one are."
        yield Problem(what, f"{OFF} Or use pp: 1 with pipeline: {{use: 1f1b}}.", f"train.{OPTION}")
    if train.delay_wgrads:
        what = "delayed weight gradients run phase by phase, which is not captured."
        yield Problem(what, f"{OFF} Or use train.delay_wgrads: false.", f"train.{OPTION}")
    if train.packing != "none":
        what = f"with packing: {train.packing}, the sequences of a pack differ at every step, and so do its shapes."
        yield Problem(what, f"{OFF} Or use train.packing: none.", f"train.{OPTION}")
    if train.record_routes:
        what = "routes are recorded while a step runs, and a replay runs no Python."
        yield Problem(what, f"{OFF} Or use train.record_routes: false.", f"train.{OPTION}")


def aligned_rows_problems(facts: Iterable[Mapping[str, Any]]) -> Iterator[Problem]:
    """Yield why rows are not a number that no value changes, from what the parts of each layer agree on."""
    for agreed in facts:
        alignment = agreed.get("row_alignment") or 1
        if alignment > 1 and agreed.get("rows") != "static":
            what = f"groups of rows are padded to multiples of {alignment}, and the host reads how many that makes."
            fix = "Set a budget: dispatch.rank_capacity and on_overflow, where the dispatcher has them."
            yield Problem(what, fix, f"train.{OPTION}")
            return
