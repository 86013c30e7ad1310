"""The MoE layer of others: one router and stacked bf16 weights, with the experts of each library that is installed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_layer import Layer, Shape

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens (T, D), ids int64 (T, K) and weights bf16 (T, K) to the output (T, D)."""
Weights = Mapping[str, nn.Parameter]
Made = tuple[Experts, Iterable[nn.Parameter]]
"""Experts and their parameters."""


class Peer:
    """A router as Hugging Face's Qwen3, then a library's experts, with our layer's weights and tokens."""

    def __init__(self, mine: Layer, shape: Shape, made: Made, dtype: torch.dtype = torch.bfloat16) -> None:
        self.router = nn.Parameter(mine.module.router.weight.detach().to(dtype))
        self.x_TD = mine.x_TD.detach().to(dtype).requires_grad_()
        self.probe_TD = mine.probe_TD.to(dtype)
        self.top_k = shape.top_k
        self.experts, weights = made
        self.parameters = (self.x_TD, self.router, *weights)

    def forward(self) -> Tensor:
        """Return the output, ``(T, D)``."""
        scores_TE = F.linear(self.x_TD, self.router).softmax(-1, dtype=torch.float32)
        weights_TK, ids_TK = scores_TE.topk(self.top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return self.experts(self.x_TD, ids_TK, weights_TK.to(self.x_TD.dtype))

    def run(self) -> None:
        """Run forward and backward with new gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self.forward().backward(self.probe_TD)


def stacked(mine: Layer, dtype: torch.dtype = torch.bfloat16) -> dict[str, nn.Parameter]:
    """Return copies of our experts' weights: gate and up (E, 2F, D), down (E, D, F)."""
    named = dict(mine.module.experts.named_parameters())
    return {name: nn.Parameter(named[name].detach().to(dtype, copy=True)) for name in ("gate_up", "down")}


def hugging_face(shape: Shape, weights: Weights) -> Made:
    """Return the ``grouped_mm`` experts of transformers."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": shape.dim, "moe_intermediate_size": shape.expert_dim, "num_experts": shape.num_experts}
    config = Qwen3MoeConfig(num_experts_per_tok=shape.top_k, **sizes)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj = weights["gate_up"]
    experts.down_proj = weights["down"]
    return experts, experts.parameters()


def liger(shape: Shape, weights: Weights) -> Made:
    """Return the fused experts of Liger-Kernel."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def experts(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        given = (x_TD, weights["gate_up"], weights["down"], ids_TK.int(), weights_TK)
        out_TD: Tensor = LigerFusedMoEFunction.apply(*given)
        return out_TD

    return experts, weights.values()


def scattermoe(shape: Shape, weights: Weights) -> Made:
    """Return the experts of ScatterMoE, whose first weight stacks up before gate."""
    from scattermoe.mlp import GLUMLP

    with torch.device("meta"):
        experts = GLUMLP(shape.dim, shape.expert_dim, shape.num_experts, shape.top_k)
    experts.experts.weight = nn.Parameter(weights["gate_up"].detach().roll(shape.expert_dim, 1))
    experts.output_experts.weight = weights["down"]
    return lambda x_TD, ids_TK, weights_TK: experts(x_TD, weights_TK, ids_TK), experts.parameters()


NOT_CARRIED = "not carried"
ON_A_CPU = ("hugging face",)
"""Libraries that need no GPU."""
PEERS: Mapping[str, tuple[str, Callable[[Shape, Weights], Made]]] = {
    "hugging face": ("transformers", hugging_face),
    "liger": ("liger_kernel", liger),
    "scattermoe": ("scattermoe", scattermoe),
}
"""The package of each library, and its experts."""
ALLOWED = 0.02
"""Relative difference of outputs for the same experts and weights in bf16: about 2^-8 for each of two GEMMs."""


def peers(
    mine: Layer, shape: Shape, device: torch.device, *, names: Collection[str] = tuple(PEERS)
) -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the layers of the named others that compute what ours does, and why each other one is left out.

    Libraries in Triton run only on a GPU.
    """
    found: dict[str, Peer] = {}
    left_out: dict[str, str] = {}
    weights = stacked(mine)
    for name in names:
        package, make = PEERS[name]
        if find_spec(package) is None:
            left_out[name] = NOT_CARRIED
        elif device.type == "cpu" and name not in ON_A_CPU:
            left_out[name] = "needs a GPU"
        else:
            try:
                peer = Peer(mine, shape, make(shape, weights))
                error = difference(mine, peer, shape)
            except Exception as failure:  # another library's failure must not cost our own numbers
                left_out[name] = f"failed: {type(failure).__name__}: {failure}"[:500]
                continue
            if error <= ALLOWED:
                found[name] = peer
            else:
                left_out[name] = f"computes something else: off by {error:.2%}"
    return found, left_out


@torch.no_grad()
def difference(mine: Layer, peer: Peer, shape: Shape) -> float:
    """Return the relative difference of outputs for our router's choices."""
    routing = mine.module.router(mine.x_TD, mine.batch)
    theirs = peer.experts(peer.x_TD, routing.expert_ids_TK, routing.weights_TK.bfloat16()).float()
    ours = mine.forward().float()
    return float((theirs - ours).norm() / ours.norm())
