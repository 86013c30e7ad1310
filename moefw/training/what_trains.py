"""What of a model trains and what is frozen: checked once the model is there, and told when a run begins."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from attrs import frozen

from moefw.compose.freezing import matches
from moefw.core.errors import Problem, SpecError, nearest
from moefw.runtime.communication.agreement import everywhere
from moefw.runtime.naming import canonical_parameters
from moefw.runtime.parallel.holders import holdings
from moefw.runtime.parallel.local_shards import num_stored
from moefw.runtime.parallel.parts import PARTS, part_of_each
from moefw.training.session import Session

FREEZE: Final = "train.freeze"


@frozen(kw_only=True)
class Parameters:
    """Numbers of parameters of the whole model by part (``PARTS``): of those that train, and of frozen ones."""

    trained: Mapping[str, int]
    frozen: Mapping[str, int]

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return sum(self.trained.values()) + sum(self.frozen.values())

    def line(self) -> str:
        """Sentence about a model of which a part is frozen: what trains, and what does not."""
        trained = sum(self.trained.values())
        share = f"{trained:,} of {self.total:,} parameters train ({trained / self.total:.2%})"
        return f"{share}: {_listed(self.trained)}; frozen: {_listed(self.frozen)}"


def _listed(numbers: Mapping[str, int]) -> str:
    there = (f"{part} {number:,}" for part, number in numbers.items() if number)
    return ", ".join(there) or "nothing"


def parameters_of(session: Session) -> Parameters:
    """Numbers of parameters of the whole model. Collective."""
    layout = session.layout
    parts = part_of_each(session.model)
    trained: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    kept: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for holding in holdings(session.model):
        numbers = trained if holding.parameter.requires_grad else kept
        # Each rank counts its share of an element, so that the sum over ranks counts the element once.
        numbers[parts[holding.parameter]] += num_stored(holding.parameter) / holding.num_copies(layout)
    answers = everywhere([trained, kept], layout.host_group())
    of_all = [{part: round(sum(answer[kind][part] for answer in answers)) for part in PARTS} for kind in (0, 1)]
    return Parameters(trained=of_all[0], frozen=of_all[1])


def require_sensible_freeze(session: Session) -> None:
    """Raise SpecError on every rank if a pattern of ``train.freeze`` names nothing, or nothing trains. Collective."""
    patterns = session.assembly.frozen
    if not patterns:
        return
    names = [piece.name for piece in canonical_parameters(session.model) if not piece.of_adapter]
    trains = any(parameter.requires_grad for parameter in session.model.parameters())
    own = [[any(matches(name, [pattern]) for name in names) for pattern in patterns], trains]
    answers = everywhere(own, session.layout.host_group())
    unused = [pattern for number, pattern in enumerate(patterns) if not any(matched[number] for matched, _ in answers)]
    of_ranks = everywhere(names, session.layout.host_group()) if unused else []
    known = {str(name) for of_rank in of_ranks for name in of_rank}
    problems = freeze_problems(unused, known, trains=any(trains for _, trains in answers))
    if problems:
        raise SpecError(problems)


def freeze_problems(unused: Sequence[str], known: Collection[str], *, trains: bool) -> list[Problem]:
    """Patterns of ``train.freeze`` that are of no use, given those that match none of the ``known`` names of weights.

    ``trains``: whether any weight does.
    """
    if not unused and not trains:
        return [Problem("it names every weight, so nothing trains.", "Leave some out.", FREEZE)]
    return [
        Problem(f"no weight of the model has a name like {pattern!r}.", nearest(pattern, known), FREEZE)
        for pattern in unused
    ]
