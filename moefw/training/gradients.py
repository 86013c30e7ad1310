"""Gradients are sums, everywhere: one all-reduce a mesh, and a norm that counts each parameter once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefw.core.contracts import Layout
from moefw.core.naming import expert_parameters

DENSE_COPIES = ("dp", "cp", "tp")
"""Axes over which dense parameters are copies that saw different tokens."""
EXPERT_COPIES = ("edp",)
PART_AXIS = "etp"
"""The axis over which ranks hold parts of the same experts."""
EXPERT_SHARDS = ("ep", PART_AXIS)


def split_by_mesh(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the dense parameters and those of routed experts, in the model's order."""
    experts = expert_parameters(model)
    dense = [parameter for parameter in model.parameters() if parameter not in experts]
    return dense, [parameter for parameter in model.parameters() if parameter in experts]


def sum_gradients(dense: Sequence[nn.Parameter], experts: Sequence[nn.Parameter], layout: Layout) -> None:
    """Add up each parameter's gradient over its copies. A parameter without a gradient counts as zero."""
    for parameters, axes in ((dense, DENSE_COPIES), (experts, EXPERT_COPIES)):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        group = layout.group(*axes)
        if group is not None:
            _all_reduce_flat(_gradients(parameters), group)


def global_norm(dense: Sequence[nn.Parameter], experts: Sequence[nn.Parameter], layout: Layout) -> Tensor:
    """Return the norm of the whole gradient, fp64: every parameter once, experts summed over their mesh."""
    own = _squares(experts, dense[0].device)
    group = layout.group(*EXPERT_SHARDS)
    if group is not None:
        dist.all_reduce(own, group=group)
    return (_squares(dense, dense[0].device) + own).sqrt()


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale gradients so that their global norm is at most ``limit``."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0).float()
    torch._foreach_mul_(_gradients(parameters), factor)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _squares(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    if not parameters:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(_gradients(parameters))
    return torch.stack(norms).double().square().sum()


def _all_reduce_flat(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)])
