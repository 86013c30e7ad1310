"""An MoE layer outside of a model of ours: the sums of its definition, their gradients, and nothing that is ignored."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moefw
from moefw.runtime.naming import by_parameter
from moefw.testing.pool import RankPool

SIZES = {"dim": 8, "expert_dim": 16, "num_experts": 4, "top_k": 2}
AUX, Z = 0.3, 0.1
LOSSES = [{"kind": "aux_loss", "coeff": AUX}, {"kind": "z_loss", "coeff": Z}]
ROUTING = {"use": "topk", "balance": LOSSES}
BIASED = {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias", "rate": 0.1}]}
PARTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "router and experts recomputed": {"memory": [{"use": "recompute", "regions": ["router", "experts"]}]},
    "activation and dispatch recomputed": {"memory": [{"use": "recompute", "regions": ["moe_act", "dispatch"]}]},
    "one expert after another": {"gemm": {"use": "loop"}},
    "rows gathered": {"dispatch": {"use": "allgather"}},
}


def tokens(rank: int) -> tuple[Tensor, Tensor]:
    """Two sequences of a rank, and which of their tokens are valid."""
    generator = torch.Generator().manual_seed(rank)
    mask_BS = torch.ones(2, 7, dtype=torch.bool)
    mask_BS[0, 5 - rank :] = False
    return torch.randn(2, 7, SIZES["dim"], generator=generator), mask_BS


def tensors(layer: moefw.Layer, *, gradients: bool) -> dict[str, Tensor]:
    """Parameters or gradients by canonical name, of the experts that this rank holds. What is frozen has no gradient."""
    found = {}
    for parameter, pieces in by_parameter(layer.moe):
        if gradients and not parameter.requires_grad:
            assert parameter.grad is None
            continue
        for piece in pieces:
            values = parameter.grad if gradients else parameter.detach()
            assert values is not None
            found[piece.name] = piece.of(values).clone()
    return found


def step(sections: dict[str, Any], frozen: bool = False) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Output, loss and gradients of one step on this rank. ``frozen``: whether the router is."""
    layer = moefw.build_layer(**SIZES, seed=0, routing=ROUTING, init_std=0.5, **sections)
    layer.moe.router.requires_grad_(not frozen)
    x, mask_BS = tokens(dist.get_rank() if dist.is_initialized() else 0)
    output = layer(x, mask_BS)
    loss = output.out[mask_BS].square().mean() + output.losses
    loss.backward()
    layer.average_gradients()
    layer.close()
    return output.out.detach(), loss.item(), tensors(layer, gradients=True)


def written_out(weights: dict[str, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Output and loss of a rank's tokens, from the definition of the layer."""
    x, mask_BS = tokens(rank)
    x_TD = x[mask_BS]
    logits_TE = x_TD @ weights["router.weight"].T
    chosen = logits_TE.topk(SIZES["top_k"])
    gates_TE = torch.zeros_like(logits_TE).scatter(1, chosen.indices, chosen.values.softmax(1))
    out_TD = torch.zeros_like(x_TD)
    for expert in range(SIZES["num_experts"]):
        gate, up, down = (weights[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        hidden_TF = torch.nn.functional.silu(x_TD @ gate.T) * (x_TD @ up.T)
        out_TD = out_TD + gates_TE[:, expert : expert + 1] * (hidden_TF @ down.T)
    share_E = torch.bincount(chosen.indices.flatten(), minlength=SIZES["num_experts"]) / chosen.indices.numel()
    aux = SIZES["num_experts"] * (share_E * logits_TE.softmax(1).mean(0)).sum()
    z = logits_TE.logsumexp(1).square().mean()
    return torch.zeros_like(x).masked_scatter(mask_BS.unsqueeze(-1), out_TD), (
        out_TD.square().mean() + AUX * aux + Z * z
    )


def expected(world: int) -> tuple[list[Tensor], list[float], dict[str, Tensor]]:
    """Outputs and losses of all ranks, and the gradients of the mean of their losses."""
    whole = moefw.build_layer(**SIZES, seed=0, routing=ROUTING, init_std=0.5)
    weights = {name: values.requires_grad_() for name, values in tensors(whole, gradients=False).items()}
    outputs, losses = zip(*(written_out(weights, rank) for rank in range(world)), strict=True)
    (sum(losses) / world).backward()
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    return [*outputs], [loss.item() for loss in losses], gradients


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("world", [1, 2])
def test_outputs_losses_and_gradients_are_those_of_the_definition(pool: RankPool, world: int, parts: str) -> None:
    sections = {**PARTS[parts], "parallel": {"experts": {"ep": world}}}
    ranks = pool.run(step, world, sections)
    outputs, losses, gradients = expected(world)
    for rank, (out, loss, own) in enumerate(ranks):
        torch.testing.assert_close(out, outputs[rank])
        assert loss == pytest.approx(losses[rank], rel=1e-5)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], msg=name)
    assert set().union(*(own for _, _, own in ranks)) == gradients.keys()


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_beside_a_frozen_router_are_averaged_all_the_same(pool: RankPool, world: int) -> None:
    ranks = pool.run(step, world, {"parallel": {"experts": {"ep": world}}}, True)
    _, _, gradients = expected(world)
    for _, _, own in ranks:
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], msg=name)
    assert set().union(*(own for _, _, own in ranks)) == gradients.keys() - {"router.weight"}


