"""Kernels compiled for GPUs that need not be present, exactly as production launches them, and their machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: Triton's own code, PTX, and the instructions of the machine (SASS) with their modifiers.

    ``shared``: the bytes of shared memory that a program takes.
    """

    ttir: str
    ptx: str
    sass: tuple[str, ...]
    shared: int

    @property
    def spills(self) -> int:
        """Return the number of instructions that move registers to local memory or back."""
        return sum(op.startswith(("STL", "LDL")) for op in self.sass)

    def narrow(self, *kinds: str) -> int:
        """Return how many accesses to global memory move less than 16 bytes a thread; ``LDGSTS`` loads to shared memory."""
        return sum(op.split(".")[0] in kinds and _bits(op) < 128 for op in self.sass)


def compile_launches(produce: Callable[[], Any], capability: int) -> list[Compiled]:
    """Return what ``produce`` launches, compiled instead of run; an autotuned launch once for each of its configs.

    Tensors may be on the device ``meta``; every device has the compute capability, 90 for 9.0. Arguments are
    specialized as in a launch: 1 is a constant, and multiples of 16 are known to be such.
    """
    launched: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
    with _recording(launched), mock.patch("torch.cuda.get_device_capability", return_value=divmod(capability, 10)):
        produce()
    return [_compiled(kernel, given, options, capability) for kernel, given, options in launched]


def count_launches(produce: Callable[[], Any]) -> int:
    """Return how many Triton kernels ``produce`` launches. They do not run."""
    launched: list[Any] = []
    with _recording(launched):
        produce()
    return len(launched)


@contextmanager
def _recording(launched: list[tuple[Any, dict[str, Any], dict[str, Any]]]) -> Iterator[None]:
    from triton.runtime import Autotuner, JITFunction

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        given |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        launched.append((kernel, given, options))

    def tune(tuner: Any, *args: Any, **options: Any) -> None:
        for config in tuner.configs:
            tuner.fn.run(*args, **options, **config.all_kwargs())

    with mock.patch.object(JITFunction, "run", launch), mock.patch.object(Autotuner, "run", tune):
        yield


def _compiled(kernel: Any, given: Mapping[str, Any], options: Mapping[str, Any], capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import mangle_type

    kinds, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else mangle_type(value, specialize=True)
        kinds[parameter.name] = kind
        if kind == "constexpr":
            constants[(place,)] = value
        elif _is_aligned(value):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    asm = compiled.asm
    return Compiled(str(asm["ttir"]), str(asm["ptx"]), _disassembled(asm["cubin"]), compiled.metadata.shared)


def _is_aligned(value: Any) -> bool:
    number = value.data_ptr() if isinstance(value, Tensor) else value
    return isinstance(number, int) and number % 16 == 0


def _disassembled(cubin: bytes) -> tuple[str, ...]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--print-code", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE))


def _bits(op: str) -> int:
    """Return the number of bits that an instruction moves for each thread."""
    found = re.search(r"\.[US]?(8|16|64|128|256)\b", op)
    return int(found[1]) if found else 32
