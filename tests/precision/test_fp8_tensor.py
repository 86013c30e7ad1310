"""One scale for a tensor: a group of rows is quantized as it would be alone, and delayed scales follow earlier steps."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moefw.core.errors import ContractError, PlanError, SpecError
from moefw.core.records import RowGroups
from moefw.plugins.precision.quantized.tensorwise import FORMATS, DelayedScales, GemmScales
from moefw.runtime.naming import state_tensors
from moefw.runtime.parallel.trained import trained_parameters
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_context, open_model, whole_model
from moefw.testing.suites.runs import train as trained
from moefw.testing.training import SMALL
from moefw.training import checkpoint
from moefw.training.checkpoint import Origin
from moefw.training.engine import Engine, evaluate
from moefw_kernels.quantize import E4M3, E5M2, Format, quantize_tensor
from pairwise import each_value

ENDS = torch.tensor([16, 16, 48, 64], dtype=torch.int32)


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    """Groups of very different magnitudes, one empty; rows past the last are NaN."""
    x = torch.randn(70, 24, generator=torch.Generator().manual_seed(0))
    x[:16] *= 1e-4
    x[48:64] *= 1e4
    x[64:] = torch.nan
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("given", [False, True], ids=["current", "given"])
def test_a_group_of_rows_is_what_it_would_be_alone(fmt: Format, given: bool, dtype: torch.dtype) -> None:
    x, scale = rows(dtype), torch.tensor([3.0, 1.0, 0.3, 1e-3]) if given else None
    found, start = quantize_tensor(x, fmt=fmt, scale=scale, ends_e=ENDS), 0
    for group, end in enumerate(ENDS.tolist()):
        alone = quantize_tensor(x[start:end], fmt=fmt, scale=None if scale is None else scale[group])
        assert torch.equal(found.codes[start:end].view(torch.uint8), alone.codes.view(torch.uint8))
        assert (found.scales[start:end] == alone.scales).all()
        assert torch.equal(found.dequantize()[start:end], alone.dequantize())
        start = end
    assert not found.dequantize()[start:].any()
    assert torch.equal(found.mT.dequantize(), found.dequantize().mT)


def test_a_stacked_weight_is_what_it_would_be_alone() -> None:
    weight = (
        torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 50.0, 1e-3])[:, None, None]
    )
    found = quantize_tensor(weight)
    assert found.scales.shape == (3, 1, 1)
    for expert, matrix in enumerate(weight):
        alone = quantize_tensor(matrix)
        assert torch.equal(found.codes[expert].view(torch.uint8), alone.codes.view(torch.uint8))
        assert torch.equal(found.scales[expert].view(()), alone.scales)
    assert torch.equal(found.mT.dequantize(), found.dequantize().mT)
    assert torch.equal(found.along(-2).dequantize(), found.dequantize())


def test_scales_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"give one for each of what it serves: \(4,\)"):
        quantize_tensor(rows(), scale=torch.ones(3), ends_e=ENDS)
    with pytest.raises(ValueError, match="divides the rows of one matrix"):
        quantize_tensor(torch.zeros(2, 16, 16), ends_e=ENDS)


@pytest.mark.parametrize("name", ["history", "margin", "algorithm"])
def test_options_of_delayed_scaling_are_refused_under_the_other_one(name: str) -> None:
    value = {"history": 4, "margin": 0, "algorithm": "max"}[name]
    given = {"use": "fp8-tensor", "backend": "emulate", name: value}
    with pytest.raises(PlanError, match=re.escape(f"precision.{name}: {name} is no option of scaling: current.")):
        LayerCase(parts={"precision": given}).resolve()
    LayerCase(parts={"precision": {**given, "scaling": "delayed"}}).resolve()


@pytest.mark.parametrize(
    ("name", "value"), [("history", 0), ("margin", -1), ("algorithm", "mean"), ("scaling", "late")]
)
def test_values_that_mean_nothing_are_refused(name: str, value: Any) -> None:
    given = {"use": "fp8-tensor", "backend": "emulate", "scaling": "delayed", name: value}
    with pytest.raises(SpecError, match=f"precision.{name}"):
        LayerCase(parts={"precision": given}).resolve()


def delayed(**options: Any) -> dict[str, Any]:
    return {"use": "fp8-tensor", "backend": "emulate", "scaling": "delayed", "history": 3, **options}


def small(world: int = 1, precision: Mapping[str, Any] | None = None, **parts: Any) -> LayerCase:
    """A dense layer and two of experts; a step has four micro-batches on one rank."""
    train = {**SMALL["train"], "tokens_per_step": 128}
    given = {"precision": precision or delayed(), "train": train, **parts}
    return whole_model(world, parts=given, plugins=(), sizes={"vocab_size": 64})


class Past:
    """Reference of delayed scaling with lists, by GEMM, operand and group."""

    def __init__(self, history: int, margin: int, algorithm: str) -> None:
        self.length, self.margin, self.latest = history, margin, algorithm == "most_recent"
        self.seen: dict[tuple[GemmScales, str, int], float] = {}
        self.history: dict[tuple[GemmScales, str, int], list[float]] = {}
        self.scale: dict[tuple[GemmScales, str, int], np.float32] = {}

    def watch(self, encode: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``GemmScales.encode`` or ``encode_both`` with its operands compared with the expected ones."""

        def watched(scales: GemmScales, x: Tensor, role: Any, *during_and_rows: Any) -> Any:
            *_, about = during_and_rows
            found = encode(scales, x, role, *during_and_rows)
            first, *second = found if isinstance(found, tuple) else (found,)
            values = first.dequantize()
            assert all(torch.equal(other.dequantize(), values) for other in second)
            for group, part in enumerate(parts(x.detach(), about)):
                key = (scales, role, group)
                if scales.training:
                    self.seen[key] = max(self.seen.get(key, 0.0), part.abs().max().item() if part.numel() else 0.0)
                scale = torch.tensor(self.scale.get(key, np.float32(1.0)))
                wanted = quantize_tensor(part, fmt=FORMATS[role], scale=scale).dequantize()
                assert torch.equal(parts(values, about)[group], wanted)
            return found

        return watched

    def step(self) -> None:
        """Prepend the magnitudes of this step to the histories."""
        for key, amax in self.seen.items():
            self.history[key] = [amax, *self.history.get(key, [])][: self.length]
            amax = self.history[key][0] if self.latest else max(self.history[key])
            if amax:
                top = {"grad": 57344.0}.get(key[1], 448.0)
                self.scale[key] = np.float32(top / 2**self.margin) / np.float32(amax)
        self.seen = {}


