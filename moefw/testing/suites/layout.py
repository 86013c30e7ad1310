"""The contract of parallel layouts: ``class TestMine(LayoutSuite): plugin = Mine``."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from moefw.core.contracts import Layout, LayoutPlan
from moefw.core.errors import PlanError, PluginError
from moefw.core.records import Side, Zero
from moefw.runtime.parallel.meshes import COPIES
from moefw.runtime.parallel.opened_layout import open_by
from moefw.testing.suites.contract import misfits
from moefw.testing.suites.part import MethodChecks

MAX_RANKS = 4096
MAX_SECONDS = 1.0


class LayoutSuite(MethodChecks):
    """Tests a layout against its contract: plans are consistent arithmetic, and opened groups are those of the plan."""

    meshes: ClassVar[Sequence[Sequence[str]]] = (("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp"))
    """Axes of each mesh, the outermost first."""
    drawn: ClassVar[st.SearchStrategy[Mapping[str, Any]] | None] = None
    """Strategy of Hypothesis that draws options. None: only ``options`` are planned."""
    opened: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Sets of options to open on ranks, in addition to ``options``."""
    max_world: ClassVar[int] = 96
    """Largest number of ranks that is planned."""

    def _misfits_of_built(self) -> list[str]:
        layout = self.layout()
        smallest = self._plan(layout, None)
        wrong = [] if smallest is None else misfits(smallest, LayoutPlan)
        world = next((world for world in self.profile.worlds if self._plan(layout, world) is not None), None)
        if wrong or world is None:
            return wrong
        return list(self.pool.run(misfits_of_opened, world, layout, world)[0])

    def layout(self, options: Mapping[str, Any] | None = None) -> Any:
        """Declaration with more options than those of the suite."""
        return self.read({**self.options, **(options or {})})

    def plans(self) -> st.SearchStrategy[LayoutPlan]:
        """Strategy for plans of worlds small enough for brute force."""
        options = st.just({}) if self.drawn is None else self.drawn

        def arranged(drawn: tuple[Mapping[str, Any], int]) -> Any:
            drawn_options, multiple = drawn
            return next(self._fitting(self.layout(drawn_options), multiple), None)

        plans = st.tuples(options, st.integers(1, 6)).map(arranged)
        return plans.filter(lambda plan: plan is not None)

    def _fitting(self, layout: Any, multiple: int) -> Iterator[LayoutPlan]:
        """Yield the plans of ``multiple`` times the smallest world, and of the smallest world."""
        smallest = self._smallest(layout)
        for world in (smallest * multiple, smallest):
            plan = self._plan(layout, world) if world <= self.max_world else None
            if plan is not None:
                yield plan

    def _smallest(self, layout: Any) -> int:
        """Smallest world that the layout arranges; more than ``max_world`` if it refuses to say."""
        plan = self._plan(layout, None)
        return self.max_world + 1 if plan is None else plan.world

    def test_the_sizes_of_each_mesh_multiply_to_the_world(self) -> None:
        """Every rank has one place in each mesh."""

        def check(plan: LayoutPlan) -> None:
            for mesh in self.meshes:
                missing = [axis for axis in mesh if axis not in plan.sizes]
                assert not missing, f"{self.plugin.name}: sizes has no axis {', '.join(missing)}."
                sizes = [plan.sizes[axis] for axis in mesh]
                says = f"{self.plugin.name}: the sizes {sizes} of {tuple(mesh)} do not multiply to {plan.world} ranks."
                assert math.prod(sizes) == plan.world, says
                assert min(sizes) >= 1, f"{self.plugin.name}: an axis of {tuple(mesh)} has a size below 1: {sizes}."

        self.for_all(check, self.plans())

    def test_coordinates_give_every_rank_a_place_of_its_own(self) -> None:
        """In each mesh, ranks and places are one to one."""

        def check(plan: LayoutPlan) -> None:
            places = [plan.coordinates(rank) for rank in range(plan.world)]
            for mesh in self.meshes:
                rank_by_position: dict[tuple[int, ...], int] = {}
                for rank, place in enumerate(places):
                    position = tuple(place[axis] for axis in mesh)
                    is_inside = all(0 <= place[axis] < plan.sizes[axis] for axis in mesh)
                    says = f"{self.plugin.name}: rank {rank} stands at {position} of {tuple(mesh)}, outside the mesh."
                    assert is_inside, says
                    other = rank_by_position.get(position)
                    says = f"{self.plugin.name}: ranks {other} and {rank} have the same place in {tuple(mesh)}."
                    assert other is None, says
                    rank_by_position[position] = rank

        self.for_all(check, self.plans())

    def test_groups_are_the_ranks_that_share_all_other_coordinates(self) -> None:
        """Compared with the definition by coordinates: members, ascending, for any order of the axes."""
        axes = st.sampled_from(list(self._sets_of_axes()))
        self.for_all(self._check_groups, st.tuples(self.plans(), axes, st.booleans()))

    def test_groups_partition_the_world(self) -> None:
        """Every rank is in one group over given axes, and all its members agree."""
        axes = st.sampled_from(list(self._sets_of_axes()))

        def check(drawn: tuple[LayoutPlan, tuple[str, ...]]) -> None:
            plan, over = drawn
            for rank in range(plan.world):
                group = plan.group(rank, over)
                says = f"{self.plugin.name}: the group of rank {rank} over {over} is {group}"
                assert rank in group, f"{says}, without the rank."
                assert len(group) == math.prod(plan.sizes[axis] for axis in over), f"{says}, not of the axes' size."
                for member in group:
                    agrees = tuple(plan.group(member, over)) == tuple(group)
                    assert agrees, f"{says}, but rank {member} of it is in another group: groups overlap."

        self.for_all(check, st.tuples(self.plans(), axes))

    def test_along_an_axis_a_rank_stands_at_its_coordinate(self) -> None:
        """Its position in the group over one axis. Stages are found by coordinates, and experts by positions."""

        def check(plan: LayoutPlan) -> None:
            for rank in range(plan.world):
                place = plan.coordinates(rank)
                for axis in dict.fromkeys(itertools.chain(*self.meshes)):
                    coordinate = place[axis]
                    group = plan.group(rank, (axis,))
                    position = group.index(rank) if rank in group else None
                    says = f"{self.plugin.name}: the coordinate of rank {rank} on {axis} is {coordinate}"
                    assert position == coordinate, f"{says}, and it stands at {position} of its group {group}."

        self.for_all(check, self.plans())

    def test_in_an_expert_group_the_ranks_of_one_ep_position_are_neighbours(self) -> None:
        """Dispatchers derive a rank's experts from its position in the group over ep and etp: position // etp."""

        def check(plan: LayoutPlan) -> None:
            for rank in range(plan.world):
                group = plan.group(rank, ("ep", "etp"))
                places = [plan.coordinates(member)["ep"] for member in group]
                runs = [place for place, _ in itertools.groupby(places)]
                says = f"{self.plugin.name}: along the ranks {group}, a group over ep and etp, the positions on ep are"
                assert len(runs) == len(set(runs)), f"{says} {places}: ranks of one position are neighbours."

        self.for_all(check, self.plans())

    def test_copies_are_rows_that_all_their_ranks_agree_on(self) -> None:
        """Copies are the ranks with a rank's parameters, each in one of the equally long rows that shard them."""
        self.for_all(self._check_copies, st.tuples(self.plans(), st.sampled_from(list(COPIES))))

    def test_the_smallest_world_is_the_first_that_fits(self) -> None:
        """``plan(None)`` arranges the smallest world; smaller ones are refused."""

        def check(options: Mapping[str, Any]) -> None:
            layout = self.layout(options)
            smallest = self._smallest(layout)
            for world in range(1, min(smallest, self.max_world)):
                fits = self._plan(layout, world) is not None
                assert not fits, f"{self.plugin.name} says that {smallest} ranks are the fewest, and arranges {world}."

        self.for_all(check, st.just({}) if self.drawn is None else self.drawn)

    def test_a_world_fits_or_is_refused_with_a_message(self) -> None:
        """A plan has the requested world; any other answer is a PlanError with the reason."""
        drawn = st.tuples(st.just({}) if self.drawn is None else self.drawn, st.integers(1, self.max_world))

        def check(example: tuple[Mapping[str, Any], int]) -> None:
            options, world = example
            plan = self._plan(self.layout(options), world)
            if plan is not None:
                assert plan.world == world, f"{self.plugin.name} arranges {plan.world} ranks when asked for {world}."

        self.for_all(check, drawn)

    def test_4096_ranks_are_arranged_within_a_second(self) -> None:
        """Plans are pure arithmetic, so a laptop can plan a cluster."""
        layout = self.layout()
        world = MAX_RANKS // self._smallest(layout) * self._smallest(layout)
        start = time.process_time()
        plan = self._plan(layout, world) if world else None
        if plan is None:
            pytest.skip(f"{self.plugin.name} does not arrange {world} ranks")
        for rank in range(plan.world):
            plan.coordinates(rank)
        for axes in self._sets_of_axes():
            for rank in range(0, plan.world, plan.world // 4 or 1):
                plan.group(rank, axes)
        for side in COPIES:
            plan.copies(0, side)
        spent = time.process_time() - start
        says = f"{self.plugin.name} takes {spent:.1f} s to look over {plan.world} ranks; {MAX_SECONDS:g} s is allowed."
        assert spent <= MAX_SECONDS, says

    def test_opened_groups_are_those_of_the_plan(self) -> None:
        """On real ranks: members in the plan's order, sizes, positions, None for a single rank, each group once."""
        any_opened = False
        for options in (self.options, *self.opened):
            layout = self.layout(options)
            for world in self.profile.worlds:
                plan = self._plan(layout, world)
                if plan is not None:
                    any_opened = True
                    ranks = self.pool.run(open_on_this_rank, world, layout, world, self.meshes)
                    for rank, opened in enumerate(ranks):
                        self._check_opened(plan, rank, opened)
        if not any_opened:
            pytest.skip(f"{self.plugin.name} arranges none of the worlds {self.profile.worlds} with these options")

    def _sets_of_axes(self) -> Iterator[tuple[str, ...]]:
        """Yield every nonempty set of axes of each mesh."""
        for mesh in self.meshes:
            yield from _subsets(mesh)

    def _plan(self, layout: Any, world: int | None) -> LayoutPlan | None:
        """Plan of a world, None: of the smallest; None if it is refused by a PlanError with a message."""
        ranks = "the smallest world" if world is None else f"{world} ranks"
        try:
            plan: LayoutPlan = layout.plan(world)
        except PlanError as error:
            has_message = bool(error.problems and error.problems[0].what)
            assert has_message, f"{self.plugin.name} refuses {ranks} without a message."
            return None
        except PluginError as error:
            raise AssertionError(f"{self.plugin.name} plans {ranks} wrongly: {error}") from error
        except Exception as error:
            what = f"{self.plugin.name} refuses {ranks} with {type(error).__name__}: {error}."
            raise AssertionError(f"{what} Raise moefw.PlanError, which says what would fit.") from error
        return plan

    def _check_groups(self, drawn: tuple[LayoutPlan, tuple[str, ...], bool]) -> None:
        """Assert that groups over some axes of a mesh, named in either order, are those by coordinates."""
        plan, axes, reverse = drawn
        mesh = next(mesh for mesh in self.meshes if set(axes) <= set(mesh))
        other_axes = [axis for axis in mesh if axis not in axes]
        places = [plan.coordinates(rank) for rank in range(plan.world)]
        over = axes[::-1] if reverse else axes
        for rank, place in enumerate(places):
            members = [
                other
                for other, other_place in enumerate(places)
                if all(other_place[axis] == place[axis] for axis in other_axes)
            ]
            group = tuple(plan.group(rank, over))
            says = (
                f"{self.plugin.name}: the group of rank {rank} over {over} is {group}; by coordinates it is {members}"
            )
            assert sorted(group) == members, f"{says}."
            assert list(group) == members, f"{says}, in ascending order."

    def _check_copies(self, drawn: tuple[LayoutPlan, Side]) -> None:
        """Assert that the rows of copies are in order, hold every copy once, and are the same for each of them."""
        plan, side = drawn
        zero = plan.zero(side)
        assert zero in get_args(Zero), f"{self.plugin.name}: zero({side!r}) is {zero!r}: a stage of ZeRO is 1, 2 or 3."
        for rank in range(plan.world):
            rows = plan.copies(rank, side)
            says = f"{self.plugin.name}: the copies of rank {rank}, {side}, are {rows}"
            group = plan.group(rank, COPIES[side])
            assert len({len(row) for row in rows}) == 1, f"{says}: the rows are of unequal length."
            columns = zip(*rows, strict=True)
            ascend = all(list(ranks) == sorted(ranks) for ranks in (*rows, *columns))
            assert ascend, f"{says}: ranks ascend along a row, and from row to row in one place."
            all_ranks = sorted(itertools.chain(*rows))
            assert all_ranks == list(group), f"{says}; together they are {COPIES[side]}, {group}, each once."
            for other in group:
                rows_of_other = plan.copies(other, side)
                assert rows_of_other == rows, f"{says}, but rank {other} of them says {rows_of_other}."

    def _check_opened(self, plan: LayoutPlan, rank: int, opened: Opened) -> None:
        """Assert that a rank sees the groups of the plan."""
        name = self.plugin.name
        assert opened.rank == rank, f"{name}: the layout opened on rank {rank} says that it is rank {opened.rank}."
        assert opened.ranks_per_node >= 1, f"{name}: ranks_per_node is {opened.ranks_per_node}; 1 is the least."
        for axes, group in opened.groups.items():
            planned = plan.group(rank, axes)
            says = f"{name}: on rank {rank} of {plan.world}, the group over {axes}"
            assert group.size == len(planned), f"{says} has size {group.size}; the plan says {len(planned)}."
            index = planned.index(rank)
            assert group.index == index, f"{says} has this rank at {group.index}; the plan says {index}."
            if len(planned) == 1:
                assert group.members is None, f"{says} is this rank alone, and should be None."
                continue
            assert group.members is not None, f"{says} is None; the plan says {planned}."
            assert group.members == planned, f"{says} is {group.members}; the plan says {planned}."
            assert group.heard == planned, f"{says} gathers {group.heard}; the plan's order is {planned}."
        for first, second in opened.twice:
            says = f"{name}: on rank {rank} of {plan.world}, {first} and {second} are the same ranks"
            raise AssertionError(f"{says} and have two groups; the same ranks have one.")


@dataclass(frozen=True)
class OpenedGroup:
    """A group as a rank sees it; ``heard`` is the result of an all-gather of ranks."""

    size: int
    index: int
    members: tuple[int, ...] | None
    heard: tuple[int, ...] = ()


@dataclass(frozen=True)
class Opened:
    """A layout as a rank sees it; ``twice``: pairs that were opened from the same ranks but are different groups."""

    rank: int
    ranks_per_node: int
    groups: dict[tuple[str, ...], OpenedGroup]
    twice: tuple[tuple[str, str], ...]


def misfits_of_opened(declaration: Any, world: int) -> list[str]:
    """Sentences about the layout as it is opened on this rank."""
    return misfits(open_by(declaration, declaration.plan(world), "cpu"), Layout)


def open_on_this_rank(declaration: Any, world: int, meshes: Sequence[Sequence[str]]) -> Opened:
    """Open a layout; inspect its groups over all sets of axes of each mesh, and those of copies. Collective."""
    layout = open_by(declaration, declaration.plan(world), "cpu")
    groups = {}
    opened: dict[tuple[int, ...], tuple[str, Any]] = {}
    twice = []

    def note_group(name: str, ranks: tuple[int, ...], group: Any) -> None:
        first_name, first_group = opened.setdefault(ranks, (name, group))
        if group is not first_group:
            twice.append((first_name, name))

    # Every rank in the same order: opening a group is a collective.
    for axes in dict.fromkeys(itertools.chain.from_iterable(map(_subsets, meshes))):
        group = layout.group(*axes)
        note_group(f"group{axes}", layout.plan.group(layout.rank, axes), group)
        members = None
        heard: tuple[int, ...] = ()
        if group is not None:
            members = tuple(dist.get_process_group_ranks(group))
            gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
            dist.all_gather(gathered, torch.tensor([dist.get_rank()]), group=group)
            heard = tuple(int(rank) for rank in gathered)
        groups[axes] = OpenedGroup(layout.size(*axes), layout.index(*axes), members, heard)
    for side in COPIES:
        for row in layout.plan.copies(layout.rank, side):
            if layout.rank in row:
                note_group(f"copies of {side}", row, layout.open(row))
    return Opened(layout.rank, layout.ranks_per_node, groups, tuple(twice))


def _subsets(mesh: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every nonempty set of axes of a mesh."""
    for count in range(1, len(mesh) + 1):
        yield from itertools.combinations(mesh, count)
