"""The excerpts of candidates: from memory, from the cache, or measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Any, Final

from attrs import define, evolve, field, frozen

from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.core.errors import MoefwError, PlanError
from moefw.core.records import Stage
from moefw.planner import cache as cache_files
from moefw.planner.measurement.alike import facts_of
from moefw.planner.plans import without_garbage_collection
from moefw.planner.skew import EVEN, largest_skew
from moefw.planner.tune.parts import MICRO_BATCHES, SIDES, Excerpt, Sides
from moefw.planner.tune.settings import Settings, pipeline_of
from moefw.runtime.parallel.meshes import COPIES
from moefw.runtime.pipeline.placement import Stages

ROW: Final = 3
"""Equal blocks of layers in a row: the one in the middle has neighbours like itself."""
LONGEST: Final = 4
"""Layers of a block at most."""
POSITIONS: Final = 2
"""Positions on pp of an excerpt: without pp, what both have is in one."""
CUTTING: Final = ("tp", "ep", "etp")
"""Axes that decide the shapes of the parameters of a rank."""
INSIDE: Final = ("cp", "tp", "ep", "etp")
"""Axes whose groups are the same in an excerpt."""
Resolve = Callable[[Settings, int | None], Assembly]
"""Assembly of a spec with settings for so many ranks; None: the fewest that its layout fits.

Raises MoefwError with what ``check`` finds.
"""


@frozen
class Measured:
    """What a candidate's ledger is composed of: the excerpt, and the kind of each layer."""

    excerpt: Excerpt
    kinds: Mapping[int, str]


@frozen(kw_only=True)
class _Part:
    """What is measured of a candidate: stages of an assembly with few ranks, as
    :class:`moefw.planner.tune.excerpt.ExcerptAssembly` has them.

    ``cuts``: along which dimensions parameters are cut for ``shards``; empty: as by the ranks of the assembly.
    """

    assembly: Assembly
    stages: Stages
    kinds: Mapping[int, str]
    by_phase: bool
    shards: Sides
    cuts: Sequence[int]

    def identity(self) -> Sequence[Any]:
        """What an excerpt depends on beside code and routing: of ``shards``, the cuts alone."""
        chosen = [[[stage.index, *stage.layers] for stage in at] for at in self.stages]
        return [cache_files.identity(self.assembly), chosen, self.by_phase, [*self.cuts]]


