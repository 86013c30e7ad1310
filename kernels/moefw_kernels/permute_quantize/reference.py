"""Reference in plain PyTorch. Blocks are along rows, so a row of codes is copied as its token would be."""

from __future__ import annotations

import torch
from torch import Tensor

from moefw_kernels.permute import RowMap
from moefw_kernels.quantize import Quantized, Scales, quantize_rows


def permute_quantize(x_TD: Tensor, rows: RowMap, scales: Scales, out: Quantized) -> None:
    """Quantize each token once and copy its codes and scales to all of its rows in ``out``."""
    tokens = quantize_rows(x_TD, scales=scales)
    zeros = quantize_rows(x_TD.new_zeros(1, x_TD.shape[1]), scales=scales)
    _copy_rows(out.codes, tokens.codes, zeros.codes, rows)
    _copy_rows(out.scales, tokens.scales, zeros.scales, rows)


def _copy_rows(to: Tensor, of_token: Tensor, of_zeros: Tensor, rows: RowMap) -> None:
    """Copy the row of each token to its rows in ``to``, as integers, so bit by bit; padding gets ``of_zeros``."""
    word = torch.int32 if to.dtype is torch.float32 else torch.uint8
    to, of_token, of_zeros = (tensor.view(word) for tensor in (to, of_token, of_zeros))
    if len(of_token):
        to.copy_(of_token.index_select(0, rows.token_R))
    if rows.padding is not None:
        to[rows.padding] = of_zeros
