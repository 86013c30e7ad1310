"""Ranks that share a model generate one text, also where their logits differ in the last bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefw.core.stages import Batch
from moefw.testing.pool import RankPool
from moefw.training.errors import NotFiniteError
from moefw.training.generate import generate

VOCABULARY = 4
END = 3


class Numbers:
    """Text whose tokens are numbers."""

    vocab_size = VOCABULARY
    ends = (END,)

    def decode(self, ids: list[int]) -> str:
        """The numbers, one behind another."""
        return "".join(map(str, ids))


class Shared(nn.Module):
    """Model whose forward is collective. ``logits_V`` are this rank's, whatever the text is."""

    def __init__(self, logits_V: Tensor) -> None:
        super().__init__()
        self.logits_V = nn.Parameter(logits_V)

    def logits(self, batch: Batch) -> tuple[Tensor, None]:
        """The same for each token."""
        if dist.is_initialized():
            dist.barrier()
        return self.logits_V.expand(*batch.ids_BS.shape, VOCABULARY), None


def text_of(logits: list[list[float]], temperature: float) -> str:
    """Text of this rank, or what it raises."""
    model = Shared(torch.tensor(logits[dist.get_rank()]))
    data: Any = Numbers()
    group = dist.group.WORLD
    try:
        return generate(model, data, [0], tokens=3, temperature=temperature, seed=0, window=8, group=group)
    except NotFiniteError as error:
        return type(error).__name__


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        pytest.param(1, 2, "0111", id="another token"),
        pytest.param(1, END, "0111", id="an end on the second rank"),
        pytest.param(END, 1, "03", id="an end on the first rank"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_the_first_rank_chooses_each_token(
    pool: RankPool, first: int, second: int, text: str, temperature: float
) -> None:
    logits = [[float(token == likeliest) for token in range(VOCABULARY)] for likeliest in (first, second)]
    assert pool.run(text_of, 2, logits, temperature) == [text, text]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_raise_together_where_the_logits_of_one_are_not_finite(pool: RankPool, rank: int) -> None:
    logits = [[1.0] * VOCABULARY, [1.0] * VOCABULARY]
    logits[rank][1] = float("nan")
    assert pool.run(text_of, 2, logits, 0.0) == ["NotFiniteError", "NotFiniteError"]
