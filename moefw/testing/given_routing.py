"""Truth of a layer whose router has no formula in the oracle: everything after the router, given its routing.

The router's ids and weights are constants of a dense layer in fp64. The dense layer gives the output and the gradients
of the experts, of the tokens through the experts, and of the routing weights. The gradient of the weights goes back
through the router's own autograd, auxiliary losses included, and gives the gradients of the router and of the tokens
through it. So a wrong router passes here (its own suite tests it), but a layer that misuses a correct router fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from moefw.compose.assembly import Assembly
from moefw.core.stages import Batch
from moefw.runtime.communication.agreement import everywhere
from moefw.testing.layer_case import LayerCase, build_layer, this_rank
from moefw.testing.oracle import Truth, expert_output, merged


@frozen
class RowBudget:
    """The ``rank_capacity`` beyond which choices are dropped. ``by_source``: each source rank has its share of it."""

    rank_capacity: float
    by_source: bool = False


def truth_given_routing(layer_case: LayerCase, parameters: Mapping[str, Tensor], budget: RowBudget | None) -> Truth:
    """This rank's part of the truth: its tokens' outputs and gradients, its share of every other gradient.

    ``parameters``: :func:`moefw.testing.layer_case.parameters_of`. Collective.
    """
    rank = this_rank()
    layer, shared = build_layer(layer_case)
    x_TD, probe_TD = layer_case.draw(rank)
    x_TD.requires_grad_()
    routing = layer.router(x_TD, batch_of(layer_case, rank))
    shared.close()
    ids_TK = routing.expert_ids_TK
    if budget is not None:
        ids = _all_ranks(ids_TK)
        ids_TK = ids_TK.masked_fill(dropped(layer_case, ids, budget)[rank], -1)
    leaves = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}
    weights = merged(leaves, layer_case.adapter_scale)
    x = x_TD.detach().double().requires_grad_()
    weights_TK = routing.weights_TK.detach().double().requires_grad_()
    clamp = layer_case.activation.clamp
    out = torch.zeros_like(x)
    for expert in range(layer_case.num_experts):
        gate = (weights_TK * (ids_TK == expert)).sum(-1, keepdim=True)
        out = out + gate * expert_output(x, weights, f"experts.{expert}.", clamp)
    if layer_case.shared:
        out = out + expert_output(x, weights, "shared_expert.", clamp)
    (out * probe_TD.double()).sum().backward()
    grads = {name: _grad(value) for name, value in leaves.items()}
    router_grads = _pull_back(routing.weights_TK, _grad(weights_TK), x_TD, layer.router)
    grads |= {f"router.{name}": grad for name, grad in router_grads.items() if name}
    return Truth(
        out_TD=out.detach(),
        expert_ids_TK=ids_TK,
        tokens_per_expert=routing.stats["tokens_per_expert"].double(),
        grads=grads | {"x": _grad(x) + router_grads[""]},
    )


def summed(parts: Sequence[Truth]) -> Truth:
    """Whole truth from every rank's part."""
    names = [name for name in parts[0].grads if name != "x"]
    grads = {name: torch.stack([part.grads[name] for part in parts]).sum(0) for name in names}
    return Truth(
        out_TD=torch.cat([part.out_TD for part in parts]),
        expert_ids_TK=torch.cat([part.expert_ids_TK for part in parts]),
        tokens_per_expert=torch.stack([part.tokens_per_expert for part in parts]).sum(0),
        grads=grads | {"x": torch.cat([part.grads["x"] for part in parts])},
    )


def batch_of(layer_case: LayerCase, rank: int) -> Batch:
    """Training batch of a rank."""
    mask_BS = layer_case.mask(rank).unsqueeze(0) if layer_case.masked else None
    scale = torch.tensor(1.0 / max(1, layer_case.valid_tokens))
    ids = torch.zeros(1, layer_case.tokens[rank], dtype=torch.int64)
    return Batch(ids_BS=ids, labels_BS=ids, mask_BS=mask_BS, loss_scale=scale, seeds_B=layer_case.seeds(rank))


