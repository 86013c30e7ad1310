"""Optimizer states in 8 bits, in one process: codes and scales, rounding, what is zero or not finite, bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from moefw.compose.optimizer import OptimizerUnderPolicies, TorchStates
from moefw.plugins.memory.optimizer_8bit.codes import NUM_CODES, decoded, encoded, table
from moefw.plugins.memory.optimizer_8bit.states import EightBitPolicy, EightBitStates
from moefw.plugins.optimizers.adamw import AdamW
from moefw.runtime.naming import by_parameter
from moefw.runtime.optimizer_states import OptimizerStates, StatePart
from moefw.runtime.parallel.trained import trained_parameters
from moefw.testing.suites.watch import same_bits

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def values_of_many_sizes(*shape: int, signed: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 10 ** (3 * torch.randn(shape, generator=generator))
    return x if signed else x.abs()


def random_bits(*shape: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, shape, generator=torch.Generator().manual_seed(1))


@SIGNED
@pytest.mark.parametrize("block", [64, 256])
def test_codes_and_scales_are_those_of_torchao(signed: bool, block: int) -> None:
    theirs = pytest.importorskip("torchao.optim.quant_utils", reason="torchao is not installed")
    values = torch.tensor(theirs.create_dynamic_map(signed))
    assert same_bits(table(signed=signed), values)
    x = values_of_many_sizes(64, 768, signed=signed)
    x[3] = 0.0
    x[4, :block] = values.repeat(block // 256 + 1)[:block]  # exactly on codes
    x[5, : block - 1] = (values[:-1] + values[1:]).repeat(block // 255 + 1)[: block - 1] / 2  # halfway between two
    x[5, block - 1] = 1.0
    scaled, scales = theirs.scale_tensor(x, block)
    codes = theirs.quantize_8bit_with_qmap(scaled, values)
    own_codes, own_scales = encoded(x, table(signed=signed), block, signed=signed, bits_RC=None)
    assert same_bits(own_codes, codes)
    assert same_bits(own_scales.flatten(), scales)
    expected = theirs.dequant_with_qmap(codes, values, scales)
    assert same_bits(decoded(own_codes, own_scales, table(signed=signed), block), expected)


@SIGNED
@pytest.mark.parametrize("num_columns", [1, 7, 16, 40, 63])
def test_the_last_block_of_a_row_is_a_block_of_its_own(num_columns: int, signed: bool) -> None:
    x = values_of_many_sizes(3, 5, num_columns, signed=signed)
    codes, scales = encoded(x, table(signed=signed), 16, signed=signed, bits_RC=None)
    assert scales.shape == (3, 5, -(-num_columns // 16))
    for number, block in enumerate(x.split(16, -1)):
        own_codes, own_scales = encoded(block, table(signed=signed), block.shape[-1], signed=signed, bits_RC=None)
        assert same_bits(codes[..., 16 * number :][..., :16], own_codes)
        assert same_bits(scales[..., number : number + 1], own_scales)


@SIGNED
def test_rounding_at_random_goes_to_a_neighbour_and_is_right_on_average(signed: bool) -> None:
    values = table(signed=signed)
    x = torch.linspace(float(values[0]), 1, 1000)
    x = torch.cat([x[x.abs() > values[values > 0][0]], torch.ones(1)])
    codes, scales = encoded(x.repeat(1 << 12, 1), values, 4096, signed=signed, bits_RC=random_bits(1 << 12, len(x)))
    assert (scales == 1.0).all()
    got = decoded(codes, scales, values, 4096)
    above = torch.searchsorted(values, x).clamp(1, NUM_CODES - 1)
    below, above = values[above - 1], values[above]
    assert ((got == below) | (got == above)).all()
    share = ((x - below) / (above - below)).double()
    rose = (got == above).double().mean(0)
    deviation = (share * (1 - share) / len(got)).sqrt()
    assert ((rose - share).abs() <= 5 * deviation + 1e-4).all()


@SIGNED
def test_values_of_codes_do_not_change(signed: bool) -> None:
    values = table(signed=signed)
    codes, _ = encoded(values.repeat(64, 1), values, NUM_CODES, signed=signed, bits_RC=random_bits(64, NUM_CODES))
    assert (codes == torch.arange(NUM_CODES, dtype=torch.uint8)).all()


def test_a_small_second_moment_does_not_become_zero_at_random() -> None:
    """Else its element would move by the first moment over epsilon."""
    values = table(signed=False)
    x = torch.full((64, 64), 1e-10)
    x[:, 0] = 1.0
    x[:, 1] = 0.0
    codes, _ = encoded(x, values, 64, signed=False, bits_RC=random_bits(64, 64))
    assert (codes[:, 0] == NUM_CODES - 1).all()
    assert (codes[:, 1] == 0).all()
    assert (codes[:, 2:] == 1).all()
    to_nearest, _ = encoded(x, values, 64, signed=False, bits_RC=None)
    assert (to_nearest[:, 2:] == 0).all()


def test_the_second_moment_of_adamw_has_codes_without_a_sign_and_no_zero() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = treated(model, stochastic=True)
    model.weight.grad = torch.full((64, 64), -1e-5)
    model.weight.grad[:, 0] = 1.0
    optimizer.step()
    state = optimizer.state[model.weight]
    assert (state["exp_avg_sq"][:, 0] == NUM_CODES - 1).all()
    assert (state["exp_avg_sq"][:, 1:] == 1).all()
    assert (optimizer.values(model.weight)["exp_avg"][:, 1:] < 0).double().mean() > 0.5


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_block_with_a_value_that_is_not_finite_has_a_scale_that_is_not(bad: float) -> None:
    x = values_of_many_sizes(4, 64, signed=True)
    x[2, 17] = bad
    for bits in (None, random_bits(4, 64)):
        _, scales = encoded(x, table(signed=True), 16, signed=True, bits_RC=bits)
        assert scales.isfinite().logical_not().nonzero().tolist() == [[2, 1]]


def treated(model: nn.Module, *, stochastic: bool, block: int = 256, **options: float) -> OptimizerUnderPolicies:
    inner = AdamW(**options).build(trained_parameters(model), 1e-2)
    states = EightBitPolicy(stochastic=stochastic, block=block).treat(TorchStates(inner))
    nonnegative = AdamW().nonnegative_states()
    return OptimizerUnderPolicies(
        inner, states, AdamW().states(), dict(by_parameter(model)), 0, nonnegative=nonnegative
    )


@pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
def test_an_update_is_that_of_adamw_in_fp64_from_the_values_of_codes(stochastic: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(67, 33)
    optimizer = treated(model, stochastic=stochastic, block=32, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)
    p, m, v = model.weight.detach().double(), torch.zeros(33, 67).double(), torch.zeros(33, 67).double()
    for step in range(1, 6):
        g = torch.randn(33, 67)
        model.weight.grad = g.clone()
        model.bias.grad = torch.randn(33)
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g.double(), 0.99 * v + 0.01 * g.double().square()
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-6)
        assert ((model.weight - p).abs() <= 2.0**-22 * p.abs() + 1e-2 * 2.0**-20).all()
        p = model.weight.detach().double()
        got = optimizer.values(model.weight)
        # the largest distance of two codes is 0.9 / 64 of the scale; -1 is no code, which 0.9 / 128 is above
        assert ((got["exp_avg"] - m).abs() <= m.abs().max() * 0.9 / 64).all()
        assert ((got["exp_avg_sq"] - v).abs() <= v.abs().max() * 0.9 / 128).all()
        m, v = got["exp_avg"].double(), got["exp_avg_sq"].double()


def test_states_of_an_element_take_random_bits_of_their_own() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = treated(model, stochastic=True, beta1=0.5, beta2=0.5)
    model.weight.grad = torch.full((64, 64), 0.5)
    model.weight.grad[:, 0] = 1.0
    optimizer.step()
    rose = {}
    for key, value in optimizer.values(model.weight).items():
        rose[key] = value[:, 1:] > value[:, 1:].mean()
        assert 0.02 < rose[key].double().mean() < 0.98
    both = (rose["exp_avg"] & rose["exp_avg_sq"]).double().mean().item()
    alone = rose["exp_avg"].double().mean().item() * rose["exp_avg_sq"].double().mean().item()
    assert both == pytest.approx(alone, abs=0.03)


def test_bytes_between_steps_are_counted() -> None:
    """A byte for each value, four for each block, of two moments. Vectors keep fp32."""
    model = nn.Linear(600, 256)
    optimizer = treated(model, stochastic=True)
    state = optimizer.state[model.weight]
    assert sum(value.nbytes for key, value in state.items() if key != "step") == 2 * (256 * 600 + 256 * 3 * 4)
    assert sum(value.nbytes for key, value in optimizer.state[model.bias].items() if key != "step") == 2 * 256 * 4


def test_decoded_states_are_few_at_a_time() -> None:
    seen = []

    class Watching(OptimizerStates):
        dtype = torch.float32

        def room(self, parameter: Tensor) -> Tensor:
            return torch.zeros_like(parameter)

        def update(self, parts: Sequence[StatePart]) -> None:
            seen.append([part.parameter.numel() for part in parts])

    model = nn.Linear(128, 256, bias=False)
    inner = AdamW().build(trained_parameters(model), 1e-2)
    states = EightBitStates(Watching(), stochastic=True, block=64, elements=1 << 12)
    optimizer = OptimizerUnderPolicies(inner, states, AdamW().states(), dict(by_parameter(model)), 0)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert seen == [[1 << 12]] * 8
