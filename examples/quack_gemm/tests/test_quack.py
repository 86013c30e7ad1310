"""Tests the contract of GEMMs for QuACK on a fake of it, and that the fake is like the real library.

What needs the real one is skipped, by name, where it is not installed. Nothing here runs on a GPU.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import fake_quack
import moefw_quack
import pytest
import snapshot_quack
import torch
from fake_quack.signatures import CALLS, SNAPSHOT, signature
from moefw_quack import Quack, machine
from quack_on_cpu import QuackOnCpu
from torch import Tensor

import moefw
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.planner import ledger
from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.testing import GemmSuite
from moefw.testing.announce import with_plugins
from moefw.testing.layer_case import LayerCase, assert_matches, solve, truth
from moefw.testing.oracle import Rule
from moefw.testing.pool import RankPool
from moefw.testing.suites.gemm_case import GemmCase, computed, experts_of

BF16 = 4e-2
"""Largest error in bf16, as a share of a tensor's largest value."""
SIZES = {"num_experts": 4, "top_k": 2, "dim": 16, "expert_dim": 32}
COUNTS = (3, 0, 2, 5)
FUNCTIONS = {name: getattr(fake_quack.gemm_interface, name) for name in SNAPSHOT["functions"]}


class TestQuack(GemmSuite):
    """The contract."""

    plugin = QuackOnCpu
    parts = {"precision": {"use": "bf16"}}
    dims = SIZES
    rtol = {"bf16": BF16}


def layer_case(**parts: Any) -> LayerCase:
    chosen = {"gemm": {"use": QuackOnCpu.name}, "precision": {"use": "bf16"}, **parts}
    return LayerCase(parts=chosen, plugins=(QuackOnCpu,), **SIZES)


def experts() -> Any:
    made, _ = experts_of(layer_case())
    CALLS.clear()
    return made


def rows(**sizes: Any) -> tuple[moefw.ExpertBatch, Tensor]:
    """Rows of experts, and the gradient of their outputs."""
    case = GemmCase(counts=COUNTS, **sizes)
    return case.batch(SIZES["dim"], torch.bfloat16, on_host=False), case.probe(SIZES["dim"], torch.bfloat16)


# The fake is like the real library.


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_fake_has_the_signatures_of_the_snapshot(name: str) -> None:
    assert inspect.signature(FUNCTIONS[name]) == signature(name)


def test_a_call_that_the_real_signature_does_not_take_fails() -> None:
    with pytest.raises(TypeError, match="cu_seqlens_n"):
        fake_quack.gemm_interface.gemm(torch.zeros(1), torch.zeros(1), cu_seqlens_n=None)


def test_every_call_binds_to_the_snapshot() -> None:
    """A forward and backward calls each function, some with a gradient to add to."""
    made = experts()
    batch, probe = rows()
    with shared_by_micro_batches(made.parameters()):
        for _ in range(2):
            made(batch).backward(probe)
    assert {name for name, _ in CALLS} == SNAPSHOT["functions"].keys()
    for name, given in CALLS:
        signature(name).bind(**given)


@pytest.fixture(scope="module")
def source() -> str:
    """Source of the interface of the release that is installed."""
    try:
        installed = distribution("quack-kernels")
    except PackageNotFoundError:
        pytest.skip("quack-kernels is not installed")
    assert installed.version == SNAPSHOT["source"]["version"] == machine.RELEASE
    return Path(str(installed.locate_file(snapshot_quack.SOURCE))).read_text()


def test_the_snapshot_is_that_of_the_installed_release(source: str) -> None:
    assert snapshot_quack.signatures(source) == SNAPSHOT["functions"]


@pytest.fixture
def real(source: str) -> ModuleType:
    """The real interface."""
    fake_quack.uninstall()
    return importlib.import_module("quack.gemm_interface")


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.02)


