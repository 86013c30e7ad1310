"""A model of ``transformers`` computes the same with our layers in it, gradients included."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import moefw
from hf_models import MODELS, SIZES, VOCABULARY, same, theirs
from moefw.models.huggingface.blocks import blocks_of
from moefw.runtime.naming import by_parameter
from moefw.testing.pool import RankPool

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "olmoe, normalised": ("olmoe", {"norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, normalised": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
}


def oracle(case: str) -> Any:
    family, options = CASES[case]
    return theirs(family, {**SIZES, **MODELS[family], **options})


def ids(rank: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(rank))


def close(found: Tensor | None, wanted: Tensor | None, name: str) -> None:
    assert found is not None
    assert wanted is not None
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max(), name


def of_blocks(model: nn.Module) -> list[dict[str, Tensor]]:
    """Gradients of the MoE blocks of a model of theirs, by their names."""
    return [
        {name: weight.grad.clone() for name, weight in block.module.named_parameters() if weight.grad is not None}
        for block in blocks_of(model)
    ]


def stacked(layer: moefw.Layer, name: str, experts: list[int]) -> Tensor:
    """Gradient of a layer of ours under a name of theirs, for some experts."""
    grads = {}
    for parameter, pieces in by_parameter(layer.moe):
        assert parameter.grad is not None
        grads |= {piece.name: piece.of(parameter.grad) for piece in pieces}
    if name == "gate.weight":
        return grads["router.weight"]
    parts = ["gate", "up"] if "gate_up" in name else ["down"]
    return torch.stack([torch.cat([grads[f"experts.{e}.{part}_proj.weight"] for part in parts]) for e in experts])


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case: str) -> None:
    before = oracle(case)
    wanted = before(input_ids=ids(0), labels=ids(0))
    wanted.loss.backward()
    model = oracle(case)
    moe = moefw.replace_moe(model)
    found = model(input_ids=ids(0), labels=ids(0))
    found.loss.backward()
    close(found.logits, wanted.logits, "logits")
    theirs_by_name = dict(before.named_parameters())
    for name, parameter in model.named_parameters():
        if ".layer.moe." not in name:
            close(parameter.grad, theirs_by_name[name].grad, name)
    for layer, gradients in zip(moe.layers, of_blocks(before), strict=True):
        for name, gradient in gradients.items():
            close(stacked(layer, name, [*range(8)]), gradient, name)
    assert moe.losses() == 0
    assert torch.allclose(model.eval()(input_ids=ids(1)).logits, before.eval()(input_ids=ids(1)).logits, atol=1e-5)


def trained(model: Any, **sections: Any) -> Any:
    """What replaces the blocks of a model, after a step that has changed every layer."""
    moe = moefw.replace_moe(model, **sections)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=ids(0), labels=ids(0)).loss.backward()
    moe.average_gradients()
    optimizer.step()
    return moe


@pytest.mark.parametrize("case", ["mixtral", "olmoe, normalised", "qwen3_moe, a dense layer"])
def test_a_saved_model_is_one_of_transformers_again(case: str, tmp_path: Path) -> None:
    model = oracle(case)
    model.save_pretrained(tmp_path / "before")
    trained(model)
    model.save_pretrained(tmp_path / "after")
    assert stored(tmp_path / "after").keys() == stored(tmp_path / "before").keys()
    again = type(model).from_pretrained(tmp_path / "after").eval()
    close(again(input_ids=ids(1)).logits, model.eval()(input_ids=ids(1)).logits, "logits")


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_model_in_bf16_is_saved_in_bf16(tmp_path: Path) -> None:
    model = oracle("mixtral").bfloat16()
    model.save_pretrained(tmp_path / "before")
    moefw.replace_moe(model)
    model.save_pretrained(tmp_path / "after")
    assert same(stored(tmp_path / "before"), stored(tmp_path / "after"))


def saved_on_ranks(case: str, folder: Path) -> str:
    """What ``save_pretrained`` of the model says where ranks share experts; that of the layers saves."""
    model = oracle(case)
    moe = trained(model, parallel={"experts": {"ep": 2}})
    moe.save_pretrained(folder)
    with pytest.raises(moefw.ContractError) as refused:
        model.save_pretrained(folder)
    moe.close()
    return str(refused.value)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_ranks_that_share_experts_save_them_all(pool: RankPool, case: str, tmp_path: Path) -> None:
    refusals = pool.run(saved_on_ranks, 2, case, tmp_path / "shared")
    assert all("Call save_pretrained(path) of what replace_moe() returned" in refusal for refusal in refusals)
    alone = oracle(case)
    trained(alone)
    alone.save_pretrained(tmp_path / "alone")
    shared = stored(tmp_path / "shared")
    for name, tensor in stored(tmp_path / "alone").items():
        assert torch.allclose(shared[name], tensor, atol=1e-6), name  # every rank has the tokens of rank 0


@pytest.mark.parametrize(
    ("routing", "told"),
    [
        ({"scale": 2.0}, r"routing\.scale 2\.0 is not what MixtralSparseMoeBlock computes \(1\.0\)"),
        ({"score": "sigmoid", "balance": [{"kind": "expert_bias"}]}, r"routing\.balance 'expert_bias' is not what"),
    ],
)
def test_a_model_that_transformers_would_compute_otherwise_is_not_saved(
    routing: dict[str, Any], told: str, tmp_path: Path
) -> None:
    model = oracle("mixtral")
    moe = moefw.replace_moe(model, routing=routing)
    for save in (model.save_pretrained, moe.save_pretrained):
        with pytest.raises(moefw.SpecError, match=told):
            save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("options", [{"state_dict": {}}, {"distributed_checkpoint": True}])
def test_what_would_lose_experts_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    model = oracle("mixtral")
    moefw.replace_moe(model)
    (name,) = options
    with pytest.raises(moefw.ContractError, match=f"whose MoE blocks are replaced: a {name}= has layers in the place"):
        model.save_pretrained(tmp_path / "folder", **options)


def on_ranks(case: str) -> tuple[Tensor, list[dict[str, Tensor]], list[int]]:
    """Logits of this rank, averaged gradients of the layers by their names, and the experts of this rank."""
    model = oracle(case)
    moe = moefw.replace_moe(model, parallel={"experts": {"ep": 2}})
    output = model(input_ids=ids(dist.get_rank()), labels=ids(dist.get_rank()))
    output.loss.backward()
    moe.average_gradients()
    first = 4 * dist.get_rank()
    experts = [*range(first, first + 4)]
    names = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    grads = [{name: stacked(layer, name, experts) for name in names} for layer in moe.layers]
    moe.close()
    return output.logits.detach(), grads, experts


@pytest.mark.parametrize("case", ["mixtral", "olmoe", "qwen3_moe, normalised"])
def test_so_are_they_where_ranks_share_the_experts(pool: RankPool, case: str) -> None:
    ranks = pool.run(on_ranks, 2, case)
    before = oracle(case)
    for rank, (logits, _, _) in enumerate(ranks):
        wanted = before(input_ids=ids(rank), labels=ids(rank))
        (wanted.loss / 2).backward()
        close(logits, wanted.logits, "logits")
    for _, layers, experts in ranks:
        for own, gradients in zip(layers, of_blocks(before), strict=True):
            for name, gradient in gradients.items():
                close(own[name], gradient if name == "gate.weight" else gradient[experts], name)


def test_a_balance_that_is_asked_for_is_a_loss_and_a_state() -> None:
    model = oracle("mixtral")
    routing = {"score": "sigmoid", "pre_softmax": None, "balance": [{"kind": "expert_bias"}, {"kind": "z_loss"}]}
    moe = moefw.replace_moe(model, routing=routing)
    model(input_ids=ids(0))
    losses = moe.losses()
    losses.backward()
    for layer in moe.layers:
        router: Any = layer.moe.router
        assert router.weight.grad.any()
        assert not router.expert_bias.any()
    moe.update()
    assert all(layer.moe.router.expert_bias.any() for layer in moe.layers)  # type: ignore[union-attr,operator]
    with pytest.raises(moefw.ContractError, match="without a forward in training"):
        moe.losses()


@pytest.mark.parametrize("reentrant", [True, False])
def test_losses_that_gradient_checkpointing_leaves_without_a_gradient_warn(reentrant: bool) -> None:
    model = oracle("mixtral")
    moe = moefw.replace_moe(model, routing={"balance": [{"kind": "z_loss"}]})
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(input_ids=ids(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = moe.losses()
    assert losses.requires_grad is not reentrant
    assert any("losses() has no gradient" in str(warning.message) for warning in caught) is reentrant


def test_weights_that_do_not_train_in_a_block_do_not_in_its_layer() -> None:
    model = oracle("mixtral")
    first, second = blocks_of(model)
    first.module.experts.requires_grad_(requires_grad=False)
    second.module.gate.requires_grad_(requires_grad=False)
    moe = moefw.replace_moe(model)
    model(input_ids=ids(0), labels=ids(0)).loss.backward()
    for layer, frozen in zip(moe.layers, ({"gate_up", "down"}, {"router"}), strict=True):
        without = {name for name, parameter in layer.named_parameters() if parameter.grad is None}
        assert len(without) == len(frozen)
        assert all(any(part in name for part in frozen) for name in without)


def test_a_layer_has_the_mode_of_its_block_and_no_losses_in_evaluation() -> None:
    model = oracle("mixtral").eval()
    moe = moefw.replace_moe(model, routing={"balance": [{"kind": "z_loss"}]})
    assert not any(module.training for module in model.modules())
    model(input_ids=ids(0))
    with pytest.raises(moefw.ContractError, match="without a forward in training"):
        moe.losses()


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_other_families_are_refused_with_those_that_are_not(family: str) -> None:
    model = theirs(family, {**SIZES, **MODELS[family]})
    with pytest.raises(moefw.SpecError, match=r"no MoE block that can be replaced\. Known: MixtralSparseMoeBlock, Olm"):
        moefw.replace_moe(model)


def test_the_loss_of_transformers_is_refused_and_nothing_is_replaced() -> None:
    model = theirs("mixtral", {**SIZES, **MODELS["mixtral"], "output_router_logits": True})
    with pytest.raises(moefw.SpecError, match="output_router_logits reads the routers"):
        moefw.replace_moe(model)
    assert len(blocks_of(model)) == 2
    model.config.output_router_logits = False
    with pytest.raises(moefw.PluginError, match=r"replace_moe\(\) gemm\.use: no plugin is called"):
        moefw.replace_moe(model, gemm={"use": "nothing"})
    assert len(blocks_of(model)) == 2
    moefw.replace_moe(model)
    with pytest.raises(moefw.SpecError, match="output_router_logits reads the routers"):
        model(input_ids=ids(0), output_router_logits=True)


def test_what_a_block_does_and_a_layer_does_not_is_refused() -> None:
    options = {**SIZES, **MODELS["mixtral"], "hidden_act": "gelu", "router_jitter_noise": 0.1}
    with pytest.raises(moefw.SpecError) as raised:
        moefw.replace_moe(theirs("mixtral", options))
    assert len(raised.value.problems) == 4  # two of each of two blocks
    assert "model.layers.1.mlp: the activation of its experts is GELUActivation." in str(raised.value)