def dropped(layer_case: LayerCase, ids: Sequence[Tensor], budget: RowBudget) -> list[Tensor]:
    """Each rank's choices beyond a budget, bool (T, K)."""
    assembly: Assembly = layer_case.resolve()
    plan = assembly.layout
    masks_by_rank = [torch.zeros_like(ids_TK, dtype=torch.bool) for ids_TK in ids]
    for group in {plan.group(rank, ("ep", "etp")) for rank in range(plan.world)}:
        masks = over_budget(
            [ids[rank] for rank in group],
            num_experts=layer_case.num_experts,
            ep=plan.sizes["ep"],
            budget=budget,
            row_alignment=layer_case.row_alignment,
        )
        for rank, mask_TK in zip(group, masks, strict=True):
            masks_by_rank[rank] = mask_TK
    return masks_by_rank


def _all_ranks(ids_TK: Tensor) -> list[Tensor]:
    """Ids of every rank of the world, this one's without a world. Collective."""
    if not dist.is_initialized():
        return [ids_TK]
    gathered = everywhere(ids_TK.tolist(), dist.group.WORLD)
    return [torch.tensor(ids, dtype=ids_TK.dtype).reshape(-1, ids_TK.shape[1]) for ids in gathered]


def _pull_back(weights_TK: Tensor, grad_TK: Tensor, x_TD: Tensor, router: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients of the router's parameters by name, and of the tokens under ``""``."""
    inputs = {"": x_TD, **dict(router.named_parameters())}
    if not weights_TK.requires_grad:
        return {name: torch.zeros_like(value, dtype=torch.float64) for name, value in inputs.items()}
    grads = torch.autograd.grad(weights_TK, list(inputs.values()), grad_TK.to(weights_TK.dtype), allow_unused=True)
    return {
        name: torch.zeros_like(value, dtype=torch.float64) if grad is None else grad.double()
        for (name, value), grad in zip(inputs.items(), grads, strict=True)
    }


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def over_budget(
    expert_ids: Sequence[Tensor],
    *,
    num_experts: int,
    ep: int,
    budget: RowBudget,
    row_alignment: int = 1,
    max_tokens: int | None = None,
) -> list[Tensor]:
    """Choices beyond the budget of each rank of one expert group, bool ``(T, K)``, by brute force.

    Rows are in order (expert, source rank, token), with each expert's rows padded to the alignment. A rank's budget
    is ``rank_capacity * etp * K`` rows per token of the rank with the most tokens, or of ``max_tokens``, rounded up to
    the alignment. With experts in parts, all parts of an expert drop the same choices. If each source rank has its
    share, its rows beyond that are dropped first, the last in order (expert, token).
    """
    masks = [torch.zeros_like(ids_TK, dtype=torch.bool) for ids_TK in expert_ids]
    etp = len(expert_ids) // ep
    top_k = expert_ids[0].shape[1]
    choices = top_k * (max_tokens or max(map(len, expert_ids)))
    most_rows = _aligned(math.ceil(budget.rank_capacity * etp * choices), row_alignment)
    limits_sources = budget.by_source and len(expert_ids) > 1
    most_rows_of_source = math.ceil(math.ceil(budget.rank_capacity * choices) / ep)
    local_experts = num_experts // ep
    for ep_index in range(ep):
        num_rows = 0
        sent = [0] * len(expert_ids)
        for expert in range(ep_index * local_experts, (ep_index + 1) * local_experts):
            for rank, ids_TK in enumerate(expert_ids):
                for token, choice in (ids_TK == expert).nonzero().tolist():
                    is_beyond_share = limits_sources and sent[rank] >= most_rows_of_source
                    masks[rank][token, choice] = is_beyond_share or num_rows >= most_rows
                    sent[rank] += 1
                    if not is_beyond_share:  # a row beyond its source's share is not sent, and takes no place
                        num_rows += 1
            num_rows = _aligned(num_rows, row_alignment)
    return masks


def _aligned(num_rows: int, alignment: int) -> int:
    return -(-num_rows // alignment) * alignment
