"""What ``tests/must_accept.yaml`` lists is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.testing.combinations import usable_here
from moefw.testing.staged import SIZES
from moefw.testing.variants import NO_FOLDER, OURS
from must_accept import products
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
    model = {"num_layers": 4, "num_dense_layers": 3, "num_experts": 8, "shared_expert_dim": 256}
    asked = specs(deep=deep)
    assert len(asked) > least
    for spec in asked:
        train = {"tokens_per_step": 256, "micro_batch": 1, "seq_len": 16}
        if "adapter" in spec:
            train["weights"] = NO_FOLDER
        tree = {"model": model, "train": train, **spec}
        assemble_tree(tree, Marks(str(spec)), defaults=defaults(), registry=registry, machine=Machine(device="cpu"))


@pytest.mark.parametrize("section", ["dispatch", "gemm", "precision", "pipeline"])
def test_no_plugin_of_ours_is_left_out_of_what_must_be_accepted(section: str) -> None:
    promised = {choice["use"] for product in products() for choice in product.get(section, ())}
    usable = usable_here(staged=SIZES).sections[section]
    assert {name for one in usable if one.distribution == OURS for name in one.names} == promised
