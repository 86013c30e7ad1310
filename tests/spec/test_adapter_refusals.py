"""Adapters are refused beside a part that does not multiply with them, and where there are no weights to train beside."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from moefw.core.site import Machine
from resolved_specs import refusal, registry, resolved

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quack_gemm"))

import moefw_quack

WITH_QUACK = registry(gemms=moefw_quack.moefw_gemms())


@frozen
class Installed(Machine):
    """A machine with every package."""

    def has_package(self, name: str) -> bool:
        return True


HOPPER = Installed(device="cuda", num_devices=8, capability="9.0")


def spec(adapter: dict[str, Any], **parts: Any) -> str:
    return json.dumps({"adapter": adapter, "train": {"weights": "a-folder"}, **parts})


def test_experts_of_a_gemm_that_knows_no_adapters_have_none_and_what_can_have_some_is_named() -> None:
    tree = spec({"use": "lora"}, gemm={"use": "quack"}, precision={"use": "bf16"})
    problem = refusal(tree, registry=WITH_QUACK, machine=HOPPER)
    needs = "lora needs an adapter of moe.experts.*: a part must multiply with the adapters of its weights"
    assert f"{needs}; nothing here offers that." in problem.what
    assert "Known: attention.k_proj, attention.o_proj," in str(problem)


def test_beside_such_a_gemm_weights_of_attention_have_adapters() -> None:
    adapter = {"use": "lora", "targets": ["attention.*"]}
    tree = spec(adapter, gemm={"use": "quack"}, precision={"use": "bf16"})
    assert resolved(tree, registry=WITH_QUACK, machine=HOPPER).parts.gemm.name == "quack"


@pytest.mark.parametrize("target", ["attention.qproj", "moe.experts.up_proj", "embed"])
def test_a_target_that_no_part_has_is_refused(target: str) -> None:
    problem = refusal(spec({"use": "lora", "targets": [target]}))
    assert f"needs an adapter of {target}" in problem.what


def test_without_weights_there_is_nothing_to_train_beside() -> None:
    problem = refusal("adapter: {use: lora}")
    assert "lora trains beside the weights of a folder, and train.weights names none. Name one." in str(problem)
