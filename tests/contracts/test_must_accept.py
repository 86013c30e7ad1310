"""What ``tests/must_accept.yaml`` lists is accepted, and hardly anything is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.testing.combinations import usable_here
from moefw.testing.matrix import survey
from moefw.testing.variants import OURS
from must_accept import MUST_ACCEPT, products
from pairwise import pairwise


def specs(*, deep: bool) -> list[dict[str, Any]]:
    """Return the specs that hold all choices together, or those that every make test tries: every two together."""
    return [
        dict(zip(product, one.values, strict=True))
        for product in products()
        for one in pairwise(*product.values())
        if bool(one.marks) is deep
    ]


@pytest.mark.parametrize(("deep", "least"), [(False, 200), pytest.param(True, 3000, marks=pytest.mark.deep)])
def test_what_must_be_accepted_is(deep: bool, least: int) -> None:
    registry = Registry()
    model = {"num_layers": 1, "num_experts": 8, "shared_expert_dim": 256}
    asked = specs(deep=deep)
    assert len(asked) > least
    for spec in asked:
        train = {"tokens_per_step": 64, "micro_batch": 1, "seq_len": 16}
        tree = {"model": model, "train": train, **spec}
        assemble_tree(tree, Marks(str(spec)), defaults=defaults(), registry=registry, machine=Machine(device="cpu"))


@pytest.mark.parametrize("section", ["dispatch", "gemm", "precision"])
def test_no_plugin_of_ours_is_left_out_of_what_must_be_accepted(section: str) -> None:
    promised = {choice["use"] for product in products() for choice in product.get(section, ())}
    assert {
        name for one in usable_here().sections[section] if one.distribution == OURS for name in one.names
    } == promised


def test_the_share_refused_does_not_grow(capsys: pytest.CaptureFixture[str]) -> None:
    found = survey(Registry())
    with capsys.disabled():
        print(f"\n{found.summary()}", file=sys.stderr)
    at_most: Any = MUST_ACCEPT["refused_at_most"]
    assert found.share_refused <= at_most, "a larger share needs an ADR and a new number in must_accept.yaml"
    assert at_most - found.share_refused < 0.002, "less is refused: lower the number in must_accept.yaml"
