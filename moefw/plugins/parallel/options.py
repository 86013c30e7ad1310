"""Common parts of layout options: worlds that fit, copies that are sharded, models that must be split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, final

from attrs import frozen

from moefw.core.errors import PlanError
from moefw.core.facts import Need, need
from moefw.core.records import Zero


@final
@frozen(kw_only=True)
class Sharing:
    """An option for the number of ranks that shard each parameter of a mesh; "all": over all copies.

    ``copy_ranks``: number of ranks that hold each parameter once; ``axes``: the axes of the copies, for errors.
    """

    option: str
    asked: int | Literal["all"]
    copy_ranks: int
    axes: str

    @property
    def unit(self) -> int:
        """The number of ranks of the smallest world with enough copies to shard over."""
        shards = 1 if self.asked == "all" else self.asked
        return self.copy_ranks * shards

    def over(self, world: int) -> int:
        """Number of ranks in ``world`` that shard a parameter. Raises PlanError where none fits."""
        copies = world // self.copy_ranks
        shards = copies if self.asked == "all" else self.asked
        if copies % shards:
            largest = min(shards, copies, _FAR)
            divisor = next(number for number in range(largest, 0, -1) if copies % number == 0)
            raise PlanError(
                f"{self.option} {shards} does not divide {self.axes} = {copies}, the copies of each parameter.",
                f"Use {self.option}: {divisor}.",
            )
        return shards


_FAR: Final = 2**16
"""The largest divisor that is tried for a suggestion."""


def shards_validator(_: object, option: Any, value: int | Literal["all"]) -> None:
    """Raise ValueError unless the value is "all" or a number of ranks. The attrs validator of a :class:`Sharing`."""
    if value != "all" and value < 1:
        raise ValueError(f"{option.name} {value} is less than one rank. Use a number from 1, or all.")


def zero_validator(sizes: Any, option: Any, value: Zero) -> None:
    """Raise ValueError on a stage of ZeRO below 3 without parameters that are sharded: it would have no effect.

    The attrs validator of ``zero``, beside options ``shard`` and perhaps ``expert_shard``.
    """
    if value != 3 and sizes.shard == 1 and getattr(sizes, "expert_shard", 1) == 1:
        raise ValueError(
            f"{option.name} {value} says how long weights and gradients that ranks shard are whole, and with shard: 1 "
            f"each rank holds them whole. Set shard, or leave {option.name} out."
        )


def fit_world(world: int | None, *, unit: int, exactly: bool, sizes: str, sharings: Sequence[Sharing] = ()) -> int:
    """``world`` if it is ``unit`` ranks or, unless ``exactly``, a multiple of it. Raises PlanError if not.

    None: the smallest world with the copies that ``sharings`` need. ``sizes`` spells out ``unit`` for the error.
    """
    smallest = unit if exactly else math.lcm(unit, *(sharing.unit for sharing in sharings))
    if world is None:
        return smallest
    if exactly:
        fits = world == unit
        needed = f"exactly {unit}"
        nearest = smallest
    else:
        fits = world >= unit and world % unit == 0
        needed = f"a multiple of {unit}"
        nearest = max(1, round(world / smallest)) * smallest
    if not fits:
        found = "1 rank does" if world == 1 else f"{world} ranks do"
        raise PlanError(
            f"{found} not fit this layout, which wants {needed} = {sizes}.",
            f"Start {nearest} {'rank' if nearest == 1 else 'ranks'}, or change the sizes.",
        )
    return world


def split_needs(sizes: Mapping[str, int]) -> list[Need]:
    """Need of a model that can be split for each option of pp, cp and tp that is above 1."""
    split_by = {"pp": "the layers", "cp": "each sequence", "tp": "each layer"}
    needs = []
    for option, size in sizes.items():
        if size > 1:
            axis = option.rpartition(".")[2]
            reason = f"{option} {size} splits {split_by[axis]}"
            needs.append(need("split", axis, reason=reason, fix=f"Use {option}: 1.", option=option))
    return needs
