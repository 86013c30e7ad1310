"""The examples that use moefw as a library run on one and two ranks, and their pages show them as they are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moefw.testing.pool import RankPool

ROOT = Path(__file__).parents[2]
EXAMPLES = {"own_loop": "use-in-your-own-loop", "replace_moe": "replace-moe-blocks"}
"""The guide of each example."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_guide_shows_its_example(example: str) -> None:
    code = (ROOT / "examples" / f"{example}.py").read_text()
    assert (
        f'```python title="{example}.py"\n{code}```' in (ROOT / "docs/guides" / f"{EXAMPLES[example]}.md").read_text()
    )


def trained(example: str, steps: int) -> float:
    """Loss of this rank's tokens after some steps of an example."""
    sys.path.insert(0, str(ROOT / "examples"))
    torch.manual_seed(dist.get_rank())
    loss: float = importlib.import_module(example).train(steps, dist.get_world_size())
    return loss


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_learns(pool: RankPool, example: str, world: int) -> None:
    before = pool.run(trained, world, example, 1)
    after = pool.run(trained, world, example, 60)
    assert all(late < 0.7 * early for early, late in zip(before, after, strict=True))