def parts(x: Tensor, about: RowGroups) -> list[Tensor]:
    if about.ends_e is None:
        return list(x) if x.ndim > 2 else [x]
    return [x[start:end] for start, end in itertools.pairwise([0, *about.ends_e.tolist()])]


def engine_of(layer_case: LayerCase) -> tuple[nn.Module, Engine, Callable[[int], list[Any]]]:
    model, assembly, layout, _ = open_model(layer_case)
    optimizer = assembly.parts.optimizer.build(trained_parameters(model), 1e-3)
    return model, Engine(model, optimizer, layout, clip_norm=1.0), lambda step: global_batch(assembly, layout, step)


def no_clock(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


@pytest.mark.parametrize(
    ("gemm", "options"),
    [
        ("loop", {}),
        pytest.param("grouped", {"algorithm": "most_recent"}, marks=pytest.mark.deep),
        ("grouped", {"margin": 2, "saved_activations": "fp8"}),
    ],
    ids=str,
)
def test_scales_follow_from_the_largest_magnitudes_of_earlier_steps(
    gemm: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four micro-batches a step, with evaluations in between, until histories are full and wrap."""
    past = Past(3, options.get("margin", 0), options.get("algorithm", "max"))
    for encode in ("encode", "encode_both"):
        monkeypatch.setattr(GemmScales, encode, past.watch(getattr(GemmScales, encode)))
    model, engine, batches = engine_of(small(precision=delayed(**options), gemm={"use": gemm}))
    meters = [part for part in model.modules() if isinstance(part, GemmScales)]
    assert len(meters) == 3 * 4 + 3 + 2 * 3 + 2 * 2 * (8 if gemm == "loop" else 1)
    for step in range(4):
        engine.step(batches(step), 1e-3, no_clock)
        past.step()
        evaluate(model, batches(100 + step), engine.layout)
        for meter, (operand, role) in itertools.product(meters, enumerate(FORMATS)):
            for group in range(len(meter.scale)):
                history = past.history[meter, role, group]
                assert meter.history[group, operand].tolist() == history + [0.0] * (3 - len(history))
                assert meter.scale[group, operand].item() == past.scale.get((meter, role, group), 1.0)


def all_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "encoder" in name}


def test_evaluation_leaves_every_scale_alone() -> None:
    model, engine, batches = engine_of(small())
    engine.step(batches(0), 1e-3, no_clock)
    before = all_state(model)
    evaluate(model, batches(1), engine.layout)
    after = all_state(model)
    assert before
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_an_abandoned_step_measured_is_forgotten() -> None:
    found = []
    for abandons in (True, False):
        model, engine, batches = engine_of(small())
        if abandons:
            with torch.no_grad():
                model.layers[0].attention_norm.weight *= 100  # type: ignore[index, union-attr]
            (model(batches(9)[0]).loss_sum * 0).backward()
            with torch.no_grad():
                model.layers[0].attention_norm.weight /= 100  # type: ignore[index, union-attr]
        engine.step(batches(0), 1e-3, no_clock)
        found.append(state_tensors(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("regions", "gemm"), each_value([["layer"], ["experts", "attention", "dense_mlp"]], ["loop", "grouped"])
)
def test_recompute_changes_no_bit(regions: list[str], gemm: str) -> None:
    memory = [{"use": "recompute", "regions": regions}]
    kept, again = (trained(small(gemm={"use": gemm}, memory=policy), 2) for policy in ([], memory))
    assert [result.loss for result in kept.results] == [result.loss for result in again.results]
    assert all(torch.equal(kept.state[name], again.state[name]) for name in kept.state)


@cache
def alone_state() -> dict[str, Tensor]:
    return trained(small(gemm={"use": "grouped"}), 1).state


LAYOUTS: Mapping[str, tuple[int, Any]] = {
    "ep 2": (2, {"experts": {"ep": 2}}),
    "ep 2, edp 2": (4, {"experts": {"ep": 2}}),
    "all sharded": (2, {"dense": {"shard": "all"}, "experts": {"shard": "all"}}),
    "etp 2": (2, {"experts": {"etp": 2}}),
    "tp 2, etp 2": (2, {"dense": {"tp": 2}, "experts": {"etp": 2}}),
}


@pytest.mark.parametrize(("layout", "gemm"), each_value(LAYOUTS, ["loop", "grouped"]))
def test_no_layout_changes_what_is_remembered(pool: RankPool, layout: str, gemm: str) -> None:
    """The largest magnitude over all copies, parts and tokens has one name.

    Weights, and inputs of the first GEMMs, are the same bits. After these, sums in another order move a value by a step
    of the format: by 1/16 in E4M3, by 1/8 in E5M2, more if several values move.
    """
    world, parallel = LAYOUTS[layout]
    alone = alone_state()
    ranks = pool.run(trained, world, small(world, parallel=parallel, gemm={"use": gemm}), 1)
    assert {name for rank in ranks for name in rank.state} == alone.keys()
    for rank, name in itertools.product(ranks, alone):
        if name in rank.state and name.endswith("history"):
            got, wanted = (state[name].view(-1, 3, 3)[..., 0] for state in (rank.state, alone))
            first = "layers.0.attention.q_proj" in name
            for operand, allowed in enumerate((0.0 if first else 0.1, 0.0, 0.2)):
                error = (got[:, operand] / wanted[:, operand] - 1).abs().max()
                assert error <= allowed, f"{name}[{operand}]: {error:.2e}"


def go_on(layer_case: LayerCase, folder: Path, steps: range) -> tuple[list[float], dict[str, Tensor]]:
    """Train the steps, from the checkpoint before the first to one after the last; return losses and state."""
    model, engine, batches = engine_of(layer_case)
    if steps.start:
        checkpoint.load(folder / "checkpoints" / f"step-{steps.start}", model, engine.optimizer)
    losses = [engine.step(batches(step), 1e-3, no_clock).loss for step in steps]
    if steps:
        checkpoint.save(folder, steps.stop, model, engine.optimizer, engine.layout, Origin(), keep=9)
    return losses, {name: tensor.clone() for name, tensor in state_tensors(model).items()}


EP = {"experts": {"ep": 2}}


@pytest.mark.parametrize(
    ("world", "parallel", "gemm"),
    [pytest.param(1, {}, "grouped", marks=pytest.mark.deep), (2, EP, "loop")],
    ids=["1", "ep 2"],
)
def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_bits(
    pool: RankPool, tmp_path: Path, world: int, parallel: Any, gemm: str
) -> None:
    layer_case = small(world, parallel=parallel, gemm={"use": gemm})
    whole = pool.run(go_on, world, layer_case, tmp_path / "whole", range(4))
    pool.run(go_on, world, layer_case, tmp_path / "parts", range(2))
    again = pool.run(go_on, world, layer_case, tmp_path / "parts", range(2, 4))
    for (losses, state), (wanted, right) in zip(again, whole, strict=True):
        assert losses == wanted[2:]
        assert state.keys() == right.keys()
        assert all(torch.equal(state[name], right[name]) for name in state)


def test_what_is_remembered_moves_into_another_layout(pool: RankPool, tmp_path: Path) -> None:
    """From the loop over experts on two ranks to stacked experts on one rank, which then trains on."""
    two = pool.run(go_on, 2, small(2, parallel=EP, gemm={"use": "loop"}), tmp_path, range(3))
    saved = {name: tensor for _, state in two for name, tensor in state.items()}
    layer_case = small(gemm={"use": "grouped"})
    _, state = go_on(layer_case, tmp_path, range(3, 3))
    assert state.keys() == saved.keys()
    assert any(name.startswith("layers.2.moe.experts.7.gate_up.") for name in state)
    assert all(torch.equal(state[name], saved[name]) for name in state)
    wanted, _ = pool.run(go_on, 2, small(2, parallel=EP), tmp_path, range(3, 5))[0]
    losses, _ = go_on(layer_case, tmp_path, range(3, 5))
    assert losses == pytest.approx(wanted, rel=5e-4)


def test_a_number_that_is_not_finite_never_becomes_one() -> None:
    scales = DelayedScales(history=1, margin=0, algorithm="max").at("gate_up", groups=4)
    x = rows()
    x[20, 3] = torch.inf
    values = scales.encode(x, "input", "fprop", RowGroups(ENDS)).dequantize()
    assert values[16:48].isnan().all()
    assert values[:16].isfinite().all()
    assert values[48:].isfinite().all()


def test_a_saved_activation_is_nothing_that_the_gemm_multiplies() -> None:
    scales = DelayedScales(history=1, margin=0, algorithm="max").at("gate_up", groups=4)
    x = rows()
    found = scales.encode_activation(x, RowGroups(ENDS))
    assert torch.equal(found.dequantize(), quantize_tensor(x, ends_e=ENDS).dequantize())
    assert isinstance(scales, GemmScales)
    assert not scales.largest.any()


def test_a_gemm_that_has_no_name_is_refused_under_delayed_scaling() -> None:
    recipe = open_context(LayerCase(parts={"precision": delayed()}))[0].recipe("moe.experts")
    with pytest.raises(ContractError, match=r"Precision\.at\(name, groups="):
        recipe.quantize(torch.zeros(4, 4), role="input", during="fprop")
