"""Asks all parts at each MoE layer what they offer and need, and settles the facts on which they agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import attrs

from moefw.compose.assembly import LayerAssembly
from moefw.compose.fitting import RULES, match, offers_of, silence
from moefw.compose.graphs import Asker, graph_needs
from moefw.compose.resolution.checks import moe_layers_of
from moefw.compose.resolution.chosen import Chosen, Placed
from moefw.compose.resolution.problems import Problems
from moefw.compose.spec.sections import TrainSpec
from moefw.compose.spec.source import key_path
from moefw.compose.spec.unknown import UNKNOWN, is_known
from moefw.compose.updates import logits_need, update_need, with_update
from moefw.compose.watched_site import WatchedSite
from moefw.core.contracts import LayoutPlan
from moefw.core.errors import Problem
from moefw.core.facts import ANY, FACTS, Need, Offers, offers
from moefw.core.plugin import DataSourcePlugin
from moefw.core.site import Dims, Machine, Site

Demand = tuple[Placed, Need]
"""A need, and what asks for it."""


def graph_demands(problems: Problems, train: TrainSpec, layout: LayoutPlan | None, *, trains: bool) -> list[Demand]:
    """What ``train.graphs`` needs of parts, where the spec is one to train with."""
    with problems.asking(("train", "graphs")):
        if trains and layout is not None and train.graphs == "step":
            asker = Placed(("train",), Asker())
            return [(asker, need) for need in graph_needs(layout)]
    return []


def update_demands(problems: Problems, chosen: Chosen) -> list[Demand]:
    """Needs of the update: one that is the same under every layout, and logits that it may clip."""
    optimizer = chosen.find("optimizer")
    if optimizer is None:
        return []
    asker = Placed(optimizer.path, Asker("the assembly"))
    demands = [(asker, update_need(optimizer.part))]
    with problems.asking(optimizer.path, optimizer.part, "qk_clipping()"):
        demands += [(asker, need) for need in logits_need(optimizer.part)]
    return demands


def site_of(
    problems: Problems, chosen: Chosen, layout: LayoutPlan | None, machine: Machine, *, trains: bool
) -> tuple[Site, list[int]]:
    """The first site of a spec, with what of it is unknown, and the numbers of its MoE layers."""
    model = chosen.find("model")
    parallel = chosen.find("parallel")
    dims = problems.answer(model, "dims", Dims) if model else None
    layers: list[int] = []
    num_layers: int = UNKNOWN
    if model:
        with problems.asking(model.path, model.part, "moe_layers()"):
            layers = moe_layers_of(model.part)
            num_layers = max(getattr(model.part, "num_layers", 0), max(layers, default=-1) + 1)
    site = Site(
        dims=dims or Dims(model_dim=UNKNOWN, expert_dim=UNKNOWN, num_experts=UNKNOWN, top_k=UNKNOWN),
        layer=0,
        num_layers=num_layers,
        layout=layout or UNKNOWN,
        ranks_per_node=parallel.part.ranks_per_node if parallel else UNKNOWN,
        machine=machine,
        trains=trains,
    )
    return site, layers


@attrs.frozen
class _Statements:
    """The offers and needs at a site, and the names of facts of which an offer is not known."""

    promises: list[tuple[object, Offers]]
    demands: list[Demand]
    unknown: set[str]


@final
class Matching:
    """Offers and needs of the parts of a spec. A misfit that an unknown offer could prevent is no problem.

    ``demands``: needs of what is no part. ``for_run``: parts that read data are also asked what training needs.
    """

    def __init__(
        self,
        problems: Problems,
        chosen: Chosen,
        layout: LayoutPlan | None,
        demands: Sequence[Demand],
        *,
        for_run: bool,
    ) -> None:
        self._problems = problems
        self._chosen = chosen
        self._layout = layout
        self._other_demands = demands
        self._for_run = for_run

    def match(self, site: Site, layers: Sequence[int]) -> dict[int, LayerAssembly]:
        """Run the checks of the parts, and match offers and needs at every MoE layer, or once if there is none.

        Parts that do not read the number of the layer are not asked again. Equal layers share their facts.
        """
        for placed in self._chosen.everything:
            for problem in self._problems.listed(placed, "check", Problem, site):
                self._problems.tell((*placed.path, *key_path(problem.where)), problem)
        stated: _Statements | None = None
        facts: Mapping[str, Any] = {}
        settled: dict[int, LayerAssembly] = {}
        depends_on_layer = True
        for layer in layers or [0]:
            here = site.at(layer)
            if depends_on_layer:
                watched = WatchedSite.of(here)
                before = stated
                stated = self._state(watched)
                depends_on_layer = watched.layer_was_read
                if stated != before:
                    facts = self._settle(stated)
            settled[layer] = LayerAssembly(site=here, facts=facts)
        return settled if layers else {}

    def _state(self, here: Site) -> _Statements:
        """Offers and needs of all parts at ``here``, and the offers of the layout and the machine."""
        promises, unknown = self._promises(here)
        demands, packages = self._demands(here)
        capability = (here.machine.capability,) if here.machine.capability else ANY
        has = offers(device=(here.machine.device,), capability=capability, package=tuple(packages))
        promises.append((here.machine.name, has))
        return _Statements(promises, [*demands, *self._other_demands], unknown)

    def _promises(self, here: Site) -> tuple[list[tuple[object, Offers]], set[str]]:
        """Offers of the parts and of the layout, and the names of facts of which an offer is not known."""
        promises: list[tuple[object, Offers]] = []
        heard = {*self._chosen.sections - self._chosen.unread}
        unknown: set[str] = set()
        for placed in self._chosen.parts:
            answers = False
            with self._problems.asking(placed.path, placed.part, "offers()"):
                own = with_update(placed.section, offers_of(placed.section, placed.part.offers(here)))
                stated = {**silence(placed.section), **own}
                known = {fact: value for fact, value in stated.items() if is_known(value)}
                for fact, value in known.items():
                    RULES[FACTS[fact].rule]([value], ())  # it raises if the value is of another form
                promises.append((placed, known))
                unknown |= stated.keys() - known.keys()
                answers = True
            if not answers:
                heard.discard(placed.section)
        if self._layout is None:
            heard.discard("parallel")
        else:
            sizes = self._layout.sizes
            promises.append(("the layout", offers(axis=tuple(sizes), axis_divides=tuple(sizes.items()))))
        unheard = {name for name, fact in FACTS.items() if not heard.issuperset(fact.offered_by)}
        return promises, unknown | unheard

    def _demands(self, here: Site) -> tuple[list[Demand], list[str]]:
        """Needs of the parts, and the packages among them that the machine has."""
        demands: list[Demand] = []
        packages: list[str] = []
        for placed in self._chosen.everything:
            needs = self._problems.listed(placed, "needs", Need, here)
            if self._for_run and isinstance(placed.part, DataSourcePlugin):
                needs += self._problems.listed(placed, "needs_to_train", Need, here)
            for need in filter(is_known, needs):
                with self._problems.asking(placed.path, placed.part, "needs()"):
                    if need.fact == "package" and here.machine.has_package(need.value):
                        packages.append(need.value)
                    demands.append((placed, need))
        return demands, packages

    def _settle(self, stated: _Statements) -> dict[str, Any]:
        """Return the facts, and report the misfits that no unknown offer could prevent."""
        try:
            facts, misfits = match(stated.promises, stated.demands)
        except Exception:  # a need has a value that its rule cannot take
            facts, misfits = match(stated.promises, self._sound_demands(stated))
        for misfit in misfits:
            if misfit.need.fact not in stated.unknown:
                self._problems.tell((*misfit.asker.path, *key_path(misfit.need.option)), misfit.problem())
        return facts

    def _sound_demands(self, stated: _Statements) -> list[Demand]:
        """Return the needs that can be matched alone, and report the fault of each other one."""
        demands = []
        for placed, need in stated.demands:
            with self._problems.asking(placed.path, placed.part, "needs()"):
                match(_about(stated.promises, need.fact), [(placed, need)])
                demands.append((placed, need))
        return demands


def _about(promises: Sequence[tuple[object, Offers]], fact: str) -> Iterator[tuple[object, Offers]]:
    """Yield the offers of one fact."""
    return ((part, {fact: offered[fact]}) for part, offered in promises if fact in offered)
