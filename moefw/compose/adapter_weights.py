"""Adapters in the files of PEFT: those with which a run begins, and the options of a spec as these files say them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed import ProcessGroup

from moefw.compose.assembly import Assembly
from moefw.core.errors import CheckpointError, MoefwError, PlanError, Problem
from moefw.models.huggingface.adapter_config import AdapterConfig
from moefw.models.huggingface.adapter_folder import AdapterFolder
from moefw.models.huggingface.adapter_places import layer_of
from moefw.models.huggingface.config import read_config
from moefw.models.huggingface.loading import wanted
from moefw.runtime.communication.agreement import everywhere, raise_together
from moefw.runtime.naming import by_parameter, canonical_parameters
from moefw.runtime.parallel.local_shards import all_of

MOST = 8
"""The most tensors that a message lists."""


def adapter_config(assembly: Assembly) -> AdapterConfig:
    """Configuration of a spec's adapter as PEFT has it. Raises PlanError if PEFT has no such adapters."""
    adapter = assembly.parts.adapter
    config: AdapterConfig | None = adapter.peft_config(assembly.spec.train.weights)
    if config is None:
        what = f"PEFT has no files of adapter {adapter.name}."
        raise PlanError(what, "Leave adapter out: adapters are merged by default.")
    return config


def read_adapter(module: nn.Module, assembly: Assembly, group: ProcessGroup | None) -> None:
    """Fill the adapters of a model from the folder that ``adapter.weights`` names, if it names one. Collective.

    Raises what :func:`compared_adapter` does, before any change; or CheckpointError with all tensors that hold NaN or
    infinity, which are found as they are read.
    """
    folder = compared_adapter(module, assembly, group)
    if folder is not None:
        _fill(module, folder, group)


def compared_adapter(module: nn.Module, assembly: Assembly, group: ProcessGroup | None) -> AdapterFolder | None:
    """Folder that ``adapter.weights`` names, which has the adapters of a model; None: it names none. Collective.

    Reads no values, so the model may be on the meta device. Raises CheckpointError on every rank of ``group`` with
    everything that is wrong with the folder, or that is not what the spec says.
    """
    path = assembly.parts.adapter.begins_with
    if path is None:
        return None
    num_layers = getattr(assembly.parts.model, "num_layers", assembly.site.num_layers)
    told = everywhere([[name, shape] for name, shape in wanted(module)], group)
    weights = {str(name): tuple(shape) for of_rank in told for name, shape in of_rank}
    own = [piece.name for piece in canonical_parameters(module) if piece.of_adapter]
    names = {str(name) for of_rank in everywhere(own, group) for name in of_rank}
    folder: AdapterFolder | None = None
    error: MoefwError | None = None
    try:
        base = read_config(Path(assembly.spec.train.weights or ""))
        folder = AdapterFolder(Path(path), weights, model_type=base["model_type"], num_layers=num_layers)
        problems = [*_differences(adapter_config(assembly), folder, names, num_layers)]
        if problems:
            raise CheckpointError(problems)
    except MoefwError as problem:
        error = problem
    raise_together(error, group)
    return folder


def _differences(config: AdapterConfig, folder: AdapterFolder, names: set[str], num_layers: int) -> Iterator[Problem]:
    """Yield what the folder has otherwise than the spec says."""
    options: Mapping[str, tuple[object, object]] = {
        "rank": (config.rank, folder.config.rank),
        "alpha": (config.alpha, folder.config.alpha),
        "rslora": (config.rslora, folder.config.rslora),
        "use_dora": (config.dora, folder.config.dora),
    }
    for option, (here, there) in options.items():
        if here != there:
            yield Problem(f"{option} of the adapter is {here}, and {folder.file} has {there}.", "Let the spec say so.")
    files = folder.shapes.keys()
    expected = {name for name in names if layer_of(name) < num_layers}  # PEFT knows no layers that predict more
    for which, these in (("lacks", expected - files), ("also has", files - expected)):
        if these:
            more = f" and {len(these) - MOST} more" if len(these) > MOST else ""
            what = f"{folder.file} {which} {', '.join(sorted(these)[:MOST])}{more}."
            yield Problem(what, "Let adapter.targets name what the folder adapts.")


@torch.no_grad()
def _fill(module: nn.Module, folder: AdapterFolder, group: ProcessGroup | None) -> None:
    with folder.reading(group) as read:
        for parameter, pieces in by_parameter(module):
            if not pieces[0].of_adapter or pieces[0].name not in folder.shapes:
                continue
            with all_of(parameter) as values:
                for piece in pieces:
                    whole = read(piece.name)
                    piece.of(values).copy_(whole if piece.shard is None else piece.shard.of(whole))
