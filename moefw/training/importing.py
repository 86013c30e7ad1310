"""Writes the model of a Hugging Face folder as the checkpoint of a run's step 0, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.data import TOKENIZER
from moefw.core.errors import SpecError
from moefw.models.huggingface.config import read_config
from moefw.models.huggingface.families import family_of
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.loading import placed
from moefw.models.huggingface.origins import Origin
from moefw.training.new_run import on_meta, write_run


def import_folder(source: Path, run_dir: Path) -> None:
    """Write ``run_dir``: a spec, the tokenizer and a checkpoint in fp32, as training keeps parameters.

    At most one tensor is held at a time. Raises SpecError for a configuration that is not supported, and
    CheckpointError for tensors that do not fit or are not finite, or if ``run_dir`` holds something. It appears whole
    or not at all.
    """
    assembly, model, folder, origins = opened(source, run_dir)

    def fill(tensors: Mapping[str, Tensor]) -> None:
        with folder.reading() as read:
            for name, origin in origins.items():
                tensors[name].copy_(read(origin))

    write_run(assembly, model, run_dir, fill, source / TOKENIZER)


def opened(source: Path, run_dir: Path) -> tuple[Assembly, nn.Module, Folder, Mapping[str, Origin]]:
    """Assembly of a run in ``run_dir`` with the model of a Hugging Face folder, the model without values,
    the folder's tensors, and the origin of each parameter and state. Raises what :func:`import_folder` does.
    """
    if not source.is_dir():
        raise SpecError(f"{source} is no folder.", "Name a folder with a config.json and safetensors files.")
    preset = str(source.absolute() / "config.json")
    tree: dict[str, Any] = {"model": {"preset": preset}, "run": {"dir": str(run_dir)}}
    assembly = assemble_tree(tree, Marks("import"), defaults=defaults(), world=1, trains=False)
    model = on_meta(assembly)
    folder = Folder(source)
    rules = family_of(read_config(source), source).rules
    origins, _ = placed(model, folder, rules, num_experts=assembly.site.dims.num_experts)
    return assembly, model, folder, origins
