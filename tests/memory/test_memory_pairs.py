"""Any policies over any regions, nested or separate, change no bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatchers import DISPATCHERS
from memory_cases import assert_same, offload, recompute, run
from moefw.testing.pool import RankPool
from moefw.testing.suites.memory_policy_case import Observed
from pairwise import deep

EMULATED = ("fp8-blockwise", "mxfp8", "fp8-tensor", "nvfp4")
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"use": "fp32"},
    "bf16": {"use": "bf16"},
    **{name: {"use": name, "backend": "emulate"} for name in EMULATED},
}
EVERYWHERE = ("layer", "attn_norm", "attention", "qkv", "core_attn", "attn_proj", "dense_mlp", "mlp_norm", "router")
IN_EXPERTS = ("experts", "expert_fc1", "expert_fc2", "shared_experts")
MECHANISMS = {
    **dict.fromkeys((*EVERYWHERE, *IN_EXPERTS, "moe_act"), (None, "recompute", "offload")),
    "dispatch": (None, "recompute"),
    "expert_fc2": (None, "offload"),
}


@cache
def kept(pool: RankPool, dispatch: str, gemm: str, precision: str, in_flight: bool) -> Sequence[Observed]:
    return observe(pool, [], dispatch, gemm, precision, in_flight)


def observe(
    pool: RankPool, memory: Sequence[Mapping[str, Any]], dispatch: str, gemm: str, precision: str, in_flight: bool
) -> Sequence[Observed]:
    parts = {"dispatch": DISPATCHERS[dispatch], "gemm": {"use": gemm}, "precision": PRECISIONS[precision]}
    return run(pool, memory, in_flight=in_flight, **parts)


@pytest.mark.parametrize("number", [6, *deep(60)])
def test_policies_on_any_regions_change_no_bit(pool: RankPool, number: int) -> None:
    @settings(max_examples=number, deadline=None)
    @given(
        dispatch=st.sampled_from(sorted(DISPATCHERS)),
        gemm=st.sampled_from(["grouped", "loop"]),
        precision=st.sampled_from(sorted(PRECISIONS)),
        in_flight=st.booleans(),
        treated=st.fixed_dictionaries({region: st.sampled_from(ways) for region, ways in MECHANISMS.items()}),
    )
    def check_one(dispatch: str, gemm: str, precision: str, in_flight: bool, treated: Mapping[str, str | None]) -> None:
        regions = {
            way: [region for region, chosen in treated.items() if chosen == way] for way in ("recompute", "offload")
        }
        if gemm == "grouped" and "moe_act" in regions["offload"]:
            regions["offload"].remove("moe_act")
        memory = [recompute(*regions["recompute"])] if regions["recompute"] else []
        memory += [offload(*regions["offload"])] if regions["offload"] else []
        assert_same(
            kept(pool, dispatch, gemm, precision, in_flight),
            observe(pool, memory, dispatch, gemm, precision, in_flight),
        )

    check_one()
