"""A Hugging Face folder becomes a module, and a module a folder: the same bits, or one message and nothing changed."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import moefw
from coded_folders import nvfp4, save_nvfp4
from command_here import complaint, moefw_says
from experts_read import experts_read
from hf_models import MODELS, OWN, SIZES, VOCABULARY, loaded, model_of, same, tensors_of, theirs
from moefw.core.errors import CheckpointError, MoefwError, SpecError
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.origins import Origin
from moefw.models.huggingface.writing import Written, lay_out
from moefw.testing.pool import RankPool
from moefw.training.importing import import_folder
from pairwise import pairwise

IDS = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))


def test_every_family_is_tried() -> None:
    assert MODELS.keys() == OWN.keys()


@pytest.mark.parametrize("family", MODELS)
def test_a_module_returns_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    oracle = model_of(family)
    oracle.save_pretrained(tmp_path)
    model = moefw.from_pretrained(tmp_path)
    wanted = oracle(input_ids=IDS).logits
    assert (model(IDS) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_patterns_freeze_weights_and_one_that_names_none_is_told(tmp_path: Path) -> None:
    oracle = model_of("mixtral")
    oracle.save_pretrained(tmp_path)
    model = moefw.from_pretrained(tmp_path, train={"freeze": ["layers.*.moe.*"]})
    trains = {name for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    assert trains == {name for name, _ in model.module.named_parameters() if ".moe." not in name}
    wanted = oracle(input_ids=IDS).logits
    assert (model(IDS) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    with pytest.raises(SpecError, match=r"train\.freeze: no weight of the model has a name like 'layers\.\*\.mlp\.\*'"):
        moefw.from_pretrained(tmp_path, train={"freeze": ["layers.*.moe.*", "layers.*.mlp.*"]})


def test_a_copy_or_a_pickle_of_a_model_says_what_to_do_instead(tmp_path: Path) -> None:
    model_of("mixtral").save_pretrained(tmp_path)
    model = moefw.from_pretrained(tmp_path)
    with pytest.raises(moefw.ContractError, match=r"cannot be copied\. Call from_pretrained a second time"):
        copy.deepcopy(model)
    with pytest.raises(moefw.ContractError, match=r"cannot be pickled, .* Use moefw\.save_pretrained"):
        torch.save(model, tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("family", "options"),
    [("mixtral", {}), ("qwen3_moe", {"norm_topk_prob": True}), ("deepseek_v3", {"n_group": 1, "topk_group": 1})],
)
def test_a_router_that_could_not_learn_computes(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The weight of the only expert, divided by itself, is 1: a run is refused, and what only computes is not."""
    options = {**SIZES, **MODELS[family], **options, "vocab_size": 256, "num_experts_per_tok": 1}
    oracle = theirs(family, options)
    oracle.save_pretrained(tmp_path / "in")
    expected = oracle(input_ids=IDS).logits
    assert (moefw.from_pretrained(tmp_path / "in")(IDS) - expected).abs().max() <= 1e-5 * expected.abs().max()
    run = tmp_path / "run"
    moefw_says("convert", "import", tmp_path / "in", run)
    moefw_says("convert", "export", run, tmp_path / "out", "--dtype=fp32")
    assert same(tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out"))
    assert moefw_says("generate", run, "run.device=cpu", "--prompt=abc", "--tokens=2").startswith("abc")
    for command in (["train", run / "spec.yaml", "--resume"], ["check", run / "spec.yaml"]):
        assert "is always 1, so the router would get no gradient." in complaint(*command)


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_see_no_padding_on_either_side(side: str, tmp_path: Path) -> None:
    oracle = model_of("qwen3_moe")
    oracle.save_pretrained(tmp_path)
    mask = torch.ones_like(IDS)
    mask[0, slice(0, 4) if side == "left" else slice(7, None)] = 0
    wanted = oracle(input_ids=IDS, attention_mask=mask).logits[mask.bool()]
    found = moefw.from_pretrained(tmp_path)(IDS, mask)[mask.bool()]
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("family", "dtype", "original"), pairwise(MODELS, [torch.float32, torch.bfloat16], [True, False])
)
def test_what_is_read_and_written_again_has_the_same_bits(
    family: str, dtype: torch.dtype, original: bool, tmp_path: Path
) -> None:
    oracle = model_of(family, dtype)
    oracle.save_pretrained(tmp_path / "in", save_original_format=original, max_shard_size="40KB")
    moefw.save_pretrained(moefw.from_pretrained(tmp_path / "in"), tmp_path / "out")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    assert same(tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out"))
    assert same(loaded(oracle, tmp_path / "out"), loaded(oracle, tmp_path / "in"))


LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "ep 2": (2, {"experts": {"ep": 2}}),
    "tp 2, ep 4, sharded": (4, {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 4}}),
    "ep 2, sharded": (4, {"dense": {"shard": "all"}, "experts": {"ep": 2, "shard": "all"}}),
    "etp 2": (2, {"experts": {"etp": 2}}),
    "pp 2, ep 2": (4, {"pp": 2, "experts": {"ep": 2}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_so_it_has_from_any_layout(pool: RankPool, family: str, layout: str, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[layout]
    model_of(family, torch.bfloat16).save_pretrained(tmp_path / "in")
    read = pool.run(copied, world, tmp_path / "in", tmp_path / "out", parallel)
    assert same(tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out"))
    shares = parallel["experts"].get("ep", 1)
    for experts in read:
        assert len(experts) == 8 // shares or ("pp" in parallel and not experts)  # a stage of dense layers has none
    assert set().union(*read) == set(range(8))


def copied(source: Path, target: Path, parallel: Mapping[str, Any]) -> set[int]:
    """Read and write a model; return the experts whose weights this rank has read."""
    gemm = {"use": "loop"} if "etp" in parallel["experts"] else {"use": "grouped"}
    train = {"tokens_per_step": 64, "micro_batch": 1, "seq_len": 16}
    with experts_read() as seen:
        model = moefw.from_pretrained(source, parallel=parallel, gemm=gemm, train=train)
    moefw.save_pretrained(model, target)
    return seen


def test_weights_in_fp8_become_the_values_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator) * 1e-2
    uneven = torch.randn(130, 200, generator=generator).to(torch.float8_e4m3fn)
    small = torch.rand(2, 2, generator=generator)
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales, "b.weight": uneven, "b.weight_scale_inv": small}
    save_file(tensors, tmp_path / "model.safetensors")
    folder = Folder(tmp_path)
    assert folder.tensors.keys() == {"a.weight", "b.weight"}
    wanted = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    assert torch.equal(folder.read(Origin("a.weight")), wanted)
    assert folder.read(Origin("b.weight"))[129, 199] == (uneven[129, 199].float() * small[1, 1]).bfloat16()


def test_experts_in_mxfp4_become_the_values_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 24, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 24, 2), generator=generator, dtype=torch.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    folder = Folder(tmp_path)
    wanted = convert_moe_packed_tensors(blocks, scales)
    assert folder.tensors["w"].shape == wanted.shape == (3, 64, 24)
    assert torch.equal(folder.read(Origin("w")), wanted)
    piece = Origin("w", (2, slice(None), slice(0, None, 2)), transposed=True)
    assert torch.equal(folder.read(piece), piece.of(wanted))


def test_weights_in_nvfp4_become_the_values_of_compressed_tensors(tmp_path: Path) -> None:
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    # Each code with each scale that is a number, by several divisors.
    every_code = torch.tensor([low | (low + 1) << 4 for low in range(0, 16, 2)], dtype=torch.uint8)  # two a byte
    every_scale = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    divisors = 1 + 9999 * torch.rand(20, generator=torch.Generator().manual_seed(0))
    matrices = {
        f"{number}.weight": {
            "weight_packed": every_code.expand(0x7F, 8).clone(),
            "weight_scale": every_scale.view(0x7F, 1).clone(),
            "weight_global_scale": divisor.view(1).clone(),
        }
        for number, divisor in enumerate(divisors)
    }
    tensors = {f"{name[:-6]}{own}": part for name, parts in matrices.items() for own, part in parts.items()}
    save_file({**tensors, "0.input_global_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    folder = Folder(tmp_path)
    assert folder.tensors.keys() == matrices.keys()
    for name, parts in matrices.items():
        ours = folder.read(Origin(name))
        theirs = NVFP4PackedCompressor.decompress(parts, preset_name_to_scheme("NVFP4A16", ["Linear"]))["weight"]
        assert ours.dtype is theirs.dtype is torch.bfloat16
        assert ours.shape == folder.tensors[name].shape == (0x7F, 16)
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
        assert torch.equal(folder.read_codes(Origin(name)).values(), ours)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_a_folder_in_nvfp4_is_read_as_its_values(family: str, tmp_path: Path) -> None:
    save_nvfp4(family, tmp_path / "in")
    moefw.save_pretrained(moefw.from_pretrained(tmp_path / "in"), tmp_path / "out")
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    packed = [name.removesuffix("_packed") for name in before if name.endswith("_packed")]
    assert any(".experts.3." in name for name in packed)
    assert any("self_attn" in name for name in packed)
    for name in packed:
        scale = before[f"{name}_scale"].float() / before[f"{name}_global_scale"]
        codes = before[f"{name}_packed"]
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        unpacked = numbers[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
        assert torch.equal(after[name], (unpacked * scale.repeat_interleave(16, -1)).bfloat16())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert same(
        {name: after[name] for name in before.keys() & after.keys()},
        {n: before[n] for n in before.keys() & after.keys()},
    )


def test_a_folder_in_nvfp4_is_imported_as_its_values(tmp_path: Path) -> None:
    save_nvfp4("qwen3_moe", tmp_path / "in")
    moefw_says("convert", "import", tmp_path / "in", tmp_path / "run")
    moefw_says("convert", "export", tmp_path / "run", tmp_path / "out")
    moefw.save_pretrained(moefw.from_pretrained(tmp_path / "in"), tmp_path / "read")
    assert same(tensors_of(tmp_path / "read"), tensors_of(tmp_path / "out"))


def test_a_folder_in_fp8_is_written_in_bf16_without_its_quantization(tmp_path: Path) -> None:
    model_of("deepseek_v3", torch.bfloat16).save_pretrained(tmp_path / "in")
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors = tensors_of(tmp_path / "in")
    tensors[name], tensors[f"{name}_scale_inv"] = tensors[name].to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    moefw.save_pretrained(moefw.from_pretrained(tmp_path / "in"), tmp_path / "out")
    written = tensors_of(tmp_path / "out")
    assert written.keys() == tensors.keys() - {f"{name}_scale_inv"}
    assert torch.equal(written[name], (tensors[name].float() * 0.5).bfloat16())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_files_have_at_most_the_given_size_and_an_index(tmp_path: Path) -> None:
    tensors = {"a": (torch.bfloat16, (3, 5)), "b": (torch.float32, (4,)), "c": (torch.uint8, (7,))}
    lay_out(tmp_path, tensors, most=40)
    written = Written.opened(tmp_path)
    for number, name in enumerate(tensors):
        written.tensors[name].fill_(number + 1)
    written.flush()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 30 + 16 + 7
    assert len(set(index["weight_map"].values())) == 2
    for number, name in enumerate(tensors):
        tensor = load_file(tmp_path / index["weight_map"][name])[name]
        assert (tensor.dtype, tuple(tensor.shape)) == tensors[name]
        assert (tensor == number + 1).all()


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lying_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape":[62,32]', b'"shape":[62,64]', 1))


def pickle_inside(folder: Path) -> None:
    torch.save({"a": torch.ones(3)}, folder / "model.safetensors")


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight"))


def with_another(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.1.mlp.experts.8.up_proj.weight": torch.ones(16, 32)}))


def of_another_shape(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name][:5].clone()}))


def in_integers(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int64)}))


