"""Writes adapters as the files of PEFT, or as those that vLLM takes, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from moefw.core.errors import CheckpointError, Problem
from moefw.models.huggingface import dense
from moefw.models.huggingface.adapter_config import CONFIG, AdapterConfig, Targets, written_config
from moefw.models.huggingface.adapter_places import (
    DENSE,
    EXPERT,
    Layout,
    Place,
    Shape,
    dense_tensors,
    expert_tensors,
    layer_of,
    stacked_on_hub,
    stacks_of,
)
from moefw.models.huggingface.families import FAMILIES
from moefw.models.huggingface.writing import Written, create
from moefw.runtime.finite import all_finite
from moefw.system.folders import new_folder

FILE: Final = "adapter_model.safetensors"
DTYPE: Final = torch.float32
"""The dtype of adapters in files, as PEFT writes those that it has trained."""
Style = Literal["peft", "vllm"]


@frozen
class AdapterFiles:
    """What the files of an adapter hold: ``places`` of tensors by our names, and the names that PEFT finds them by.

    ``left_out``: our names of the tensors for which there is no place.
    """

    places: Mapping[str, tuple[Place, ...]]
    targets: Targets
    left_out: tuple[str, ...]


def adapter_files(
    config: AdapterConfig, shapes: Mapping[str, Shape], *, model_type: str, num_layers: int, style: Style
) -> AdapterFiles:
    """Places of an adapter's tensors: see :func:`write_adapter`.

    Raises CheckpointError with all that the files cannot say.
    """
    left_out = tuple(sorted(name for name in shapes if layer_of(name) >= num_layers))
    kept = {name: shape for name, shape in shapes.items() if layer_of(name) < num_layers}
    rules = FAMILIES[model_type].rules
    layout = Layout(rules, per_expert=style == "vllm" and not stacked_on_hub(rules))
    _require_whole(kept, config, layout, model_type)
    targets = _targets(kept, layout, num_layers, model_type)
    refused = list(_refused_by_vllm(kept, config) if style == "vllm" else _refused_by_peft(config, targets))
    if refused:
        raise CheckpointError(refused)
    return AdapterFiles(layout.places(kept), targets, left_out)


def write_adapter(
    folder: Path,
    config: AdapterConfig,
    shapes: Mapping[str, Shape],
    read: Callable[[str], Tensor],
    *,
    model_type: str,
    num_layers: int,
    style: Style = "peft",
    dtype: torch.dtype = DTYPE,
) -> tuple[str, ...]:
    """Write a folder that PEFT or vLLM loads, and return the names of the tensors that it leaves out.

    ``shapes`` are those of all tensors of the adapter, and ``read`` gives the values of one. Left out are those of
    layers from ``num_layers`` on, which predict further tokens and which ``transformers`` does not build. vLLM takes
    an expert a tensor, and PEFT's stacks of a family that is stacked on the hub, such as gpt-oss (vllm#29322).

    Raises CheckpointError with all that the files cannot say, if values are not finite, or if ``folder`` holds
    something. It appears whole or not at all.
    """
    files = adapter_files(config, shapes, model_type=model_type, num_layers=num_layers, style=style)
    places = files.places
    with new_folder(folder) as scratch:
        (scratch / CONFIG).write_text(written_config(config, files.targets))
        create(scratch / FILE, {place.key: (dtype, place.shape) for each in places.values() for place in each})
        written = Written.opened(scratch)
        with all_finite(f"the adapter in {str(dtype).removeprefix('torch.')}", _not_finite) as looked_at:
            for name, each in places.items():
                values = read(name)
                for place in each:
                    looked_at(name, place.of(written.tensors[place.key]).copy_(values))
        written.flush()
    return files.left_out


def _not_finite(what: str) -> CheckpointError:
    return CheckpointError(what, "Use an earlier checkpoint: nothing can be computed with this one.")


def _require_whole(shapes: Mapping[str, Shape], config: AdapterConfig, layout: Layout, model_type: str) -> None:
    """Raise CheckpointError with tensors that no file has a place for, that are missing, or of another rank."""
    if not shapes:
        what = "the adapter has no tensor of a layer that transformers builds."
        raise CheckpointError(what, "Adapt other layers than those that predict further tokens.")
    problems = []
    linears = {name: name.rpartition(".")[0] for name in shapes}
    whole = {name for experts, stack in stacks_of(shapes).items() for name in expert_tensors(experts, stack)}
    for linear in set(linears.values()):
        if DENSE.fullmatch(linear):
            whole.update(dense_tensors(linear, dora=config.dora))
    for name, shape in sorted(shapes.items()):
        if not layout.has(linears[name]):
            what = f"files of adapters of {model_type} have no place for {name}."
            problems.append(Problem(what, "Adapt linear layers of attention, of MLPs and of experts only."))
        elif name not in whole:
            problems.append(Problem(f"{name} is no tensor of such an adapter.", "Leave it out."))
        elif config.rank != {"lora_A": shape[0], "lora_B": shape[-1]}.get(name.rpartition(".")[2], config.rank):
            problems.append(Problem(f"{name} {shape} is not of rank {config.rank}.", "Give all layers one rank."))
    problems += [
        Problem(f"the adapter lacks {name}.", "Give all tensors of a layer, and of all its experts.")
        for name in sorted(whole - shapes.keys())
    ]
    if problems:
        raise CheckpointError(problems)


def _targets(shapes: Mapping[str, Shape], layout: Layout, num_layers: int, model_type: str) -> Targets:
    """Targets that name exactly what is adapted, but for experts in tensors of their own, which have their last names.

    vLLM goes by the names of tensors, and PEFT by the last names.
    """
    modules: set[str] = set()
    parameters: set[str] = set()
    for linear in {name.removesuffix(".lora_B") for name in shapes if name.endswith(".lora_B")}:
        if EXPERT.fullmatch(linear) and layout.per_expert:
            modules.add(layout.module(linear).rpartition(".")[2])
        elif EXPERT.fullmatch(linear):
            parameters.add(layout.stacked_parameter(linear))
        elif ".attention." in linear or model_type in dense.FAMILIES or layout.per_expert:
            modules.add(layout.module(linear))
        else:
            # PEFT takes a gate_proj, up_proj or down_proj in target_modules for that of the routed experts, whatever
            # stands before it (peft#3711). In target_parameters a weight is what it is.
            parameters.add(f"{layout.module(linear)}.weight")
    return Targets(_short(modules, num_layers), _short(parameters, num_layers))


def _short(names: set[str], num_layers: int) -> list[str]:
    """Names; those that all layers have are given once, without the number of a layer."""
    by_rest: dict[str, list[str]] = {}
    for name in sorted(names):
        by_rest.setdefault(re.sub(r"^model\.layers\.\d+\.", "", name), []).append(name)
    short: list[str] = []
    for rest, each in sorted(by_rest.items()):
        short += [rest] if len(each) == num_layers else each
    return short


def _refused_by_peft(config: AdapterConfig, targets: Targets) -> Iterator[Problem]:
    """Yield what PEFT does not compute."""
    if config.dora and targets.parameters:
        what = f"PEFT has no DoRA for what it adapts as parameters: {', '.join(targets.parameters)}."
        yield Problem(what, "Use LoRA, or DoRA for attention alone, or merge the adapter.")


def _refused_by_vllm(shapes: Mapping[str, Shape], config: AdapterConfig) -> Iterator[Problem]:
    """Yield what vLLM refuses, and what it loads and does not apply."""
    if config.dora:
        yield Problem("vLLM has no DoRA.", "Merge the adapter and serve the model.")
    absorbed = sorted(name for name in shapes if name.endswith(".kv_b_proj.lora_A"))
    if absorbed:
        what = f"vLLM loads adapters of kv_b_proj and does not apply them (vllm#48974): {', '.join(absorbed)}."
        yield Problem(what, "Merge the adapter and serve the model, or adapt other layers.")
    for experts, stack in sorted(stacks_of(shapes).items()):
        if len(stack.parts) == 1:
            what = f"vLLM needs gate, up and down of all experts, and of {experts} only {min(stack.parts)} is adapted."
            yield Problem(what, "Merge the adapter and serve the model, or adapt all three.")
