"""Kernels compiled for a GPU that need not be there, and what the assembler says of them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any


def compiled(
    kernel: Any, types: str, aligned: str, constants: Mapping[str, Any], *, capability: int = 90, **options: int
) -> Mapping[str, Any]:
    """Return what Triton makes of a kernel: ``ttir``, ``ptx``.

    ``types`` are those of the arguments that are no constants, in their order; ``aligned`` names those that 16 divides.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    names = [argument for argument in kernel.arg_names if argument not in constants]
    kinds = dict(zip(names, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
    place = kernel.arg_names.index
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={argument: kinds[argument] for argument in kernel.arg_names},
        constexprs={(place(argument),): value for argument, value in constants.items()},
        attrs={(place(argument),): [["tt.divisibility", 16]] for argument in aligned.split()},
    )
    asm: Mapping[str, Any] = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
    return asm


def assembled(ptx: str) -> str:
    """Return what the assembler says of PTX for Hopper: registers and spills."""
    from triton.backends.nvidia.compiler import get_ptxas

    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-o", "/dev/null", "/dev/stdin"]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
