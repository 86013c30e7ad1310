"""Writes a run's checkpoint as a Hugging Face folder, tensor by tensor, whatever layout saved it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.data import TOKENIZER
from moefw.core.errors import CheckpointError, MoefwError, Problem, SpecError
from moefw.models.huggingface.codings import CODINGS, Coding
from moefw.models.huggingface.config import read_config
from moefw.models.huggingface.families import FAMILIES
from moefw.models.huggingface.handed_on import BASE_CONFIG, CHAT, hand_on
from moefw.models.huggingface.origins import Origin, origin_of
from moefw.models.huggingface.stored import Description
from moefw.models.huggingface.values import wrong_values
from moefw.models.huggingface.writing import Written, lay_out
from moefw.models.huggingface.written import (
    ROUTER,
    computed_routing,
    configurations,
    dense_layers,
    empty_tensors,
    without_experts,
)
from moefw.plugins.data.source import tokenizer_beside
from moefw.runtime.attention.rope_options import OWN
from moefw.runtime.finite import all_finite
from moefw.system.folders import new_folder, temporary_folder
from moefw.training.checkpoint.base import base_of, require_same_base
from moefw.training.checkpoint.choice import way_out
from moefw.training.checkpoint.manifest import Damage
from moefw.training.checkpoint.reading import Reader, opened
from moefw.training.exporting_base import Base, Merged
from moefw.training.exporting_codes import CodedTensors

Tree = Mapping[str, Any]
Form = Literal["bf16", "fp32", "fp8", "mxfp4", "nvfp4"]
"""How a folder holds weights: as values of a dtype, or some of them as codes and the others in bf16."""
_POSITIONS: Final = "max_position_embeddings"
OF_TRAINING: Final = ("use", "init_std", "embed_init_std", "zero_init", "mtp_coeff", "mtp_layers", "num_dense_layers")
"""Options of a model that do not change what it computes, or that are compared in another form."""
OF_EXPERTS: Final = (
    *("num_experts", "top_k", "expert_dim", "biased_experts"),
    *("shared_expert_dim", "shared_expert_gate"),
)
"""Options of a model that mean nothing where no layer has experts."""


@frozen
class Exported:
    """What has been written: the family of the model, and lines that say what is not told by its name."""

    family: str
    told: tuple[str, ...]


def export(assembly: Assembly, checkpoint: Path, target: Path, form: Form) -> Exported:
    """Write ``target``, a folder that ``transformers`` loads. States stay fp32.

    At most one tensor is held at a time. Frozen weights come from the folder of the run's base; where it has the codes
    that are asked for, these are copied. Raises CheckpointError if the checkpoint is damaged or not finite, if its base
    is another one, if no family of Hugging Face computes what the model does, if the family or a weight does not fit
    the format, or if the folder holds something. It appears whole or not at all.
    """
    config = config_of(assembly.resolved())
    family: str = config["model_type"]
    coding = _coding(form, family)
    with way_out(checkpoint):
        saved = opened(checkpoint)
        require_same_base(checkpoint, saved.manifest.origin.base, base_of(assembly, None))
    base = Base(assembly)
    shapes = {name: saved.tensors[name].shape for name in _exported(saved) if name not in base.of_adapters}
    shapes |= base.shapes
    origins = {name: origin_of(name.split("/", 1)[1], FAMILIES[family].rules) for name in shapes}
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    described = _described(origins, shapes, dtype)
    coded = None if coding is None else CodedTensors(coding, origins, shapes, base)
    if coded is not None:
        described = coded.described(described)
        config["quantization_config"] = coded.config(described)
    empty = {name: (dtype, shape) for name, shape in empty_tensors(config).items()}
    described |= empty
    run_dir = Path(assembly.spec.run.dir)
    config[_POSITIONS] = _positions(config, assembly, run_dir, is_trained=saved.manifest.step > 0)
    tokenizer = tokenizer_beside(run_dir / TOKENIZER)
    with new_folder(target) as scratch:
        lay_out(scratch, described)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            (scratch / TOKENIZER).write_bytes(tokenizer)
        for name in CHAT:
            hand_on(run_dir / name, scratch / name)
        written = Written.opened(scratch)
        with (
            way_out(checkpoint),
            all_finite(f"{checkpoint} in {config['dtype']}", _too_large) as as_written,
            all_finite(checkpoint, Damage) as as_saved,
        ):

            def read(name: str) -> Tensor:
                values = base.read(name) if name in base.shapes else saved.read(name)
                as_saved(name.split("/", 1)[1], values)
                return values

            _write(Merged(base, read), origins, coded, written, as_written)
        written.flush()
    told = [] if coded is None else [*coded.told()]
    if empty:
        told.append(f"{family} is the family that computes this. It has shared experts; here they are empty tensors.")
    return Exported(family, tuple(told))


def _positions(config: Tree, assembly: Assembly, run_dir: Path, *, is_trained: bool) -> int:
    """Number of positions that the model takes: of the model that the run began with, or more if it trained on them.

    Stretched positions are those of the spec, which says by how much.
    """
    number: int = config[_POSITIONS]
    base = run_dir / BASE_CONFIG
    if base.exists() and config["rope_parameters"]["rope_type"] == "default":
        number = _positions_of(base) or number
    return max(number, assembly.spec.train.seq_len) if is_trained else number


def _positions_of(base: Path) -> int | None:
    """Number of positions in the configuration of the model that a run began with; None: it has none.

    Raises SpecError if it is no such number.
    """
    config = {_POSITIONS: read_config(base).get(_POSITIONS)}
    for _, what in wrong_values(config):
        fix = "Write the number there, or remove the line: then the export has what the spec says."
        raise SpecError(f"{base}: {what}", fix)
    return config[_POSITIONS]


def _write(
    weights: Merged,
    origins: Mapping[str, Origin],
    coded: CodedTensors | None,
    written: Written,
    check: Callable[[str, Tensor], Tensor],
) -> None:
    """Write all weights to where their ``origins`` are in a folder that is laid out. ``check`` sees them there."""
    if coded is not None:
        coded.write(weights, written.tensors)
    for name, origin in sorted(origins.items()):
        if coded is None or name not in coded:
            target = origin.of(written.tensors[origin.name])
            check(name.split("/", 1)[1], target.copy_(weights(name)))


def _coding(form: Form, family: str) -> Coding | None:
    """How weights become codes; None: they do not. Raises CheckpointError for a family that has none of these."""
    coding = CODINGS.get(form)
    if coding is not None and family not in coding.families:
        others = [name for name, other in CODINGS.items() if family in other.families]
        what = f"no reader takes {family} in {form}: such folders are of {', '.join(sorted(coding.families))}."
        raise CheckpointError(what, f"Use --dtype {', '.join(['bf16', *others])}.")
    return coding


def _too_large(what: str) -> CheckpointError:
    return CheckpointError(what, "Use --dtype fp32: the largest values of fp32 are infinite in bf16.")


def config_of(resolved: Tree) -> dict[str, Any]:
    """``config.json`` of a model, given its resolved spec.

    Raises CheckpointError with what the likeliest family of Hugging Face cannot say.
    """
    parts = [resolved[name] for name in ("model", "attention", "routing")]
    if parts[2]["use"] != ROUTER:
        what = f"no family of Hugging Face routes like {parts[2]['use']}."
        raise CheckpointError(what, f"Only {ROUTER} can be exported.")
    computed = dict(_computed(*parts))
    differing: dict[str, list[Problem]] = {}
    for family, config in configurations(*parts).items():
        read_back = _read_back(config)
        differing[family] = [
            Problem(
                f"{name} {computed[name]!r} is not what {family} of Hugging Face computes ({read_back.get(name)!r})."
            )
            for name in computed
            if computed[name] != read_back.get(name)
        ]
        if not differing[family]:
            return config
    if not differing:
        raise CheckpointError(f"no family of Hugging Face has the attention {parts[1]['use']}.", "It stays in moefw.")
    raise CheckpointError(min(differing.values(), key=len))


def _read_back(config: Tree) -> dict[str, Any]:
    """Options on which the logits of a configuration's model depend; empty if the configuration cannot be read."""
    with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        try:
            tree: dict[str, Any] = {"model": {"preset": str(path)}, "run": {"device": "cpu"}}
            resolved = assemble_tree(tree, Marks("export"), defaults=defaults(), world=1, trains=False).resolved()
        except MoefwError:
            return {}
    return dict(_computed(*(resolved[name] for name in ("model", "attention", "routing"))))


