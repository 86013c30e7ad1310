"""Distributions whose plugins may be loaded, and the requirements for loading a plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from command_cases import HEAD, dispatcher, listing, refusal
from moefw.commands.plugins import plugins
from moefw.compose.trust import ALLOWED

Install = Callable[..., None]
OBSERVER = HEAD + "@moefw.hookimpl\ndef moefw_{hook}: pass\n"
HOOKS = ("before_step(step)", "after_step(metrics)", "check(assembly): return []\ndef f()")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_distribution_that_only_observes_is_named_in_run_observers(install: Install, hook: str) -> None:
    install("my-watch", OBSERVER.format(hook=hook), names=["watch"])
    assert refusal({"run": {"observers": ["watch", "watch"]}}) == ""
    assert "'watch' is no part: it observes a run. Name it in run.observers." in refusal({"gemm": {"use": "watch"}})
    found = listing()
    assert found["problems"] == []
    assert found["observers"] == [{"name": "watch", "distribution": "my-watch", "version": "1.5"}]
    assert "observer: watch my-watch 1.5" in CliRunner().invoke(plugins).stdout


def test_parts_of_others_that_observe_nothing_are_refused_as_observers(install: Install) -> None:
    install("my-watch", OBSERVER.format(hook=HOOKS[0]), names=["watch"])
    install("other-parts", dispatcher("mine", "pass"), names=["mine"])
    said = refusal({"run": {"observers": ["mine"]}})
    assert "'mine' observes nothing: an observer implements moefw_check" in said
    assert "Installed: watch." in said


@pytest.mark.parametrize("source", ["", HEAD + "def moefw_after_step(metrics): pass\n"])
def test_one_that_implements_nothing_is_refused(install: Install, source: str) -> None:
    install("my-watch", source, names=["watch"])
    said = refusal({"run": {"observers": ["watch"]}})
    assert "my-watch 1.5 announces a plugin 'watch' and declares no part of that name" in said


def test_parts_of_another_name_beside_an_observer_are_still_refused(install: Install) -> None:
    install("my-watch", dispatcher("mine", "pass") + OBSERVER.format(hook=HOOKS[0])[len(HEAD) :], names=["watch"])
    assert "declares no part of that name. It declares mine." in refusal({"run": {"observers": ["watch"]}})


STRANGER = 'raise AssertionError("imported")\n'


@pytest.mark.fault("a spec asks for a distribution that is not allowed ({id})", "refused before it is imported")
@pytest.mark.parametrize("allowed", ["", "moefw", "other-parts, my.parts"])
@pytest.mark.parametrize("spec", [{"dispatch": {"use": "fast"}}, {"run": {"observers": ["fast"]}}])
def test_what_is_not_allowed_is_refused_before_it_is_imported(
    install: Install, monkeypatch: pytest.MonkeyPatch, allowed: str, spec: dict[str, object]
) -> None:
    install("strange-parts", STRANGER, names=["fast"])
    monkeypatch.setenv(ALLOWED, allowed)
    assert refusal(spec).endswith(
        "plugin 'fast' is of distribution strange-parts 1.5, which is not allowed. "
        "Name it in MOEFW_ALLOWED_DISTRIBUTIONS if you trust its code."
    )
    assert refusal({}) == "", "what is built in is always allowed"
    found = listing()
    assert found["not_allowed"] == [{"name": "fast", "distribution": "strange-parts", "version": "1.5"}]
    assert found["problems"] == []
    assert "not allowed: fast strange-parts 1.5" in CliRunner().invoke(plugins).stdout
    assert "strange_parts" not in sys.modules


@pytest.mark.parametrize("allowed", ["Other_Parts", "x,  other.parts ,"])
def test_names_are_allowed_however_they_are_spelled(
    install: Install, monkeypatch: pytest.MonkeyPatch, allowed: str
) -> None:
    install("other-parts", dispatcher("fast", "pass"), names=["fast"])
    monkeypatch.setenv(ALLOWED, allowed)
    assert listing()["not_allowed"] == []
    assert "fast" in {entry["name"] for entry in listing()["plugins"]}


def test_what_is_not_allowed_takes_no_name_from_what_is(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("strange-parts", STRANGER, names=["alltoall"])
    assert "two distributions bring a plugin called 'alltoall'" in refusal({"dispatch": {"use": "alltoall"}})
    monkeypatch.setenv(ALLOWED, "other-parts")
    assert refusal({"dispatch": {"use": "alltoall"}}) == ""


CHANGES = HEAD + "import torch\ntorch.set_default_dtype(torch.float64)\n" + dispatcher("fast", "pass")[len(HEAD) :]


@pytest.mark.fault("a plugin changes the default dtype as it is imported", "named")
def test_one_that_changes_the_default_dtype_as_it_is_imported_is_named(install: Install, tmp_path: Path) -> None:
    install("rude-parts", CHANGES, names=["fast"])
    told = (
        "plugin 'fast' (distribution rude-parts 1.5) fails to import: it changes torch's default dtype. "
        "Mend or uninstall rude-parts."
    )
    try:
        assert told in refusal({"dispatch": {"use": "fast"}})
    finally:
        torch.set_default_dtype(torch.float32)
    command = [sys.executable, "-m", "moefw", "plugins"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"broken: {told}" in first.stdout, "also where nobody else has imported torch before"
