"""Checks of recipes that round gradients at random: what they draw depends on the row's key and the column alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import pytest
import torch
from torch import Tensor

from moefw.core.plugin import PrecisionPlugin
from moefw.core.records import RowGroups
from moefw.testing.suites.base import Suite
from moefw.testing.suites.watch import same_bits

ROWS: Final = 640
"""With the two blocks of a row, more than 20,000 draws."""
EACH: Final = 8
"""Every eighth value of a row is its largest, so that each block has one of them, and its scale is known."""
LEVELS: Final[Sequence[float]] = (0.3, 0.21, 0.137)
"""The other values of a row, as shares of the largest: below the half of it, where no format saturates."""
SIGMAS: Final = 4.0
"""Standard errors by which the mean of all draws may be off; that of one of the many columns, by two more."""


class RandomRounding(Suite):
    """Checks of what a recipe draws, with keys of rows; skipped for one that draws nothing."""

    plugin: ClassVar[type[PrecisionPlugin]]
    block: ClassVar[int]

    @abstractmethod
    def recipe(self) -> Any:
        """Recipe of one layer."""

    def _drawing(self) -> Any:
        """Recipe of one GEMM that rounds at random; skip the check if it draws nothing."""
        recipe = self.recipe()
        if not recipe.draws:
            pytest.skip(f"{self.plugin.name} rounds nothing at random")
        return recipe.at("gemm", groups=1)

    def test_random_rounding_has_no_bias(self) -> None:
        """The mean over 640 equal rows with keys of their own is what is rounded, in all columns and in each."""
        rows_RD, is_largest_D = self._equal_rows()
        operand_RD = _rounded(self._drawing(), rows_RD, _keys(ROWS))
        error_RD = (operand_RD - rows_RD).double()[:, ~is_largest_D]
        says = f"{self.plugin.name}: the mean of {error_RD.numel():,} values that are rounded at random"
        off = _standard_errors(error_RD.flatten())
        assert off <= SIGMAS, f"{says} is {off:.1f} standard errors off; {SIGMAS:g} are allowed."
        off = max(map(_standard_errors, error_RD.T))
        assert off <= SIGMAS + 2, f"{says} is {off:.1f} standard errors off in one column; {SIGMAS + 2:g} are allowed."

    def test_random_rounding_follows_the_keys_of_rows(self) -> None:
        """Rows in another order, with their keys, have the same bits: what is drawn for a token goes with it."""
        recipe = self._drawing()
        generator = torch.Generator().manual_seed(0)
        rows_RD = torch.randn(ROWS, 2 * self.block, generator=generator)
        order = torch.randperm(ROWS, generator=generator)
        keys_R = _keys(ROWS)
        in_order = _rounded(recipe, rows_RD, keys_R)
        in_another = _rounded(recipe, rows_RD[order], keys_R[order])
        what = (
            f"{self.plugin.name} draws by the place of a row: in another order, with their keys, rows have other bits."
        )
        assert same_bits(in_another, in_order[order]), f"{what} Draw from rows.keys_R."

    def test_random_rounding_draws_for_each_value(self) -> None:
        """Equal values of one row are not all rounded to the same side."""
        rows_RD, _ = self._equal_rows()
        operand_RD = _rounded(self._drawing(), rows_RD, _keys(ROWS))
        what = (
            f"{self.plugin.name} draws once for all columns of a row: equal values of a row are always rounded alike."
        )
        alike = all(_are_alike(operand_RD[:, rows_RD[0] == level]) for level in rows_RD[0].unique())
        assert not alike, f"{what} Mix the column into what is drawn."

    def _equal_rows(self) -> tuple[Tensor, Tensor]:
        """Equal rows ``(R, D)`` of two blocks, fp32, and the mask ``(D)`` of their largest values."""
        columns = torch.arange(2 * self.block)
        is_largest_D = columns % EACH == 0
        row_D = torch.tensor(LEVELS)[columns % len(LEVELS)].masked_fill(is_largest_D, 1.0)
        return row_D.repeat(ROWS, 1), is_largest_D


def _keys(rows: int) -> Tensor:
    """A key for each row: ``(R)`` int64."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)


def _rounded(recipe: Any, rows_RD: Tensor, keys_R: Tensor) -> Tensor:
    """Operand of gradients, rounded at random."""
    operand: Tensor = recipe.quantize(rows_RD, role="grad", during="dgrad", rows=RowGroups(keys_R=keys_R))
    return operand.float()


def _standard_errors(errors: Tensor) -> float:
    """Distance of the mean from zero in standard errors of the mean. Infinite for equal errors that are not zero."""
    mean = abs(errors.mean().item())
    standard_error = errors.std().item() / len(errors) ** 0.5
    return mean / standard_error if standard_error else (0.0 if mean < 1e-6 else torch.inf)


def _are_alike(values: Tensor) -> bool:
    """Whether all columns are equal."""
    return torch.equal(values, values[:, :1].expand_as(values))
