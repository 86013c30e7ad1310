"""Whoever trains in bf16 on a CPU that multiplies it slowly is told so."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from moefw.commands.train import train
from moefw.training import cpu_speed

SPEC = """
model: {preset: qwen3-moe-tiny, num_layers: 1, num_experts: 4}
data: {use: text, path: TEXT}
train: {steps: 1, tokens_per_step: 64, micro_batch: 2, seq_len: 32, eval_every: 0, checkpoint_every: 0}
run: {device: cpu, dir: RUN}
"""


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("times", [0.2, 80.0])
def test_a_run_says_that_fp32_is_faster_where_it_is(
    precision: str, times: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_speed, "bf16_over_fp32", lambda: times)
    (tmp_path / "text.txt").write_text("a fox jumps over a dog\n" * 500)
    spec = SPEC.replace("TEXT", str(tmp_path / "text.txt")).replace("RUN", str(tmp_path / "run"))
    (tmp_path / "spec.yaml").write_text(spec)
    done = CliRunner().invoke(train, [str(tmp_path / "spec.yaml"), f"precision.use={precision}"])
    assert done.exit_code == 0, done.output
    slow = "a bf16 product takes 80.0 times as long as one in fp32 on this CPU: precision.use=fp32 trains faster"
    assert (slow in done.output) == (precision == "bf16" and times > 1)


def test_products_are_timed() -> None:
    assert 0.01 < cpu_speed.bf16_over_fp32() < 1000