def codes_without_scales(folder: Path) -> None:
    change(folder, lambda t: t.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}))


def in_fp8(*shape: int) -> Callable[[Path], None]:
    codes = {"model.norm.weight": torch.ones(shape).to(torch.float8_e4m3fn)}
    return lambda folder: change(
        folder, lambda tensors: tensors.update({**codes, "model.norm.weight_scale_inv": torch.ones(1, 1)})
    )


def scales_in_bytes(folder: Path) -> None:
    in_fp8(32, 32)(folder)
    scales = torch.ones(1, 1, dtype=torch.uint8)
    change(folder, lambda tensors: tensors.update({"model.norm.weight_scale_inv": scales}))


def blocks_in_fp32(folder: Path) -> None:
    blocks = {"w_blocks": torch.ones(2, 8, 1, 16), "w_scales": torch.ones(2, 8, 1, dtype=torch.uint8)}
    change(folder, lambda tensors: tensors.update(blocks))


def in_nvfp4(**changes: Any) -> Callable[[Path], None]:
    """Add a matrix in NVFP4, some of whose tensors are others; None: missing."""
    parts = {**nvfp4(32, 32, torch.Generator().manual_seed(0)), **{f"_{end}": part for end, part in changes.items()}}
    weight = {f"w.weight{end}": part for end, part in parts.items() if part is not None}
    return lambda folder: change(folder, lambda tensors: tensors.update(weight))


