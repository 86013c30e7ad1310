"""The weights that stream from any layout are those of a whole export, by the names and dtypes of Hugging Face."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moefw
from adapted_models import LORA, adapted, tensors_of_adapter
from coded_folders import save_fp8
from hf_models import MODELS, model_of, same, tensors_of
from moefw.compose.adapter_weights import adapter_config
from moefw.core.errors import CheckpointError, PlanError, SpecError
from moefw.models.huggingface.adapter_files import write_adapter
from moefw.runtime.parallel.local_shards import is_held_as_codes
from moefw.testing.pool import RankPool
from pairwise import each_value, quick

FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "ep 2": (2, {"experts": {"ep": 2}}),
    "tp 2, ep 2, etp 2": (4, {"dense": {"tp": 2}, "experts": {"ep": 2, "etp": 2}}),
    "ep 2, sharded": (4, {"dense": {"shard": "all"}, "experts": {"ep": 2, "shard": "all"}}),
    "tp 2, sharded": (4, {"dense": {"tp": 2, "shard": "all"}, "experts": {"shard": "all"}}),
    "pp 2, ep 2": (4, {"pp": 2, "experts": {"ep": 2}}),
}


TRAIN = {"tokens_per_step": 64, "micro_batch": 1, "seq_len": 16}


def gemm_for(parallel: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"use": "loop"} if "etp" in parallel.get("experts", {}) else {"use": "grouped"}


def streamed(model: moefw.Pretrained, **options: Any) -> dict[str, Tensor]:
    return dict(moefw.stream_pretrained(model, **options))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("family", MODELS)
def test_names_dtypes_and_values_are_those_of_transformers(family: str, stacked: bool, tmp_path: Path) -> None:
    """As the folder has them: experts stacked, as in the module of transformers, or one by one, as on the hub."""
    oracle = model_of(family, torch.bfloat16)
    oracle.save_pretrained(tmp_path, save_original_format=not stacked)
    tensors = streamed(moefw.from_pretrained(tmp_path))
    assert same(tensors, tensors_of(tmp_path))
    if stacked:
        assert same(tensors, oracle.state_dict())


def stream_and_compare(folder: Path, parallel: Mapping[str, Any]) -> None:
    """Compare what this rank gets, also behind a forward, with the folder."""
    model = moefw.from_pretrained(folder, parallel=parallel, gemm=gemm_for(parallel), train=TRAIN)
    assert same(streamed(model), tensors_of(folder))
    with torch.no_grad():
        model.eval()(torch.arange(16).view(1, 16))
    assert same(streamed(model), tensors_of(folder))


@pytest.mark.parametrize(("family", "layout"), each_value(FAMILIES, LAYOUTS))
def test_every_rank_of_any_layout_gets_them(pool: RankPool, family: str, layout: str, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[layout]
    model_of(family, torch.bfloat16).save_pretrained(tmp_path)
    pool.run(stream_and_compare, world, tmp_path, parallel)


def test_no_tensor_is_held_but_the_last_and_the_caller_keeps_gradients(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    tensors = moefw.stream_pretrained(moefw.from_pretrained(tmp_path))
    earlier: list[weakref.ref[Tensor]] = []
    for _, tensor in tensors:
        assert torch.is_grad_enabled()
        assert not any(each() is not None for each in earlier)
        earlier.append(weakref.ref(tensor))
        del tensor


def test_what_trained_streams(tmp_path: Path) -> None:
    """They are the parameters of now, in the dtype of the folder, and later steps do not change them."""
    model_of("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "in")
    model = moefw.from_pretrained(tmp_path / "in")
    model(torch.arange(22).view(2, 11)).square().mean().backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    tensors = streamed(model)
    moefw.save_pretrained(model, tmp_path / "out")
    optimizer.step()
    assert same(tensors, tensors_of(tmp_path / "out"))
    assert not same(tensors, tensors_of(tmp_path / "in"))


def adapters_of(folder: Path, parallel: Mapping[str, Any], style: Any) -> None:
    """Compare merged weights with a whole export from the same layout, and adapters with those of one rank."""
    model = adapted(folder / "in", parallel=parallel, gemm=gemm_for(parallel), train=TRAIN)
    moefw.save_pretrained(model, folder / "out")
    assert same(streamed(model), tensors_of(folder / "out"))
    assert same(streamed(model, adapter=style), tensors_of(folder / style))


@pytest.mark.parametrize("layout", quick(LAYOUTS, "tp 2, ep 2, etp 2", "ep 2, sharded"))
@pytest.mark.parametrize(
    ("family", "style"), [("qwen3_moe", "peft"), ("qwen3_moe", "vllm"), ("gpt_oss", "peft"), ("deepseek_v3", "peft")]
)
def test_adapters_stream_merged_or_alone(pool: RankPool, family: str, style: Any, layout: str, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[layout]
    model_of(family, torch.bfloat16).save_pretrained(tmp_path / "in")
    model = adapted(tmp_path / "in")
    own = tensors_of_adapter(model)
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    config = adapter_config(model.assembly)
    write_adapter(tmp_path / style, config, shapes, own.__getitem__, model_type=family, num_layers=2, style=style)
    pool.run(adapters_of, world, tmp_path, parallel, style)


def merged_into_codes(folder: Path, parallel: Mapping[str, Any]) -> None:
    """Compare merged weights of a base that is held as codes with those of the same base as values."""
    held = [{**TRAIN, "frozen_weights": form} for form in ("as_stored", "decoded")]
    coded, decoded = (adapted(folder, parallel=parallel, gemm=gemm_for(parallel), train=train) for train in held)
    assert any(map(is_held_as_codes, coded.module.parameters()))
    assert same(streamed(coded), streamed(decoded))


@pytest.mark.parametrize("layout", ["ep 2", "ep 2, sharded"])
def test_adapters_over_codes_stream_merged(pool: RankPool, layout: str, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[layout]
    save_fp8("qwen3_moe", tmp_path)
    pool.run(merged_into_codes, world, tmp_path, parallel)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_alone_are_named_as_peft_names_its_own(family: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    oracle = model_of(family)
    oracle.save_pretrained(tmp_path)
    adapter = {**LORA, "targets": ["attention.o_proj", "moe.experts.*"]}
    tensors = streamed(moefw.from_pretrained(tmp_path, adapter=adapter), adapter="peft")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=8, lora_alpha=4, target_modules=["o_proj"], target_parameters=experts)
    theirs = get_peft_model_state_dict(get_peft_model(oracle, config))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in theirs.items()
    }


def test_what_cannot_stream_alone_is_refused_before_the_first_tensor(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(PlanError, match=r"PEFT has no files of adapter none\. Leave adapter out"):
        moefw.stream_pretrained(moefw.from_pretrained(tmp_path), adapter="peft")
    others = moefw.from_pretrained(tmp_path, adapter=LORA, train={"freeze": ["layers.*.moe.experts.*"]})
    with pytest.raises(PlanError, match=r"embed\.weight trains beside adapters, and would not stream with them\."):
        moefw.stream_pretrained(others, adapter="peft")
    lone = moefw.from_pretrained(tmp_path, adapter={**LORA, "targets": ["moe.experts.down_proj"]})
    with pytest.raises(CheckpointError, match="vLLM needs gate, up and down of all experts"):
        moefw.stream_pretrained(lone, adapter="vllm")
    unknown: Any = "merged"
    with pytest.raises(SpecError, match=r"'merged' says not what becomes of adapters\. Use merge, peft, vllm\."):
        moefw.stream_pretrained(lone, adapter=unknown)
