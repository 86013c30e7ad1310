"""A run's checkpoint becomes a folder that ``transformers`` loads, from any layout; what it cannot say is refused."""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import moefw
from checkpoint_cases import spoil
from command_here import complaint, moefw_says
from hf_models import CLASSES, DENSE_MODELS, OWN, VOCABULARY, configurations, model_of, same, tensors_of
from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.optimizer import build_optimizer
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import CheckpointError
from moefw.core.site import Machine
from moefw.models.presets import PRESETS
from moefw.runtime.naming import initialise
from moefw.testing.pool import RankPool
from moefw.training import checkpoint
from moefw.training.checkpoint.reading import Reader, opened
from moefw.training.exporting import Form, config_of, export
from moefw.training.importing import import_folder
from pairwise import deep, each_value

TINY = (
    *("qwen3-30b-a3b-tiny", "qwen2-57b-a14b-tiny", "mixtral-8x7b-tiny", "olmoe-1b-7b-tiny", "gpt-oss-20b-tiny"),
    *("glm-4.5-tiny", "minimax-m2-tiny", "deepseek-v2-tiny"),
)
PARALLEL: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one rank": (1, {}),
    "ep 4, tp 2": (4, {"dense": {"tp": 2}, "experts": {"ep": 4}}),
    "sharded": (4, {"dense": {"shard": "all"}, "experts": {"ep": 2, "shard": "all"}}),
}


def assembled(preset: str, *, world: int = 1, **sections: Any) -> Assembly:
    tree = {"model": {"preset": preset, **sections.pop("model", {})}, "run": {"device": "cpu"}, **sections}
    return assemble_tree(tree, Marks("export"), defaults=defaults(), world=world, machine=Machine(device="cpu"))


def resolved(preset: str, **sections: Any) -> Any:
    return assembled(preset, **sections).resolved()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_configuration_that_means_the_same(name: str, tmp_path: Path) -> None:
    config = config_of(resolved(name))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert config_of(resolved(f"{tmp_path}/config.json")) == config


@pytest.mark.parametrize("number", [4, *deep(40)])
@pytest.mark.parametrize("family", OWN)
def test_so_has_every_configuration_that_is_drawn(family: str, number: int) -> None:
    @settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(configurations(family))
    def run(values: dict[str, Any]) -> None:
        import transformers

        with tempfile.TemporaryDirectory() as folder:
            getattr(transformers, f"{CLASSES[family]}Config")(**values).save_pretrained(folder)
            config = config_of(resolved(folder))
            getattr(transformers, f"{CLASSES[config['model_type']]}Config")(**config)

    run()


def saved(preset: str, run_dir: Path, parallel: Mapping[str, Any], world: int, model: Mapping[str, Any]) -> None:
    """Save a checkpoint of a model with drawn weights and states. Collective."""
    train = {"tokens_per_step": 64, "micro_batch": 1, "seq_len": 16}
    assembly = assembled(preset, world=world, parallel=parallel, train=train, model=model)
    layout, shared = open_layout(assembly, "cpu"), Shared()
    module: Any = build_model(assembly, layout, torch.device("cpu"), shared)
    initialise(module, seed=0, std=lambda name: 0.2)
    for name, state in module.named_buffers():
        if name.endswith("expert_bias"):
            state.copy_(torch.linspace(-0.1, 0.1, len(state)))
    optimizer = build_optimizer(assembly, module, layout, torch.device("cpu"), shared)
    checkpoint.save(run_dir, 1, module, optimizer, layout, checkpoint.Origin(), keep=1)
    shared.close()


