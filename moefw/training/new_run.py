"""Writes a run at step 0 whose weights come from elsewhere, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model, open_layout
from moefw.core.data import TOKENIZER
from moefw.models.huggingface.handed_on import BASE_CONFIG, CHAT, CONFIG, hand_on
from moefw.models.huggingface.loading import router_states, wanted
from moefw.models.huggingface.writing import Written
from moefw.plugins.data.source import tokenizer_beside
from moefw.runtime.safetensors_dtypes import NAMES
from moefw.system.folders import new_folder
from moefw.training.checkpoint.commit import begin, commit
from moefw.training.checkpoint.files import file_of, finish, laid_out, reserve, whole
from moefw.training.checkpoint.manifest import Manifest, SavedTensor
from moefw.training.resolved_spec import write_resolved


def on_meta(assembly: Assembly) -> nn.Module:
    """Model of an assembly for one process, without values."""
    device = torch.device("meta")
    with device:
        return build_model(assembly, open_layout(assembly, "cpu"), device, Shared())


def write_run(
    assembly: Assembly, model: nn.Module, run_dir: Path, fill: Callable[[Mapping[str, Tensor]], None], tokenizer: Path
) -> None:
    """Write ``run_dir``: a spec, a checkpoint of ``model``, and copies of ``tokenizer`` and what chats need beside it.

    ``fill`` copies values into the parameters and states by name, fp32 views of the file: what it holds meanwhile is
    all that is held. Raises CheckpointError if ``run_dir`` holds something, and DataError if ``tokenizer`` is none. It
    appears whole or not at all.
    """
    content = tokenizer_beside(tokenizer)
    with new_folder(run_dir) as scratch:
        step = scratch / "checkpoints" / "step-0"
        writing = step.with_name("step-0.tmp")
        begin(writing)
        states = {name for name, _ in router_states(model)}
        names = {f"{'state' if name in states else 'model'}/{name}": name for name, _ in wanted(model)}
        shapes = dict(wanted(model))
        tensors = {full: SavedTensor(NAMES[torch.float32], shapes[name]) for full, name in names.items()}
        path = writing / file_of(0)
        parts = laid_out(whole(full, tensor) for full, tensor in tensors.items())
        reserve(path, parts)
        written = Written.opened(writing)
        fill({name: written.tensors[full] for full, name in names.items()})
        written.flush()
        saved = finish(path, parts)
        commit(writing, Manifest(step=0, tensors=tensors, files={saved.file: saved.digest}).sealed(), step)
        write_resolved(assembly, scratch)
        if content is not None:
            (scratch / TOKENIZER).write_bytes(content)
        for name in CHAT:
            hand_on(tokenizer.with_name(name), scratch / name)
        for name in (CONFIG, BASE_CONFIG):  # of a folder of Hugging Face, or of another run
            hand_on(tokenizer.with_name(name), scratch / BASE_CONFIG)
