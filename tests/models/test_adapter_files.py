"""Adapters in the files of PEFT: what we write, PEFT computes, and what PEFT writes, we read; all else is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from adapter_cases import LAYERS, OWN, RANK, Base, Values, close, drawn, merged, read_all, saved_base, weights_of
from hf_models import tensors_of
from moefw.core.errors import CheckpointError
from moefw.models.huggingface.adapter_config import AdapterConfig
from moefw.models.huggingface.adapter_files import write_adapter
from moefw.models.huggingface.adapter_folder import AdapterFolder
from pairwise import deep

CONFIG = AdapterConfig(rank=RANK, alpha=7.0, base="base")
WHAT: Mapping[str, str] = {
    "everything": ".*",
    "gate and up": r".*experts.*\.(gate|up)_proj",
    "down": r".*experts.*\.down_proj",
    "the last layer": r"layers\.1\..*",
    "attention of the first": r"layers\.0\.attention\..*",
    "all but routed experts": r".*(attention|mlp|shared_expert)\..*",
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    """The base of a family, built once."""
    made: dict[str, Base] = {}

    def base(family: str) -> Base:
        if family not in made:
            made[family] = saved_base(family, tmp_path_factory.mktemp(family))
        return made[family]

    return base


def written(
    folder: Path, base: Base, adapter: Values, config: AdapterConfig = CONFIG, **options: Any
) -> tuple[str, ...]:
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.items()}
    options = {"model_type": base.family, "num_layers": LAYERS, **options}
    return write_adapter(folder, config, shapes, adapter.__getitem__, **options)


def loaded_by_peft(base: Base, folder: Path) -> Any:
    """Return PEFT's model, which has found exactly the tensors of the file."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of a missing tensor
        warnings.simplefilter("error", RuntimeWarning)  # of a target that matches nothing
        model = peft.PeftModel.from_pretrained(base.fresh(), folder)
    assert peft.get_peft_model_state_dict(model, save_embedding_layers=False).keys() == tensors_of(folder).keys()
    return model


def merged_by_peft(model: Any, folder: Path) -> Values:
    model.merge_and_unload().save_pretrained(folder)
    return weights_of(folder)


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("family", OWN)
def test_peft_merges_what_is_written(bases: Callable[[str], Base], family: str, what: str, tmp_path: Path) -> None:
    base = bases(family)
    adapter = drawn(base.weights, WHAT[what])
    assert written(tmp_path / "adapter", base, adapter) == ()
    theirs = merged_by_peft(loaded_by_peft(base, tmp_path / "adapter"), tmp_path / "merged")
    assert close(theirs, merged(base.weights, adapter, CONFIG))
    same_bits(base, tmp_path / "adapter", adapter)


def same_bits(base: Base, folder: Path, adapter: Values) -> None:
    read = base.adapter(folder)
    values = read_all(read)
    assert values.keys() == adapter.keys()
    assert all(torch.equal(values[name], adapter[name]) for name in adapter)
    assert read.shapes == {name: tuple(tensor.shape) for name, tensor in adapter.items()}
    assert {f"{name[:-7]}.lora_B" for name in read.targets} == {name for name in adapter if name.endswith("lora_B")}


