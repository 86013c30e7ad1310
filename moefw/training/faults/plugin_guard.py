"""Calls of third-party plugins during a run: shared state that they change is restored, and the plugin is named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any, final

from moefw.compose.assembly import Assembly
from moefw.compose.process_state import kept
from moefw.compose.registry import RegisteredPlugin
from moefw.compose.spec.source import show
from moefw.compose.trust import OURS
from moefw.core.errors import ContractError, MoefwError, PluginError
from moefw.core.plugin import Plugin


class MisbehaviourError(PluginError):
    """A plugin misbehaves during a run, perhaps on one rank only: each rank that fails reports it."""

    exit_code = 1


@final
class PluginGuard:
    """Calls the plugins of an assembly that take part in the steps of a run, on rank ``rank``."""

    def __init__(self, assembly: Assembly, rank: int) -> None:
        self._assembly = assembly
        self._rank = rank

    def notify(self, hook: str, *, step: int, **arguments: Any) -> None:
        """Call the observers of a hook; one that fails or changes shared state is named and not called again."""
        place = f"{hook}, step {step + 1}, rank {self._rank}"
        self._assembly.registry.notify(hook, place=place, around=partial(kept, ContractError), step=step, **arguments)

    def learning_rate(self, step: int) -> float:
        """Learning rate of ``step`` (from 0). Raises MisbehaviourError if the schedule gives none."""
        train = self._assembly.spec.train
        schedule = self._assembly.parts.schedule
        with self.calling(schedule, step):
            factor: object = schedule.factor(step, train.steps)
            known = isinstance(factor, Real) and not isinstance(factor, bool)
            rate = train.lr * float(factor) if known else math.nan  # type: ignore[arg-type]
        if math.isfinite(rate) and rate >= 0:
            return rate
        what = f"its factor is {show(factor)}, which is no finite number from 0 on."
        raise self._fault(self._assembly.registry.origin(schedule), step, what)

    @contextmanager
    def calling(self, plugin: Plugin, step: int) -> Iterator[None]:
        """Guard a call of a part. Raises MisbehaviourError if a third-party part fails or changes shared state."""
        part = self._assembly.registry.accountable(plugin)
        if part.distribution == OURS:
            yield
            return
        try:
            with kept(partial(self._fault, part, step)):
                yield
        except MoefwError:
            raise
        except (Exception, SystemExit) as error:
            raise self._fault(part, step, f"it raises {type(error).__name__}: {error}.") from error

    def _fault(self, part: RegisteredPlugin, step: int, what: str) -> MisbehaviourError:
        who = f"plugin {part.name!r} (distribution {part.distribution} {part.version})"
        place = f"{part.kind}, step {step + 1}, rank {self._rank}"
        return MisbehaviourError(
            f"{who} fails in {place}: {' '.join(what.split())}", f"Mend or uninstall {part.distribution}."
        )
