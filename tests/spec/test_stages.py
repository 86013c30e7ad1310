"""Stages that a model, a layout string or a schedule cannot fill are refused, with a number or a string that can."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import pytest
from attrs import frozen

from moefw.compose.pipeline_schedule import PipelineSchedule
from moefw.plugins.pipelines.one_stage import OneForwardOneBackward
from resolved_specs import REGISTRY, refusal, resolved


@pytest.mark.parametrize(
    ("pipeline", "pp", "stages"),
    [("{use: 1f1b}", 8, 8), ("{use: zbv}", 4, 8), ("{use: interleaved, chunks: 3}", 2, 6)],
)
def test_layers_that_do_not_fill_the_stages(pipeline: str, pp: int, stages: int) -> None:
    text = "{{parallel: {{pp: {}}}, pipeline: {}, model: {{num_layers: {}}}}}"
    problem = refusal(text.format(pp, pipeline, 4))
    assert problem.where == "spec.yaml:1:13 parallel.pp"
    assert problem.what.startswith(f"num_layers 4 does not fill {stages} pipeline stages")
    assert problem.fix.endswith("for at most 4 in all.")
    resolved(text.format(pp, pipeline, stages))


@pytest.mark.parametrize(
    ("layout", "says", "fix"),
    [
        ("Et|tt|tL", "has 3 stages, and there are 2", "Write one | between two stages."),
        ("Ett|tL", "spells E t*3 L, and the model is E t*4 L.", "a t for each layer"),
        ("Ett|ttmL", "spells E t*4 m L, and the model is E t*4 L.", "an m for each of mtp_layers"),
        ("tt|EttL", "spells t t E t t L".replace("t t", "t*2"), "Write E, then"),
        ("|EttttL", "stage 0 of the layout", "Give each stage a piece"),
        ("Ett|(ttL", "a ( is not closed", "Write it like"),
        ("Exx|ttL", "'x' is none of E t m L", "Write it like"),
    ],
)
def test_a_layout_that_does_not_spell_the_model(layout: str, says: str, fix: str) -> None:
    text = "{{model: {{num_layers: 4}}, parallel: {{pp: 2}}, pipeline: {{layout: '{}'}}}}"
    problem = refusal(text.format(layout))
    assert problem.where == "spec.yaml:1:56 pipeline.layout"
    assert says in problem.what
    assert fix in problem.fix
    for right in ("Et|tttL", "E|(t)*4L", "Ettt|t,L"):
        resolved(text.format(right))


@pytest.mark.parametrize(
    ("pipeline", "count", "what"),
    [
        ("interleaved", 5, "interleaved runs micro-batches in 2 rounds, which do not divide 5 of them."),
        ("interleaved", 11, "interleaved runs micro-batches in 5 rounds, which do not divide 11 of them."),
        ("dualpipe-v", 3, "dualpipe-v runs at least as many micro-batches as stages, 4, and not 3."),
    ],
)
def test_micro_batches_that_a_schedule_cannot_run(pipeline: str, count: int, what: str) -> None:
    def text(count: int, use: str = pipeline) -> str:
        train = f"{{tokens_per_step: {count * 128}, micro_batch: 1, seq_len: 128}}"
        return f"{{train: {train}, model: {{num_layers: 4}}, parallel: {{pp: 2}}, pipeline: {{use: {use}}}}}"

    problem = refusal(text(count))
    assert problem.where == "spec.yaml:1:10 train.tokens_per_step"
    assert problem.what == what
    fitting, other = re.findall(r"Use (\d+) micro-batches a step, or use: (.*)\.", problem.fix)[0]
    assert abs(int(fitting) - count) == 1
    resolved(text(int(fitting)))
    resolved(text(count, other))


@pytest.mark.parametrize("use", ["interleaved", "dualpipe-v"])
def test_packs_whose_number_a_schedule_may_not_run(use: str) -> None:
    text = "{{model: {{num_layers: 4}}, parallel: {{pp: 2}}, train: {{packing: {}, micro_batch: 1}}, pipeline: {{use: {}}}}}"
    problem = refusal(text.format("static", use))
    assert problem.where.endswith("train.packing")
    assert problem.what == f"the number of packs differs from step to step, and {use} cannot run every number."
    for other in ("gpipe", "1f1b", "zero-bubble", "zbv"):
        resolved(text.format("static", other))
    resolved(text.format("none", use))


def test_schedules_are_equal_where_their_options_are_even_those_that_have_no_hash() -> None:
    @frozen
    class Weighted(OneForwardOneBackward):
        name: ClassVar[str] = "weighted"
        weights: Mapping[str, int] = {}

    def schedule(ranks: int, weight: int) -> PipelineSchedule:
        return PipelineSchedule(Weighted(weights={"F": weight}), ranks, REGISTRY)

    assert len({schedule(4, 1), schedule(4, 1)}) == 1
    others = schedule(2, 1), schedule(4, 2), PipelineSchedule(OneForwardOneBackward(), 4, REGISTRY)
    assert len({schedule(4, 1), *others}) == 4
