"""Arguments of a region. Tensors are saved where it was called, so that the policy around it treats them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from moefw.runtime.memory.dropped import output_of


@final
class Arguments:
    """Positional and keyword arguments, including tensors in nested structures."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        leaves, self._structure = tree_flatten((tuple(args), dict(kwargs)))
        self._places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[at] for at in self._places]
        self._differentiable = [tensor.requires_grad for tensor in tensors]
        self._outputs = [output_of(tensor) for tensor in tensors]
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._saving: Tensor = _Save.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, detached from their graph. Those that could be recomputed in forward still can be."""
        leaves = list(self._others)
        saved: Sequence[Tensor] = self._saving.grad_fn.saved_tensors  # type: ignore[union-attr]
        for at, tensor, wanted, output in zip(self._places, saved, self._differentiable, self._outputs, strict=True):
            leaves[at] = tensor.detach().requires_grad_(wanted)
            if output is not None:
                output.lies_in(tensor)
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs


class _Save(torch.autograd.Function):
    """A node outside the graph. It has no backward, so its saved tensors live as long as its result."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)
