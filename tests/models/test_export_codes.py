"""A run leaves as codes: ``transformers`` reads them, what has not trained is copied, and rounding is told."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import moefw
from coded_folders import save_fp8, save_mxfp4, save_nvfp4
from command_here import moefw_says
from hf_models import CLASSES, sizes_of, theirs
from moefw.runtime.compute.code_formats import FP8, MXFP4, NVFP4, CodeFormat

WHOLE: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 128},
    "qwen2_moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
    "mixtral": {},
    "olmoe": {},
    "deepseek_v3": {"moe_intermediate_size": 256, "kv_lora_rank": 120},
    "gpt_oss": {},
    "llama": {"head_dim": 8},
    "qwen3": {},
}
"""Sizes of matrices of whole blocks, or of less than one, which ``transformers`` reads, too."""
FORMS = {family: "mxfp4" if family == "gpt_oss" else "fp8" for family in WHOLE}


def save(family: str, path: Path, **sizes: Any) -> Any:
    """Save a model in fp32 whose matrices are of whole blocks."""
    width = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 256}
    model = theirs(family, {**sizes_of(family), **width, **WHOLE[family], **sizes})
    model.save_pretrained(path)
    return model


def exported(tmp_path: Path, form: str) -> str:
    """What a run at step 0 says that holds the model in ``in`` and is exported to ``out``."""
    moefw_says("convert", "import", tmp_path / "in", tmp_path / "run")
    return moefw_says("convert", "export", tmp_path / "run", tmp_path / "out", "--dtype", form)


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("form", [FP8, MXFP4, NVFP4], ids=lambda form: form.name)
def test_what_has_been_decoded_is_encoded_as_almost_the_same_values(form: CodeFormat) -> None:
    values = torch.randn(200, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[:, :128] *= 1e-2 if form is NVFP4 else 1e-6  # scales in E4M3 have a small range
    values[128:, 128:256] = 0.0
    decoded = form.decode(*form.encode(values))
    again = form.decode(*form.encode(decoded))
    bound = {"FP8": 2.0**-4, "MXFP4": 0.25, "NVFP4": 0.25}[form.name]
    largest = values.abs().float().unflatten(1, (-1, 32)).amax(-1).repeat_interleave(32, 1)
    assert ((decoded.float() - values.float()).abs() <= bound * largest).all()
    assert not decoded[128:, 128:256].any()
    torch.testing.assert_close(again, decoded, rtol=0.0 if form is MXFP4 else 2.0**-7, atol=0.0)


def test_fp8_codes_reach_the_largest_number_in_each_block() -> None:
    codes, scales = FP8.encode(torch.randn(200, 320, generator=torch.Generator().manual_seed(0)))
    blocks = [codes[i : i + 128, j : j + 128].float().abs().max() for i in (0, 128) for j in (0, 128, 256)]
    assert blocks == [448.0] * 6
    assert scales.shape == (2, 3)


def test_mxfp4_is_that_of_torchao() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
    magnitudes = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    normal = magnitudes[(magnitudes > 2.0**-120) & (magnitudes < 2.0**127)]
    values = torch.rand(len(normal), 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    values = torch.cat([normal.unsqueeze(1) * values, normal.unsqueeze(1).expand(-1, 32)])
    theirs = MXTensor.to_mx(values, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.FLOOR)
    codes, scales = MXFP4.encode(values)
    assert torch.equal(codes, theirs.qdata.view(torch.uint8))
    assert torch.equal(scales, theirs.scale.view(torch.uint8))


@pytest.mark.parametrize("family", WHOLE)
def test_transformers_computes_the_logits_of_codes(family: str, tmp_path: Path) -> None:
    import transformers

    original = save(family, tmp_path / "in")
    form = FORMS[family]
    told = exported(tmp_path, form)
    assert f"{tmp_path}/out holds the model of step 0: {family}, {form}\n" in told
    assert "cut short" not in told
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")
    oracle = model.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).float()
    oracle.config._attn_implementation = "eager"
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = oracle(input_ids=ids).logits
        found = moefw.from_pretrained(tmp_path / "out")(ids)
        unrounded = original(input_ids=ids).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert not torch.allclose(wanted, unrounded, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_compressed_tensors_decodes_what_is_written_in_nvfp4(family: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    widths = {"kv_lora_rank": 112, "q_lora_rank": 32, "v_head_dim": 16}
    save(family, tmp_path / "in", **(widths if family == "deepseek_v3" else {}))
    told = exported(tmp_path, "nvfp4")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    assert config.format == "nvfp4-pack-quantized"
    (scheme,) = config.config_groups.values()
    written, saved = tensors(tmp_path / "out"), canonical(tmp_path, "out")
    packed = [name.removesuffix(".weight_packed") for name in written if name.endswith(".weight_packed")]
    assert f"{len(packed)} weights are encoded in NVFP4, once" in told
    assert not {name for name, tensor in written.items() if tensor.ndim == 2 and tensor.dtype is torch.bfloat16} - {
        *("model.embed_tokens.weight", "lm_head.weight"),
        *(f"{module}.weight" for module in config.ignore),
    }
    for module in packed:
        state = {name.removeprefix(f"{module}."): written[name] for name in written if name.startswith(f"{module}.")}
        theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"].float()
        ours = [value for name, value in saved.items() if value.shape == theirs.shape and torch.equal(value, theirs)]
        assert len(ours) == 1


def test_matrices_that_servers_join_have_one_global_scale_in_nvfp4(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path / "in")
    exported(tmp_path, "nvfp4")
    scales = {n: t.item() for n, t in tensors(tmp_path / "out").items() if n.endswith("global_scale")}
    layer = "model.layers.0"
    q, k, v, o = (scales[f"{layer}.self_attn.{part}_proj.weight_global_scale"] for part in "qkvo")
    assert q == k == v != o
    gate, up, down = (
        scales[f"{layer}.mlp.experts.0.{part}_proj.weight_global_scale"] for part in ("gate", "up", "down")
    )
    assert gate == up != down
    assert gate != scales[f"{layer}.mlp.experts.1.gate_proj.weight_global_scale"]


def test_matrices_of_layers_become_codes_and_nothing_else(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path / "in")
    exported(tmp_path, "fp8")
    written = tensors(tmp_path / "out")
    codes = {name for name, tensor in written.items() if tensor.dtype is torch.float8_e4m3fn}
    assert {f"{name}_scale_inv" for name in codes} == {name for name in written if name.endswith("_scale_inv")}
    others = {name for name, tensor in written.items() if tensor.ndim == 2} - codes
    assert {name for name in others if not name.endswith("_scale_inv")} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.mlp.gate.weight",
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    said = config["quantization_config"]
    assert said["modules_to_not_convert"] == ["lm_head", "model.layers.1.mlp.gate"]
    assert (said["quant_method"], said["weight_block_size"]) == ("fp8", [128, 128])
    assert config["dtype"] == "bfloat16"


def test_blocks_that_are_cut_short_are_read_by_moefw_and_told(tmp_path: Path) -> None:
    """``kv_a_proj_with_mqa`` of DeepSeek-V3 has 576 rows: the last block has 64."""
    save("deepseek_v3", tmp_path / "in", kv_lora_rank=184)
    told = exported(tmp_path, "fp8")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert f"blocks are cut short in {name}" in told
    codes, scales = (tensors(tmp_path / "out")[f"{name}{suffix}"] for suffix in ("", "_scale_inv"))
    assert scales.shape == (2, 1)
    moefw_says("convert", "import", tmp_path / "out", tmp_path / "again")
    saved = load_file(tmp_path / "again" / "checkpoints" / "step-0" / "rank-00000.safetensors")
    read = saved["model/layers.0.attention.kv_a_proj.weight"]
    assert torch.equal(read, FP8.decode(codes, scales).float())


def test_adapters_alone_have_no_dtype() -> None:
    told = moefw_says("convert", "export", "run", "out", "--adapter", "peft", "--dtype", "fp8", code=2)
    assert "Adapters alone are in fp32: leave --dtype out, or merge them." in told


@pytest.mark.parametrize(
    ("family", "form", "sizes", "says"),
    [
        ("gpt_oss", "fp8", {}, "no reader takes gpt_oss in fp8: such folders are of deepseek_v2, deepseek_v3,"),
        ("gpt_oss", "fp8", {}, "Use --dtype bf16, mxfp4."),
        (
            "qwen3_moe",
            "nvfp4",
            {"moe_intermediate_size": 40},
            "is of a width that is no multiple of 16",
        ),
        ("qwen3_moe", "mxfp4", {}, "no reader takes qwen3_moe in mxfp4: such folders are of gpt_oss."),
        (
            *("gpt_oss", "mxfp4", {"intermediate_size": 80}),
            "model.layers.0.mlp.experts.down_proj is of a width that is no multiple of 32, and MXFP4",
        ),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    family: str, form: str, sizes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save(family, tmp_path / "in", **sizes)
    moefw_says("convert", "import", tmp_path / "in", tmp_path / "run")
    told = moefw_says("convert", "export", tmp_path / "run", tmp_path / "out", "--dtype", form, code=2)
    assert says in told
    assert "gate_up_proj" not in told
    assert not (tmp_path / "out").exists()


# Beside a base that has codes.

LORA = {"use": "lora", "rank": 8, "alpha": 64.0}


def tuned(tmp_path: Path, targets: list[str], **train: Any) -> None:
    """Train a run over the folder ``base``, whose adapters move weights visibly, or its weights themselves."""
    (tmp_path / "text.txt").write_text("a fox jumps over a dog\n" * 200)
    steps = {"steps": 2, "micro_batch": 2, "seq_len": 16, "tokens_per_step": 64, "eval_tokens": 64, "lr": 0.05}
    spec = {
        "model": {"preset": str(tmp_path / "base" / "config.json")},
        "adapter": {**LORA, "targets": targets} if targets else {"use": "none"},
        "data": {"use": "text", "path": str(tmp_path / "text.txt")},
        "train": {"weights": str(tmp_path / "base"), **steps, **train},
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
    }
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    moefw_says("train", tmp_path / "spec.yaml")


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype and bytes."""
    return one.dtype is other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


