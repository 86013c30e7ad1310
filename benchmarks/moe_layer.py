"""An MoE layer to measure: built as in a model, with weights and tokens drawn on its device."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import asdict, frozen
from torch import Tensor

from moefw.compose.build import ModelParts, Shared, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.machine import this_machine
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.context import ModelContext
from moefw.core.stages import Batch
from moefw.runtime.naming import canonical_parameters
from moefw.runtime.phases import straight


@frozen(kw_only=True)
class Shape:
    """Sizes of an MoE layer and the number of its tokens."""

    tokens: int
    dim: int
    expert_dim: int
    num_experts: int
    top_k: int

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return self.tokens * self.top_k

    @property
    def flops(self) -> int:
        """Floating-point operations of the experts in forward; backward has twice as many."""
        return 6 * self.rows * self.dim * self.expert_dim

    @property
    def weights(self) -> int:
        """Parameters of the experts."""
        return 3 * self.num_experts * self.dim * self.expert_dim


@frozen
class Gemm:
    """A GEMM by its name in a spec; ``plugins``: the modules that declare it, where it is not installed."""

    name: str
    plugins: tuple[Any, ...] = ()


GROUPED = Gemm("grouped")
TINY = Shape(tokens=64, dim=128, expert_dim=128, num_experts=4, top_k=2)
"""For runs on a CPU that only show that the code runs."""


class Layer:
    """The MoE layer in a precision, with its tokens.

    ``gemm`` and ``memory``: the spec's. ``ids_TK``: each token's experts; None: those that the router chooses.
    ``seed``: of tokens. Raises MoefwError where the GEMM is refused.
    """

    def __init__(
        self,
        precision: Mapping[str, Any],
        device: torch.device,
        shape: Shape,
        *,
        gemm: Gemm = GROUPED,
        memory: Sequence[Mapping[str, Any]] = (),
        ids_TK: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        context = model_context(precision, device, shape, gemm=gemm, memory=memory)
        recipe = context.at(0).recipe("moe.experts")
        self.module = context.moe_layer(0)
        layer = self.module
        self._run = straight(context.at(0).layer(layer.phases(lambda inputs: layer.send(*inputs), layer.collect)))
        draw(self.module)
        generator = torch.Generator(device).manual_seed(seed)
        size = (2, shape.tokens, shape.dim)
        drawn = torch.randn(size, device=device, generator=generator, dtype=torch.bfloat16)
        self.x_TD, self.probe_TD = (tensor.to(recipe.residual_dtype) for tensor in drawn)
        self.x_TD.requires_grad_()
        ids = torch.zeros(1, shape.tokens, dtype=torch.int64, device=device)
        self.batch = Batch(ids_BS=ids, labels_BS=ids, routes=None if ids_TK is None else {0: ids_TK})

    def take_weights(self, other: Layer) -> None:
        """Compute with the parameters of another layer of this shape, which have the same names and shapes."""
        for name, parameter in other.module.named_parameters():
            owner, _, leaf = name.rpartition(".")
            setattr(self.module.get_submodule(owner), leaf, parameter)

    def forward(self) -> Tensor:
        """Return the output, ``(T, D)``."""
        out_TD: Tensor = self._run((self.x_TD, self.batch))
        return out_TD

    def run(self) -> Tensor:
        """Run forward and backward with new gradients, and return the output."""
        self.module.zero_grad()
        self.x_TD.grad = None
        out_TD = self.forward()
        out_TD.backward(self.probe_TD)
        return out_TD.detach()

    def figures(self) -> dict[str, Tensor]:
        """Return output and gradients by name, with those of all experts concatenated."""
        found = {"out": [self.run()], "x": [grad_of(self.x_TD)]}
        for piece in canonical_parameters(self.module):
            found.setdefault(piece.name.split(".")[-2], []).append(piece.of(grad_of(piece.parameter)))
        return {name: torch.cat([tensor.flatten() for tensor in tensors]) for name, tensors in found.items()}


def model_context(
    precision: Mapping[str, Any],
    device: torch.device,
    shape: Shape,
    *,
    gemm: Gemm = GROUPED,
    memory: Sequence[Mapping[str, Any]] = (),
) -> ModelContext:
    """Return the context from which a model of one layer is built. Raises MoefwError where its parts do not fit."""
    sizes = {name: size for name, size in asdict(shape).items() if name != "tokens"}
    tree = {"model": {"num_layers": 1, **sizes}, "precision": dict(precision), "memory": list(memory)}
    tree["gemm"] = {"use": gemm.name}
    assembly = assemble_tree(
        tree,
        Marks("benchmark"),
        defaults=defaults(),
        registry=Registry(extra=gemm.plugins),
        machine=this_machine(device.type),
    )
    return ModelParts(assembly, open_layout(assembly, device.type), device, Shared())


@torch.no_grad()
def draw(module: torch.nn.Module) -> None:
    """Draw each matrix on its device by its name, such that products keep the size of their operands; vectors are 1."""
    for name, parameter in module.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.fill_(1.0)


def grad_of(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor."""
    assert tensor.grad is not None
    return tensor.grad


def off(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the error of each figure."""
    return {name: relative(got[name], wanted[name]) for name in wanted}


def relative(got: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm of ``wanted``."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())
