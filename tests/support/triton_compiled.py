"""Kernels compiled for a GPU that need not be present, and the assembler's report."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any


def compiled(
    kernel: Any, types: str, aligned: str, constants: Mapping[str, Any], *, capability: int = 90, **options: int
) -> Mapping[str, Any]:
    """Compile a kernel with Triton and return its ``ttir``, ``ptx`` and so on.

    ``types``: types of the non-constant arguments, in order. ``aligned``: names of the arguments divisible by 16.
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
    """Return the assembler's report on PTX for Hopper: registers and spills."""
    from triton.backends.nvidia.compiler import get_ptxas

    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-o", "/dev/null", "/dev/stdin"]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
