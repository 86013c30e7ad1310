"""Writes the model of a Hugging Face folder as the checkpoint of a run's step 0, tensor by tensor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import torch

from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.errors import CheckpointError, SpecError
from moefw.models.huggingface.config import read_config
from moefw.models.huggingface.families import FAMILIES
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.loading import placed, router_states, wanted
from moefw.models.huggingface.writing import Description, Written, create
from moefw.training.checkpoint.commit import begin, commit, sync
from moefw.training.checkpoint.manifest import Manifest
from moefw.training.checkpoint.shards import described
from moefw.training.folder import TOKENIZER
from moefw.training.resolved_spec import write_resolved

FILE: Final = "rank-00000.safetensors"


def import_folder(source: Path, run_dir: Path) -> None:
    """Write ``run_dir``: a spec, the tokenizer and a checkpoint in fp32, as training keeps parameters.

    At most one tensor is held at a time. Raises SpecError for a configuration that is not supported, and
    CheckpointError for tensors that do not fit, or if ``run_dir`` holds something. It appears whole or not at all.
    """
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise CheckpointError(f"{run_dir} is there and is no empty folder.", "Name a new folder.")
    if not source.is_dir():
        raise SpecError(f"{source} is no folder.", "Name a folder with a config.json and safetensors files.")
    preset = str(source.absolute() / "config.json")
    tree: dict[str, Any] = {"model": {"preset": preset}, "run": {"dir": str(run_dir)}}
    assembly = assemble_tree(tree, Marks("import"), defaults=defaults(), world=1)
    with torch.device("meta"):
        model = build_model(assembly, open_layout(assembly, "cpu"), torch.device("meta"), Shared())
    folder, rules = Folder(source), FAMILIES[read_config(source)["model_type"]].rules
    origins, _ = placed(model, folder, rules, num_experts=assembly.site.dims.num_experts)
    scratch = run_dir.with_name(f"{run_dir.name}.tmp")
    step = scratch / "checkpoints" / "step-0"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        begin(step.with_name("step-0.tmp"))
        path = step.with_name("step-0.tmp") / FILE
        states = {name for name, _ in router_states(model)}
        names = {name: f"{'state' if name in states else 'model'}/{name}" for name in origins}
        tensors: dict[str, Description] = {names[name]: (torch.float32, shape) for name, shape in wanted(model)}
        create(path, tensors)
        written = Written.opened(path.parent)
        for name, origin in origins.items():
            written.tensors[names[name]].copy_(folder.read(origin))
        written.flush()
        sync(path)
        commit(path.parent, Manifest(step=0, shards=(described(path),)).sealed(), step)
        write_resolved(assembly, scratch)
        if (source / TOKENIZER).is_file():
            shutil.copyfile(source / TOKENIZER, scratch / TOKENIZER)
        if run_dir.is_dir():
            run_dir.rmdir()
        scratch.rename(run_dir)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        what = f"{run_dir} cannot be written: {(error.strerror or str(error)).lower()}."
        raise CheckpointError(what, "Name another folder.") from error
