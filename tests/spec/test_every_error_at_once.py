"""However many mistakes a spec holds, one run reports each, once, and nothing that follows from them."""

from __future__ import annotations

import types
from pathlib import Path
from typing import ClassVar

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import moefw
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble
from moefw.core.errors import MoefwError
from moefw.core.plugin import SchedulePlugin
from moefw.core.site import Machine, Site
from spec_cases import DEFAULTS, GOOD

pytestmark = pytest.mark.usefixtures("empty_folder")


@frozen
class Sloppy(SchedulePlugin):
    """A plugin with a mistake of its own."""

    name: ClassVar[str] = "sloppy"

    def offers(self, site: Site) -> moefw.Offers:
        return moefw.offers(rowz=("ragged",))


module = types.ModuleType("sloppy_parts")
module.moefw_schedules = moefw.hookimpl(lambda: [Sloppy])  # type: ignore[attr-defined]
REGISTRY = Registry([module])


@frozen
class Mistake:
    """A mistake in a spec, what is told of it, and the mistakes of which nothing can be known beside it."""

    override: str
    told: str
    silences: tuple[str, ...] = ()


BATCH = ("needs what the layout lacks", "a batch that does not divide")
STAGES = (*BATCH, "too few layers")
LAYOUT = (*STAGES, "copies that do not divide")
MISTAKES = {
    "no whole number": Mistake("model.num_experts=sixteen", "'sixteen' is not a whole number", ("too many choices",)),
    "no number": Mistake("model.norm_eps=small", "'small' is not a finite number"),
    "too many choices": Mistake("model.top_k=64", "top_k 64 of 8 experts cannot be chosen"),
    "an odd size": Mistake("attention.head_dim=33", "head_dim 33 is odd"),
    "sizes that do not divide": Mistake("attention.num_kv_heads=3", "2 heads cannot share 3 key-value heads"),
    "needs what the layout lacks": Mistake("model.vocab_size=257", "a size of axis tp that divides 257"),
    "a misspelt choice": Mistake("routing.score=sigmiod", "Did you mean 'sigmoid'?"),
    "out of range": Mistake("routing.jitter=2.0", "'jitter' must be < 1.0: 2.0."),
    "a missing key": Mistake("routing.groups={keep: 1}", "'count' is missing"),
    "a rule twice": Mistake("routing.balance=[{kind: z_loss}, {kind: z_loss}]", "balance names z_loss more than once"),
    "needs what no part offers": Mistake("dispatch.wire=fp8", "alltoall needs fp8 rows on the wire"),
    "an unknown region": Mistake("memory[0].regions=[attention, nowhere]", "region nowhere to allow recompute"),
    "a wrong item": Mistake("memory[1].regions=[layer, 3]", "3 is not plain text"),
    "a path that is not there": Mistake("memory[7].use=keep", "memory has 2 items and none at '7'"),
    "too few layers": Mistake("parallel.pp=4", "num_layers 2 does not fill 4 pipeline stages"),
    "no size of an axis": Mistake("parallel.experts.ep=two", "'two' is not a whole number", LAYOUT),
    "copies that do not divide": Mistake("parallel.experts.shard=3", "experts.shard 3 does not divide edp", STAGES),
    "a key twice": Mistake("data={heldout: 0.1, heldout: 0.2}", "'heldout' stands here twice"),
    "a batch that does not divide": Mistake("train.tokens_per_step=1000", "1000 tokens a step do not divide"),
    "a tag": Mistake("train.loss_spike=!much 3", "tags, anchors and aliases are not allowed"),
    "no yaml": Mistake("train.clip_norm=[1", "this is not YAML"),
    "a bound": Mistake("train.optimizer.beta1=1.5", "'beta1' must be < 1.0: 1.5."),
    "a mistake in a plugin": Mistake("train.schedule={use: sloppy}", "plugin 'sloppy' (distribution this process 0), "),
    "a misspelt key": Mistake("run.sed=3", "Did you mean 'seed'?"),
    "an unknown plugin": Mistake("run.observers=[wsb]", "no plugin is called 'wsb'"),
    "a folder without a name": Mistake("run.dir=..", "'dir' must end in the name of a folder"),
    "a misspelt section": Mistake("trian={steps: 3}", "Did you mean 'train'?"),
    "no assignment": Mistake("steps", "an override is written key.path=value"),
}
STRUCTURAL = {
    "no plugin": Mistake("gemm=loop", "Write {use: loop}.", ("an unknown region",)),
    "an unknown preset": Mistake(
        "model.preset=qwen",
        "decoder has no preset 'qwen'",
        ("an unknown region", "sizes that do not divide", "an odd size"),
    ),
    "an unknown recipe": Mistake("precision.use=fp23", "no plugin is called 'fp23'", ("needs what no part offers",)),
    "an unknown schedule": Mistake("pipeline.use=1f2b", "Did you mean '1f1b'?", ("too few layers",)),
    "an order that is none": Mistake("parallel.dense.order=[dp, xp, tp]", "'xp' is not one of the choices", LAYOUT),
}
"""Mistakes beside which less is known."""
BOTH = MISTAKES | STRUCTURAL


def told(names: list[str]) -> list[str]:
    """Return the errors of the good spec with these mistakes in it."""
    Path("spec.yaml").write_text(GOOD)
    overrides = ["parallel.dense={dp: 2, tp: 2}", *(BOTH[name].override for name in names)]
    try:
        assemble(Path("spec.yaml"), overrides, defaults=DEFAULTS, registry=REGISTRY, machine=Machine())
    except MoefwError as error:
        return [str(problem) for problem in error.problems]
    return []


def assert_told(names: list[str]) -> None:
    silent = {silenced for name in names for silenced in BOTH[name].silences}
    expected = [BOTH[name].told for name in names if name not in silent]
    found = told(names)
    for fragment in expected:
        assert sum(fragment in line for line in found) == 1, (fragment, found)
    assert len(found) == len(expected), found


def test_the_spec_is_good() -> None:
    assert told([]) == []


@pytest.mark.parametrize("name", BOTH)
def test_one_mistake_is_one_error(name: str) -> None:
    assert_told([name])


@given(st.lists(st.sampled_from([*MISTAKES]), min_size=2, max_size=12, unique=True))
def test_every_mistake_of_two_to_twelve_is_told_once(names: list[str]) -> None:
    assert_told(names)


@settings(max_examples=50)
@given(st.sampled_from([*STRUCTURAL]), st.lists(st.sampled_from([*MISTAKES]), min_size=1, max_size=11, unique=True))
def test_beside_a_part_that_is_not_known_all_else_is_told(structural: str, names: list[str]) -> None:
    assert_told([structural, *names])


def test_all_of_them() -> None:
    assert_told([*MISTAKES])
