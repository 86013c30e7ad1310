"""A Transformer Engine that quantizes with our encoders and multiplies in fp32: its interface on a CPU."""

from types import ModuleType

from fake_te import gemms, quantizers
from fake_te.quantizers import DType
from fake_te.signatures import CALLS, SNAPSHOTS
from fake_te.storages import HOPPER

__all__ = ["CALLS", "HOPPER", "SNAPSHOTS", "modules"]


def modules() -> dict[str, ModuleType]:
    """Return the modules that ``backend: te`` imports, by name."""
    pytorch, gemm, compiled = (
        ModuleType(name)
        for name in (
            "transformer_engine.pytorch",
            "transformer_engine.pytorch.cpp_extensions",
            "transformer_engine_torch",
        )
    )
    made = {name: getattr(quantizers, name) for name in SNAPSHOTS[-1]["quantizers"]}
    pytorch.__dict__.update(made, DType=DType)
    gemm.__dict__.update(general_gemm=gemms.general_gemm, general_grouped_gemm=gemms.general_grouped_gemm)
    compiled.__dict__.update(split_quantize=quantizers.split_quantize)
    return {one.__name__: one for one in (pytorch, gemm, compiled)}
