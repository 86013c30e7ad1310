"""What QuACK runs on, checked in a spec, when a model is built, and by ``moefw doctor``. Imports no torch by itself.

The sources are its README and ``quack/gemm.py`` of release 0.6.5.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import moefw

if TYPE_CHECKING:
    import torch

PACKAGE: Final = "quack"
RELEASE: Final = "0.6.5"
"""The release whose signatures were checked. In 0.6.4, SwiGLU writes wrong values in some tiles on Blackwell."""
CAPABILITIES: Final = ("9.0", "10.0", "10.3", "12.0")
"""H100, B200, B300 and RTX 50."""
CUDA: Final = (12, 9)
GROUPED: Final = "Use gemm: {use: grouped}."
_COMMAND: Final = "pip install 'moefw-quack[cu12]', or 'moefw-quack[cu13]' for CUDA 13"
INSTALL: Final = f"Run: {_COMMAND}. Or: {GROUPED}"


def require(device: torch.device) -> None:
    """Raise PlanError unless QuACK is there in the known release, and runs on ``device`` if that is a GPU.

    A CPU is where a layer is planned, on tensors without memory: needs() refuses to train there.
    """
    problems = [*_problems_of_the_package()]
    if device.type == "cuda":
        problems += _problems_of_the_gpu(device)
    if problems:
        raise moefw.PlanError(problems)


def _problems_of_the_package() -> Iterator[moefw.Problem]:
    try:
        installed = importlib.import_module(PACKAGE).__version__
        importlib.import_module(f"{PACKAGE}.gemm_interface")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        yield moefw.Problem(f"gemm quack cannot import quack-kernels {RELEASE}: {reason}.", INSTALL)
        return
    if installed != RELEASE:
        yield moefw.Problem(f"gemm quack knows quack-kernels {RELEASE}; {installed} is installed.", INSTALL)


def _problems_of_the_gpu(device: torch.device) -> Iterator[moefw.Problem]:
    import torch

    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    if capability not in CAPABILITIES:
        requirement = f"gemm quack needs compute capability {' or '.join(CAPABILITIES)}, Hopper or Blackwell"
        yield moefw.Problem(f"{requirement}; {device} has {capability}.", GROUPED)
    built_for = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if built_for < CUDA:
        oldest = ".".join(map(str, CUDA))
        requirement = f"gemm quack needs a torch built for CUDA {oldest} or later"
        fix = f"Install another build of torch. Or: {GROUPED}"
        yield moefw.Problem(f"{requirement}; this one is for {torch.version.cuda}.", fix)


def _try() -> tuple[str, str]:
    """Release of QuACK, and the GPU on which a product of two groups came out right."""
    import torch

    problems = [*_problems_of_the_package()]
    if torch.cuda.is_available():
        problems += _problems_of_the_gpu(torch.device("cuda"))
    else:
        problems.append(moefw.Problem("gemm quack needs a Hopper or Blackwell GPU; torch sees none."))
    if problems:
        raise moefw.ProbeError(" ".join(problem.what for problem in problems))
    from moefw_quack.operators import product

    x_RI = torch.randn(24, 64)
    weight_eIO = torch.randn(2, 64, 64)
    groups = torch.tensor([0, 8, 24], dtype=torch.int32)
    expected = torch.cat([x_RI[:8] @ weight_eIO[0], x_RI[8:] @ weight_eIO[1]])
    found = product(x_RI.bfloat16().cuda(), weight_eIO.bfloat16().cuda(), groups.cuda())
    if not torch.allclose(found.cpu().float(), expected, rtol=0.1, atol=0.5):
        raise moefw.ProbeError("a product of two groups of rows is wrong")
    return RELEASE, f"multiplies on {torch.cuda.get_device_name()}"


PROBE: Final = moefw.Probe(
    name="quack",
    package=PACKAGE,
    distribution="quack-kernels",
    run=_try,
    fix=f"On a Hopper or Blackwell GPU, with CUDA 12.9 or later: {_COMMAND}",
)
