"""The releases of Transformer Engine that are taken, and the fake's faith to them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import moefw
from moefw.plugins.precision.quantized.te import library


@pytest.mark.parametrize(("found", "allowed"), [("2.17.1", False), ("2.18.0", True), ("2.20.2+cu13", True), ("3.0.0", False)])  # fmt: skip
@pytest.mark.usefixtures("te")
def test_another_version_is_refused_with_the_one_that_is_wanted(
    found: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "version", lambda name: found)
    if allowed:
        library.load()
        return
    wanted = rf"from 2.18 to below 3; {found} is installed. Run: pip install .*transformer-engine\[pytorch\]>=2.18,<3"
    with pytest.raises(moefw.PlanError, match=wanted):
        library.load()


def test_a_library_that_does_not_load_is_refused_with_its_own_words(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", None)
    with pytest.raises(moefw.PlanError, match=r"backend: te cannot use transformer_engine: .*transformer_engine_torch"):
        library.load()
    monkeypatch.undo()
    with pytest.raises(moefw.PlanError, match=r"moefw\[te\]"):
        library.load()
    assert te


def test_a_call_that_does_not_bind_to_a_release_fails(te: Any) -> None:
    loaded = library.load()
    with pytest.raises(TypeError, match="unexpected keyword argument 'layouts'"):
        loaded.gemm(None, None, layouts="TN")
    with pytest.raises(TypeError, match="missing a required argument: 'quantization_params'"):
        loaded.grouped_gemm([], [], [])
    with pytest.raises(TypeError, match="unexpected keyword argument 'with_2d_quantization'"):
        loaded.quantizers["MXFP8Quantizer"](0, with_2d_quantization=True)
    with pytest.raises(TypeError, match="the library itself calls it with"):
        loaded.split_quantize(torch.zeros(0), [], quantizer_list=[])
    assert te


def test_every_release_has_what_is_imported_and_saved(te: Any) -> None:
    assert [one["source"]["version"] for one in te.SNAPSHOTS] == ["2.18.0", "2.20.2"]
    for one in te.SNAPSHOTS:
        assert {"DType", *library.QUANTIZERS} <= {*one["exports"]}
        assert {"kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"} <= {*one["dtypes"]}
        assert {"internal", "optimize_for_gemm"} <= {*one["quantizer"]["fields"]}
        for storage in one["storages"].values():
            taken = {parameter["name"] for parameter in storage["__new__"]}
            assert {*storage["metadata"]} <= taken