def made_by_peft(base: Base, folder: Path, **options: Any) -> tuple[AdapterFolder, Values]:
    """Return the reader of an adapter that PEFT has written, with drawn values, and what PEFT merges it to."""
    import peft

    model = peft.get_peft_model(base.fresh(), peft.LoraConfig(r=RANK, lora_alpha=5, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.uniform_(0.1, 1.0)
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return base.adapter(folder / "adapter"), merged_by_peft(model, folder / "merged")


@pytest.mark.parametrize("stacks", [["gate_up_proj", "down_proj"], ["gate_up_proj"], ["down_proj"]])
@pytest.mark.parametrize("family", OWN)
def test_what_peft_writes_is_read(bases: Callable[[str], Base], family: str, stacks: list[str], tmp_path: Path) -> None:
    base = bases(family)
    adapter, merged_there = made_by_peft(
        base,
        tmp_path,
        use_rslora=len(stacks) == 1,
        target_modules=["o_proj", "kv_b_proj", "q_proj"],
        target_parameters=[f"mlp.experts.{name}" for name in stacks],
    )
    assert adapter.config == AdapterConfig(rank=RANK, alpha=5.0, rslora=len(stacks) == 1, base=str(base.path))
    assert close(merged_there, merged(base.weights, read_all(adapter), adapter.config))


@pytest.mark.parametrize("family", OWN)
def test_dora_of_attention(bases: Callable[[str], Base], family: str, tmp_path: Path) -> None:
    base = bases(family)
    config = AdapterConfig(rank=RANK, alpha=7.0, rslora=True, dropout=0.25, dora=True, base="base")
    adapter = drawn(base.weights, r".*\.attention\..*", dora=True)
    written(tmp_path / "adapter", base, adapter, config)
    theirs = merged_by_peft(loaded_by_peft(base, tmp_path / "adapter"), tmp_path / "merged")
    assert close(theirs, merged(base.weights, adapter, config))
    same_bits(base, tmp_path / "adapter", adapter)
    assert base.adapter(tmp_path / "adapter").config == config


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dora_of_every_layer_of_a_dense_model(bases: Callable[[str], Base], family: str, tmp_path: Path) -> None:
    base = bases(family)
    config = AdapterConfig(rank=RANK, alpha=7.0, dropout=0.25, dora=True, base="base")
    adapter = drawn(base.weights, ".*", dora=True)
    written(tmp_path / "adapter", base, adapter, config)
    theirs = merged_by_peft(loaded_by_peft(base, tmp_path / "adapter"), tmp_path / "merged")
    assert close(theirs, merged(base.weights, adapter, config))
    same_bits(base, tmp_path / "adapter", adapter)


def test_dora_that_peft_writes_is_read(bases: Callable[[str], Base], tmp_path: Path) -> None:
    base = bases("deepseek_v3")
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    adapter, merged_there = made_by_peft(base, tmp_path, use_dora=True, lora_dropout=0.1, target_modules=targets)
    assert adapter.config == AdapterConfig(rank=RANK, alpha=5.0, dropout=0.1, dora=True, base=str(base.path))
    assert close(merged_there, merged(base.weights, read_all(adapter), adapter.config))


@pytest.mark.parametrize("family", OWN)
def test_targets_name_what_is_adapted_and_nothing_else(
    bases: Callable[[str], Base], family: str, tmp_path: Path
) -> None:
    """peft#3711: in target_modules, gate_proj of a shared expert means that of the routed experts."""
    base = bases(family)
    written(tmp_path / "adapter", base, drawn(base.weights, r"layers\.1\..*"), AdapterConfig(RANK, 7.5, dropout=0.5))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert all(".self_attn." in name for name in config["target_modules"])
    assert all("layers.1." in name for name in config["target_modules"] + config["target_parameters"])
    assert "model.layers.1.mlp.experts.gate_up_proj" in config["target_parameters"]
    assert config["lora_alpha"] == 7.5
    assert config["lora_dropout"] == 0.0  # PEFT takes no other with parameters
    written(tmp_path / "attention", base, drawn(base.weights, r".*attention.*"), AdapterConfig(RANK, 7.0, dropout=0.5))
    config = json.loads((tmp_path / "attention" / "adapter_config.json").read_text())
    assert not any("layers" in name for name in config["target_modules"])  # once for all layers
    assert config["lora_dropout"] == 0.5


@pytest.mark.parametrize(
    "what", [r".*experts.*", r"layers\.1\..*(o_proj|expert).*", r"layers\.0\.attention.*(q|o)_proj"]
)
@pytest.mark.parametrize("family", OWN)
def test_what_is_written_for_vllm_is_read_back(
    bases: Callable[[str], Base], family: str, what: str, tmp_path: Path
) -> None:
    base = bases(family)
    adapter = drawn(base.weights, what)
    written(tmp_path / "adapter", base, adapter, style="vllm")
    same_bits(base, tmp_path / "adapter", adapter)


@pytest.mark.parametrize("family", OWN)
def test_vllm_takes_an_expert_a_tensor(bases: Callable[[str], Base], family: str, tmp_path: Path) -> None:
    """SkyRL#1852, vllm#29322: stacks are for families that the hub, too, has as stacks."""
    base = bases(family)
    adapter = drawn(base.weights, r"(?!.*kv_b_proj).*")
    written(tmp_path / "adapter", base, adapter, style="vllm")
    tensors = tensors_of(tmp_path / "adapter")
    per_expert = [name for name in tensors if re.search(r"\.experts\.\d+\.", name)]
    if family == "gpt_oss":
        written(tmp_path / "stacked", base, adapter)
        assert tensors.keys() == tensors_of(tmp_path / "stacked").keys()
        assert not per_expert
    else:
        layers = sum(name.endswith("experts.0.down_proj.weight") for name in base.weights)
        assert len(per_expert) == layers * 8 * 3 * 2
        gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        block = "block_sparse_moe" if family == "mixtral" else "mlp"
        experts = f"base_model.model.model.layers.1.{block}.experts.5"
        ours = "layers.1.moe.experts.5"
        assert torch.equal(tensors[f"{experts}.{gate}.lora_A.weight"], adapter[f"{ours}.gate_up_proj.lora_A"])
        assert torch.equal(tensors[f"{experts}.{up}.lora_A.weight"], adapter[f"{ours}.gate_up_proj.lora_A"])
        assert torch.equal(tensors[f"{experts}.{gate}.lora_B.weight"], adapter[f"{ours}.gate_proj.lora_B"])
        assert torch.equal(tensors[f"{experts}.{up}.lora_B.weight"], adapter[f"{ours}.up_proj.lora_B"])
        assert torch.equal(tensors[f"{experts}.{down}.lora_B.weight"], adapter[f"{ours}.down_proj.lora_B"])
    same_bits(base, tmp_path / "adapter", adapter)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_peft_merges_names_of_single_experts_too(bases: Callable[[str], Base], family: str, tmp_path: Path) -> None:
    import peft

    base = bases(family)
    adapter = drawn(base.weights, r".*experts.*")
    written(tmp_path / "adapter", base, adapter, style="vllm")
    model = peft.PeftModel.from_pretrained(base.fresh(), tmp_path / "adapter")
    assert close(merged_by_peft(model, tmp_path / "merged"), merged(base.weights, adapter, CONFIG))


def test_layers_that_predict_further_tokens_are_left_out(bases: Callable[[str], Base], tmp_path: Path) -> None:
    base = bases("deepseek_v3")
    adapter = drawn(base.weights, r"layers\.1\..*")
    further = {name.replace("layers.1.", f"layers.{LAYERS}."): tensor for name, tensor in adapter.items()}
    left_out = written(tmp_path / "adapter", base, {**adapter, **further})
    assert set(left_out) == further.keys()
    same_bits(base, tmp_path / "adapter", adapter)
    with pytest.raises(CheckpointError, match="no tensor of a layer that transformers builds"):
        written(tmp_path / "none", base, further)


def test_an_adapter_can_be_written_in_bf16(bases: Callable[[str], Base], tmp_path: Path) -> None:
    base = bases("gpt_oss")
    adapter = {name: tensor.bfloat16().float() for name, tensor in drawn(base.weights, ".*").items()}
    written(tmp_path / "adapter", base, adapter, dtype=torch.bfloat16)
    values = read_all(base.adapter(tmp_path / "adapter"))
    assert {tensor.dtype for tensor in values.values()} == {torch.bfloat16}
    assert all(torch.equal(values[name].float(), adapter[name]) for name in adapter)


def refusals(error: pytest.ExceptionInfo[CheckpointError]) -> list[str]:
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("family", "what", "dora", "style", "says"),
    [
        ("olmoe", ".*", True, "peft", "no DoRA for what it adapts as parameters: mlp.experts.down_proj"),
        ("deepseek_v3", r"layers\.0\.mlp\..*", True, "peft", "model.layers.0.mlp.down_proj.weight"),
        ("olmoe", r".*attention.*", True, "vllm", "vLLM has no DoRA"),
        (
            "deepseek_v3",
            r".*kv_b_proj",
            False,
            "vllm",
            "does not apply them (vllm#48974): layers.0.attention.kv_b_proj",
        ),
        ("mixtral", r".*down_proj", False, "vllm", "of layers.1.moe.experts only down is adapted"),
        ("gpt_oss", r".*experts.*(gate|up)_proj", False, "vllm", "of layers.0.moe.experts only gate_up is adapted"),
    ],
)
def test_what_a_format_cannot_say_is_refused(
    bases: Callable[[str], Base], family: str, what: str, dora: bool, style: str, says: str, tmp_path: Path
) -> None:
    base = bases(family)
    adapter = drawn(base.weights, what, dora=dora)
    with pytest.raises(CheckpointError) as error:
        written(tmp_path / "adapter", base, adapter, AdapterConfig(RANK, 7.0, dora=dora), style=style)
    assert any(says in refusal for refusal in refusals(error))
    assert not list(tmp_path.iterdir())


def test_all_that_is_wrong_with_an_adapter_is_told_at_once(bases: Callable[[str], Base], tmp_path: Path) -> None:
    base = bases("mixtral")
    adapter = drawn(base.weights, r"layers\.1\..*")
    del adapter["layers.1.attention.q_proj.lora_B"]
    del adapter[f"{EXPERTS}.3.up_proj.lora_B"]
    adapter["layers.1.moe.router.lora_A"] = torch.ones(RANK, 40)
    adapter["layers.1.moe.shared_expert.up_proj.lora_A"] = torch.ones(RANK, 40)
    adapter["layers.1.attention.o_proj.lora_magnitude"] = torch.ones(40)
    adapter[f"{EXPERTS}.2.down_proj.lora_A"] = torch.ones(RANK + 1, 12)
    with pytest.raises(CheckpointError) as error:
        written(tmp_path / "adapter", base, adapter)
    told = refusals(error)
    for says in (
        "the adapter lacks layers.1.attention.q_proj.lora_B",
        f"the adapter lacks {EXPERTS}.3.up_proj.lora_B",
        "of mixtral have no place for layers.1.moe.router.lora_A",
        "of mixtral have no place for layers.1.moe.shared_expert.up_proj.lora_A",
        "layers.1.attention.o_proj.lora_magnitude is no tensor of such an adapter",
        f"{EXPERTS}.2.down_proj.lora_A (4, 12) is not of rank 3",
    ):
        assert any(says in refusal for refusal in told), says


def test_nan_is_never_written(bases: Callable[[str], Base], tmp_path: Path) -> None:
    base = bases("olmoe")
    adapter = drawn(base.weights, ".*")
    adapter[f"{EXPERTS}.2.up_proj.lora_B"][1, 1] = torch.nan
    with pytest.raises(CheckpointError, match=rf"NaN or infinity in {EXPERTS}.2.up_proj.lora_B"):
        written(tmp_path / "adapter", base, adapter)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_stays(bases: Callable[[str], Base], tmp_path: Path) -> None:
    base = bases("olmoe")
    adapter = drawn(base.weights, r".*q_proj")
    written(tmp_path / "adapter", base, adapter)
    with pytest.raises(CheckpointError, match="is no empty folder"):
        written(tmp_path / "adapter", base, adapter)


EXPERTS = "layers.1.moe.experts"
STACKED = "base_model.model.model.layers.1.mlp.experts"
ATTENTION = "base_model.model.model.layers.0.self_attn"
Tensors = dict[str, Tensor]


@pytest.fixture
def adapter(bases: Callable[[str], Base], tmp_path: Path) -> Path:
    """The folder of a whole adapter of Qwen3-MoE."""
    base = bases("qwen3_moe")
    written(tmp_path / "adapter", base, drawn(base.weights, r".*(attention|experts).*"))
    return tmp_path / "adapter"


def told_of(base: Base, folder: Path) -> list[str]:
    """Return the refusals of a folder, also those that come as values are read."""
    with pytest.raises(CheckpointError) as error:
        read_all(base.adapter(folder))
    return refusals(error)


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in tensors_of(folder).items()}
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop(f"{STACKED}.lora_B.weight"), f"lacks {STACKED}.lora_B.weight of shape (40, 24)"),
        (lambda tensors: tensors.pop(f"{ATTENTION}.k_proj.lora_A.weight"), f"lacks {ATTENTION}.k_proj.lora_A.weight"),
        (lambda tensors: [tensors.pop(f"{ATTENTION}.k_proj.lora_{m}.weight") for m in "AB"], "has nothing for model.layers.0.self_attn.k_proj"),
        (lambda tensors: [tensors.pop(f"{STACKED}{w}.lora_{m}.weight") for w in ("", ".base_layer") for m in "AB"], "has nothing for model.layers.1.mlp.experts.down_proj"),
        (lambda tensors: tensors.update(x=torch.ones(1)), "holds x, which is no tensor"),
        (lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.ones(1)}), "holds base_model.model.lm_head.weight"),
        (lambda tensors: tensors.update({f"{ATTENTION}.k_proj.lora_magnitude_vector": torch.ones(16)}), "k_proj.lora_magnitude_vector, which is no tensor"),
        (lambda tensors: tensors.update({f"{STACKED}.lora_A.weight": torch.ones(24, 40)}), "must be (24, 12). Use the base of the adapter, and PEFT 0.19.1 or later"),
        (lambda tensors: tensors.update({f"{ATTENTION}.q_proj.lora_A.weight": torch.ones(3, 40, dtype=torch.uint8)}), "q_proj.lora_A.weight is torch.uint8"),
        (lambda tensors: tensors.update({f"{ATTENTION}.q_proj.lora_A.weight": torch.ones(3, 40, dtype=torch.int64)}), "q_proj.lora_A.weight is I64, which no adapter is"),
        (lambda tensors: tensors[f"{STACKED}.lora_A.weight"].fill_(torch.inf), f"NaN or infinity in {STACKED}.lora_A.weight"),
        (lambda tensors: tensors.clear(), "has nothing for model.layers.0.self_attn.q_proj"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(
    bases: Callable[[str], Base], adapter: Path, change: Callable[[Tensors], object], says: str
) -> None:
    change_tensors(adapter, change)
    assert any(says in refusal for refusal in told_of(bases("qwen3_moe"), adapter))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head'] is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern {'q_proj': 4} is not supported"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern {'q_proj': 4} is not supported"),
        ({"layer_replication": [[0, 1]]}, "layer_replication [[0, 1]] is not supported"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True is not supported"),
        ({"of_tomorrow": 1}, "of_tomorrow 1 is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' has changed the base"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not 'LORA'"),
        ({"r": None}, "r is missing"),
        ({"r": 0}, "r 0 is not a whole number from 1"),
        ({"r": True}, "r True is not a whole number from 1"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan is not a number above 0"),
        ({"lora_dropout": 1}, "lora_dropout 1 is not a number from 0 to below 1"),
        ({"target_modules": [1]}, "target_modules [1] is not a list of names"),
        ({"peft_version": "0.19.0"}, "of PEFT 0.19.0, which took the outputs of experts for their inputs"),
        ({"peft_version": "0.18.1"}, "of PEFT 0.18.1, which took the outputs of experts for their inputs"),
        ({"use_dora": True}, "lacks base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
        ({"r": 4}, "q_proj.lora_A.weight is (3, 40), and must be (4, 40)"),
        ({"target_parameters": []}, None),
        ({"layers_to_transform": [0], "target_modules": ["q_proj"]}, None),
    ],
)
def test_what_no_adapter_of_ours_can_be_is_refused_by_name(
    bases: Callable[[str], Base], adapter: Path, values: dict[str, Any], says: str | None
) -> None:
    change_config(adapter, **values)
    if says is None:
        read_all(bases("qwen3_moe").adapter(adapter))
    else:
        assert any(says in refusal for refusal in told_of(bases("qwen3_moe"), adapter))


@pytest.mark.parametrize(("version", "right"), [("0.18.1", True), ("0.19.0", False), ("0.19.1", True), ("x", True)])
def test_one_peft_was_wrong_about_gpt_oss(
    bases: Callable[[str], Base], version: str, right: bool, tmp_path: Path
) -> None:
    base = bases("gpt_oss")
    adapter = drawn(base.weights, ".*")
    written(tmp_path / "adapter", base, adapter)
    change_config(tmp_path / "adapter", peft_version=version)
    if right:
        same_bits(base, tmp_path / "adapter", adapter)
    else:
        assert "took the outputs of experts for their inputs" in told_of(base, tmp_path / "adapter")[0]


def test_a_lone_parameter_needs_its_name(bases: Callable[[str], Base], tmp_path: Path) -> None:
    base = bases("mixtral")
    written(tmp_path / "adapter", base, drawn(base.weights, WHAT["down"]))
    change_config(tmp_path / "adapter", target_parameters=[])
    told = told_of(base, tmp_path / "adapter")
    assert any("A lone parameter must be named in target_parameters" in refusal for refusal in told)


def test_another_base_is_seen_by_its_sizes(bases: Callable[[str], Base], adapter: Path) -> None:
    base = bases("qwen3_moe")
    wider = {name: torch.empty(weight.shape[0], 48) for name, weight in base.weights.items()}
    with pytest.raises(CheckpointError) as error:
        base.adapter(adapter, wider)
    assert any("q_proj.lora_A.weight is (3, 40), and must be (3, 48)" in refusal for refusal in refusals(error))


def test_gate_and_up_that_do_not_share_are_named(bases: Callable[[str], Base], tmp_path: Path) -> None:
    base = bases("mixtral")
    written(tmp_path / "adapter", base, drawn(base.weights, r".*experts.*"), style="vllm")
    gate, up = (
        f"base_model.model.model.layers.1.block_sparse_moe.experts.5.{name}.lora_A.weight" for name in ("w1", "w3")
    )
    change_tensors(tmp_path / "adapter", lambda tensors: tensors[up].add_(1))
    assert any(f"{gate} and {up} differ" in refusal for refusal in told_of(base, tmp_path / "adapter"))


BAD_FILES: Mapping[str, Callable[[Path], object]] = {
    "no config": lambda folder: (folder / "adapter_config.json").unlink(),
    "a config of bytes": lambda folder: (folder / "adapter_config.json").write_bytes(b"\xff\xfe"),
    "a config cut short": lambda folder: (folder / "adapter_config.json").write_text('{"r": '),
    "a list as config": lambda folder: (folder / "adapter_config.json").write_text("[1]"),
    "a deep config": lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000),
    "no tensors": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "a pickle": lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
    "tensors cut short": lambda folder: (folder / "adapter_model.safetensors").write_bytes(
        (folder / "adapter_model.safetensors").read_bytes()[:-9]
    ),
    "an empty file": lambda folder: (folder / "adapter_model.safetensors").write_bytes(b""),
    "other bytes": lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 99),
}


@pytest.mark.parametrize("damage", BAD_FILES)
def test_a_damaged_folder_is_an_error_of_ours(bases: Callable[[str], Base], adapter: Path, damage: str) -> None:
    BAD_FILES[damage](adapter)
    assert told_of(bases("qwen3_moe"), adapter)


def test_config_and_file_are_judged_together(bases: Callable[[str], Base], adapter: Path) -> None:
    change_config(adapter, bias="all", r=-1)
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    told = " ".join(told_of(bases("qwen3_moe"), adapter))
    assert all(says in told for says in ("bias 'all'", "r -1", "no whole safetensors file"))


def test_no_value_of_a_key_is_a_traceback(bases: Callable[[str], Base], adapter: Path) -> None:
    from peft import LoraConfig

    base = bases("qwen3_moe")
    before = (adapter / "adapter_config.json").read_text()
    keys = {**LoraConfig().to_dict(), **json.loads(before)}
    for key in sorted(keys):
        for value in (None, True, -1, 1e999, "x", [], [None], {}, {"x": [1]}, 10**400, [[["a"]]]):
            (adapter / "adapter_config.json").write_text(before)
            change_config(adapter, **{key: value})
            with suppress(CheckpointError):
                base.adapter(adapter)


# The tests above import peft in a process that has imported moefw.
@pytest.mark.parametrize("modules", deep("moefw, peft", "peft, moefw"))
def test_peft_can_be_imported_beside(modules: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {modules}"], check=True, timeout=250)
