"""Both quickstarts are one; examples that use moefw as a library run on one and two ranks, as their pages show them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ruamel.yaml import YAML

from moefw.testing.pool import RankPool
from pairwise import each_value

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "own_loop": ("use-in-your-own-loop", 60),
    "replace_moe": ("replace-moe-blocks", 60),
    "rewards": ("train-with-rewards", 16),
}
"""The guide of each example, and steps after which it has learned."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_guide_shows_its_example(example: str) -> None:
    code = (ROOT / "examples" / f"{example}.py").read_text()
    guide, _ = EXAMPLES[example]
    assert f'```python title="{example}.py"\n{code}```' in (ROOT / "docs/guides" / f"{guide}.md").read_text()


def trained(example: str, steps: int) -> float:
    """Loss of this rank's tokens after some steps of an example."""
    sys.path.insert(0, str(ROOT / "examples"))
    torch.manual_seed(dist.get_rank())
    loss: float = importlib.import_module(example).train(steps, dist.get_world_size())
    return loss


@pytest.mark.parametrize(("example", "world"), each_value(EXAMPLES, [2, 1]))
def test_an_example_learns(pool: RankPool, example: str, world: int) -> None:
    before = pool.run(trained, world, example, 1)
    after = pool.run(trained, world, example, EXAMPLES[example][1])
    assert all(late < 0.7 * early for early, late in zip(before, after, strict=True))


def test_both_quickstarts_train_one_model_on_one_text() -> None:
    in_bf16, in_fp32 = (
        YAML(typ="safe").load(ROOT / "examples" / name) for name in ("quickstart.yaml", "quickstart-fp32.yaml")
    )
    differ = {section for section in in_bf16 | in_fp32 if in_bf16[section] != in_fp32[section]}
    assert differ == {"precision", "train"}


def make_train(venv: Path, *variables: str) -> str:
    """Commands of ``make train`` in a checkout without an environment."""
    command = ["make", "--dry-run", "train", f"VENV={venv}", *variables]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("has_bf16", "spec"), [("yes", "examples/quickstart.yaml"), ("", "examples/quickstart-fp32.yaml")]
)
def test_make_train_takes_the_quickstart_for_the_machine(tmp_path: Path, has_bf16: str, spec: str) -> None:
    assert f"moefw train {spec} " in make_train(tmp_path, f"HAS_BF16={has_bf16}")


def test_make_train_installs_only_what_training_needs(tmp_path: Path) -> None:
    commands = make_train(tmp_path)
    assert "--editable '.'" in commands
    assert "[dev]" not in commands


def test_the_extra_that_examples_name_brings_transformers() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [requirement.partition(">")[0] for requirement in extras["hf"]] == ["transformers"]


def test_an_example_without_transformers_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('No module named transformers')")
    example = [sys.executable, str(ROOT / "examples/fine_tune/make_model.py"), str(tmp_path / "model")]
    done = subprocess.run(example, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "make_model.py needs transformers. Install it with: pip install '.[hf]', in a clone of moefw.\n"
    )