def _computed(model: Tree, attention: Tree, routing: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the options on which logits depend, in a form that is equal where these are."""
    dense = dense_layers(model)
    yield "model.dense_layers", dense
    unused = OF_EXPERTS if without_experts(model) else ()
    for name, value in model.items():
        if name not in (*OF_TRAINING, *unused, "dense_layers") and (name != "dense_dim" or dense):
            yield f"model.{name}", value
    rope = attention["rope"]
    own = {name: default if rope[name] is None else rope[name] for name, default in OWN[rope["kind"]].items()}
    yield "attention.rope", {**{name: rope[name] for name in ("kind", "theta", "pairs")}, **own}
    for name, value in attention.items():
        if name not in ("kernel", "rope"):
            yield f"attention.{name}", value
    if not without_experts(model):
        for name, value in computed_routing(routing).items():
            yield f"routing.{name}", value


def _exported(saved: Reader) -> list[str]:
    """Tensors of a checkpoint that belong to the model: parameters, and the routers' states."""
    routers = (name for name in saved.tensors if name.startswith("state/") and ".router." in name)
    return [*(name for name in saved.tensors if name.startswith("model/")), *routers]


def _described(
    origins: Mapping[str, Origin], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Description]:
    """Every tensor of the folder, with the shape that its pieces make up."""
    pieces: dict[str, list[str]] = {}
    for name, origin in origins.items():
        pieces.setdefault(origin.name, []).append(name)
    described = {}
    for tensor, names in pieces.items():
        origin = origins[names[0]]
        shape = shapes[names[0]]
        left = list(reversed(shape) if origin.transposed else shape)
        whole = []
        for at, cut in enumerate(origin.cut):
            stacked = 1 + max(origins[name].cut[at] for name in names) if isinstance(cut, int) else 0
            whole.append(stacked or left.pop(0) * (cut.step or 1))
        is_state = names[0].startswith("state/")
        described[tensor] = (torch.float32 if is_state else dtype, (*whole, *left))
    return described