def test_tokens_of_a_batch_are_those_of_its_rows() -> None:
    layer = moefw.build_layer(**SIZES, precision={"use": "bf16"}).eval()
    x, mask_BS = tokens(0)
    output = layer(x, mask_BS)
    flat = layer(x.flatten(0, 1), mask_BS.flatten())
    assert torch.equal(output.out.flatten(0, 1), flat.out)
    assert output.out.dtype == torch.float32
    assert output.losses == 0


def bias_after_two_forwards() -> Tensor:
    layer = moefw.build_layer(**SIZES, seed=0, routing=BIASED, parallel={"experts": {"ep": dist.get_world_size()}})
    x, mask_BS = tokens(dist.get_rank())
    layer(x, mask_BS)
    layer(x)
    layer.update()
    return layer.state_dict()["moe.router.expert_bias"]


def test_a_bias_advances_by_the_tokens_of_all_ranks_and_forwards(pool: RankPool) -> None:
    layer = moefw.build_layer(**SIZES, seed=0, routing=BIASED)
    counts_E = torch.zeros(SIZES["num_experts"])
    for x, mask_BS in map(tokens, range(2)):
        for mask in (mask_BS, None):
            counts_E += layer(x, mask).stats.stats["tokens_per_expert"]
    bias_E = 0.1 * torch.sign(counts_E.mean() - counts_E)
    assert bias_E.any()
    for found_E in pool.run(bias_after_two_forwards, 2):
        assert torch.equal(found_E, bias_E)


def test_a_bias_that_does_not_advance_is_a_warning() -> None:
    layer = moefw.build_layer(**SIZES, routing=BIASED)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, _ = tokens(0)

    def train(*, updates: bool) -> None:
        layer(x).out.sum().backward()
        optimizer.step()
        if updates:
            layer.update()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(updates=True)
        layer(x)  # a micro-batch of the next step
        train(updates=False)
    with pytest.warns(UserWarning, match="expert_bias, which advances in update"):
        layer(x)


def test_draws_start_from_the_generator_of_pytorch() -> None:
    layer = moefw.build_layer(**SIZES, routing={"use": "topk", "jitter": 0.5})
    x, _ = tokens(0)
    torch.manual_seed(0)
    first, second = layer(x).out, layer(x).out
    torch.manual_seed(0)
    assert torch.equal(first, layer(x).out)
    assert not torch.equal(first, second)