SAVED = {"fp8": save_fp8, "nvfp4": save_nvfp4, "mxfp4": lambda family, path: save_mxfp4(path)}
FORMATS = {"fp8": FP8, "mxfp4": MXFP4, "nvfp4": NVFP4}
OF_FORMATS = [("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4"), ("qwen3_moe", "nvfp4")]


@pytest.mark.parametrize("frozen", ["as_stored", "decoded"])
@pytest.mark.parametrize(("family", "form"), OF_FORMATS)
def test_what_has_not_trained_leaves_as_it_came_to_the_byte(
    family: str, form: str, frozen: str, tmp_path: Path
) -> None:
    SAVED[form](family, tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    said = {"quant_method": form, "modules_to_not_convert": ["lm_head", "its own"]}
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    tuned(tmp_path, ["moe.experts.down_proj"], frozen_weights=frozen)
    told = moefw_says("convert", "export", tmp_path / "run", tmp_path / "out", "--dtype", form)
    before, after = tensors(tmp_path / "base"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not same(before[name], after[name])}
    assert changed
    assert all("down_proj" in name for name in changed)
    assert "have not trained: their" in told
    assert "training has moved them by" in told
    assert "what servers join" not in told
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == said


@pytest.mark.parametrize(("family", "form"), OF_FORMATS[:2])
def test_adapters_are_merged_into_codes_by_one_rounding_whose_size_is_told(
    family: str, form: str, tmp_path: Path
) -> None:
    SAVED[form](family, tmp_path / "base")
    tuned(tmp_path, ["moe.experts.gate_up_proj"])
    told = moefw_says("convert", "export", tmp_path / "run", tmp_path / "out", "--dtype", form)
    moefw_says("convert", "export", tmp_path / "run", tmp_path / "whole", "--dtype", "fp32")
    codes = FORMATS[form]
    found, merged, base = (canonical(tmp_path, at) for at in ("out", "whole", "base"))
    names = [name for name in base if re.search(r"experts\.\d+\.(gate|up)_proj\.weight", name)]
    assert len(names) == 2 * 2 * 4
    for name in names:
        assert torch.equal(found[name], codes.decode(*codes.encode(merged[name])).float())
    rounding = ratio([found[name] - merged[name] for name in names], [merged[name] for name in names])
    training = ratio([merged[name] - base[name] for name in names], [base[name] for name in names])
    assert f"{len(names)} weights are encoded in {codes.name}, once" in told
    assert f"rounding moves them by {rounding:.2%} (root mean square); the most, model.layers." in told
    assert f"training has moved them by {training:.2%}" in told


def canonical(folder: Path, name: str) -> dict[str, Tensor]:
    """The weights of a Hugging Face folder by their names in a checkpoint, fp32."""
    moefw_says("convert", "import", folder / name, folder / f"{name}-run")
    return load_file(folder / f"{name}-run" / "checkpoints" / "step-0" / "rank-00000.safetensors")


def ratio(some: list[Tensor], others: list[Tensor]) -> float:
    """Root mean square of some values over that of others."""
    squares = [sum(each.double().square().sum().item() for each in these) for these in (some, others)]
    return math.sqrt(squares[0] / squares[1])


def test_the_tensors_that_are_codes_are_those_of_the_base(tmp_path: Path) -> None:
    """A folder may hold fewer matrices in FP8 than its format is for, and other ones in fp32."""
    save_fp8("qwen3_moe", tmp_path / "base")
    stored = tensors(tmp_path / "base")
    for name in [name for name in stored if name.endswith("o_proj.weight")]:
        stored[name] = FP8.decode(stored[name], stored.pop(f"{name}_scale_inv"))
    stored["model.norm.weight"] = stored["model.norm.weight"].float()
    save_file(stored, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    tuned(tmp_path, [], freeze=["norm.weight", "layers.*.attention.q_proj.*"])
    told = moefw_says("convert", "export", tmp_path / "run", tmp_path / "out", "--dtype", "fp8")
    after = tensors(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in after.items()} == {n: tensor.dtype for n, tensor in stored.items()}
    unchanged = {name for name, tensor in stored.items() if same(tensor, after[name])}
    assert unchanged == {"model.norm.weight", *(name for name in stored if "q_proj" in name)}
    assert "2 weights have not trained: their FP8 is copied" in told


def test_a_part_of_what_servers_join_is_told_where_it_alone_has_trained(tmp_path: Path) -> None:
    save_nvfp4("qwen3_moe", tmp_path / "base")
    tuned(tmp_path, ["attention.q_proj"])
    told = moefw_says("convert", "export", tmp_path / "run", tmp_path / "out", "--dtype", "nvfp4")
    assert "only a part of what servers join has trained: 2 have several global scales" in told
