"""Homes of matrices: which rank computes the update of each whole matrix, and what it needs for that, by arithmetic.

The ranks that store parts or copies of the same matrices are a *group*: those of dp, cp and tp for the dense mesh, of
edp and etp for experts. Each matrix of a group has one *home*, a rank that stores some of it. There it is computed once
a step for the whole world, and all others that store some of it get their part of the update. What lies whole on one
rank alone stays there.

Every rank does the same arithmetic over the same names and sizes, so none is asked, and nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from moefw.core.contracts import LayoutPlan
from moefw.core.errors import ContractError
from moefw.core.records import Canonical, Side
from moefw.runtime.parallel.boxes import Box, boxes_within, whole_shape
from moefw.runtime.parallel.holders import STAGE, STATE_HOLDERS, Holding

FP32_BYTES = 4

Cost = Callable[[tuple[int, int]], float]
"""Cost of the update of a matrix of a shape."""


@frozen(kw_only=True, eq=False)
class Stored:
    """How ranks hold a parameter, and the dimension along which FSDP shards it; None: each rank stores all it holds."""

    holding: Holding
    sharded_dim: int | None


@frozen
class Extent:
    """Where a part lies in a matrix: the index of its first element, and its sizes."""

    corner: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(box: Box | None) -> Extent | None:
        """Extent of a box; None: of none."""
        if box is None:
            return None
        sizes = (box.slices[dim].stop - box.slices[dim].start for dim in box.dims)
        return Extent(box.corner, tuple(sizes))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the part in the matrix."""
        return tuple(slice(first, first + size) for first, size in zip(self.corner, self.sizes, strict=True))


@frozen(eq=False)
class Spread:
    """What each rank of a group stores of a matrix, by position in the group; None: nothing of it.

    ``owners``: the positions that store the same extent, which are copies. ``stored_by``: those that store any.
    """

    extents: tuple[Extent | None, ...]
    owners: Mapping[Extent, Sequence[int]]
    stored_by: tuple[int, ...]

    @staticmethod
    def of(extents: Sequence[Extent | None]) -> Spread:
        """Spread of extents by position."""
        owners: dict[Extent, list[int]] = {}
        for position, extent in enumerate(extents):
            if extent is not None:
                owners.setdefault(extent, []).append(position)
        stored_by = (position for position, extent in enumerate(extents) if extent is not None)
        return Spread(tuple(extents), owners, tuple(stored_by))

    def source(self, extent: Extent, home: int) -> int:
        """Position that brings an extent to a home: the home itself, or the nearest one that stores it."""
        if self.extents[home] == extent:
            return home
        return min(self.owners[extent], key=lambda position: (abs(position - home), position))


