"""An MoE layer whose GEMMs multiply quantized operands, written out on one rank, with the rounding axis of each operand.

``y = x W^T`` sums over the last axis of both, ``dx = dy W`` over the last axis of dy and the first of W,
``dW = dy^T x`` over the rows of both. Only the quantizers are shared with recipes and GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import nvfp4_oracle as nvfp4
from moefw.testing.choices import Rule, route
from moefw.testing.layer_case import LayerCase, Outcome, parameters_of, solve
from moefw.testing.oracle import Truth
from moefw_kernels.quantize import E5M2, Quantized, quantize_fp8, quantize_mxfp8, quantize_tensor
from nvfp4_oracle import Draws

Rounds = Callable[[Tensor], Tensor]
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Format:
    """Functions that round an operand for a sum over its last axis (``across``) and over the one before (``down``).

    ``codes``: returns the stored codes of ``down``. ``gradients``: rounds a gradient across and down if rounding is
    stochastic. ``mixes_rows``: ``down`` sums rows before it rounds. ``grad``: rounds a gradient along either axis if
    neither of these does. ``by_group``: ``codes`` takes ``ends_e`` to separate the rows of experts.
    """

    choice: Mapping[str, Any]
    rows: int
    across: Rounds
    down: Rounds
    weight_across: Rounds
    weight_down: Rounds
    codes: Callable[..., Quantized]
    gradients: Callable[[Tensor, Draws], tuple[Tensor, Tensor]] | None = None
    mixes_rows: bool = False
    grad: Rounds | None = None
    by_group: bool = False


def _values(quantizer: Callable[..., Quantized], **how: Any) -> Rounds:
    return lambda x: quantizer(x.contiguous(), **how).dequantize()


def _blockwise(**also: Any) -> Format:
    how = {"power_of_two": not also}
    across, down, square = (_values(quantize_fp8, block=block, **how) for block in ((1, 128), (128, 1), (128, 128)))
    choice = {"use": "fp8-blockwise", "backend": "emulate", **also}
    return Format(choice, 128, across, down, square, square, partial(quantize_fp8, block=(128, 1), **how))


_TENSOR = _values(quantize_tensor)
_ACROSS, _DOWN = (_values(quantize_mxfp8, block=block) for block in ((1, 32), (32, 1)))
FORMATS: Mapping[str, Format] = {
    "fp8-blockwise": _blockwise(),
    "fp8-blockwise fp32 scales": _blockwise(scales="fp32"),
    "mxfp8": Format(
        {"use": "mxfp8", "backend": "emulate"},
        32,
        _ACROSS,
        _DOWN,
        _ACROSS,
        _DOWN,
        partial(quantize_mxfp8, block=(32, 1)),
    ),
    "nvfp4": Format(
        {"use": "nvfp4", "backend": "emulate", "keep_bf16": []},
        16,
        nvfp4.across,
        nvfp4.down,
        nvfp4.weight,
        nvfp4.weight,
        nvfp4.codes_down,
        nvfp4.gradients,
        mixes_rows=True,
        by_group=True,
    ),
    "fp8-tensor": Format(
        {"use": "fp8-tensor", "backend": "emulate"},
        16,
        *[_TENSOR] * 4,
        quantize_tensor,
        grad=_values(quantize_tensor, fmt=E5M2),
        by_group=True,
    ),
}


def product(x: Tensor, weight: Tensor, form: Format) -> Tensor:
    """Return ``y = x W^T`` (T, O)."""
    return (form.across(x) @ form.weight_across(weight).T).to(x.dtype)


def product_backward(
    grad: Tensor, x: Tensor, weight: Tensor, form: Format, draws: Draws | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``dx`` (T, I) and ``dW`` (O, I)."""
    if form.grad is not None:
        across = down = form.grad(grad)
    elif draws is None or form.gradients is None:
        across, down = form.across(grad), form.down(grad)
    else:
        across, down = form.gradients(grad, draws)
    return (across @ form.weight_down(weight)).to(x.dtype), down.T @ form.down(x)


@dataclass
class Experts:
    """Results of one expert, or of a part of one: outputs and gradients of its rows, and gradients of its matrices."""

    out_RD: Tensor
    grad_x: Tensor
    grad_weights: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def expert(
    x_RD: Tensor, w_R: Tensor, grad_RD: Tensor, weights: Sequence[Tensor], form: Format, keys_R: nvfp4.Words
) -> Experts:
    """Compute ``W2 (w * silu(W1 x) * W3 x)``; W1 over W3 is one matrix, and zero rows pad the last block of rows."""
    count, (gate, up, down) = len(x_RD), weights
    more = -count % form.rows
    into, out_of = (Draws(np.pad(keys_R, (0, more)), f"layers.0.moe.experts.{name}") for name in ("gate_up", "down"))
    x_RD, grad_RD, w = F.pad(x_RD, (0, 0, 0, more)), F.pad(grad_RD, (0, 0, 0, more)), F.pad(w_R, (0, more))
    both, w = torch.cat([gate, up]), w.unsqueeze(1)
    g, u = product(x_RD, both, form).chunk(2, dim=1)
    s, sigmoid = F.silu(g), g.sigmoid()
    a = (s * u * w).to(x_RD.dtype)
    grad_a, grad_down = product_backward(grad_RD, a, down, form, out_of)
    grad_g, grad_u = grad_a * w * u * sigmoid * (1 + g * (1 - sigmoid)), grad_a * w * s
    grad_both = torch.cat([grad_g, grad_u], 1).to(x_RD.dtype)
    grad_x, grad_both = product_backward(grad_both, x_RD, both, form, into)
    grad_w = (grad_a.float() * s.float() * u.float()).sum(1)
    out = product(a, down, form)
    return Experts(out[:count], grad_x[:count], grad_w[:count], *grad_both.chunk(2), grad_down)


