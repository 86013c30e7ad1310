"""Reads adapters from the files of PEFT: everything is checked before a value is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from attrs import evolve
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.errors import CheckpointError, Problem
from moefw.models.huggingface.adapter_config import CONFIG, is_older_than, read_adapter_config
from moefw.models.huggingface.adapter_files import FILE
from moefw.models.huggingface.adapter_places import (
    DENSE,
    EXPERT,
    PREFIX,
    Layout,
    Shape,
    Stack,
    dense_tensors,
    expert_tensors,
    layer_of,
    stacked_on_hub,
    stacks_of,
)
from moefw.models.huggingface.families import FAMILIES
from moefw.models.huggingface.folder import DTYPES
from moefw.models.huggingface.stored import Plain
from moefw.runtime.communication.agreement import everywhere
from moefw.runtime.finite import all_finite

FIRST_VERSION: Final = "0.19.1"
"""The first PEFT that tells outputs of experts from inputs, in stacks (E, O, I) and in gpt-oss's (E, I, O).

Before 0.19 it took all for (E, I, O); 0.19.0 took each for the other.
"""
_PARTS: Final = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


class AdapterFolder:
    """The tensors of an adapter in a folder, whose experts are stacked, as PEFT has them, or one by one.

    ``weights`` are the shapes (O, I) of the base's weights, by our names; those of layers from ``num_layers`` on may
    not be adapted by such files. Raises CheckpointError with everything that is wrong with configuration, names and
    shapes.
    """

    def __init__(self, path: Path, weights: Mapping[str, Shape], *, model_type: str, num_layers: int) -> None:
        self.file = path / FILE
        rules = FAMILIES[model_type].rules
        self._layout = Layout(rules, per_expert=False)
        self._weights = {
            name.removesuffix(".weight"): shape
            for name, shape in weights.items()
            if layer_of(name) < num_layers and self._layout.has(name.removesuffix(".weight"))
        }
        problems: list[Problem] = []
        try:
            self.config, self._targets, self._version = read_adapter_config(path)
        except CheckpointError as error:
            problems += error.problems
        try:
            self._tensors = _opened(self.file)
        except CheckpointError as error:
            problems += error.problems
        if problems:
            raise CheckpointError(problems)
        self._modules = {re.sub(r"\.lora_[^.]+(\.weight)?$", "", key) for key in self._tensors}
        one_by_one = any(re.search(r"\.experts\.\d+\.", module) for module in self._modules)
        self._layout = Layout(rules, per_expert=one_by_one and not stacked_on_hub(rules))
        self.shapes: Mapping[str, Shape] = dict(self._adapted())
        """The shape of each tensor, by our names."""
        self._places = self._layout.places(self.shapes)
        problems = [*self._outdated(), *self._wrong_tensors(), *self._lacking()]
        if problems:
            raise CheckpointError(problems)

    @property
    def targets(self) -> tuple[str, ...]:
        """The weights that the adapter changes."""
        return tuple(f"{name.removesuffix('.lora_B')}.weight" for name in self.shapes if name.endswith(".lora_B"))

    @contextmanager
    def reading(self, group: ProcessGroup | None = None) -> Iterator[Callable[[str], Tensor]]:
        """Yield the function that reads a tensor by our name, and looks at it. Collective at exit.

        Values are views of the file, in its dtype. Raises CheckpointError at exit with all tensors that hold NaN or
        infinity, and else with all experts whose gate and up have a ``lora_A`` each, whichever rank has read them.
        """
        unlike = dict[str, None]()
        with all_finite(self.file, _not_finite, group) as looked_at:

            def read(name: str) -> Tensor:
                values, *others = (
                    looked_at(place.key, place.of(self._tensors[place.key].read(None))) for place in self._places[name]
                )
                if not all(torch.equal(values, other) for other in others):
                    unlike[name] = None
                return values

            yield read
        names = list(dict.fromkeys(name for told in everywhere(list(unlike), group) for name in told))
        if names:
            raise CheckpointError([self._unlike(name) for name in names])

    def _unlike(self, name: str) -> Problem:
        gate, up = (place.key for place in self._places[name])
        what = f"{self.file}: {gate} and {up} differ, and gate and up of an expert share one here."
        return Problem(what, "Merge the adapter with PEFT, or train one of target_parameters.")

    def _adapted(self) -> Iterator[tuple[str, Shape]]:
        """Yield all tensors that the adapter must have, judged by those that it has."""
        rank = self.config.rank
        names = []
        for linear in self._weights:
            if DENSE.fullmatch(linear) and f"{PREFIX}{self._layout.module(linear)}" in self._modules:
                names += dense_tensors(linear, dora=self.config.dora)
        for experts, stack in stacks_of(f"{linear}.weight" for linear in self._weights).items():
            names += expert_tensors(experts, evolve(stack, parts=self._parts(experts, stack)))
        for name in names:
            linear, _, matrix = name.rpartition(".")
            outputs, inputs = self._weights[linear.replace("gate_up_proj", "gate_proj")]
            yield name, {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}.get(matrix, (outputs,))

    def _parts(self, experts: str, stack: Stack) -> frozenset[str]:
        """Which of ``gate_up`` and ``down`` are adapted in a layer."""
        if self._layout.per_expert:
            return frozenset(part for part in stack.parts if self._has_one(experts, part, stack.num_experts))
        holder = self._layout.stacked_parameter(f"{experts}.0.down_proj").rpartition(".")[0]
        if f"{PREFIX}{holder}.base_layer" in self._modules:
            return stack.parts
        if f"{PREFIX}{holder}" not in self._modules:
            return frozenset()
        # One parameter alone; only the configuration says which.
        return frozenset(part for part in stack.parts if self._targets.name_parameter(f"{holder}.{part}_proj"))

    def _has_one(self, experts: str, part: str, num_experts: int) -> bool:
        """Whether the file has a tensor of any expert's ``gate_up`` or ``down``."""
        linears = (f"{experts}.{number}.{linear}" for number in range(num_experts) for linear in _PARTS[part])
        return any(f"{PREFIX}{self._layout.module(linear)}" in self._modules for linear in linears)

    def _wrong_tensors(self) -> Iterator[Problem]:
        """Yield the tensors that are missing, left over, of another shape, or no numbers."""
        expected = {place.key: place for each in self._places.values() for place in each}
        for key in sorted(expected.keys() - self._tensors.keys()):
            what = f"{self.file} lacks {key} of shape {expected[key].shape}."
            yield Problem(what, "Write or download the adapter again.")
        for key in sorted(self._tensors.keys() - expected.keys()):
            what = f"{self.file} holds {key}, which is no tensor of such an adapter of this model."
            yield Problem(what, "Use the base of the adapter. A lone parameter must be named in target_parameters.")
        for key in sorted(expected.keys() & self._tensors.keys()):
            tensor = self._tensors[key]
            if tensor.shape != expected[key].shape:
                what = f"{self.file}: {key} is {tensor.shape}, and must be {expected[key].shape}."
                stacked = f", and PEFT {FIRST_VERSION} or later" if ".experts." in key else ""
                yield Problem(what, f"Use the base of the adapter{stacked}.")
            elif not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
                yield Problem(f"{self.file}: {key} is {tensor.dtype}.", "Write or download the adapter again.")

    def _lacking(self) -> Iterator[Problem]:
        """Yield what the configuration names and the file does not have.

        Last names, such as gate_proj of experts in tensors of their own, say little.
        """
        if self._layout.per_expert:
            return
        rest = self._weights.keys() - {name.rpartition(".")[0] for name in self.shapes}
        modules = {self._layout.module(linear) for linear in rest if DENSE.fullmatch(linear)}
        parameters = {self._layout.stacked_parameter(linear) for linear in rest if EXPERT.fullmatch(linear)}
        named = [*filter(self._targets.name_module, modules), *filter(self._targets.name_parameter, parameters)]
        for name in sorted(named):
            what = f"{self.file} has nothing for {name}, which {CONFIG} names."
            yield Problem(what, "Write or download the adapter again.")

    def _outdated(self) -> Iterator[Problem]:
        """Yield that an earlier PEFT has taken the outputs of experts for their inputs.

        Where both are of one size, shapes do not show it.
        """
        stacked = next((name.rpartition(".")[0] for name in self.shapes if EXPERT.match(name)), None)
        if stacked is None or self._layout.per_expert or not is_older_than(self._version, FIRST_VERSION):
            return
        if not self._layout.stacks_transposed(stacked) or not is_older_than(self._version, "0.19"):
            what = f"{self.file} is of PEFT {self._version}, which took the outputs of experts for their inputs."
            yield Problem(what, f"Train the adapter with PEFT {FIRST_VERSION} or later, or merge it with that version.")


def _not_finite(what: str) -> CheckpointError:
    return CheckpointError(what, "Download it again, or use another adapter: nothing can be computed with this one.")


def _opened(path: Path) -> dict[str, Plain]:
    """Tensors of a file. Raises CheckpointError if it is not whole, or no safetensors file."""
    if not path.is_file():
        pickle = path.with_suffix(".bin")
        what = f"{path} is {'no regular file' if path.exists() else 'missing'}"
        what += f"; {pickle.name} is a pickle, which could run any code." if pickle.exists() else "."
        raise CheckpointError(
            what, "Save the adapter with save_pretrained of a current PEFT, which writes safetensors."
        )
    try:
        file = safe_open(path, "pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        what = f"{path} is no whole safetensors file: {error}."
        raise CheckpointError(what, "Write or download the adapter again.") from error
    unknown = sorted(name for name, lazy in slices.items() if lazy.get_dtype() not in DTYPES)
    if unknown:
        told = (Problem(f"{path}: {name} is {slices[name].get_dtype()}, which no adapter is.") for name in unknown)
        raise CheckpointError(told)
    return {
        name: Plain(lazy, tuple(lazy.get_shape()), DTYPES[lazy.get_dtype()]) for name, lazy in sorted(slices.items())
    }
