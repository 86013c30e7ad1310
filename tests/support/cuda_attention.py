"""PyTorch's attention operators for CUDA, on a CPU: signatures and shapes are those of its own meta kernels.

Limits are those of ``attention.cu``, ``attention_backward.cu`` and FlashAttention's ``flash_api.cpp``, values those of
a dense softmax in fp64.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class CudaAttention:
    """In the place of ``torch.ops.aten``. ``called`` lists the operators that were called, without their common start."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def _scaled_dot_product_flash_attention(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        made = self._shapes("_flash_attention", q, k, v, *rest, **named)
        flash_takes(q, k, v)
        out, lse = forward(q, k, v, _causal(q, k, rest[1]), named["scale"])
        return _as(made[0], out), _as(made[1], lse), *made[2:]

    def _scaled_dot_product_flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **named: Any
    ) -> Any:
        assert torch.are_deterministic_algorithms_enabled(), "two equal backwards would differ in their last bits"
        made = self._shapes("_flash_attention_backward", grad, q, k, v, out, lse, *rest, **named)
        flash_takes(grad, q, k, v, out)
        assert (lse.shape, lse.dtype, lse.is_contiguous()) == (q.shape[:-1], torch.float32, True)
        assert rest[:4] == (None, None, q.shape[2], k.shape[2])
        grads = backward(grad, q, k, v, out, lse, _causal(q, k, rest[5]), named["scale"])
        return tuple(_as(one, other) for one, other in zip(made, grads, strict=True))

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_lse: bool, *rest: Any, **named: Any
    ) -> Any:
        made = self._shapes("_efficient_attention", q, k, v, bias, compute_lse, *rest, **named)
        efficient_takes(q, k, v, bias)
        assert compute_lse
        out, lse = forward(q, k, v, _causal(q, k, rest[1]) if bias is None else bias, named["scale"])
        padded = torch.full_like(made[1], inf, device="cpu")
        padded[..., : q.shape[2]] = lse
        return _as(made[0], out), padded, *made[2:]

    def _scaled_dot_product_efficient_attention_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        *rest: Any,
        **named: Any,
    ) -> Any:
        assert torch.are_deterministic_algorithms_enabled(), "two equal backwards would differ in their last bits"
        made = self._shapes("_efficient_attention_backward", grad, q, k, v, bias, out, lse, *rest, **named)
        efficient_takes(q, k, v, bias)
        assert out.transpose(1, 2).is_contiguous()
        assert lse.shape[-1] % 32 == 0
        assert (lse[..., q.shape[2] :] == inf).all()
        assert rest[3] == [True, True, True, False]
        bias = _causal(q, k, rest[4]) if bias is None else bias
        grads = backward(grad, q, k, v, out, lse[..., : q.shape[2]], bias, named["scale"])
        return *(_as(one, other) for one, other in zip(made[:3], grads, strict=True)), None

    def _shapes(self, name: str, *args: Any, **named: Any) -> Any:
        self.called.append(name.removeprefix("_"))
        operator = getattr(torch.ops.aten, f"_scaled_dot_product{name}")
        return operator(*tree_map_only(Tensor, lambda x: x.to("meta"), args), **named)


def flash_takes(q: Tensor, *others: Tensor) -> None:
    width = q.shape[-1]
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert width % 8 == 0
    assert width <= 256
    for x in (q, *others):
        assert (x.shape[-1], x.dtype, x.stride(-1)) == (width, q.dtype, 1)


def efficient_takes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    assert q.shape[1] == k.shape[1] == v.shape[1]
    for x in (q, k, v):
        assert (x.shape[-1] % 8, x.stride(-1), x.dtype) == (0, 1, q.dtype)
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert (bias.dtype, bias.stride(-1)) == (q.dtype, 1)
        assert not any(stride % 8 for stride in bias.stride()[:-1])


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias, scale)
    return scores.softmax(-1) @ _spread(q, v), scores.logsumexp(-1)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's (arXiv 2205.14135, algorithm 4), which trusts ``out`` and ``lse``."""
    grad, wide_q = grad.double(), q.double()
    weights = (_scores(q, k, bias, scale) - lse.double().unsqueeze(-1)).exp()
    along = (grad * out.double()).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ _spread(q, v).mT - along) * scale
    grad_k, grad_v = grad_scores.mT @ wide_q, weights.mT @ grad
    return grad_scores @ _spread(q, k), *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (grad_k, grad_v))


def _scores(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> Tensor:
    return q.double() @ _spread(q, k).mT * scale + bias.double()


def _spread(q: Tensor, x: Tensor) -> Tensor:
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _causal(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    bias = torch.zeros(q.shape[2], k.shape[2])
    return bias.masked_fill_(torch.ones_like(bias, dtype=torch.bool).triu(1), -inf) if causal else bias


def _as(like: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(like, device="cpu").copy_(values)
