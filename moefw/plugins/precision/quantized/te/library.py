"""The only import of Transformer Engine. Signatures: ``tests/snapshots/transformer_engine-*.json``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, final

from packaging.version import Version

import moefw
from moefw.plugins.precision.quantized.te.machine import INSTALL

OLDEST: Final = (2, 18)
"""The oldest release whose signatures were checked."""
QUANTIZERS: Final = (
    "Float8BlockQuantizer",
    "MXFP8Quantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "NVFP4Quantizer",
)


@final
@dataclass(frozen=True, slots=True)
class Library:
    """Quantizers by name, dtypes, both GEMMs, and the function that quantizes groups of rows in one call."""

    dtypes: Any
    quantizers: dict[str, Callable[..., Any]]
    gemm: Callable[..., Any]
    grouped_gemm: Callable[..., Any]
    split_quantize: Callable[..., Any]


def load() -> Library:
    """Import Transformer Engine.

    Raises PlanError where it is too old or too new, has no compiled part, or lacks a function. The error includes the
    library's message.
    """
    _check_version()
    try:
        pytorch = importlib.import_module("transformer_engine.pytorch")
        gemms = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        compiled = importlib.import_module("transformer_engine_torch")
        return Library(
            dtypes=pytorch.DType,
            quantizers={name: getattr(pytorch, name) for name in QUANTIZERS},
            gemm=gemms.general_gemm,
            grouped_gemm=gemms.general_grouped_gemm,
            split_quantize=compiled.split_quantize,
        )
    except (ImportError, AssertionError, OSError, RuntimeError, AttributeError) as error:
        message = " ".join(str(error).split())
        raise moefw.PlanError(f"backend: te cannot use transformer_engine: {message}.", INSTALL) from error


def _check_version() -> None:
    """Raise PlanError unless a release is installed whose signatures are known: ``OLDEST`` or later, same major."""
    try:
        installed = version("transformer-engine")
    except PackageNotFoundError as error:
        raise moefw.PlanError("backend: te needs transformer-engine, which is not installed.", INSTALL) from error
    next_major = OLDEST[0] + 1
    if not OLDEST <= Version(installed).release < (next_major,):
        oldest = ".".join(map(str, OLDEST))
        requirement = f"transformer-engine[pytorch]>={oldest},<{next_major}"
        raise moefw.PlanError(
            f"backend: te knows transformer-engine from {oldest} to below {next_major}; {installed} is installed.",
            f"Run: pip install --no-build-isolation '{requirement}'.",
        )