@define
class Excerpts:
    """Excerpts that are measured once each. ``cache``: a folder; None: none is kept.

    ``skew``: their memory is that of the rank with most rows, so many times the mean, or as many as it can have; None:
    routing is even. ``measured`` and ``from_cache``: how many were needed until now.
    """

    resolve: Resolve
    cache: Path | None
    skew: float | None = None
    measured: int = 0
    from_cache: int = 0
    _known: dict[object, Measured] = field(factory=dict)
    _like: dict[tuple[int, ...], Excerpt] = field(factory=dict)
    """The first excerpt with some shapes of parameters, by the sizes of the axes that decide these."""
    _code: dict[frozenset[str], Any] = field(factory=dict)

    def of(self, settings: Settings, assembly: Assembly) -> Measured:
        """Excerpt of the layers of an assembly with such settings, and their kinds.

        More ranks may cut parameters along another dimension than the few of an excerpt do, and copy what they gather
        once more: then layers are measured as they cut them. Which do is known of shapes, so of an excerpt like it.
        """
        key = self._key(settings, assembly)
        sizes = tuple(assembly.layout.size(axis) for axis in CUTTING)
        if sizes not in self._like:
            first = self._known.get(key) or self._find(settings, assembly)
            self._known[key] = first
            if first.excerpt.unknown:
                return first
            self._like[sizes] = first.excerpt
            self._known[key, first.excerpt.cuts(first.excerpt.shards)] = first
        like = self._like[sizes]
        cuts = like.cuts(_shards(assembly))
        if (key, cuts) not in self._known:
            self._known[key, cuts] = self._find(settings, assembly, like)
        return self._known[key, cuts]

    def _key(self, settings: Settings, assembly: Assembly) -> object:
        """What an excerpt depends on: neither pp, nor the number of copies if it is more than one.

        Of the schedule, whether it merges passes: each phase then has a graph of its own, and frees what it can.
        """
        others = pipeline_of(assembly)
        own = [(path, repr(value)) for path, value in settings.items() if path not in others]
        return tuple(own), _ranks_of_stage(assembly), assembly.parts.pipeline.merges

    def _find(self, settings: Settings, assembly: Assembly, like: Excerpt | None = None) -> Measured:
        """Excerpt with the work of even routing.

        ``like``: one with the same shapes, which says whether the assembly's ranks cut them as those of the excerpt;
        None: that is unknown, and these do.
        """
        numbers = sorted(number for stages in assembly.stages for stage in stages for number in stage.layers)
        kinds = _named({number: repr(facts_of(assembly, number)) for number in numbers})
        small = self._small(settings, assembly)
        shards = _shards(small)
        cuts: Sequence[int] = ()
        if like is not None and like.cuts(shards) != like.cuts(_shards(assembly)):
            shards = _shards(assembly)
            cuts = like.cuts(shards)
        part = _Part(
            assembly=small,
            stages=_stages([*kinds.values()], has_neighbours=_gathers_ahead(assembly)),
            kinds=kinds,
            by_phase=assembly.parts.pipeline.merges,
            shards=shards,
            cuts=cuts,
        )
        even = self._excerpt(part, skew=None)
        if self.skew is None:
            return Measured(even, kinds)
        factor = min(self.skew, largest_skew(small))
        if factor == EVEN:
            return Measured(evolve(even, skew=EVEN), kinds)
        return Measured(self._excerpt(part, skew=factor).with_work_of(even), kinds)

    def _excerpt(self, part: _Part, *, skew: float | None) -> Excerpt:
        """Excerpt from the cache, or measured."""
        path = None
        if self.cache is not None:
            identity = [*part.identity(), skew, self._sources(part.assembly)]
            path = self.cache / f"{cache_files.digest(identity)}.json"
            data = cache_files.stored(path)
            if data is not None:
                self.from_cache += 1
                return Excerpt.of_data(data)
        with without_garbage_collection():
            from moefw.planner.tune.excerpt import measure

            excerpt = measure(
                part.assembly, part.stages, part.kinds, by_phase=part.by_phase, shards=part.shards, skew=skew
            )
        self.measured += 1
        if path is not None and not excerpt.unknown:  # what is missing may be installed later
            cache_files.store(path, excerpt.to_data())
        return excerpt

    def _small(self, settings: Settings, assembly: Assembly) -> Assembly:
        """Assembly of the same layers with two positions on pp, and as few ranks as are like the candidate's.

        Raises PlanError for a model of fewer layers.
        """
        if assembly.site.num_layers < POSITIONS:
            what = (
                f"a search measures layers in {POSITIONS} stages, and the model has {assembly.site.num_layers} layer."
            )
            raise PlanError(what, "Search with another layer like it; moefw plan takes the model as it is.")
        train = assembly.spec.train
        few, all_of_stage = _ranks_of_stage(assembly), assembly.layout.world // len(assembly.stages)

        def of(ranks: int) -> Assembly:
            dp = ranks * assembly.layout.size("dp") * len(assembly.stages) // assembly.layout.world
            tokens = MICRO_BATCHES * dp * train.micro_batch * train.seq_len
            paths = pipeline_of(assembly)
            values = dict(zip(paths, (POSITIONS, defaults()["pipeline"]), strict=True))
            others = {path: value for path, value in settings.items() if path not in paths}
            return self.resolve({**others, **values, ("train", "tokens_per_step"): tokens}, POSITIONS * ranks)

        try:
            return of(few)
        except MoefwError:
            if few == all_of_stage:
                raise
        return of(all_of_stage)

    def _sources(self, assembly: Assembly) -> Any:
        names = cache_files.packages(assembly)
        if names not in self._code:
            self._code[names] = [*cache_files.sources(names)]
        return self._code[names]


def _named(kinds: Mapping[int, str]) -> Mapping[int, str]:
    """Kinds by layer under names that do not depend on pp, as facts do: numbers in the order of the first layers."""
    names = {kind: str(number) for number, kind in enumerate(dict.fromkeys(kinds.values()))}
    return {layer: names[kind] for layer, kind in kinds.items()}


