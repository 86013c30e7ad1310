"""The sums over tokens of which balance losses are made, and the Switch loss. See README.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefw_kernels.routing.balance import reference
from moefw_kernels.routing.balance.sums import Rows, Sums
from moefw_kernels.routing.choice import Choice
from moefw_kernels.routing.limits import kernels_take

__all__ = ["Rows", "Sums", "switch_loss", "token_sums", "z_loss"]


def token_sums(
    logits_TE: Tensor,
    choice: Choice,
    over: Sequence[Rows | None],
    *,
    scores_TE: Tensor | None = None,
    ids_TK: Tensor | None = None,
    mask_T: Tensor | None = None,
    z_coeff: float | None = None,
) -> tuple[tuple[Sums, ...], Tensor | None]:
    """Sums over each of ``over``, and the z-loss of all tokens times ``z_coeff``, a scalar. T may be 0.

    ``logits_TE`` fp32 or fp64. A token's shares are probabilities: its scores by ``choice.score`` divided by their sum.
    It chooses the ``choice.k`` best of all experts by score, whatever bias or groups limited it, and ``ids_TK`` (int64,
    -1 is none) are these choices if the caller has them. ``mask_T`` (bool, or 0 and 1): tokens that count; None: all.
    ``None`` among ``over`` is one row of all tokens, whose mass need not be added up in order.

    The z-loss is the sum of ``logsumexp(logits)^2`` (ST-MoE, arXiv 2202.08906 eq. 5).

    On a GPU fp32 takes two kernels forward for each of ``over`` and one backward, without atomics. The first stores at
    most T / 32 + R parts of rows, of (2E + 2) fp32 each, and the second adds them up in order. Saved are the logits.
    PyTorch operations, which take ``scores_TE`` (with their graph) where a router has made them, are used elsewhere.
    """
    if not kernels_take(logits_TE, choice):
        return reference.token_sums(logits_TE, choice, over, scores_TE, ids_TK, mask_T, z_coeff)
    if not over:
        if z_coeff is None:
            return (), None
        _, _, z = _Sums.apply(logits_TE, choice, ids_TK, mask_T, None, z_coeff)  # type: ignore[no-untyped-call]
        return (), z
    sums = []
    z = None
    for number, rows in enumerate(over):
        # The z-loss is over all tokens, whatever the rows: it comes with the first of them.
        coeff = z_coeff if number == 0 else None
        mass_RE, seen_RX, z_of_pass = _Sums.apply(  # type: ignore[no-untyped-call]
            logits_TE, choice, ids_TK, mask_T, rows or Rows(1), coeff
        )
        sums.append(Sums(mass_RE, seen_RX))
        if number == 0:
            z = z_of_pass
    return tuple(sums), z


def switch_loss(mass_RE: Tensor, seen_RX: Tensor, k: int, coeff: float) -> Tensor:
    """Load-balancing loss of each row of tokens times its valid tokens, summed, times ``coeff``: a scalar.

    A row of N valid tokens, of which ``n_e`` choose expert e, adds ``N * E / (K N^2) * sum_e mass_e n_e`` (Switch,
    arXiv 2101.03961 eq. 4-6): 1 for each token if experts are equally loaded. ``seen_RX`` holds n and N. If rows are
    spread over ranks, ``seen_RX`` is the sum over these ranks and ``mass_RE`` is not, and each rank returns its part of
    the loss. A row without valid tokens adds 0.
    """
    if not kernels_take(mass_RE, Choice(k=k)):
        return reference.switch_loss(mass_RE, seen_RX, k, coeff)
    loss: Tensor = _Switch.apply(mass_RE, seen_RX, coeff * mass_RE.shape[1] / k)  # type: ignore[no-untyped-call]
    return loss


def z_loss(logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """Sum over valid tokens of ``logsumexp(logits)^2``; ``valid_T`` is 1 for these and 0 for others."""
    z = token_sums(logits_TE, Choice(k=1), (), mask_T=valid_T, z_coeff=1.0)[1]
    assert z is not None
    return z


class _Sums(torch.autograd.Function):
    """Saves the logits, and the row of each token where it is given."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        choice: Choice,
        ids_TK: Tensor | None,
        mask_T: Tensor | None,
        rows: Rows | None,
        z_coeff: float | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        from moefw_kernels.routing.balance import triton

        ctx.save_for_backward(logits_TE, mask_T, None if rows is None else rows.row_T)
        ctx.score = choice.score
        ctx.count = None if rows is None else rows.count
        ctx.z_coeff = z_coeff
        sums = triton.token_sums(logits_TE, choice, ids_TK, mask_T, rows, z_coeff)
        # The three share one storage. ``data`` hides from autograd that they are views of it: otherwise it would refuse
        # that ranks add up ``seen_RX`` in place.
        mass_RE, seen_RX, z = (None if tensor is None else tensor.data for tensor in sums)
        if seen_RX is not None:
            ctx.mark_non_differentiable(seen_RX)
        ctx.set_materialize_grads(False)
        return mass_RE, seen_RX, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RE: Tensor | None, _: None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
        from moefw_kernels.routing.balance import triton

        if grad_RE is None and grad_z is None:
            return None, None, None, None, None, None
        logits_TE, mask_T, row_T = ctx.saved_tensors
        rows = None if ctx.count is None else Rows(ctx.count, row_T)
        grad_TE = triton.token_sums_backward(logits_TE, ctx.score, mask_T, rows, ctx.z_coeff, grad_RE, grad_z)
        return grad_TE, None, None, None, None, None


class _Switch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mass_RE: Tensor, seen_RX: Tensor, coeff: float) -> Tensor:
        from moefw_kernels.routing.balance import triton

        ctx.save_for_backward(seen_RX)
        ctx.coeff = coeff
        return triton.switch_loss(mass_RE, seen_RX, coeff)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        from moefw_kernels.routing.balance import triton

        (seen_RX,) = ctx.saved_tensors
        return triton.switch_loss_backward(seen_RX, grad, ctx.coeff), None, None
