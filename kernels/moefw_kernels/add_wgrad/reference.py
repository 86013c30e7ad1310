"""Reference: one product at a time, as a CPU runs them."""

from __future__ import annotations

from torch import Tensor

from moefw_kernels.cpu_products import whole_blocks


def add_wgrad(main: Tensor, grad_RO: Tensor, x_RI: Tensor, ends_e: Tensor | None, fresh: bool) -> None:
    """Add the product of one group at a time. Reads ``ends_e`` on the host."""
    if ends_e is None:
        return _add(main, grad_RO, x_RI, fresh)
    start = 0
    for main_OI, end in zip(main, ends_e.tolist()):
        if end > start:
            _add(main_OI, whole_blocks(grad_RO[start:end]), whole_blocks(x_RI[start:end]), fresh)
        elif fresh:
            main_OI.zero_()
        start = end


def _add(main_OI: Tensor, grad_RO: Tensor, x_RI: Tensor, fresh: bool) -> None:
    if main_OI.dtype is grad_RO.dtype:
        main_OI.addmm_(grad_RO.t(), x_RI, beta=0.0 if fresh else 1.0)
    elif fresh:
        main_OI.copy_(grad_RO.t() @ x_RI)
    else:
        main_OI.add_(grad_RO.t() @ x_RI)