def also_in_nvfp4(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    parts = nvfp4(32, 32, torch.Generator().manual_seed(0))
    change(folder, lambda tensors: tensors.update({f"{name}{end}": part for end, part in parts.items()}))


def also_in_another_file(folder: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(32), "lm_head.weight": torch.zeros(62, 32)}, folder / "old.safetensors")


def also_in_mxfp4(folder: Path) -> None:
    blocks = torch.zeros(2, 8, 1, 16, dtype=torch.uint8), torch.zeros(2, 8, 1, dtype=torch.uint8)
    twice = {"model.norm.weight_blocks": blocks[0], "model.norm.weight_scales": blocks[1]}
    change(folder, lambda tensors: tensors.update(twice))


def also_stacked(folder: Path) -> None:
    stacked = {"model.layers.1.mlp.experts.down_proj": torch.zeros(8, 32, 16)}
    change(folder, lambda tensors: tensors.update(stacked))


def pipe(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def not_finite(folder: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][3] = torch.nan
        tensors["model.layers.1.mlp.experts.3.up_proj.weight"][0, 0] = -torch.inf

    change(folder, spoil)


def nan_in_codes(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    codes = torch.ones(16, 32)
    codes[5, 7] = torch.nan
    weight = {name: codes.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    change(folder, lambda tensors: tensors.update(weight))


def infinite_scale(folder: Path) -> None:
    nan_in_codes(folder)
    name = "model.layers.0.self_attn.k_proj.weight"
    weight = {name: torch.ones(16, 32).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((1, 1), torch.inf)}
    change(folder, lambda tensors: tensors.update(weight))


def too_large_for_fp32(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.full((32,), 1e300, dtype=torch.float64)}))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = tensors_of(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def index_of(places: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(places))

    return write


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (cut_short, "model.safetensors is no whole safetensors file"),
    (lying_header, "model.safetensors is no whole safetensors file"),
    (pickle_inside, "model.safetensors is no whole safetensors file"),
    (only_a_pickle, "holds no model.safetensors, only pytorch_model.bin, a pickle, which could run any code."),
    (without, "lacks model.layers.1.mlp.experts.3.up_proj.weight of shape (16, 32)."),
    (with_another, "holds model.layers.1.mlp.experts.8.up_proj.weight, which the model does not have."),
    (of_another_shape, "model.layers.0.self_attn.k_proj.weight is (5, 32), which holds no (16, 32)"),
    (in_integers, "model.norm.weight is I64, which no weight is."),
    (codes_without_scales, "model.norm.weight is FP8 and has no model.norm.weight_scale_inv."),
    (index_of({"weight_map": {"a": "../secret.safetensors"}}), "'../secret.safetensors', which is no safetensors file"),
    (index_of({"weight_map": {"a": "gone.safetensors"}}), "gone.safetensors is missing."),
    (index_of({"weight_map": {"a": "model.safetensors"}}), "a is misplaced: the file lacks it."),
    (in_fp8(), "model.norm.weight has scales, and is torch.float8_e4m3fn of shape ()."),
    (in_fp8(32), "model.norm.weight has scales, and is torch.float8_e4m3fn of shape (32,)."),
    (in_fp8(1, 1, 4, 4), "model.norm.weight has scales, and is torch.float8_e4m3fn of shape (1, 1, 4, 4)."),
    (scales_in_bytes, "the scales of model.norm.weight are torch.uint8 of shape (1, 1)."),
    (blocks_in_fp32, "w_blocks and w_scales are torch.float32 and torch.uint8."),
    (also_in_another_file, "model.safetensors and old.safetensors both hold lm_head.weight and 1 more, and no index"),
    (also_in_mxfp4, "holds model.norm.weight twice: in MXFP4, as model.norm.weight_blocks, and as it is."),
    (also_in_nvfp4, "q_proj.weight twice: in NVFP4, as model.layers.0.self_attn.q_proj.weight_packed, and as it is."),
    (in_nvfp4(scale=None), "w.weight_packed has no w.weight_scale."),
    (in_nvfp4(scale=None, global_scale=None), "has no w.weight_scale and no w.weight_global_scale."),
    (in_nvfp4(packed=None), "w.weight_scale is FP8 and has no codes w.weight_packed."),
    (
        in_nvfp4(packed=torch.zeros(2, 32, 16, dtype=torch.uint8)),
        "w.weight_packed is torch.uint8 of shape (2, 32, 16).",
    ),
    (in_nvfp4(packed=torch.zeros(32, 16)), "w.weight_packed is torch.float32 of shape (32, 16)."),
    (in_nvfp4(packed=torch.zeros(32, 12, dtype=torch.uint8)), "of shape (32, 2), and its codes (32, 12)."),
    (in_nvfp4(scale=torch.ones(32, 2, dtype=torch.uint8)), "w.weight_scale is torch.uint8 of shape (32, 2), and"),
    (in_nvfp4(global_scale=torch.ones(())), "w.weight_global_scale is torch.float32 of shape ()."),
    (
        also_stacked,
        "twice: in model.layers.1.mlp.experts.3.down_proj.weight and in model.layers.1.mlp.experts.down_proj",
    ),
    (pipe("model.safetensors"), "model.safetensors is no regular file."),
    (pipe("model.safetensors.index.json"), "model.safetensors.index.json cannot be read: It is no regular file."),
    (not_finite, "holds NaN or infinity in model.layers.1.mlp.experts.3.up_proj.weight, model.norm.weight."),
    (nan_in_codes, "holds NaN or infinity in model.layers.0.self_attn.k_proj.weight."),
    (infinite_scale, "holds NaN or infinity in model.layers.0.self_attn.k_proj.weight."),
    (too_large_for_fp32, "holds NaN or infinity in model.norm.weight."),
    (index_of([]), "it has no weight_map"),
    (index_of({"weight_map": {"a": 3}}), "it has no weight_map"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGES, ids=[f"{n}" for n in range(len(DAMAGES))])
def test_a_damaged_folder_is_refused_by_file_and_tensor(
    damage: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    model_of("qwen3_moe").save_pretrained(folder)
    damage(folder)
    for read in (moefw.from_pretrained, partial(import_folder, run_dir=tmp_path / "run")):
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        assert any(says in str(problem) for problem in caught.value.problems), str(caught.value)
    assert [*tmp_path.iterdir()] == [folder]


def both_ranks(source: Path) -> str:
    """Return what this rank is told of a folder, of which only one of two ranks reads the expert that is bad."""
    with pytest.raises(CheckpointError) as caught:
        moefw.from_pretrained(source, parallel={"experts": {"ep": 2}}, train={"micro_batch": 1})
    return str(caught.value)


def test_what_one_rank_finds_is_told_on_all(pool: RankPool, tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    not_finite(tmp_path)
    first, second = pool.run(both_ranks, 2, tmp_path)
    assert first == second
    for name in ("model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight"):
        assert name in first
    change(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.7.up_proj.weight"))
    first, second = pool.run(both_ranks, 2, tmp_path)
    assert first == second
    assert "lacks model.layers.1.mlp.experts.7.up_proj.weight" in first


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.fault("{id} of a model is a pipe", "refused; nobody waits for a writer")
def test_a_pipe_beside_the_weights_is_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    model_of("qwen3_moe").save_pretrained(folder)
    pipe(name)(folder)
    with pytest.raises(MoefwError, match=rf"(?i)in/{name} .*: it is no regular file\."):
        import_folder(folder, tmp_path / "run")
    assert [*tmp_path.iterdir()] == [folder]


def test_a_pipe_beside_a_model_is_not_handed_on(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path / "in")
    model = moefw.from_pretrained(tmp_path / "in")
    pipe("vocab.json")(tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"in/vocab\.json cannot be read: It is no regular file\."):
        moefw.save_pretrained(model, tmp_path / "out")
    assert [*tmp_path.iterdir()] == [tmp_path / "in"]


def test_no_model_is_written_that_is_not_finite(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path / "in")
    model = moefw.from_pretrained(tmp_path / "in")
    with torch.no_grad():
        model.module.norm.weight[0] = torch.nan
        model.module.embed.weight[1, 2] = torch.inf
    with pytest.raises(CheckpointError, match=r"the model holds NaN or infinity in embed\.weight, norm\.weight\."):
        moefw.save_pretrained(model, tmp_path / "out")
    assert [*tmp_path.iterdir()] == [tmp_path / "in"]


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    without(tmp_path)
    of_another_shape(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        moefw.from_pretrained(tmp_path)
    assert len(caught.value.problems) == 2


def test_mtp_layers_that_a_folder_lacks_are_named_with_the_way_out(tmp_path: Path) -> None:
    model_of("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.2\.enorm\.weight.*Use model\.mtp_layers: 0\."):
        moefw.from_pretrained(tmp_path, model={"mtp_layers": 1})


def test_no_folder_is_written_over(tmp_path: Path) -> None:
    model_of("mixtral").save_pretrained(tmp_path / "in")
    model = moefw.from_pretrained(tmp_path / "in")
    with pytest.raises(CheckpointError, match="is there and is no empty folder"):
        moefw.save_pretrained(model, tmp_path / "in")
    shutil.copytree(tmp_path / "in", tmp_path / "copy")
    (tmp_path / "file").touch()
    for path in ("copy", "file"):
        with pytest.raises(CheckpointError):
            moefw.save_pretrained(model, tmp_path / path)
    assert not list(tmp_path.glob("*.tmp"))
    assert same(tensors_of(tmp_path / "in"), tensors_of(tmp_path / "copy"))


def test_what_a_model_cannot_read_is_told(tmp_path: Path) -> None:
    model_of("mixtral").save_pretrained(tmp_path)
    model = moefw.from_pretrained(tmp_path)
    ids = torch.randint(62, (2, 9))
    calls: list[tuple[str, tuple[Any, ...]]] = [
        (r"input_ids go from 62 to 123, and the model knows those from 0 to 61\.", (torch.tensor([[62, 123]]),)),
        (r"input_ids go from -1 to 3, and", (torch.tensor([[-1, 3]]),)),
        (r"input_ids are \(9,\) torch.int64\. Hand over a tensor \(B, S\) of torch.int64", (ids[0],)),
        (r"input_ids are \(2, 9\) torch.float32\.", (ids.float(),)),
        (r"input_ids are a list\.", (ids.tolist(),)),
        (r"attention_mask is \(2, 8\), and input_ids are \(2, 9\)\.", (ids, torch.ones(2, 8))),
        (r"documents is \(2, 8\), and input_ids are \(2, 9\)\.", (ids, None, torch.zeros(2, 8, dtype=torch.int64))),
    ]
    for told, arguments in calls:
        with pytest.raises(moefw.ContractError, match=told):
            model(*arguments)


def test_where_there_is_no_folder_nothing_is_read(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"is no folder\. .* hf download NAME --local-dir DIR fetches one from the hub\."
    ):
        moefw.from_pretrained("Qwen/Qwen3-30B-A3B")
    with pytest.raises(MoefwError, match=r"config\.json cannot be read"):
        moefw.from_pretrained(tmp_path)
