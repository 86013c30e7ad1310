"""What the real QuACK does with the calls of ``quack``: it compiles them, and on a GPU they give the right results.

Tests are skipped, by name, where QuACK is not installed, and those of results where there is no GPU.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from typing import Any

import fake_quack
import pytest
import torch
from moefw_quack import machine
from quack_on_cpu import QuackAnywhere, QuackOnCpu
from torch import Tensor

import moefw
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.gemm_case import (
    GemmCase,
    Results,
    computed,
    computed_in_step,
    dense,
    differing,
    experts_of,
    parameters_of,
    terms_of_row_weights,
)
from moefw.testing.suites.watch import worst_error

BF16 = 4e-2
"""Largest error in bf16, as a share of a tensor's largest value."""
IN_FP32 = 1e-5
DIM = 256
SMALLEST = 1e-3
"""Largest value of a tensor that may be zero."""

COMPILES = """
import torch
import quack.gemm_interface as interface
from moefw_quack import operators

# The function behind the operator of PyTorch, which exists on a GPU alone.
interface.gemm_add_inplace_op = interface.gemm_add_inplace_op._init_fn
x, a, h, gate_up, down = (
    torch.zeros(shape, dtype=torch.bfloat16) for shape in ((96, 64), (96, 32), (96, 64), (3, 64, 64), (3, 64, 32))
)
groups = torch.tensor([0, 10, 10, 90], dtype=torch.int32)
for call in (
    lambda: operators.gated(x, gate_up, groups),
    lambda: operators.product(a, down.mT, groups),
    lambda: operators.product(h, gate_up, groups, in_turn=True),
    lambda: operators.dgated(x, down, h, torch.zeros(96), groups),
    *(
        lambda shape=shape, grad=grad, rows=rows, in_turn=in_turn, fresh=fresh: operators.wgrad(
            torch.zeros(shape), grad, rows, groups, in_turn=in_turn, fresh=fresh
        )
        for shape, grad, rows, in_turn in (((3, 64, 32), x, a, False), ((3, 64, 64), h, x, True))
        for fresh in (True, False)
    ),
):
    try:
        call()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def quack() -> None:
    """The real QuACK. Skips where it is not installed."""
    fake_quack.uninstall()
    if importlib.util.find_spec("quack") is None:
        pytest.skip("quack-kernels is not installed")


@pytest.mark.parametrize("capability", machine.CAPABILITIES)
@pytest.mark.usefixtures("quack")
def test_every_call_compiles(capability: str, tmp_path: Any) -> None:
    """QuACK compiles for a GPU that is not there. Each call then fails where it looks for the driver."""
    arch = capability.replace(".", "")
    variables = {"QUACK_ARCH": arch, "CUTE_DSL_ARCH": f"sm_{arch}a", "QUACK_CACHE_DIR": str(tmp_path)}
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path), **variables}
    said = subprocess.run([sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True)
    assert len(list(tmp_path.rglob("*.o"))) == 8, said.stdout + said.stderr


CASES = {
    "few": GemmCase(counts=(3, 0, 2, 5), padding=(1, 2, 0, 3), tail=4),
    "none": GemmCase(counts=(0, 0, 0, 0), tail=3),
    "tiles": GemmCase(counts=(31, 300, 0, 128), tail=200),
}


@pytest.fixture(params=["cpu", "cuda"])
def experts(request: pytest.FixtureRequest) -> Any:
    """Experts on the GPU, over QuACK; on a CPU, over the fake, which tries the tests themselves."""
    if request.param == "cuda":
        request.getfixturevalue("quack")
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")
    plugin = QuackAnywhere if request.param == "cuda" else QuackOnCpu
    parts = {"gemm": {"use": plugin.name}, "precision": {"use": "bf16"}}
    made, _ = experts_of(LayerCase(parts=parts, plugins=(plugin,), dim=DIM, expert_dim=2 * DIM))
    return made.to(request.param)


def inputs(case: GemmCase, device: torch.device) -> tuple[moefw.ExpertBatch, Tensor]:
    """Rows on the device, and the gradient of their outputs."""
    batch = case.batch(DIM, torch.bfloat16)
    moved = {
        "rows_RD": batch.rows_RD.detach().to(device).requires_grad_(),
        "row_weights_R": batch.row_weights_R.detach().to(device).requires_grad_(),
        "counts_e": batch.counts_e.to(device),
        "offsets_e": batch.offsets_e.to(device),
    }
    return replace(batch, **moved), case.probe(DIM, torch.bfloat16).to(device)


def up_to(end: int, results: Results) -> Results:
    """Results without rows behind the last group, which are undefined."""
    return results | {name: results[name][:end] for name in ("out", "rows", "row_weights")}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_those_of_the_dense_formula_and_repeat(experts: Any, case: GemmCase) -> None:
    """Rows behind the last group are NaN, and so are the gradients of their outputs."""
    device = experts.down.device
    end = sum(case.counts) + sum(case.padding)
    results, again = (up_to(end, computed(experts, *inputs(case, device))) for _ in range(2))
    assert not differing(results, again)
    weights = {name: weight.cpu() for name, weight in parameters_of(experts).items()}
    batch, probe = inputs(case, torch.device("cpu"))
    expected = dense(weights, case, batch, probe, alignment=1)
    # The gradient of a row's weight is a sum of terms that nearly cancel.
    floors = {"row_weights": terms_of_row_weights(expected, batch, probe)}
    for name, right in up_to(end, expected).items():
        error = worst_error(results[name].cpu(), right, floor=floors.get(name, SMALLEST))
        assert error <= BF16, f"{name} is off by {error:.1e} of its largest value"


def test_gradients_of_micro_batches_add_up_in_fp32(experts: Any) -> None:
    device = experts.down.device
    cases = [CASES["few"], CASES["tiles"]]
    alone = [computed(experts, *inputs(case, device)) for case in cases]
    together = computed_in_step(experts, [inputs(case, device) for case in cases])
    for name, grad in together.items():
        error = worst_error(grad, alone[0][name].double() + alone[1][name].double())
        assert error <= IN_FP32, f"the gradient of {name} is off by {error:.1e} of its largest value"
