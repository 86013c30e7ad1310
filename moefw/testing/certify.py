"""Certification of an installed plugin without a test file: ``pytest --moefw-dispatcher NAME``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import attrs
import pytest
from attrs import frozen

from moefw.compose.registry import Registry
from moefw.compose.spec.source import Marks, read_yaml
from moefw.core.errors import MoefwError, PluginError, SpecError, closest, nearest
from moefw.core.plugin import OptimizerMemoryPlugin, Plugin


@frozen
class Kind:
    """A kind of plugin that can be certified: its hook, its section of a spec, its suite in ``suites``."""

    hook: str
    section: str
    suite: str


KINDS: Final[Mapping[str, Kind]] = {
    "dispatcher": Kind("moefw_dispatchers", "dispatch", "DispatcherSuite"),
    "attention": Kind("moefw_attentions", "attention", "AttentionSuite"),
    "context": Kind("moefw_context_parallels", "context_parallel", "ContextParallelSuite"),
    "router": Kind("moefw_routers", "routing", "RouterSuite"),
    "gemm": Kind("moefw_gemms", "gemm", "GemmSuite"),
    "precision": Kind("moefw_precisions", "precision", "PrecisionSuite"),
    "memory": Kind("moefw_memory_policies", "memory", "MemorySuite"),
    "layout": Kind("moefw_layouts", "parallel", "LayoutSuite"),
    "pipeline": Kind("moefw_pipelines", "pipeline", "PipelineSuite"),
}


@frozen
class Candidate:
    """A plugin to certify, with its options."""

    word: str
    declaration: type[Plugin]
    options: Mapping[str, Any]

    def suite(self) -> type:
        """Class that pytest collects."""
        if issubclass(self.declaration, OptimizerMemoryPlugin):
            # Its hook and section are those of the policies for activations, its contract is not.
            module = _home("optimizer_memory")
            suite = "OptimizerMemorySuite"
        else:
            module = _home(self.word)
            suite = KINDS[self.word].suite
        base = getattr(importlib.import_module(module), suite)
        name = "".join(word.capitalize() for word in self.declaration.name.replace("-", "_").split("_"))
        body = {"plugin": self.declaration, "options": dict(self.options), "__module__": __name__}
        return type(f"Test{name}", (base,), body)


def candidates(config: pytest.Config) -> list[Candidate]:
    """Plugins that the command line names. Raises UsageError for a wrong name or option."""
    words = [word for word in KINDS if config.getoption(f"--moefw-{word}")]
    written = config.getoption("--moefw-options")
    if written and len(words) != 1:
        raise pytest.UsageError(
            "--moefw-options goes with exactly one of " + ", ".join(f"--moefw-{word}" for word in KINDS)
        )
    registry = Registry()
    return [_candidate(word, config.getoption(f"--moefw-{word}"), written, registry) for word in words]


def _candidate(word: str, name: str, written: str | None, registry: Registry) -> Candidate:
    kind = KINDS[word]
    if importlib.util.find_spec(_home(word)) is None:
        raise pytest.UsageError(f"--moefw-{word} {name}: this moefw has no suite for it.")
    try:
        declaration = registry.get(kind.hook, name).declaration
    except PluginError as error:
        raise pytest.UsageError(f"--moefw-{word} {name}: {_with_nearest(error, name, kind, registry)}") from error
    options = _options(written)
    known = {field.name: field for field in attrs.fields(declaration) if field.init}
    unknown = [option for option in options if option not in known]
    if unknown:
        raise pytest.UsageError(
            f"--moefw-options: {name} has no option {unknown[0]!r}. {nearest(unknown[0], known)}".strip()
        )
    missing = [option for option, field in known.items() if field.default is attrs.NOTHING and option not in options]
    if missing:
        example = ", ".join(f"{option}: {_example(known[option].type)}" for option in missing)
        raise pytest.UsageError(
            f"--moefw-{word} {name}: it cannot be named without {', '.join(missing)}. "
            f"Pass --moefw-options '{{{example}}}'."
        )
    _check(word, kind, declaration, options)
    return Candidate(word, declaration, options)


def _home(word: str) -> str:
    """Name of the module of a kind's suite."""
    return f"moefw.testing.suites.{word}"


def _with_nearest(error: PluginError, name: str, kind: Kind, registry: Registry) -> str:
    """The registry's message with the nearest installed name of the kind, or else with all of them.

    The registry itself lists plugins of every kind, of which only one kind is meant here.
    """
    message = str(error).partition(" Known: ")[0]
    if "Did you mean" in message or "fails to import" in message:
        return message
    registry.load_all()
    installed = [part.name for part in registry.parts() if part.hook == kind.hook]
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


def _check(word: str, kind: Kind, declaration: type[Plugin], options: Mapping[str, Any]) -> None:
    """Raise UsageError for invalid option values. Whether options fit a world is left to the suite."""
    from moefw.testing.layer_case import LayerCase

    chosen: Any = {"use": declaration.name, **options}
    try:
        LayerCase(parts={kind.section: [chosen] if word == "memory" else chosen}).assemble()
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
