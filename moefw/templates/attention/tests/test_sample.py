from collections.abc import Mapping

import torch
from moefw.testing import KindSuite
from torch import Tensor

from moefw_sample import Sample

WIDTH = 32


def rotated(x_SHd: Tensor, positions_S: Tensor) -> Tensor:
    turns = positions_S.unsqueeze(1) * 10000.0 ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
    cos = turns.cos().unsqueeze(1)
    sin = turns.sin().unsqueeze(1)
    first, second = x_SHd.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def formula(weights: Mapping[str, Tensor], x_SD: Tensor, positions_S: Tensor) -> Tensor:
    q, k, v = ((x_SD @ weights[f"{name}_proj.weight"].T).unflatten(1, (-1, WIDTH)) for name in "qkv")
    q = rotated(q, positions_S)
    k = rotated(k, positions_S)
    scores_HSS = torch.einsum("shd,tgd->hst", q, k) / WIDTH**0.5
    hidden_SS = torch.ones(len(x_SD), len(x_SD), dtype=torch.bool).triu(1)
    shares_HSS = scores_HSS.masked_fill(hidden_SS, -torch.inf).softmax(-1)
    return torch.einsum("hst,tgd->shd", shares_HSS, v).flatten(1) @ weights["o_proj.weight"].T


class TestSample(KindSuite):
    plugin = Sample
    reference = staticmethod(formula)
