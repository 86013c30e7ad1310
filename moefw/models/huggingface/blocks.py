"""MoE blocks of models of ``transformers`` in memory: their sizes, how they route, and where they hold each weight."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor, nn

from moefw.core.errors import Problem
from moefw.models.huggingface.origins import DECODER, Origin, origins_of

NORMALISED: Final[Mapping[str, Callable[[Any], bool]]] = {
    "MixtralSparseMoeBlock": lambda block: True,
    "OlmoeSparseMoeBlock": lambda block: block.gate.norm_topk_prob,
    "Qwen3MoeSparseMoeBlock": lambda block: block.gate.norm_topk_prob,
}
"""Classes of blocks that can be replaced, and whether a block divides the weights of chosen experts by their sum."""


@frozen(eq=False)
class Block:
    """The MoE block called ``name`` in its model, an attribute of ``parent``."""

    name: str
    parent: nn.Module
    module: Any

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the layer that computes the same."""
        num_experts, dim, expert_dim = self.module.experts.down_proj.shape
        return {
            "dim": dim,
            "expert_dim": expert_dim,
            "num_experts": num_experts,
            "top_k": self.module.gate.top_k,
        }

    @property
    def routing(self) -> Mapping[str, Any]:
        """Section ``routing`` of that layer."""
        normalised = NORMALISED[type(self.module).__name__](self.module)
        return {"use": "topk", "score": "softmax", "pre_softmax": None if normalised else True}

    @property
    def device(self) -> torch.device:
        """Device that holds the weights."""
        device: torch.device = self.module.gate.weight.device
        return device

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The weights of the block by its own names."""
        return {name: weight.detach() for name, weight in self.module.named_parameters()}

    def is_frozen(self, names: Iterable[str]) -> bool:
        """Whether the block has weights that a layer of ours calls ``names``, and none of them trains."""
        weights = dict(self.module.named_parameters())
        origins = (_origin(name, weights) for name in names)
        trains = [weights[own].requires_grad for own, _ in filter(None, origins)]
        return bool(trains) and not any(trains)

    def replace(self, module: nn.Module) -> None:
        """Put ``module`` in the place of the block."""
        setattr(self.parent, self.name.rpartition(".")[2], module)


def view_of(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """View of the weight that a layer of ours calls ``name`` in ``tensors`` of a block; None: the block has none."""
    found = _origin(name, tensors)
    if found is None:
        return None
    own, origin = found
    view: Tensor = origin.of(tensors[own])
    return view


def _origin(name: str, stored: Container[str]) -> tuple[str, Origin] | None:
    """The block's own name, and the piece under it, of the weight that a layer of ours calls ``name``."""
    for origin in origins_of(f"layers.0.moe.{name}", DECODER):
        own = origin.name.removeprefix("model.layers.0.mlp.")
        if own in stored:
            return own, origin
    return None


def blocks_of(model: nn.Module) -> list[Block]:
    """MoE blocks of a model, in order."""
    return [
        Block(name, model.get_submodule(name.rpartition(".")[0]), module)
        for name, module in model.named_modules()
        if type(module).__name__ in NORMALISED
    ]


def problems_of(model: nn.Module, blocks: list[Block]) -> Iterator[Problem]:
    """Yield why blocks cannot be replaced."""
    if not hasattr(model, "config"):
        yield Problem(f"{type(model).__name__} is no model of transformers: it has no config.", "Hand over the model.")
    if not blocks:
        known = ", ".join(NORMALISED)
        yield Problem(f"{type(model).__name__} has no MoE block that can be replaced.", f"Known: {known}.")
    for block in blocks:
        module = block.module
        activation = type(module.experts.act_fn).__name__
        if activation not in ("SiLU", "SiLUActivation"):
            yield Problem(f"the activation of its experts is {activation}.", "Only SiLU is supported.", block.name)
        if getattr(module, "jitter_noise", 0.0):
            what = f"it multiplies tokens by random numbers (router_jitter_noise {module.jitter_noise})."
            yield Problem(what, "Set router_jitter_noise to 0, or use routing.jitter, of the router alone.", block.name)
        if block.sizes != blocks[0].sizes or block.routing != blocks[0].routing:
            what = f"its sizes or its routing differ from those of {blocks[0].name}."
            yield Problem(what, "All MoE blocks must be alike.", block.name)
        if module.gate.weight.device != blocks[0].module.gate.weight.device:
            what = f"it is on {module.gate.weight.device}, and {blocks[0].name} is not."
            yield Problem(what, "Move the model to one device.", block.name)
