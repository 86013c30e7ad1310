"""``backend: te`` says what it needs of a machine, and what to do where that is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

import moefw
from moefw.core.site import Machine
from moefw.plugins.precision.quantized.nvfp4 import NVFP4
from moefw.testing.layer_case import LayerCase

CAPABILITIES = {
    "fp8-blockwise": {"8.0": False, "8.9": False, "9.0": True, "10.0": True, "12.0": False},
    "mxfp8": {"9.0": False, "10.0": True, "12.0": False},
    "fp8-tensor": {"8.0": False, "8.9": True, "9.0": True, "10.0": True},
    "nvfp4": {"9.0": False, "10.0": True},
}
"""Compute capabilities, and whether the recipe multiplies on them."""


def said(machine: Machine, use: str = "mxfp8", **parts: Any) -> str:
    """Return the message about a spec on a machine; empty if it is sound."""
    given = {"precision": {"use": use, "backend": "te"}, **parts}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moefw.testing.layer_case.Machine", lambda device: machine)
        try:
            LayerCase(parts=given).resolve()
        except moefw.PlanError as refusal:
            return str(refusal)
    return ""


@frozen(kw_only=True)
class Cluster(Machine):
    """A machine with every package."""

    def has_package(self, name: str) -> bool:
        return True


@pytest.mark.parametrize("use", CAPABILITIES)
def test_the_wheel_without_the_compiled_part_is_refused_with_what_to_install(use: str) -> None:
    found = said(Machine(device="cuda"), use)
    assert f"precision.backend: {use} needs package transformer_engine.transformer_engine_torch" in found
    assert "Run: pip install --no-build-isolation 'moefw[te]', or use backend: emulate." in found


def test_the_compiled_part_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_engine"
    (package / "wheel_lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Machine().has_package("some_engine")
    assert not Machine().has_package("some_engine.some_engine_torch")
    (package / "wheel_lib" / "some_engine_torch.cpython-311-x86_64-linux-gnu.so").touch()
    assert Machine().has_package("some_engine.some_engine_torch")
    assert not Machine().has_package("no_engine.some_engine_torch")
    assert "some_engine" not in sys.modules


@pytest.mark.parametrize(("use", "capability"), [(use, one) for use, known in CAPABILITIES.items() for one in known])
def test_a_gpu_that_cannot_multiply_is_refused_with_what_it_has(use: str, capability: str) -> None:
    found = said(Cluster(device="cuda", capability=capability), use)
    if CAPABILITIES[use][capability]:
        assert found == ""
    else:
        assert f"precision.backend: {use} needs compute capability" in found
        assert f"this machine offers {capability}. Use backend: emulate." in found


def test_exact_scales_of_blocks_need_hopper() -> None:
    exact = {"precision": {"use": "fp8-blockwise", "backend": "te", "scales": "fp32"}}
    assert said(Cluster(device="cuda", capability="9.0"), **exact) == ""
    assert "needs compute capability 9.0" in said(Cluster(device="cuda", capability="10.0"), **exact)


def test_a_machine_without_a_gpu_is_refused() -> None:
    found = said(Cluster(device="cpu"))
    assert "precision.backend: mxfp8 needs device cuda: Transformer Engine multiplies MXFP8 on GPUs" in found
    assert said(Cluster(device="cuda")) == "", "a laptop may ask what a cluster would say"


def test_a_dispatcher_whose_host_learns_no_counts_is_refused() -> None:
    budget = {"use": "hybridep", "backend": "library", "rank_capacity": 1.5, "on_overflow": "drop", "max_tokens": 64}
    found = said(Cluster(device="cuda", capability="10.0"), dispatch=budget)
    assert "mxfp8 needs counts on the host: Transformer Engine's grouped GEMM takes the sizes" in found


def test_rows_that_are_drawn_by_the_library_need_no_keys() -> None:
    site: Any = None
    drawn, plain = NVFP4(backend="te"), NVFP4(backend="te", stochastic_rounding=False)
    for plugin in (drawn, plain):
        assert "row_keys" not in {need.fact for need in plugin.needs(site)}
        assert {need.value for need in plugin.needs(site) if need.fact == "row_alignment"} == {16, 128}
