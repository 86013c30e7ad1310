"""Weight gradients of groups, added to main gradients in place."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.add_wgrad import reference
from moefw_kernels.devices import runs_ahead, takes_kernels

__all__ = ["add_wgrad", "adds_in_place"]


def adds_in_place(operand: Tensor) -> bool:
    """Whether ``add_wgrad`` takes such operands: on a GPU those of 16 bits, on a CPU all, elsewhere none."""
    if takes_kernels(operand):
        return operand.dtype in (torch.bfloat16, torch.float16)
    return not runs_ahead(operand.device)


def add_wgrad(main: Tensor, grad_RO: Tensor, x_RI: Tensor, ends_e: Tensor | None, *, fresh: bool) -> None:
    """Add ``grad^T x`` over the rows of each group to ``main`` in place, or write it if ``fresh``.

    ``main`` (e, O, I), or (O, I) without ``ends_e``, fp32 or bf16, contiguous; ``grad_RO`` and ``x_RI`` of one dtype;
    ``ends_e`` int32, where each group of rows ends. Rows past the last end are not read. On a GPU the host waits for
    nothing, and products are summed in fp32. It is the operator ``moefw::add_wgrad``.

    Raises:
        ValueError: ``main`` is not contiguous, or the operands are not of one dtype that ``adds_in_place``.
    """
    if not main.is_contiguous() or grad_RO.dtype is not x_RI.dtype or not adds_in_place(grad_RO):
        raise ValueError(
            f"main gradients of strides {main.stride()}, and operands of {grad_RO.dtype} and {x_RI.dtype}: "
            "give contiguous ones, and operands of one dtype, on a GPU of 16 bits"
        )
    torch.ops.moefw.add_wgrad(main, grad_RO, x_RI, ends_e, fresh)


def _add_wgrad(main: Tensor, grad_RO: Tensor, x_RI: Tensor, ends_e: Tensor | None, fresh: bool) -> None:
    if not takes_kernels(main):
        reference.add_wgrad(main, grad_RO, x_RI, ends_e, fresh)
        return
    from moefw_kernels.add_wgrad import triton

    triton.add_wgrad(main, grad_RO, x_RI, ends_e, fresh)


_OPERATORS = torch.library.Library("moefw", "FRAGMENT")
_OPERATORS.define("add_wgrad(Tensor(a!) main, Tensor grad, Tensor x, Tensor? ends, bool fresh) -> ()")
_OPERATORS.impl("add_wgrad", _add_wgrad, "CompositeExplicitAutograd")
_OPERATORS.impl("add_wgrad", lambda *_: None, "Meta")