def _ranks_of_stage(assembly: Assembly) -> int:
    """Fewest ranks of a stage with the same groups of tp, cp, ep and etp in nodes, and as much as two copies of
    parameters where there are several; all of the stage's where copies are sharded over some of them.
    """
    layout: Any = assembly.layout
    sizes = layout.sizes
    whole: int = layout.world // sizes["pp"]
    per_node = assembly.site.ranks_per_node or layout.world
    for side in SIDES:
        if 1 < layout.num_shards(side) < len(layout.group(0, COPIES[side])):
            return whole
    ranks = lcm(sizes["tp"] * sizes["cp"], sizes["ep"] * sizes["etp"])
    needed = [side for side, axes in COPIES.items() if any(sizes[axis] > 1 for axis in axes)]
    while ranks < whole:
        copies = {"dense": ranks // sizes["tp"], "experts": ranks // (sizes["ep"] * sizes["etp"])}
        has_dp = sizes["dp"] == 1 or ranks > sizes["tp"] * sizes["cp"]
        if has_dp and all(copies[side] > 1 for side in needed):
            break
        ranks *= 2
    if whole % ranks:
        return whole
    groups = [layout.group(0, (axis,)) for axis in INSIDE]
    strides = [group[1] - group[0] for group in groups if len(group) > 1]
    is_inside = all(max(group) < ranks for group in groups)
    return ranks if is_inside and (not strides or max(strides) < per_node or ranks == whole) else whole


def _shards(assembly: Assembly) -> Sides:
    """By mesh, the number of ranks that share a parameter."""
    return {side: assembly.layout.num_shards(side) for side in SIDES}


def _gathers_ahead(assembly: Assembly) -> bool:
    """Whether what a layer holds depends on the next one, whose weights are gathered ahead for each pass."""
    layout: Any = assembly.layout
    return any(layout.num_shards(side) > 1 and layout.zero(side) == 3 for side in SIDES)


def _stages(kinds: Sequence[str], *, has_neighbours: bool) -> Stages:
    """Stages of an excerpt: a layer of each kind, and the last layer.

    ``has_neighbours``: whether the layer of a kind has some like itself before and behind it, if there are such.
    """
    count = len(kinds)
    last = range(count - 1, count)
    choose = _rows_and_others if has_neighbours else _fewest
    return ((Stage(0, 2, choose(kinds[:-1], known=kinds[-1:])),), (Stage(1, 2, last),))


def _fewest(kinds: Sequence[str], known: Sequence[str]) -> range:
    """Fewest layers in a row that have each kind but ``known`` ones; one at least."""
    needed = {*kinds} - {*known}
    count = len(kinds)
    rows = (range(first, first + length) for length in range(1, count + 1) for first in range(count - length + 1))
    return next((row for row in rows if needed <= {*kinds[row.start : row.stop]}), range(0))


def _rows_and_others(kinds: Sequence[str], known: Sequence[str]) -> range:
    """Layers that have each kind in a row of equal blocks, if there is one, and each other kind but ``known`` ones."""
    chosen = range(0)
    for kind in dict.fromkeys(kinds):
        rows = [row for row in _rows(kinds) if kind in kinds[row.start : row.stop]]
        if not rows and kind not in known:
            rows = [range(at, at + 1) for at, own in enumerate(kinds) if own == kind]
        if rows:
            chosen = min((_spanned(chosen, row) for row in rows), key=len)
    return chosen or range(min(len(kinds), 1))


def _rows(kinds: Sequence[str]) -> Iterator[range]:
    """Yield rows of equal blocks, those of short ones first."""
    for length in range(1, LONGEST + 1):
        for first in range(len(kinds) - ROW * length + 1):
            if kinds[first : first + (ROW - 1) * length] == kinds[first + length : first + ROW * length]:
                yield range(first, first + ROW * length)


def _spanned(one: range, other: range) -> range:
    """Fewest numbers in a row with all of both ranges."""
    return range(min(one.start, other.start), max(one.stop, other.stop)) if one else other