def test_the_fake_computes_what_the_real_references_do(real: ModuleType) -> None:
    """QuACK has a reference in PyTorch for each function. They run on a CPU."""
    fake = fake_quack.gemm_interface
    generator = torch.Generator().manual_seed(0)
    x, h, grad, gate_up, down = (
        (torch.randn(shape, generator=generator) / 4).bfloat16()
        for shape in ((10, 16), (10, 64), (10, 16), (3, 64, 16), (3, 16, 32))
    )
    scale = torch.rand(10, generator=generator)
    groups = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    over_rows = {"cu_seqlens_m": groups}
    over_columns = {"cu_seqlens_k": groups}

    found = fake.gemm_gated(x, gate_up.mT, activation="swiglu", concat_layout=("B",), tuned=False, **over_rows)
    expected = real.gemm_gated_ref(x, gate_up.mT, activation="swiglu", concat_layout=("B",), **over_rows)
    assert all(map(close, found, expected))

    found = fake.gemm(h, gate_up, concat_layout=("B",), tuned=False, **over_rows)
    assert close(found, real.gemm_ref(h, gate_up, concat_layout=("B",), **over_rows))

    main = torch.ones(3, 64, 16)
    expected = real.gemm_ref(h.mT, x, concat_layout=("out",), **over_columns).float()
    fake.gemm_add_inplace(h.mT, x, main, concat_layout=("C", "out"), tuned=False, **over_columns)
    assert close(main, expected + 1)
    fake.gemm(h.mT, x, out=main, concat_layout=("out",), tuned=False, **over_columns)
    assert close(main, expected)

    grad_h, a, grad_scale = fake.gemm_dgated(
        grad, down, h, "swiglu", colvec_scale=scale, colvec_reduce=True, tuned=False, **over_rows
    )
    grad_h_unscaled, a_unscaled = real.gemm_dgated_ref(grad, down, h, "swiglu", **over_rows)
    assert close(grad_h, grad_h_unscaled * scale.unsqueeze(1))
    assert close(a, a_unscaled * scale.unsqueeze(1))
    assert close(grad_scale, (a_unscaled * real.gemm_ref(grad, down, **over_rows)).sum(1))


# What the GEMM promises beyond the contract.


def test_gradients_of_a_step_are_added_in_fp32_in_place() -> None:
    """The first micro-batch writes them, the second adds to them; no temporary of a weight's size is made."""
    made = experts()
    batch, probe = rows()
    with shared_by_micro_batches(made.parameters()):
        for _ in range(2):
            made(batch).backward(probe)
    written = [given["out"] for name, given in CALLS if name == "gemm" and "out" in given]
    added = [given["out"] for name, given in CALLS if name == "gemm_add_inplace"]
    for mains in (written, added):
        assert {main.data_ptr() for main in mains} == {one.grad.data_ptr() for one in made.parameters()}
        assert {main.dtype for main in mains} == {torch.float32}


def test_experts_that_do_not_train_have_no_weight_gradients() -> None:
    made = experts().requires_grad_(False)
    batch, probe = rows()
    made(batch).backward(probe)
    assert not [name for name, given in CALLS if "cu_seqlens_k" in given]
    assert batch.rows_RD.grad is not None


def test_the_gradient_of_the_results_may_be_an_expanded_tensor() -> None:
    """As that of a sum is, whose rows lie on one another: QuACK takes none such."""
    made = experts()
    batch, _ = rows()
    made(batch).sum().backward()
    expanded = batch.rows_RD.grad
    batch.rows_RD.grad = None
    made(batch).backward(torch.ones_like(batch.rows_RD))
    assert torch.equal(expanded, batch.rows_RD.grad)


def test_the_host_reads_no_value() -> None:
    made = experts()
    batch, probe = rows(padding=(1, 2, 0, 3), tail=4)
    with ExitStack() as patches:
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            patches.enter_context(mock.patch.object(Tensor, name, side_effect=AssertionError("a value is read")))
        made(batch).backward(probe)


