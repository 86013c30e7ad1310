"""What of a model trains and what is frozen: checked once the model is there, and told when a run begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen
from torch import nn
from torch.distributed import ProcessGroup

from moefw.compose.freeze_patterns import FREEZE, useless_patterns
from moefw.core.errors import Problem, SpecError
from moefw.runtime.communication.agreement import everywhere
from moefw.runtime.parallel.holders import holdings
from moefw.runtime.parallel.local_shards import num_stored
from moefw.runtime.parallel.parts import PARTS, part_of_each
from moefw.training.session import Session


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
    problems = freeze_problems(session.model, session.assembly.frozen, session.layout.host_group())
    if problems:
        raise SpecError(problems)


def freeze_problems(model: nn.Module, patterns: Sequence[str], group: ProcessGroup | None) -> list[Problem]:
    """What is wrong with patterns of ``train.freeze``: some name no weight, or together they name all. Collective."""
    if not patterns:
        return []
    useless = useless_patterns(model, patterns, group)
    trains = everywhere(any(parameter.requires_grad for parameter in model.parameters()), group)
    if useless or any(trains):
        return useless
    return [Problem("it names every weight, so nothing trains.", "Leave some out.", FREEZE)]
