"""The folder that a run has begun with: where an export finds the weights that did not train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from moefw.compose.assembly import Assembly
from moefw.models.huggingface.config import read_config
from moefw.models.huggingface.families import family_of
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.loading import placed, wanted
from moefw.models.huggingface.origins import Origin
from moefw.models.huggingface.stored import Coded
from moefw.runtime.adapters import MergeableWeight, mergeable_weights
from moefw.runtime.compute.code_formats import CodeFormat
from moefw.runtime.compute.coded_weight import CodedWeight
from moefw.runtime.naming import canonical_parameters
from moefw.training.new_run import on_meta


@final
class Base:
    """Weights that a run has frozen, as the folder of its base has them, and adapters beside them, if there are any.

    Without frozen weights it is empty. Names are those in a checkpoint.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        """The shape of each frozen weight."""
        self.of_adapters: set[str] = set()
        """The names of what belongs to adapters."""
        self.adapted: Mapping[str, MergeableWeight] = {}
        """By the name of each weight that has adapters, what it is merged in."""
        self.config: Mapping[str, Any] = {}
        """The configuration of the folder."""
        self._origins: Mapping[str, Origin] = {}
        if not assembly.frozen:
            return
        path = Path(assembly.spec.train.weights or "")
        self._folder = Folder(path)
        self.config = read_config(path)
        model = on_meta(assembly)
        rules = family_of(self.config, path).rules
        self._origins, _ = placed(model, self._folder, rules, num_experts=assembly.site.dims.num_experts)
        frozen = {piece.name for piece in canonical_parameters(model) if not piece.parameter.requires_grad}
        self.of_adapters = {f"model/{piece.name}" for piece in canonical_parameters(model) if piece.of_adapter}
        self.adapted = {f"model/{name}": adapted for adapted in mergeable_weights(model) for name in adapted.rows}
        self.shapes = {f"model/{name}": shape for name, shape in wanted(model) if name in frozen}

    @property
    def format(self) -> CodeFormat | None:
        """Format of the codes in the folder; None: it has none."""
        stored = self._folder.tensors.values() if self._origins else ()
        return next((each.format for each in stored if isinstance(each, Coded)), None)

    def holds(self, name: str) -> bool:
        """Whether the folder has the weight, be it frozen or not."""
        return name.removeprefix("model/") in self._origins

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the values of a weight, as the folder has them."""
        return self._folder.tensors[self._origin(name).name].dtype

    def is_coded(self, name: str) -> bool:
        """Whether the folder has the weight as codes."""
        return self.holds(name) and self._folder.format(self._origin(name)) is not None

    def read(self, name: str) -> Tensor:
        """Values of a weight."""
        return self._folder.read(self._origin(name))

    def read_codes(self, name: str) -> CodedWeight:
        """Codes and scales of a weight that is coded."""
        return self._folder.read_codes(self._origin(name))

    def input_scale(self, name: str) -> Tensor | None:
        """Scale of the rows that a weight multiplies; None: the folder has none."""
        return self._folder.input_scale(self._origin(name)) if self.holds(name) else None

    def _origin(self, name: str) -> Origin:
        return self._origins[name.removeprefix("model/")]


@final
class Merged:
    """Weights of a run with its adapters merged. Called with the name of one, it returns its values."""

    def __init__(self, base: Base, read: Callable[[str], Tensor]) -> None:
        """``read`` returns what is saved, or the base has, under a name."""
        self._adapted = base.adapted
        self._read = read
        self._last: tuple[MergeableWeight, Mapping[str, Tensor]] | None = None
        """What was merged last: gate and up of an expert are merged together, and asked for one after the other."""

    def __call__(self, name: str) -> Tensor:
        """Values of a weight."""
        adapted = self._adapted.get(name)
        if adapted is None:
            return self._read(name)
        if self._last is None or self._last[0] is not adapted:
            self._last = adapted, adapted.merged(lambda own: self._read(f"model/{own}"))
        return self._last[1][name.removeprefix("model/")]