def test_weights_of_grouped_load_and_give_the_same_results() -> None:
    """Both have the same names, and under a name the same values."""
    ours = experts()
    theirs, _ = experts_of(layer_case(gemm={"use": "grouped"}))
    pieces = {piece.name: piece for piece in theirs.canonical()}
    for piece in ours.canonical():
        other = pieces.pop(piece.name)
        other.of(other.parameter.data).copy_(piece.of(piece.parameter.data))
    assert not pieces
    results, expected = (computed(made, *rows()) for made in (ours, theirs))
    assert results.keys() == expected.keys()
    for name, values in expected.items():
        assert (results[name] - values).abs().max() <= BF16 * values.abs().max(), name


@pytest.mark.parametrize("row_alignment", [1, 16])
def test_layers_on_four_ranks_equal_the_oracle(moefw_pool: RankPool, row_alignment: int) -> None:
    case = replace(
        layer_case(
            routing={"use": "topk", "score": "softmax"},
            dispatch={"use": "alltoall"},
            parallel={"experts": {"ep": 2, "etp": 2}},
        ),
        tokens=(5, 3, 0, 2),
        masked=True,
        row_alignment=row_alignment,
    )
    assert_matches(moefw_pool.run(solve, 4, case), truth(case, Rule(score="softmax", top_k=2)), rtol=BF16)


def test_operators_have_the_shapes_and_effects_that_they_declare() -> None:
    fake_quack.install()
    operators = torch.ops.moefw_quack
    x, h, gate_up, down = (torch.randn(shape).bfloat16() for shape in ((10, 16), (10, 64), (3, 64, 16), (3, 16, 32)))
    groups = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    main = torch.zeros(3, 64, 16)
    for operator, arguments in {
        operators.gated: (x, gate_up, groups),
        operators.product: (h, gate_up, groups, True),
        operators.dgated: (x, down, h, torch.rand(10), groups),
        operators.wgrad: (main, h, x, groups, True, False),
    }.items():
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_layer_is_planned_without_quack_or_memory() -> None:
    """It saves what ``grouped`` does, and where the first group begins."""
    tree = {
        "model": {"vocab_size": 64, "dim": 64, "num_layers": 1, "num_experts": 4, "top_k": 2, "expert_dim": 64},
        "attention": {"num_heads": 2, "head_dim": 32},
        "precision": {"use": "bf16"},
        "train": {"micro_batch": 1, "seq_len": 64, "tokens_per_step": 64},
        "run": {"device": "cpu"},
    }
    saved = {}
    for use in (QuackOnCpu.name, "grouped"):
        assembly = assemble_tree(
            {**tree, "gemm": {"use": use}},
            Marks("plan"),
            defaults=defaults(),
            world=1,
            registry=with_plugins((QuackOnCpu,)),
        )
        found = ledger(assembly)
        assert found.peak_bytes
        saved[use] = {row.region: row.saved for row in found.regions}
    saved["grouped"]["expert_fc1"] += torch.int32.itemsize
    assert saved[QuackOnCpu.name] == saved["grouped"]


# What it refuses, and what it says.


def registry() -> Registry:
    """Plugins with ``quack`` among them, whether it is installed or not."""
    try:
        distribution("moefw-quack")
    except PackageNotFoundError:
        return Registry(extra=[moefw_quack])
    return Registry()


def refusal(tree: dict[str, Any], device: Machine) -> str:
    whole = {"model": {"preset": "qwen3-moe-tiny"}, "gemm": {"use": "quack"}, "precision": {"use": "bf16"}, **tree}
    with pytest.raises(moefw.MoefwError) as refused:
        assemble_tree(whole, Marks("spec"), defaults=defaults(), world=1, registry=registry(), machine=device)
    return str(refused.value)


class Installed(Machine):
    """A machine with all packages."""

    def has_package(self, name: str) -> bool:
        return True


HOPPER = Installed(device="cuda", capability="9.0")


def test_a_spec_takes_it_on_a_hopper() -> None:
    tree = {"model": {"preset": "qwen3-moe-tiny"}, "gemm": {"use": "quack"}, "precision": {"use": "bf16"}}
    assembly = assemble_tree(tree, Marks("spec"), defaults=defaults(), world=1, registry=registry(), machine=HOPPER)
    assert assembly.parts.gemm == Quack()