@pytest.mark.parametrize(("preset", "parallel"), each_value([*TINY, "deepseek-v3-tiny"], PARALLEL))
def test_transformers_computes_the_logits_of_a_checkpoint(
    pool: RankPool, preset: str, parallel: str, tmp_path: Path
) -> None:
    import transformers

    world, layout = PARALLEL[parallel]
    model = {"num_layers": 2, "vocab_size": 64}
    pool.run(saved, world, preset, tmp_path / "run", layout, world, model)
    family = export(assembled(preset, model=model), *paths(tmp_path), "fp32").family
    oracle = getattr(transformers, f"{CLASSES[family]}ForCausalLM").from_pretrained(tmp_path / "out", dtype="float32")
    oracle.config._attn_implementation = "eager"
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    wanted = oracle(input_ids=ids).logits
    found = moefw.from_pretrained(tmp_path / "out")(ids)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", DENSE_MODELS)
def test_a_model_without_experts_leaves_as_what_it_was(family: str, tmp_path: Path) -> None:
    import transformers

    oracle = model_of(family)
    oracle.save_pretrained(tmp_path / "in")
    import_folder(tmp_path / "in", tmp_path / "run")
    says = moefw_says("convert", "export", tmp_path / "run", tmp_path / "out", "--dtype=fp32")
    assert says.endswith(f"holds the model of step 0: {family}, fp32\n")
    assert same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "in"))
    came, left = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("in", "out"))
    assert left["max_position_embeddings"] == came["max_position_embeddings"]
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(written(input_ids=ids).logits, oracle(input_ids=ids).logits)


def test_options_of_experts_do_not_keep_a_model_without_experts_from_leaving() -> None:
    options = {"model": {"preset": "qwen3-moe-tiny", "num_dense_layers": 3, "shared_expert_dim": 64, "vocab_size": 64}}
    assembly = assemble_tree({**options, "run": {"device": "cpu"}}, Marks("export"), defaults=defaults(), world=1)
    assert config_of(assembly.resolved())["model_type"] == "qwen3"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.nan, "step-0 holds NaN or infinity in norm.weight. No other checkpoint of the run is whole"),
        (3.4e38, "step-0 in bfloat16 holds NaN or infinity in norm.weight. Use --dtype fp32"),
    ],
)
def test_no_checkpoint_is_exported_that_is_not_finite_as_it_is_written(value: float, says: str, tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path / "in")
    import_folder(tmp_path / "in", tmp_path / "run")
    spoil(tmp_path / "run" / "checkpoints" / "step-0", "model/norm.weight", value)
    assert says in complaint("convert", "export", tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def paths(folder: Path) -> tuple[Path, Path]:
    return folder / "run" / "checkpoints" / "step-1", folder / "out"


def test_weights_are_written_in_bf16_and_states_in_fp32(pool: RankPool, tmp_path: Path) -> None:
    model = {"num_layers": 2, "mtp_layers": 1}
    pool.run(saved, 1, "deepseek-v3-tiny", tmp_path / "run", {}, 1, model)
    export(assembled("deepseek-v3-tiny", model=model), *paths(tmp_path), "bf16")
    written = tensors_of(tmp_path / "out")
    wide = {name for name, tensor in written.items() if tensor.dtype is torch.float32}
    assert wide == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    assert {"model.layers.2.enorm.weight", "model.layers.2.shared_head.norm.weight"} <= written.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"attention": {"sinks": True}}, "attention.sinks True is not what"),
        ({"model": {"shared_expert_dim": 64}}, "model.shared_expert_dim 64 is not what"),
        ({"routing": {"score": "sigmoid"}}, "routing.score 'sigmoid' is not what"),
        ({"routing": {"use": "sinkhorn"}}, "no family of Hugging Face routes like sinkhorn"),
        ({"routing": {"capacity": {"factor": 1.0}}}, "routing.capacity"),
    ],
)
def test_what_no_family_computes_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        config_of(resolved("qwen3-moe-tiny", **sections))
    assert says in str(caught.value)


