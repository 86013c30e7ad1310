"""Comparison of the outcomes of two computations of a layer."""

from __future__ import annotations

from moefw.testing.layer_case import Outcome


def assert_near(got: Outcome, wanted: Outcome, *, rtol: float) -> None:
    """Check that output and every gradient differ by at most ``rtol`` of their norm, and have the same dtype."""
    mine, right = ({"out": one.out_TD, **one.grads, **one.shares} for one in (got, wanted))
    assert mine.keys() == right.keys()
    for name, value in right.items():
        norm = value.double().norm()
        off = (mine[name].double() - value.double()).norm()
        assert mine[name].dtype == value.dtype
        assert off <= rtol * norm, f"{name}: {off / norm:.1e}"