CLAMPED = {"kind": "clamped_swiglu", "limit": 7.0}


@pytest.mark.parametrize(
    ("tree", "device", "words"),
    [
        ({}, Installed(device="cpu"), ("device cuda", "Use gemm: {use: grouped}.")),
        ({}, Installed(device="cuda", capability="8.0"), ("capability 9.0", "Use gemm: {use: grouped}.")),
        ({}, Machine(device="cuda", capability="9.0"), ("package quack", "pip install 'moefw-quack[cu12]'")),
        ({"precision": {"use": "fp32"}}, HOPPER, ("bf16 operands", "or gemm: {use: grouped}")),
        ({"precision": {"use": "mxfp8", "backend": "emulate"}}, HOPPER, ("quack",)),
        ({"model": {"preset": "qwen3-moe-tiny", "activation": CLAMPED}}, HOPPER, ("clamped_swiglu", "quack")),
        ({"model": {"preset": "qwen3-moe-tiny", "biased_experts": True}}, HOPPER, ("bias", "quack")),
        ({"model": {"preset": "qwen3-moe-tiny", "expert_dim": 36}}, HOPPER, ("multiples of 8", "expert_dim is 36")),
        ({"train": {"graphs": "step"}}, HOPPER, ("quack",)),
        ({"memory": [{"use": "recompute", "regions": ["expert_fc2"]}]}, HOPPER, ("expert_fc2", "quack")),
    ],
    ids=["cpu", "ampere", "package", "fp32", "mxfp8", "clamp", "biases", "sizes", "graphs", "region"],
)
def test_what_it_does_not_do_is_refused(tree: dict[str, Any], device: Machine, words: tuple[str, ...]) -> None:
    said = refusal(tree, device)
    for word in words:
        assert word in said


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Function that lets QuACK of a release, a GPU of a capability and a CUDA of a version seem to be here."""

    def pretend(release: str, capability: str, cuda: str) -> None:
        fake_quack.install()
        monkeypatch.setattr(sys.modules["quack"], "__version__", release)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: tuple(map(int, capability.split("."))))
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return pretend


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (("0.6.4", "9.0", "13.0"), "knows quack-kernels 0.6.5; 0.6.4 is installed."),
        (("0.6.5", "8.0", "13.0"), "9.0 or 10.0 or 10.3 or 12.0, Hopper or Blackwell; cuda has 8.0."),
        (("0.6.5", "10.0", "12.8"), "a torch built for CUDA 12.9 or later; this one is for 12.8."),
    ],
    ids=["release", "gpu", "cuda"],
)
def test_a_build_names_what_is_missing(on_a_gpu: Any, found: tuple[str, str, str], words: str) -> None:
    on_a_gpu(*found)
    with pytest.raises(moefw.PlanError) as refused:
        machine.require(torch.device("cuda"))
    assert words in str(refused.value)
    assert machine.GROUPED in str(refused.value)
    with pytest.raises(moefw.ProbeError) as unusable:
        machine.PROBE.run()
    assert words in str(unusable.value)


def test_a_build_without_quack_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack", None)
    with pytest.raises(moefw.PlanError) as refused:
        Quack().build(mock.Mock(device=torch.device("cpu")))
    assert "cannot import quack-kernels 0.6.5" in str(refused.value)
    assert "pip install 'moefw-quack[cu12]'" in str(refused.value)


def test_the_doctor_is_told_to_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = registry()
    plugins.load_all()
    assert machine.PROBE in plugins.probes
    assert "Hopper or Blackwell GPU, with CUDA 12.9 or later: pip install" in machine.PROBE.fix
    fake_quack.install()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(moefw.ProbeError, match="torch sees none"):
        machine.PROBE.run()


def test_the_release_is_the_same_everywhere() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'cu12 = ["quack-kernels=={machine.RELEASE}"]' in project
    assert f'cu13 = ["quack-kernels[cu13]=={machine.RELEASE}"]' in project
    assert SNAPSHOT["source"]["version"] == machine.RELEASE
