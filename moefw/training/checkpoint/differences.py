"""Differences between a checkpoint and the run that reads it: what is refused, starts fresh, or is dropped.

Weights must fit: else it is another model. The state of a recipe or of a balancing rule may start fresh, or be dropped.
The states of an optimizer are carried on together, or none of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Final

from attrs import frozen

from moefw.training.checkpoint.manifest import SavedTensor, words
from moefw.training.checkpoint.slots import Slot

MOST_LISTED: Final = 3
"""The most tensors that an error names."""
_EXPERT: Final = re.compile(r"\.experts\.[0-9]+\.")


def of_any_expert(name: str) -> str:
    """Name with a star for the number of a routed expert: a rank has those of its own experts, and none of others."""
    return _EXPERT.sub(".experts.*.", name)


@frozen(kw_only=True)
class Differences:
    """States that a run does not carry on from a checkpoint, by name.

    ``fresh``: states of the run's parts that begin as in a new run, as the checkpoint has none, or others.
    ``dropped``: states of the checkpoint that nothing here keeps. ``fresh_optimizer``: its optimizer was another one,
    whose states are among those that are dropped.
    """

    fresh: Set[str] = frozenset()
    dropped: Set[str] = frozenset()
    fresh_optimizer: bool = False

    def counts(self) -> dict[str, dict[str, int]]:
        """Number of tensors that are fresh, and that are dropped, by kind: ``expert_bias``, ``optimizer exp_avg``."""
        return {"fresh": _by_kind(self.fresh), "dropped": _by_kind(self.dropped)}

    def notes(self, checkpoint: str) -> Iterator[str]:
        """Yield a line for the user on each kind of difference from the checkpoint of that name."""
        of_optimizer = {name for name in self.dropped if name.startswith("optimizer/")}
        for kind, count in _by_kind(self.fresh).items():
            yield f"{kind} starts fresh in {_tensors(count)}: {checkpoint} has none of this form"
        for kind, count in _by_kind(self.dropped - of_optimizer).items():
            yield f"{kind} of {checkpoint} is dropped, {_tensors(count)}: it has no place here"
        if self.fresh_optimizer:
            lost = ", ".join(f"{kind} of {_tensors(count)}" for kind, count in _by_kind(of_optimizer).items())
            yield (
                f"{checkpoint} is of another optimizer, so states of this one start fresh, while steps and the "
                f"learning rate go on; dropped: {lost or 'nothing, as it had no states'}"
            )


def _by_kind(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(map(_kind, names)).items()))


def _kind(name: str) -> str:
    """Kind of a state: ``optimizer exp_avg``, or ``expert_bias``."""
    group, key, *_ = name.split("/")
    return f"optimizer {key}" if group == "optimizer" else name.rpartition(".")[2]


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def misfit_of_weights(saved: Mapping[str, SavedTensor], slots: Mapping[str, Slot], known: Set[str]) -> str:
    """How the weights of a checkpoint differ from those of a model, in words; empty if they fit.

    ``slots``: of this rank. ``known``: the names that all stages have, of any expert (:func:`of_any_expert`).
    """
    weights = [name for name in slots if name.startswith("model/")]
    missing = sorted(name for name in weights if name not in saved)
    extra = sorted(name for name in saved if _is_extra(name, saved, known))
    misfit = misfit_of_forms(saved, {name: slots[name] for name in weights if name in saved})
    said = [f"it lacks {_listed(map(words, missing), ', ')}"] if missing else []
    said += [f"it holds also {_listed(map(words, extra), ', ')}"] if extra else []
    said += [misfit] if misfit else []
    return "; ".join(said)


def misfit_of_forms(saved: Mapping[str, SavedTensor], slots: Mapping[str, Slot]) -> str:
    """How the shapes and dtypes of saved tensors differ from those of their slots, in words; empty if they fit."""
    misfits = {name: slot.misfit(saved[name]) for name, slot in slots.items()}
    return _listed((f"{words(name)} is {misfit}" for name, misfit in misfits.items() if misfit), "; ")


def _is_extra(name: str, saved: Collection[str], known: Set[str]) -> bool:
    """Whether a tensor is a weight that no rank has, or a state of the optimizer for a weight that is nowhere."""
    group, *_, of = name.split("/")
    weight = f"model/{of}"
    if group == "state" or of_any_expert(weight) in known:
        return False
    return group == "model" or weight not in saved


def states_of_parts(
    saved: Mapping[str, SavedTensor], slots: Mapping[str, Slot], known: Set[str]
) -> tuple[set[str], set[str]]:
    """Names of the states of parts that start fresh on this rank, and of those that are dropped on all ranks.

    The arguments are those of :func:`misfit_of_weights`. A state of another shape or dtype is fresh, not dropped.
    """
    states = {name: slot for name, slot in slots.items() if name.startswith("state/")}
    fresh = {name for name, slot in states.items() if name not in saved or slot.misfit(saved[name])}
    dropped = {name for name in saved if name.startswith("state/") and of_any_expert(name) not in known}
    return fresh, dropped


def states_of_optimizer(saved: Iterable[str]) -> dict[str, set[str]]:
    """Keys of the optimizer's states in a checkpoint, by the name of the weight that they belong to."""
    keys: dict[str, set[str]] = {}
    for name in saved:
        if name.startswith("optimizer/"):
            _, key, weight = name.split("/", 2)
            keys.setdefault(weight, set()).add(key)
    return keys


def misfit_of_optimizer(saved: Iterable[str], kept: Mapping[str, Set[str]]) -> str:
    """How the states of a checkpoint differ from those that an optimizer keeps, in words; empty if they fit.

    ``kept``: the keys that the optimizer keeps of each weight of this rank. A weight that had no gradient has no states
    in the checkpoint.
    """
    there = states_of_optimizer(saved)
    none: set[str] = set()
    others = [name for name in kept if (name in there or not there) and there.get(name, none) != kept[name]]
    if not others:
        return ""
    first = others[0]
    more = f" (and of {len(others) - 1} more)" if len(others) > 1 else ""
    return f"it keeps {_keys(there.get(first, none))} of {first}{more}, and this one {_keys(kept[first])}"


def _keys(keys: Collection[str]) -> str:
    return ", ".join(sorted(keys)) or "no state"


def _listed(items: Iterable[str], separator: str) -> str:
    everything = [*items]
    more = f" and {len(everything) - MOST_LISTED} more" if len(everything) > MOST_LISTED else ""
    return separator.join(everything[:MOST_LISTED]) + more
