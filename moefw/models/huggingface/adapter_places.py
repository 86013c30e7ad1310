"""Where files of adapters hold each tensor of ours: experts stacked, as PEFT has them, or one by one, as vLLM does.

E experts, r rank, I inputs and O outputs of a weight. Ours are ``lora_A`` (r, I), ``lora_B`` (O, r) and, with
DoRA, ``lora_magnitude`` (O) of each weight; gate and up of an expert share one ``lora_A``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from attrs import frozen
from torch import Tensor

from moefw.models.huggingface.origins import Origin, Rule, origin_of, origins_of

PREFIX: Final = "base_model.model."
"""What PEFT writes before the names of modules."""
MATRICES: Final = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
"""Our tensors, and how PEFT's files call them."""
LAYER: Final = re.compile(r"layers\.(\d+)\.")
DENSE: Final = re.compile(r"layers\.\d+\.(attention|mlp|moe\.shared_expert(\.mlp)?)\.\w+_proj")
"""Linear layers that each token passes, without ``.weight``."""
EXPERT: Final = re.compile(r"(layers\.\d+\.moe\.experts)\.(\d+)\.(gate_up|gate|up|down)_proj")
"""Linear layers of routed experts; ``gate_up`` is both with their shared ``lora_A``."""
Shape = tuple[int, ...]


@frozen
class Place:
    """A tensor of a file, its name and shape, and the function that gives a view of ours in it."""

    key: str
    shape: Shape
    of: Callable[[Tensor], Tensor] = lambda tensor: tensor


@frozen
class Layout:
    """Names and shapes of a file for models of one family. ``per_expert``: each expert has tensors of its own."""

    rules: Sequence[Rule]
    per_expert: bool

    def places(self, shapes: Mapping[str, Shape]) -> dict[str, tuple[Place, ...]]:
        """Places of all tensors of an adapter. Per-expert files hold a shared ``lora_A`` twice."""
        stacks = stacks_of(shapes)
        return {name: self._places(name, shape, stacks) for name, shape in shapes.items()}

    def has(self, linear: str) -> bool:
        """Whether models of the family have such a linear layer that can be adapted."""
        if EXPERT.fullmatch(linear):
            return True
        return bool(DENSE.fullmatch(linear)) and any(origins_of(f"{linear}.weight", self.rules))

    def module(self, linear: str) -> str:
        """Name of a dense linear layer, or of an expert's own one, in the models of the files."""
        return origin_of(f"{linear}.weight", self.rules).name.removesuffix(".weight")

    def stacked_parameter(self, linear: str) -> str:
        """Name of the parameter of transformers 5 that stacks a linear layer of all experts."""
        return self._stacked(linear).name

    def stacks_transposed(self, linear: str) -> bool:
        """Whether that parameter is (E, I, O), and not (E, O, I)."""
        return self._stacked(linear).transposed

    def _stacked(self, linear: str) -> Origin:
        """Origin of an expert's weight in the parameter that stacks those of all; that of gate for gate_up."""
        weight = f"{linear.replace('gate_up_proj', 'gate_proj')}.weight"
        return next(origin for origin in origins_of(weight, self.rules) if origin.cut)

    def _places(self, name: str, shape: Shape, stacks: Mapping[str, Stack]) -> tuple[Place, ...]:
        linear, _, matrix = name.rpartition(".")
        suffix = MATRICES[matrix]
        expert = EXPERT.fullmatch(linear)
        if expert is None:
            return (Place(f"{PREFIX}{self.module(linear)}.{suffix}", shape),)
        if self.per_expert:
            parts = ("gate_proj", "up_proj") if expert[3] == "gate_up" else (f"{expert[3]}_proj",)
            modules = [self.module(f"{expert[1]}.{expert[2]}.{part}") for part in parts]
            return tuple(Place(f"{PREFIX}{module}.{suffix}", shape) for module in modules)
        return (self._in_stack(linear, matrix, shape, stacks[expert[1]]),)

    def _in_stack(self, linear: str, matrix: str, shape: Shape, stack: Stack) -> Place:
        origin = self._stacked(linear)
        experts, _, parameter = origin.name.rpartition(".")
        # PEFT wraps the experts once for each adapted parameter: gate_up_proj inside, down_proj around it.
        wrapped = parameter == "gate_up_proj" and stack.parts == {"gate_up", "down"}
        key = f"{PREFIX}{experts}{'.base_layer' if wrapped else ''}.{MATRICES[matrix]}"
        count = stack.num_experts
        if matrix == "lora_A":
            rank, inputs = shape
            number = origin.cut[0]
            # Row e * r + k is row k of expert e.
            return Place(key, (count * rank, inputs), lambda tensor: tensor.view(count, rank, inputs)[number])
        outputs, rank = shape
        outputs *= 2 if parameter == "gate_up_proj" else 1

        def of(tensor: Tensor) -> Tensor:
            # Column k * E + e is column k of expert e. A weight with r inputs: its origin finds gate, up and down.
            weights = tensor.view(outputs, rank, count).permute(2, 0, 1)  # (E, O, r)
            view: Tensor = origin.of(weights.mT if origin.transposed else weights)
            return view

        return Place(key, (outputs, rank * count), of)


@frozen
class Stack:
    """The experts of a layer: how many there are, and which of ``gate_up`` and ``down`` are adapted."""

    num_experts: int
    parts: frozenset[str]


def stacks_of(names: Iterable[str]) -> dict[str, Stack]:
    """Experts of each layer of an adapter, by what the names of its tensors begin with."""
    numbers: dict[str, set[int]] = {}
    parts: dict[str, set[str]] = {}
    for name in names:
        expert = EXPERT.fullmatch(name.rpartition(".")[0])
        if expert:
            numbers.setdefault(expert[1], set()).add(int(expert[2]))
            parts.setdefault(expert[1], set()).add("down" if expert[3] == "down" else "gate_up")
    return {experts: Stack(1 + max(numbers[experts]), frozenset(parts[experts])) for experts in numbers}


def expert_tensors(experts: str, stack: Stack) -> list[str]:
    """Names of all tensors that an adapter of a layer's experts has."""
    matrices = []
    if "gate_up" in stack.parts:
        matrices += ["gate_up_proj.lora_A", "gate_proj.lora_B", "up_proj.lora_B"]
    if "down" in stack.parts:
        matrices += ["down_proj.lora_A", "down_proj.lora_B"]
    return [f"{experts}.{number}.{matrix}" for number in range(stack.num_experts) for matrix in matrices]


def layer_of(name: str) -> int:
    """Number of the layer that a tensor belongs to; -1 if it belongs to none."""
    layer = LAYER.match(name)
    return int(layer[1]) if layer else -1


def dense_tensors(linear: str, *, dora: bool) -> list[str]:
    """Names of all tensors that an adapter of a dense linear layer has."""
    return [f"{linear}.{matrix}" for matrix in MATRICES if dora or matrix != "lora_magnitude"]


def stacked_on_hub(rules: Sequence[Rule]) -> bool:
    """Whether a family stacks its experts on the hub, too, so that no tensor belongs to one expert."""
    return bool(origin_of("layers.0.moe.experts.0.down_proj.weight", rules).cut)
