"""Writes the adapters of a run's checkpoint alone, as files of PEFT or as those that vLLM takes."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from moefw.compose.adapter_weights import adapter_config
from moefw.compose.assembly import Assembly
from moefw.core.errors import CheckpointError
from moefw.models.huggingface.adapter_files import Style, write_adapter
from moefw.models.huggingface.config import read_config
from moefw.runtime.naming import canonical_parameters
from moefw.training.checkpoint.base import base_of, require_same_base
from moefw.training.checkpoint.choice import way_out
from moefw.training.checkpoint.reading import opened
from moefw.training.new_run import on_meta


def export_adapter(assembly: Assembly, checkpoint: Path, target: Path, style: Style) -> tuple[str, ...]:
    """Write ``target``, a folder that ``peft`` or vLLM loads, and return the names of the tensors that it leaves out.

    Left out are adapters of layers that predict further tokens, which ``transformers`` does not build. Raises PlanError
    if the spec has no adapters that PEFT has, and CheckpointError if the checkpoint is damaged or not finite, if its
    base is another one, if other weights have trained, too, or if the folder holds something. It appears whole or not
    at all.
    """
    config = adapter_config(assembly)
    with way_out(checkpoint):
        checkpointed = opened(checkpoint)
        require_same_base(checkpoint, checkpointed.manifest.origin.base, base_of(assembly, None))
    of_adapters = {piece.name for piece in canonical_parameters(on_meta(assembly)) if piece.of_adapter}
    saved = {name.removeprefix("model/") for name in checkpointed.tensors if name.startswith("model/")}
    others = sorted(saved - of_adapters)
    if others:
        what = f"{checkpoint} also has weights that trained beside adapters, such as {others[0]}."
        raise CheckpointError(what, "Use --adapter merge: files of adapters have no place for them.")

    def read(name: str) -> Tensor:
        with way_out(checkpoint):
            return checkpointed.read(f"model/{name}")

    base = Path(assembly.spec.train.weights or "")
    return write_adapter(
        target,
        config,
        {name: checkpointed.tensors[f"model/{name}"].shape for name in sorted(of_adapters)},
        read,
        model_type=read_config(base)["model_type"],
        num_layers=getattr(assembly.parts.model, "num_layers", assembly.site.num_layers),
        style=style,
    )