@frozen(kw_only=True, eq=False)
class Matrix:
    """A named matrix of a group, whole, and how its ranks store it."""

    name: str
    shape: tuple[int, int]
    cost: float
    spread: Spread

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix in fp32."""
        return FP32_BYTES * math.prod(self.shape)


Sent = Mapping[int, Sequence[tuple[int, Extent]]]
"""By position: parts of matrices, each with the number of its matrix among those that a rank computes in a bucket."""


@frozen(kw_only=True, eq=False)
class Bucket:
    """Matrices that the ranks of a group compute between two exchanges, as the rank at a ``position`` sees them.

    ``computed``: those whose home is this rank, of equal shapes next to each other. ``given``: by position of the home,
    the names of matrices of which this rank brings its part there; ``taken``: what it gets as a home, by position of
    the source. Updates go back: ``returned`` by position of those that store parts, ``awaited`` by position of homes.
    ``moves``: whether any rank of the group sends anything.
    """

    position: int
    computed: tuple[Matrix, ...]
    given: Mapping[int, Sequence[str]]
    taken: Sent
    returned: Sent
    awaited: Mapping[int, Sequence[str]]
    moves: bool


@frozen(kw_only=True, eq=False)
class GroupPlan:
    """Homes of the matrices of a group.

    ``ranks``: the group. ``homes``: the position of each matrix's home. ``loads``: by position, the cost of what a rank
    computes. Those of experts include dense matrices; those of dense ones the experts that have no choice of a home.
    """

    ranks: tuple[int, ...]
    matrices: Sequence[Matrix]
    homes: Sequence[int]
    loads: Sequence[float]

    def buckets(self, position: int, bucket_bytes: int) -> list[Bucket]:
        """Buckets as the rank at a position sees them: of ``bucket_bytes`` at each home, or less, or of one matrix."""
        at_home: list[list[Matrix]] = [[] for _ in self.ranks]
        for matrix, home in zip(self.matrices, self.homes, strict=True):
            at_home[home].append(matrix)
        # Equal shapes next to each other are computed together.
        cut = [list(_cut(sorted(own, key=lambda one: (one.shape, one.name)), bucket_bytes)) for own in at_home]
        count = max(map(len, cut), default=0)
        return [
            _bucket(position, [of_home[number] if number < len(of_home) else [] for of_home in cut])
            for number in range(count)
        ]


def plan_homes(stored: Sequence[Stored], plan: LayoutPlan, rank: int, *, cost: Cost) -> list[GroupPlan]:
    """Homes of all matrices of which ``rank`` stores or holds some, by group: dense ones, then those of experts.

    Each matrix goes, the most costly first, to the rank with the least to do of those that store some of it. Dense ones
    are chosen first, spread over the groups of experts, and each of these groups then makes up for what its ranks have
    of them. Raises ContractError for a tensor that is no matrix, and for ranks that do not store each element of one.
    """
    geometry = _Geometry(plan)
    groups: dict[tuple[Side, tuple[int, ...]], list[Stored]] = {}
    for each in stored:
        side = each.holding.side
        groups.setdefault((side, _group(each.holding, plan, rank)), []).append(each)
    matrices = {
        group: sorted(geometry.matrices(members, group[1], cost), key=lambda matrix: matrix.name)
        for group, members in sorted(groups.items())  # dense comes first
    }
    alone = {group: _loads_alone(own, len(group[1])) for group, own in matrices.items()}
    # All groups of experts are alike: a rank's position in its own tells what it has to compute there in any case.
    of_experts = next((loads for (side, _), loads in alone.items() if side == "experts"), None)
    planned: dict[int, float] = {}
    """Cost of the dense matrices whose home is a rank."""
    plans = []
    for (side, ranks), own in matrices.items():
        # What ranks of other stages have to do is not known here, so all ranks of such a group begin with nothing.
        in_one_stage = not groups[side, ranks][0].holding.stages
        loads = [planned.get(other, 0.0) if in_one_stage else 0.0 for other in ranks]
        peers_of_each = [plan.group(other, STATE_HOLDERS["experts"]) for other in ranks]
        if side == "dense" and in_one_stage and of_experts is not None:
            loads = [of_experts[peers.index(other)] for other, peers in zip(ranks, peers_of_each, strict=True)]
        homes = _share_out(own, loads, [peers[0] for peers in peers_of_each])
        for home, matrix in zip(homes, own, strict=True):
            loads[home] += matrix.cost
            if side == "dense" and in_one_stage:
                planned[ranks[home]] = planned.get(ranks[home], 0.0) + matrix.cost
        plans.append(GroupPlan(ranks=ranks, matrices=own, homes=homes, loads=loads))
    return plans


def _loads_alone(matrices: Sequence[Matrix], size: int) -> list[float]:
    """Cost, by position, of the matrices that one rank alone stores."""
    loads = [0.0] * size
    for matrix in matrices:
        if len(matrix.spread.stored_by) == 1:
            loads[matrix.spread.stored_by[0]] += matrix.cost
    return loads


def _share_out(matrices: Sequence[Matrix], loads: Sequence[float], peers: Sequence[int]) -> list[int]:
    """Home of each matrix, by position, given the ``loads`` that ranks have already.

    Of ranks with equal loads, one is chosen whose ``peers``, those of the same number, have least.
    """
    loads = list(loads)
    of_peers: dict[int, float] = {}
    homes = [0] * len(matrices)

    def give(number: int, home: int) -> None:
        homes[number] = home
        loads[home] += matrices[number].cost
        of_peers[peers[home]] = of_peers.get(peers[home], 0.0) + matrices[number].cost

    with_choice = []
    for number, matrix in enumerate(matrices):
        if len(matrix.spread.stored_by) == 1:
            give(number, matrix.spread.stored_by[0])
        else:
            with_choice.append(number)
    for number in sorted(with_choice, key=lambda number: (-matrices[number].cost, matrices[number].name)):
        give(
            number,
            min(
                matrices[number].spread.stored_by,
                key=lambda position: (loads[position], of_peers.get(peers[position], 0.0), position),
            ),
        )
    return homes


def boxes_on(stored: Stored, plan: LayoutPlan, rank: int) -> tuple[Box, ...]:
    """Boxes of what a rank stores of a parameter."""
    geometry = _Geometry(plan)
    there = (geometry.box(stored, piece, rank) for piece in stored.holding.pieces)
    return tuple(box for box in there if box is not None)


def _group(holding: Holding, plan: LayoutPlan, rank: int) -> tuple[int, ...]:
    """Ranks that store parts or copies of a parameter, or hold a shard of it that is empty."""
    if not holding.stages:
        return plan.group(rank, STATE_HOLDERS[holding.side])
    ranks = plan.group(rank, ("pp", *STAGE))
    return tuple(other for other in ranks if plan.coordinates(other)["pp"] in holding.stages)


def _cut(matrices: Sequence[Matrix], bucket_bytes: int) -> Iterator[list[Matrix]]:
    """Yield the matrices in order, in buckets."""
    bucket: list[Matrix] = []
    free = bucket_bytes
    for matrix in matrices:
        if bucket and matrix.nbytes > free:
            yield bucket
            bucket = []
            free = bucket_bytes
        bucket.append(matrix)
        free -= matrix.nbytes
    if bucket:
        yield bucket


def _bucket(own: int, at_home: Sequence[Sequence[Matrix]]) -> Bucket:
    """Bucket as position ``own`` sees it. ``at_home``: the matrices of each home."""
    given: dict[int, list[str]] = {}
    awaited: dict[int, list[str]] = {}
    moves = False
    for home, matrices in enumerate(at_home):
        for matrix in matrices:
            spread = matrix.spread
            moves = moves or len(spread.stored_by) > 1
            extent = spread.extents[own]
            if extent is None or home == own:
                continue
            awaited.setdefault(home, []).append(matrix.name)
            if spread.source(extent, home) == own:
                given.setdefault(home, []).append(matrix.name)
    taken: dict[int, list[tuple[int, Extent]]] = {}
    returned: dict[int, list[tuple[int, Extent]]] = {}
    for number, matrix in enumerate(at_home[own]):
        for extent in matrix.spread.owners:
            source = matrix.spread.source(extent, own)
            if source != own:
                taken.setdefault(source, []).append((number, extent))
        for position, stored_there in enumerate(matrix.spread.extents):
            if stored_there is not None and position != own:
                returned.setdefault(position, []).append((number, stored_there))
    return Bucket(
        position=own,
        computed=tuple(at_home[own]),
        given=given,
        taken=taken,
        returned=returned,
        awaited=awaited,
        moves=moves,
    )


@frozen(eq=False)
class _Geometry:
    """What ranks store of matrices, computed once for all that lie alike in their parameters, as those of layers do."""

    plan: LayoutPlan
    _coordinates: dict[int, Mapping[str, int]] = field(factory=dict, init=False)
    _shards: dict[tuple[Side, int], tuple[int, int]] = field(factory=dict, init=False)
    _spreads: dict[Any, Spread] = field(factory=dict, init=False)

    def matrices(self, stored: Sequence[Stored], ranks: Sequence[int], cost: Cost) -> Iterator[Matrix]:
        """Yield the matrices of parameters of a group."""
        for each in stored:
            for piece in each.holding.pieces:
                yield self._matrix(each, piece, ranks, cost)

    def _matrix(self, stored: Stored, piece: Canonical, ranks: Sequence[int], cost: Cost) -> Matrix:
        shape = whole_shape_of_matrix(piece)
        key = (tuple(ranks), stored.holding.side, stored.sharded_dim, tuple(piece.parameter.shape), repr(piece.index))
        if piece.shard is not None:
            key = (*key, piece.shard.dim, piece.shard.count, piece.shard.axis)  # type: ignore[assignment]
        spread = self._spreads.get(key)
        if spread is None:
            spread = self._spreads[key] = Spread.of([Extent.of(self.box(stored, piece, rank)) for rank in ranks])
            if sum(extent.elements for extent in spread.owners) != math.prod(shape):
                what = f"the ranks {', '.join(map(str, ranks))} do not store each element of {piece.name} once."
                raise ContractError(what, "Let Canonical.shard and LayoutPlan.copies tell what each rank holds.")
        return Matrix(name=piece.name, shape=shape, cost=cost(shape), spread=spread)

    def box(self, stored: Stored, piece: Canonical, rank: int) -> Box | None:
        """Box of what a rank stores of a piece of a parameter; None: nothing."""
        if piece.shard is not None:
            index = self._coordinates_of(rank)[piece.shard.axis]
            piece = evolve(piece, shard=evolve(piece.shard, index=index))
        sizes = list(piece.parameter.shape)
        first = [0] * len(sizes)
        dim = stored.sharded_dim
        if dim is not None:
            index, count = self._shard(stored.holding.side, rank)
            # As torch cuts: equal chunks, of which the last may be smaller or missing.
            chunk = -(-sizes[dim] // count)
            first[dim] = min(index * chunk, sizes[dim])
            sizes[dim] = min(chunk, sizes[dim] - first[dim])
        return next(iter(boxes_within([piece], first, sizes)), None)

    def _coordinates_of(self, rank: int) -> Mapping[str, int]:
        if rank not in self._coordinates:
            self._coordinates[rank] = self.plan.coordinates(rank)
        return self._coordinates[rank]

    def _shard(self, side: Side, rank: int) -> tuple[int, int]:
        """Number of the shard that FSDP gives a rank, and the number of shards."""
        if (side, rank) not in self._shards:
            for row in self.plan.copies(rank, side):
                self._shards.update({(side, other): (index, len(row)) for index, other in enumerate(row)})
        return self._shards[side, rank]


def whole_shape_of_matrix(piece: Canonical) -> tuple[int, int]:
    """Shape of the named matrix of which a piece is all or a part. Raises ContractError for a tensor that is none."""
    shape = whole_shape(piece)
    if len(shape) != 2:
        what = f"the rule of the optimizer takes {piece.name}, a tensor {shape}, and updates matrices."
        raise ContractError(what, "Let MatrixRule.takes() refuse parameters with a tensor that has not two dimensions.")
    rows, columns = shape
    return rows, columns
