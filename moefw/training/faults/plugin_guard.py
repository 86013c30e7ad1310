"""Calls into code of others while a run goes: what it leaves behind is put back, and who did it is named."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, final

import numpy as np
import torch
from attrs import frozen

from moefw.core.assembly import Assembly
from moefw.core.errors import ContractError, MoefwError, PluginError, show
from moefw.core.plugin import Plugin
from moefw.core.registry import OURS, Part


class MisbehaviourError(PluginError):
    """A plugin misbehaves while a run goes, perhaps on one rank alone: each that fails says so."""

    exit_code = 1


@frozen
class _Global:
    """Something that all code of the process shares. ``key`` makes what ``read`` returns comparable."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    key: Callable[[Any], Any] = lambda value: value


_SHARED = (
    _Global("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Global("torch's default device", torch.get_default_device, lambda _: torch.set_default_device(None)),
    _Global("whether gradients are recorded", torch.is_grad_enabled, torch.set_grad_enabled),
    _Global("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    _Global("torch's matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _Global(
        "torch's use of deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    _Global("torch's random state", torch.get_rng_state, torch.set_rng_state, lambda state: state.numpy().tobytes()),
    _Global("numpy's random state", np.random.get_state, np.random.set_state, lambda s: (s[1].tobytes(), *s[2:])),
    _Global("the state of the module random", random.getstate, random.setstate),
)
_ON_GPU = _Global(
    "torch's random state on the GPU",
    lambda: torch.cuda.get_rng_state(),
    lambda state: torch.cuda.set_rng_state(state),
    lambda state: state.numpy().tobytes(),
)


@contextmanager
def kept() -> Iterator[None]:
    """Put back what is changed inside of what the process shares; raise ContractError that says what it was."""
    shared = (*_SHARED, _ON_GPU) if torch.cuda.is_initialized() else _SHARED
    before = [each.read() for each in shared]
    try:
        yield
    except BaseException:
        _put_back(shared, before)
        raise
    changed = _put_back(shared, before)
    if changed:
        raise ContractError(f"it changes {' and '.join(changed)}, which is put back.")


def _put_back(shared: Sequence[_Global], before: Sequence[Any]) -> list[str]:
    changed = []
    for each, value in zip(shared, before, strict=True):
        if each.key(each.read()) != each.key(value):
            each.write(value)
            changed.append(each.name)
    return changed


@final
class PluginGuard:
    """Calls the plugins of an assembly that take part in the steps of a run, on rank ``rank``."""

    def __init__(self, assembly: Assembly, rank: int) -> None:
        self._assembly, self._rank = assembly, rank
        self._origins = {part.declaration: part for part in assembly.registry.parts()}

    def notify(self, hook: str, *, step: int, **arguments: Any) -> None:
        """Call the observers of a hook; one that fails or changes what is shared is named and not called again."""
        place = f"{hook}, step {step + 1}, rank {self._rank}"
        self._assembly.registry.notify(hook, place=place, around=kept, step=step, **arguments)

    def learning_rate(self, step: int) -> float:
        """Return the rate of ``step``, from 0. Raises MisbehaviourError where the schedule gives none."""
        train, schedule = self._assembly.spec.train, self._assembly.parts.schedule
        with self.calling(schedule, step):
            factor: object = schedule.factor(step, train.steps)
            known = isinstance(factor, Real) and not isinstance(factor, bool)
            rate = train.lr * float(factor) if known else math.nan  # type: ignore[arg-type]
        if math.isfinite(rate) and rate >= 0:
            return rate
        what = f"its factor is {show(factor)}, which is no finite number from 0 on."
        raise self._fault(self._origins[type(schedule)], step, what)

    @contextmanager
    def calling(self, plugin: Plugin, step: int) -> Iterator[None]:
        """Be in a call of a part. Raises MisbehaviourError where one of others fails, or changes what is shared."""
        part = self._origins[type(plugin)]
        if part.distribution == OURS:
            yield
            return
        try:
            with kept():
                yield
        except ContractError as error:
            raise self._fault(part, step, str(error)) from error
        except MoefwError:
            raise
        except (Exception, SystemExit) as error:
            raise self._fault(part, step, f"it raises {type(error).__name__}: {error}.") from error

    def _fault(self, part: Part, step: int, what: str) -> MisbehaviourError:
        who = f"plugin {part.name!r} (distribution {part.distribution} {part.version})"
        place = f"{part.hook}, step {step + 1}, rank {self._rank}"
        return MisbehaviourError(
            f"{who} fails in {place}: {' '.join(what.split())}", f"Mend or uninstall {part.distribution}."
        )
