"""Needs of ``backend: te`` on the machine and the dispatcher, and the GPUs on which it multiplies each format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import moefw
from moefw.plugins.precision.quantized.gpus import Gpus

PACKAGE: Final = "transformer_engine.transformer_engine_torch"
"""The compiled part. moefw itself installs only the Python part, which computes nothing."""
INSTALL: Final = "Run: pip install --no-build-isolation 'moefw[te]', or use backend: emulate."

_gpus = partial(Gpus, backend="te", library="Transformer Engine")
BLOCKS: Final = _gpus(multiplies="FP8 in blocks of 128", capabilities=("9.0", "10.0", "10.3"), cuda=(12, 9))
"""On Blackwell as MXFP8: a power-of-two scale serves four blocks of 32."""
EXACT_BLOCKS: Final = _gpus(multiplies="FP8 in blocks of 128 with scales: fp32", capabilities=("9.0",), cuda=(12, 9))
MX_BLOCKS: Final = _gpus(multiplies="MXFP8", capabilities=("10.0", "10.3"), cuda=(12, 8))
FP4: Final = _gpus(multiplies="NVFP4", capabilities=("10.0", "10.3"), cuda=(12, 8))
WHOLE_TENSORS: Final = _gpus(multiplies="FP8", capabilities=("8.9", "9.0", "10.0", "10.3", "12.0"), cuda=(12, 1))
"""``_compute_*_support`` in ``transformer_engine/pytorch/quantization.py`` of 2.20.2 is the source of these GPUs."""
RECIPES: Final[Mapping[str, Gpus]] = {
    "fp8-blockwise": BLOCKS,
    "mxfp8": MX_BLOCKS,
    "fp8-tensor": WHOLE_TENSORS,
    "nvfp4": FP4,
}


def te_needs(gpus: Gpus) -> list[moefw.Need]:
    """Needs on the machine and the dispatcher."""
    sizes = "Transformer Engine's grouped GEMM takes the sizes of the groups from the host"
    return [
        moefw.need("package", PACKAGE, reason="backend: te calls it", fix=INSTALL, option="backend"),
        *gpus.needs(),
        moefw.need("counts", ("host",), reason=sizes, option="backend"),
    ]
