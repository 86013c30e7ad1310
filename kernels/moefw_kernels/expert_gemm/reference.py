"""Reference: grouped products of PyTorch in fp32, with the roundings of the kernels. The host reads nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moefw_kernels.expert_gemm.row_tiles import NUMBERS, ROWS, most_tiles
from moefw_kernels.swiglu import reference as swiglu
from moefw_kernels.swiglu.reference import Clamp


def row_tiles(ends_e: Tensor, num_rows: int) -> Tensor:
    """Number of tiles, then of each its group, first row and group end (see ``row_tiles.py``); 0 behind the last."""
    groups = len(ends_e)
    starts_e = F.pad(ends_e[:-1], (1, 0))
    behind_e = torch.cumsum((ends_e - starts_e + ROWS - 1) // ROWS, 0)
    tile_T = torch.arange(most_tiles(num_rows, groups), device=ends_e.device)
    group_T = torch.searchsorted(behind_e, tile_T, right=True)
    valid_T = group_T < groups
    group_T = group_T.clamp(max=groups - 1)
    before_T = F.pad(behind_e[:-1], (1, 0))[group_T]
    first_T = starts_e[group_T] + (tile_T - before_T) * ROWS
    numbers_TN = torch.stack([group_T, first_T, ends_e[group_T], torch.zeros_like(group_T)], 1)
    count_N = F.pad(behind_e[-1:], (0, NUMBERS - 1))
    return torch.cat([count_N, (numbers_TN * valid_T.unsqueeze(1)).flatten()]).int()


def gated(
    x_RD: Tensor,
    gate_up_eHD: Tensor,
    bias_eH: Tensor | None,
    weights_R: Tensor,
    ends_e: Tensor,
    tiles: Tensor,
    clamp: Clamp | None,
) -> tuple[Tensor, Tensor]:
    """Pre-activation ``(R, H)`` and weighted activation ``(R, F)``, in the dtype of ``x``."""
    h_RH = _products(x_RD, gate_up_eHD.mT, ends_e)
    if bias_eH is not None:
        h_RH += _of_groups(bias_eH, ends_e, len(x_RD))
    h_RH = h_RH.to(x_RD.dtype)
    return h_RH, swiglu.weighted_swiglu(h_RH, weights_R, clamp)


def product(
    x_RI: Tensor,
    weight: Tensor,
    bias_eO: Tensor | None,
    weights_R: Tensor | None,
    ends_e: Tensor,
    tiles: Tensor,
    transposed: bool,
) -> Tensor:
    """``(R, O)`` in the dtype of ``x``: products, plus each row's weight times its group's bias."""
    out_RO = _products(x_RI, weight.mT if transposed else weight, ends_e)
    if bias_eO is not None and weights_R is not None:
        out_RO += weights_R.unsqueeze(1) * _of_groups(bias_eO, ends_e, len(x_RI))
    return out_RO.to(x_RI.dtype)


def gated_backward(
    grad_RD: Tensor,
    down_eDF: Tensor,
    bias_eD: Tensor | None,
    h_RH: Tensor,
    weights_R: Tensor,
    ends_e: Tensor,
    tiles: Tensor,
    clamp: Clamp | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``h`` and of the weights (fp32), and the weighted activation, computed again."""
    grad_RF = _products(grad_RD, down_eDF, ends_e).to(h_RH.dtype)
    grad_RH, grad_weights_R, a_RF = swiglu.weighted_swiglu_backward(grad_RF, h_RH, weights_R, clamp)
    if bias_eD is not None:
        grad_weights_R += torch.linalg.vecdot(grad_RD.float(), _of_groups(bias_eD, ends_e, len(grad_RD)))
    return grad_RH, grad_weights_R, a_RF


def _products(x_RI: Tensor, weight_eIO: Tensor, ends_e: Tensor) -> Tensor:
    """Products of groups in fp32. Rows behind the last group are undefined."""
    if not len(x_RI):
        return x_RI.new_empty(0, weight_eIO.shape[-1], dtype=torch.float32)
    return F.grouped_mm(x_RI.float(), weight_eIO.float(), offs=ends_e)


def _of_groups(bias_eC: Tensor, ends_e: Tensor, num_rows: int) -> Tensor:
    """Bias of each row's group in fp32; for rows behind the last group, that of the last."""
    rows_R = torch.arange(num_rows, dtype=ends_e.dtype, device=ends_e.device)
    groups_R = torch.searchsorted(ends_e, rows_R, right=True).clamp_(max=len(ends_e) - 1)
    return bias_eC.float()[groups_R]
