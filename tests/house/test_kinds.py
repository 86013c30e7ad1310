"""The table of kinds, and all that is named or typed beside it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import get_type_hints

import attrs
import pytest

import moefw
import moefw.testing
from moefw.commands.new import PIECES, TEMPLATES
from moefw.compose.assembly import ChosenPlugins
from moefw.compose.spec.sections import Spec, TrainSpec, plugin_fields
from moefw.core import hooks
from moefw.core.choice import PluginChoice
from moefw.core.kinds import CERTIFIED, KINDS, Kind, kind_of

DOCS = Path(__file__).parents[2] / "docs"
EVERY = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def test_a_spec_chooses_each_kind_in_its_section() -> None:
    one = {field.name: PluginChoice("x") for cls in (Spec, TrainSpec) for field in attrs.fields(cls) if field.metadata}
    train = TrainSpec(optimizer=one.pop("optimizer"), schedule=one.pop("schedule"))
    spec = Spec(**{**one, "memory": (PluginChoice("x"),)}, train=train)  # type: ignore[arg-type]
    chosen = {kind: ".".join(key for key in path if isinstance(key, str)) for path, kind, _ in plugin_fields(spec)}
    assert chosen == {kind.name: kind.section for kind in KINDS.values()}


def test_the_chosen_plugins_are_typed_as_the_table_says() -> None:
    types = get_type_hints(ChosenPlugins)
    assert types == {kind.key: tuple[kind.base, ...] if kind.many else kind.base for kind in KINDS.values()}


@EVERY
def test_a_kind_has_one_name(kind: Kind) -> None:
    words = "".join(word.capitalize() for word in kind.name.split("_"))
    assert kind.base.__name__ == f"{words}Plugin"
    assert getattr(moefw, kind.base.__name__) is kind.base
    assert kind.suite in (f"{words}Suite", None)
    assert kind_of(kind.base) is kind


@EVERY
def test_its_hook_is_specified_with_its_summary(kind: Kind) -> None:
    assert kind.summary in str(getattr(hooks, kind.hook).__doc__)


@EVERY
def test_what_it_names_is_there(kind: Kind) -> None:
    if kind.contract is not None:
        module, _, name = kind.contract.partition(":")
        assert isinstance(getattr(importlib.import_module(module), name), type)
    assert (kind.guide is None) == (kind.suite is None) == bool(kind.why_not)
    if kind.suite is not None:
        assert issubclass(getattr(moefw.testing, kind.suite), moefw.testing.Suite)
        assert (DOCS / str(kind.guide)).is_file()
        assert all((TEMPLATES / kind.name / piece).is_file() for piece in PIECES.values())


def test_there_is_no_template_or_guide_beside_the_table() -> None:
    assert {folder.name for folder in TEMPLATES.iterdir()} == {"package", *CERTIFIED}
    guides = {f"guides/{page.name}" for page in (DOCS / "guides").glob("write-*.md")}
    assert guides == {kind.guide for kind in CERTIFIED.values()}