def shared_expert(
    x: Tensor, grad: Tensor, weights: Sequence[Tensor], form: Format, keys_T: nvfp4.Words
) -> tuple[Tensor, ...]:
    """Compute ``W2 (silu(W1 x) * W3 x)`` without padding. Returns out, dx, dW1, dW3, dW2."""
    gate, up, down = weights
    names = ("gate_proj", "up_proj", "down_proj")
    to_gate, to_up, to_down = (Draws(keys_T, f"layers.0.moe.shared_expert.{name}") for name in names)
    g, u = product(x, gate, form), product(x, up, form)
    s, sigmoid = F.silu(g), g.sigmoid()
    grad_a, grad_down = product_backward(grad, s * u, down, form, to_down)
    from_gate, grad_gate = product_backward(grad_a * u * sigmoid * (1 + g * (1 - sigmoid)), x, gate, form, to_gate)
    from_up, grad_up = product_backward(grad_a * s, x, up, form, to_up)
    return product(s * u, down, form), from_gate + from_up, grad_gate, grad_up, grad_down


class InFP32(LayerCase):
    """A layer case whose residual stream is fp32, so that only the operands are rounded."""

    dtype = torch.float32


def quantized_truth(
    layer_case: LayerCase, form: Format, *, etp: int = 1, groups: int = 1, packed: bool = False
) -> Truth:
    """Return the results of a layer case's layer; each of ``groups`` sets of consecutive ranks has all experts.

    ``packed``: rows travel to experts as codes.
    """
    weights = parameters_of(layer_case)
    drawn = [layer_case.draw(rank) for rank in range(layer_case.world)]
    x_TD, probe_TD = (torch.cat(tensors) for tensors in zip(*drawn, strict=True))
    keys_T = np.concatenate(
        [nvfp4.keys_of_tokens(int(layer_case.seeds(n)), count) for n, count in enumerate(layer_case.tokens)]
    )
    valid = torch.cat([layer_case.mask(rank) for rank in range(layer_case.world)])
    x, router = x_TD.double().requires_grad_(), weights["router.weight"].double().requires_grad_()
    routed = route(x @ router.T, Rule(top_k=layer_case.top_k, score="softmax"), valid=valid, ranks=layer_case.tokens)
    out, grad_x, grad_TK = torch.zeros_like(x_TD), torch.zeros_like(x_TD), torch.zeros(routed.ids_TK.shape)
    grads = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    together = torch.tensor([rank * groups // layer_case.world for rank in range(layer_case.world)])
    group_T = together.repeat_interleave(torch.tensor(layer_case.tokens))
    for number in range(layer_case.num_experts * groups * etp):
        e, rest = divmod(number, groups * etp)
        group, part = divmod(rest, etp)
        rows, choices = ((routed.ids_TK == e) & (group_T == group).unsqueeze(1)).nonzero(as_tuple=True)
        names = [f"experts.{e}.{kind}_proj.weight" for kind in ("gate", "up", "down")]
        pieces = [weights[name].chunk(etp, dim)[part] for name, dim in zip(names, (0, 0, 1))]
        w_R = routed.weights_TK.detach()[rows, choices].float()
        keys_R = nvfp4.keys_of_rows(keys_T[rows.numpy()], e)
        arrived = form.across(x_TD[rows]).to(x_TD.dtype) if packed else x_TD[rows]
        found = expert(arrived, w_R, probe_TD[rows], pieces, form, keys_R)
        out.index_add_(0, rows, found.out_RD)
        grad_x.index_add_(0, rows, found.grad_x)
        grad_TK.index_put_((rows, choices), found.grad_weights, accumulate=True)
        for name, dim, grad in zip(names, (0, 0, 1), (found.gate, found.up, found.down)):
            grads[name].chunk(etp, dim)[part].add_(grad)
    if layer_case.shared:
        names = [f"shared_expert.{kind}_proj.weight" for kind in ("gate", "up", "down")]
        for at in torch.arange(len(x_TD)).split(list(layer_case.tokens)):
            whole = [weights[name] for name in names]
            y, dx, *found_W = shared_expert(x_TD[at], probe_TD[at], whole, form, keys_T[at.numpy()])
            out[at], grad_x[at] = out[at] + y, grad_x[at] + dx
            for name, grad in zip(names, found_W, strict=True):
                grads[name] += grad
    routed.weights_TK.backward(grad_TK.double())
    assert x.grad is not None
    assert router.grad is not None
    grads |= {"router.weight": router.grad, "x": grad_x + x.grad}
    counts = torch.stack([(routed.ids_TK == e).sum() for e in range(layer_case.num_experts)]).double()
    return Truth(out_TD=out.double(), expert_ids_TK=routed.ids_TK, tokens_per_expert=counts, grads=grads)


def solve_many(layer_cases: Sequence[LayerCase]) -> list[Outcome]:
    """Solve layer cases of one world on this rank."""
    return [solve(layer_case) for layer_case in layer_cases]


class OneBatch(LayerCase):
    """A layer case whose tokens are the same for any number of ranks."""

    def draw(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the rank's part of the tokens and of the probe."""
        whole = LayerCase(tokens=(sum(self.tokens),), dim=self.dim, seed=self.seed, parts=self.parts).draw(0)
        x_TD, probe_TD = (tensor.split(list(self.tokens))[rank].clone() for tensor in whole)
        return x_TD, probe_TD

    def keys(self, rank: int) -> Tensor:
        """Return the keys of the rank's part of the tokens."""
        whole = LayerCase(tokens=(sum(self.tokens),), seed=self.seed).keys(0)
        return whole.split(list(self.tokens))[rank]