def run_of(folder: Path, model: Mapping[str, Any], **sections: Any) -> Path:
    """The folder of a run of one step."""
    spec = folder / "spec.yaml"
    train = {"steps": 1, "tokens_per_step": 64, "micro_batch": 2, "seq_len": 16, "eval_tokens": 64}
    (folder / "text.txt").write_text("what a router sends, experts see\n" * 100)
    data = {"path": str(folder / "text.txt"), "tokenizer": "bpe-300"}
    run = {"dir": str(folder / "run"), "device": "cpu"}
    model = {"vocab_size": 300, **model}
    spec.write_text(json.dumps({"model": model, "data": data, "train": train, "run": run, **sections}))
    moefw_says("train", spec)
    return folder / "run"


def test_a_run_is_exported_by_a_command(tmp_path: Path) -> None:
    import transformers

    run = run_of(tmp_path, {"preset": "olmoe-1b-7b-tiny", "num_layers": 1})
    out = tmp_path / "out"
    assert moefw_says("convert", "export", run, out) == f"{out} holds the model of step 1: olmoe, bf16\n"
    assert transformers.AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0
    assert (out / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    assert "is there and is no empty folder" in complaint("convert", "export", run, out)
    assert "holds no checkpoint of step 7" in complaint("convert", "export", run, out / "x", "--step=7")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_family_with_shared_experts_lacks_none_where_the_model_has_none(tmp_path: Path) -> None:
    import transformers

    routing = {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias"}]}  # as in the quickstart
    run = run_of(tmp_path, {"preset": "qwen3-moe-tiny"}, routing=routing)
    out = tmp_path / "out"
    first, why = moefw_says("convert", "export", run, out).splitlines()
    assert first.endswith("holds the model of step 1: glm4_moe, bf16")
    assert why == "glm4_moe is the family that computes this. It has shared experts; here they are empty tensors."
    _, found = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(found.values()), found
    moefw_says("convert", "import", out, tmp_path / "imported")
    moefw.save_pretrained(moefw.from_pretrained(out), tmp_path / "written")
    assert same(tensors_of(tmp_path / "written"), tensors_of(out))


MANY = {"pp": 2, "dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}
"""A layout of eight ranks that splits everything: stages, matrices, experts, and each parameter over its copies."""


SMALL = {"num_layers": 4, "vocab_size": 64}


@pytest.fixture(scope="module")
def split_and_whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of the same model: one that eight ranks have written, and one of a rank alone."""
    folder = tmp_path_factory.mktemp("layouts")
    with closing(RankPool(8)) as eight:
        for name, world, parallel in (("split", 8, MANY), ("whole", 1, {})):
            eight.run(saved, world, "deepseek-v3-tiny", folder / name, parallel, world, SMALL)
    return folder / "split" / "checkpoints" / "step-1", folder / "whole" / "checkpoints" / "step-1"


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_the_export_of_eight_ranks_is_that_of_one_bit_for_bit(
    split_and_whole: tuple[Path, Path], form: Form, tmp_path: Path
) -> None:
    assembly = assembled("deepseek-v3-tiny", model=SMALL)
    for name, checkpoint_of in zip(("split", "whole"), split_and_whole, strict=True):
        export(assembly, checkpoint_of, tmp_path / name, form)
    split, whole = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("split", "whole")
    )
    assert len(opened(split_and_whole[0]).files) == 8
    assert "model.safetensors" in whole
    assert split == whole


def test_an_export_holds_one_tensor_at_a_time(
    split_and_whole: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a checkpoint in many parts, and of tensors that stand in one of the folder, as experts do."""
    alive: list[str] = []
    read_at_once: list[int] = []
    read = Reader.read

    def watched(reader: Reader, name: str) -> torch.Tensor:
        values = read(reader, name)
        alive.append(name)
        weakref.finalize(values, alive.remove, name)
        read_at_once.append(len(alive))
        return values

    monkeypatch.setattr(Reader, "read", watched)
    export(assembled("deepseek-v3-tiny", model=SMALL), split_and_whole[0], tmp_path / "out", "fp32")
    assert len(read_at_once) > 100
    assert set(read_at_once) == {1}