REFUSED: dict[str, tuple[dict[str, Any], type[moefw.MoefwError], str]] = {
    "a misspelt part": ({"dispatch": {"use": "alltoal"}}, moefw.PluginError, "build_layer() dispatch.use: no plugin"),
    "a size that does not fit": ({"top_k": 9}, moefw.PlanError, "build_layer() routing: top_k 9 of 4 experts"),
    "a size that is no number": ({"top_k": "2"}, moefw.SpecError, "build_layer() top_k: "),
    "a section of a run": ({"data": {"use": "text"}}, moefw.SpecError, "'data' is no argument of build_layer()"),
    "a loss over all layers": (
        {"routing": {"use": "topk", "balance": [{"kind": "aux_loss", "over": "model"}]}},
        moefw.PlanError,
        "a loss over the model is computed where its layers end",
    ),
    "scales of earlier steps": (
        {"precision": {"use": "fp8-tensor", "scaling": "delayed", "backend": "emulate"}},
        moefw.PlanError,
        "delayed scaling remembers",
    ),
    "a region of an attention": (
        {"memory": [{"use": "recompute", "regions": ["core_attn"]}]},
        moefw.PlanError,
        "build_layer() memory[0].regions: a layer alone has no region core_attn.",
    ),
    "a budget that a second run lifts": (
        {"dispatch": {"use": "alltoall", "rank_capacity": 1.5, "on_overflow": "rerun"}},
        moefw.PlanError,
        "build_layer() dispatch: a budget of rows",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_take_effect_is_refused(case: str) -> None:
    arguments, kind, message = REFUSED[case]
    with pytest.raises(kind) as raised:
        moefw.build_layer(**{**SIZES, **arguments})
    assert message in str(raised.value)


def sharded() -> None:
    moefw.build_layer(**SIZES, parallel={"dense": {"shard": "all"}})


def test_so_are_parameters_that_ranks_would_shard(pool: RankPool) -> None:
    with pytest.raises(moefw.ContractError, match="build_layer\\(\\) parallel: the parameters of a layer alone"):
        pool.run(sharded, 2)


def test_a_wrong_call_says_what_to_hand_over() -> None:
    layer = moefw.build_layer(**SIZES)
    x, mask_BS = tokens(0)
    for call, message in (
        (lambda: layer(x[..., :4]), "Hand over (T, 8) or (B, S, 8)."),
        (lambda: layer(x, mask_BS.float()), "Hand over (2, 7) torch.bool"),
        (lambda: layer(x.long()), "an MoE layer got tokens of torch.int64."),
        (layer.update, "have seen no tokens in training"),
        (lambda: copy.deepcopy(layer), "cannot be copied"),
    ):
        with pytest.raises(moefw.ContractError) as raised:
            call()
        assert message in str(raised.value)


def weights(layer: moefw.Layer) -> list[Tensor]:
    return [weight.clone() for weight in tensors(layer, gradients=False).values()]


def test_layers_differ_and_a_seed_of_torch_repeats_them() -> None:
    torch.manual_seed(1)
    first, second = (weights(moefw.build_layer(**SIZES)) for _ in range(2))
    torch.manual_seed(1)
    again = weights(moefw.build_layer(**SIZES))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, second))
    assert all(
        map(torch.equal, weights(moefw.build_layer(**SIZES, seed=5)), weights(moefw.build_layer(**SIZES, seed=5)))
    )


def built_on_a_rank() -> tuple[Tensor, Tensor]:
    """Weights of the router of two layers, where ranks have seeds of their own."""
    torch.manual_seed(dist.get_rank())
    layers = [moefw.build_layer(**SIZES, parallel={"experts": {"ep": 2}}) for _ in range(2)]
    first, second = (tensors(layer, gradients=False)["router.weight"] for layer in layers)
    return first, second


def test_ranks_with_seeds_of_their_own_build_one_layer(pool: RankPool) -> None:
    (first, second), others = pool.run(built_on_a_rank, 2)
    assert torch.equal(first, others[0])
    assert torch.equal(second, others[1])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_is_what_torch_takes(device: Any) -> None:
    assert next(moefw.build_layer(**SIZES, device=device).parameters()).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "told"),
    [("meta", r"build_layer\(\) device: 'meta' is not one of"), ("gpu", "device='gpu' is no device")],
)
def test_a_device_that_is_none_is_told(device: str, told: str) -> None:
    with pytest.raises(moefw.SpecError, match=told):
        moefw.build_layer(**SIZES, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_of_a_model_leaves_its_routers_in_fp32(dtype: torch.dtype) -> None:
    layer = moefw.build_layer(**SIZES, routing=BIASED, init_std=0.5)
    router: Any = layer.moe.router
    router.expert_bias.add_(1 / 3)
    before = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    model = torch.nn.Sequential(torch.nn.Linear(SIZES["dim"], SIZES["dim"]), layer)
    model.to(dtype)
    assert model[0].weight.dtype != torch.float32
    assert {parameter.dtype for parameter in layer.moe.experts.parameters()} == {model[0].weight.dtype}
    for name, tensor in router.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])
    loss = layer(torch.randn(6, SIZES["dim"], dtype=model[0].weight.dtype)).out.square().mean()
    loss.backward()
    assert router.weight.grad.any()


def test_a_layer_is_not_pickled(tmp_path: Path) -> None:
    with pytest.raises(
        moefw.ContractError, match=r"cannot be pickled, as torch.save\(layer\) does. Save layer.state_dict"
    ):
        torch.save(moefw.build_layer(**SIZES), tmp_path / "layer.pt")
