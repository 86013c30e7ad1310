"""The problems of a spec, collected while parts are asked that may raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, final

import attrs

from moefw.compose.registry import Registry
from moefw.compose.resolution.chosen import Placed
from moefw.compose.spec.source import KeyPath, Marks, show
from moefw.compose.spec.unknown import UnknownUsedError, is_known
from moefw.core.errors import MoefwError, PlanError, PluginError, Problem, SpecError
from moefw.core.plugin import Plugin

A = TypeVar("A")


@final
class Problems:
    """Problems of a spec, each once, by the error that tells them.

    Left out is what depends on a value that could not be read (``UNKNOWN``): that value has a problem of its own.
    ``found``: those that reading the spec has found.
    """

    def __init__(self, registry: Registry, marks: Marks, found: Sequence[Problem]) -> None:
        self.marks = marks
        self.of_spec: list[Problem] = list(found)
        """Those of the spec's form."""
        self._registry = registry
        self._of: dict[type[MoefwError], list[Problem]] = {SpecError: self.of_spec, PluginError: [], PlanError: []}
        self._cause: Exception | None = None

    def tell(self, path: KeyPath, problem: Problem, kind: type[MoefwError] = PlanError) -> None:
        """Report a problem at ``path``. A repeated one, for example over layers, is reported once."""
        placed = attrs.evolve(problem, where=self.marks.where(path))
        if placed not in self._of[kind]:
            self._of[kind].append(placed)

    @property
    def blames_a_plugin(self) -> bool:
        """Whether a part has made a mistake: what else it says is worth nothing."""
        return bool(self._of[PluginError])

    def raise_all(self, advise: Callable[[Problem], Problem]) -> None:
        """Raise all problems, as the first kind of error among them, each as ``advise`` returns it."""
        for kind, problems in self._of.items():
            if problems:
                everything = [problem for of_a_kind in self._of.values() for problem in of_a_kind]
                raise kind(map(advise, everything)) from self._cause

    @contextmanager
    def asking(self, path: KeyPath, plugin: Plugin | type[Plugin] | None = None, what: str = "") -> Iterator[None]:
        """Report an error inside, and go on. A use of an unknown value is none: that value has its own problem.

        The error is the user's, at ``path``; or that of ``what`` of ``plugin``, if that raises anything but a misfit.
        """
        try:
            yield
        except UnknownUsedError:
            return
        except Exception as error:
            problems = error.problems if isinstance(error, MoefwError) else (_fault(error),)
            is_users = isinstance(error, MoefwError) and not (plugin and isinstance(error, PluginError))
            if is_users:
                for problem in problems:
                    self.tell(path, problem, PluginError if isinstance(error, PluginError) else PlanError)
            elif plugin is None:
                raise
            elif is_known(plugin):  # else it may be what a built-in function says of an option that is not
                self._cause = error
                origin = self._registry.origin(plugin)
                faults = (attrs.evolve(problem, what=f"{origin}, {what}: {problem.what}") for problem in problems)
                known = self._of[PluginError]
                known += [fault for fault in faults if fault not in known]

    def ask(self, path: KeyPath, question: Callable[..., A], /, *args: Any, **kwargs: Any) -> A | None:
        """Result of ``question``, or None if it raises."""
        with self.asking(path):
            return question(*args, **kwargs)
        return None

    def answer(self, placed: Placed, method: str, kind: type[A], *args: Any) -> A | None:
        """Answer of a part, or None if it raises or is not of kind ``kind``."""
        with self.asking(placed.path, placed.part, f"{method}()"):
            return _of_kind(kind, getattr(placed.part, method)(*args))
        return None

    def listed(self, placed: Placed, method: str, kind: type[A], *args: Any) -> list[A]:
        """Items of kind ``kind`` that a part lists, and those of iterators in the list, up to an error."""

        def read(items: Any) -> None:
            with self.asking(placed.path, placed.part, f"{method}()"):
                for item in items(*args) if callable(items) else items:
                    if isinstance(item, Iterator):
                        read(item)
                    else:
                        listed.append(_of_kind(kind, item))

        listed: list[A] = []
        read(getattr(placed.part, method))
        return listed


def _fault(error: Exception) -> Problem:
    """Problem of a method that raises."""
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return Problem(f"{what.rstrip(':.')}.", "This is a mistake in the plugin.")


def _of_kind(kind: type[A], answer: object) -> A:
    if not isinstance(answer, kind):
        raise TypeError(f"{show(answer)} is not a {kind.__name__}")
    return answer
