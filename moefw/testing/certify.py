"""Certification of an installed plugin without a test file: ``pytest --moefw-dispatcher NAME``."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import attrs
import pytest
from attrs import frozen

import moefw.testing
from moefw.compose.registry import Registry
from moefw.compose.spec.source import Marks, read_yaml
from moefw.core.errors import MoefwError, PluginError, SpecError, closest, nearest
from moefw.core.kinds import CERTIFIED, Kind
from moefw.core.plugin import OptimizerMemoryPolicyPlugin, Plugin


@frozen
class Candidate:
    """A plugin to certify, with its options."""

    kind: Kind
    declaration: type[Plugin]
    options: Mapping[str, Any]

    def suite(self) -> type:
        """Class that pytest collects."""
        # Policies for optimizer states are of one kind with those for activations, and have a contract of their own.
        of_states = issubclass(self.declaration, OptimizerMemoryPolicyPlugin)
        base = moefw.testing.OptimizerMemoryPolicySuite if of_states else getattr(moefw.testing, str(self.kind.suite))
        name = "".join(word.capitalize() for word in self.declaration.name.replace("-", "_").split("_"))
        body = {"plugin": self.declaration, "options": dict(self.options), "__module__": __name__}
        return type(f"Test{name}", (base,), body)

    def chosen(self) -> dict[str, Any]:
        """The choice of the plugin in a spec, with options that the suite fills in, such as regions."""
        try:
            return dict(self.suite()().chosen)
        except pytest.skip.Exception:  # nothing here allows what it does: each check says so
            return {"use": self.declaration.name, **self.options}


def candidates(config: pytest.Config) -> list[Candidate]:
    """Plugins that the command line names. Raises UsageError for a wrong name or option."""
    kinds = [kind for kind in CERTIFIED.values() if config.getoption(kind.option)]
    written = config.getoption("--moefw-options")
    if written and len(kinds) != 1:
        raise pytest.UsageError(
            "--moefw-options goes with exactly one of " + ", ".join(kind.option for kind in CERTIFIED.values())
        )
    registry = Registry()
    return [_candidate(kind, config.getoption(kind.option), written, registry) for kind in kinds]


def _candidate(kind: Kind, name: str, written: str | None, registry: Registry) -> Candidate:
    try:
        declaration = registry.get(kind.name, name).declaration
    except PluginError as error:
        raise pytest.UsageError(f"{kind.option} {name}: {_with_nearest(error, name, kind, registry)}") from error
    options = _options(written)
    known = {field.name: field for field in attrs.fields(declaration) if field.init}
    unknown = [option for option in options if option not in known]
    if unknown:
        raise pytest.UsageError(
            f"--moefw-options: {name} has no option {unknown[0]!r}. {nearest(unknown[0], known)}".strip()
        )
    candidate = Candidate(kind, declaration, options)
    chosen = candidate.chosen()
    missing = [option for option, field in known.items() if field.default is attrs.NOTHING and option not in chosen]
    if missing:
        example = ", ".join(f"{option}: {_example(known[option].type)}" for option in missing)
        raise pytest.UsageError(
            f"{kind.option} {name}: it cannot be named without {', '.join(missing)}. "
            f"Pass --moefw-options '{{{example}}}'."
        )
    _check(kind, chosen)
    return candidate


def _with_nearest(error: PluginError, name: str, kind: Kind, registry: Registry) -> str:
    """The registry's message with the nearest installed name of the kind, or else with all of them.

    The registry itself lists plugins of every kind, of which only one kind is meant here.
    """
    message = str(error).partition(" Known: ")[0]
    if "Did you mean" in message or "fails to import" in message:
        return message
    registry.load_all()
    installed = [part.name for part in registry.parts() if part.kind == kind.name]
    close = closest(name, installed)
    if close is None:
        return f"{message} Installed here: {', '.join(installed)}."
    return f"{message} Did you mean {close!r}?"


def _options(written: str | None) -> dict[str, Any]:
    """Options that ``--moefw-options`` writes as YAML. Raises UsageError if they are no mapping."""
    problems: list[Any] = []
    tree = read_yaml(written or "{}", Marks("--moefw-options"), problems)
    if problems:
        raise pytest.UsageError("\n".join(map(str, problems)))
    if not isinstance(tree, dict):
        raise pytest.UsageError(f"--moefw-options {written!r}: write a mapping, for example '{{backend: torch}}'.")
    return dict(tree)


def _check(kind: Kind, chosen: Mapping[str, Any]) -> None:
    """Raise UsageError for invalid option values. Whether options fit a world is left to the suite."""
    from moefw.testing.layer_case import LayerCase

    try:
        LayerCase(parts=kind.spec(chosen)).assemble()
    except SpecError as error:
        raise pytest.UsageError(f"--moefw-options: {error}") from error
    except MoefwError:
        return


def _example(annotation: Any) -> str:
    """Value for an option in a message: the first of a Literal, or dots."""
    values = getattr(annotation, "__args__", None)
    return str(values[0]) if values and isinstance(values[0], str) else "..."


class Certificate(pytest.Module):
    """Tests of the named plugins, collected as this file."""

    named: list[Candidate]

    def _getobj(self) -> ModuleType:
        """Module with one suite per plugin."""
        module = ModuleType("certify")
        for candidate in self.named:
            suite = candidate.suite()
            setattr(module, suite.__name__, suite)
        return module
