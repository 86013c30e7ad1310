"""Weights of a model in memory, handed to every rank one after another, as Hugging Face has them.

Ranks first tell which tensor each of them writes (:mod:`moefw.runtime.parallel.holders`), and so agree on one order.
Then, name by name, the ranks that hold parts of a tensor join them, and the one that writes it sends it to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, final, get_args

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from moefw.compose.adapter_weights import adapter_config
from moefw.compose.pretrained import Pretrained
from moefw.core.contracts import Layout
from moefw.core.errors import MoefwError, PlanError, SpecError
from moefw.core.records import Canonical
from moefw.models.huggingface.adapter_files import DTYPE, Style, adapter_files
from moefw.models.huggingface.adapter_places import Place, layer_of
from moefw.models.huggingface.families import family_of
from moefw.models.huggingface.loading import router_states
from moefw.models.huggingface.origins import origins_of
from moefw.runtime.adapters import MergedParameters
from moefw.runtime.communication.agreement import everywhere, raise_together
from moefw.runtime.compute.coded_weight import values_of
from moefw.runtime.naming import canonical_parameters
from moefw.runtime.parallel.boxes import whole_shape
from moefw.runtime.parallel.holders import Holding, holdings, is_first_part, writes_state
from moefw.runtime.parallel.local_shards import is_shared_out, whole

Adapters = Literal["merge", "peft", "vllm"]
"""What becomes of adapters: they are merged into their weights, or stream alone, named as PEFT or as vLLM has them."""


def stream_pretrained(model: Pretrained, *, adapter: Adapters = "merge") -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each tensor, as :func:`moefw.save_pretrained` would write it, to every rank.

    ``merge``: the tensors of the folder that the model was read from, by its names and in its dtypes (codes as
    bf16), with adapters merged into their weights. ``peft`` and ``vllm``: the adapters alone in fp32, as ``moefw
    convert export --adapter`` writes them. Layers come in order, and what belongs to none first.

    Collective over all ranks, which iterate to the end together. Each gets the same whole tensors, on the device of the
    model, to keep or to drop: a rank holds one parameter and one tensor at a time, never the model. The weights must
    not change meanwhile.

    Raises SpecError for another ``adapter``. Raises PlanError on every rank, before the first tensor, if adapters are
    to stream alone and PEFT has no such ones, or other weights train, too; and CheckpointError for those that PEFT or
    vLLM cannot take.
    """
    if adapter not in get_args(Adapters):
        raise SpecError(f"{adapter!r} says not what becomes of adapters.", f"Use {', '.join(get_args(Adapters))}.")
    own = _Own(model, of_adapters=adapter != "merge")
    told = everywhere(own.shapes(), model.layout.host_group())
    shapes = {name: tuple(shape) for of_rank in told for name, shape in of_rank.items()}
    writers = {name: rank for rank, of_rank in enumerate(told) for name in of_rank}
    tensors: Mapping[str, _Streamed] = {}
    error: MoefwError | None = None
    try:
        tensors = _merged(model, shapes) if adapter == "merge" else _of_adapters(model, shapes, adapter)
    except MoefwError as problem:
        error = problem
    raise_together(error, model.layout.host_group())
    return _stream(own, tensors, writers)


@frozen(eq=False)
class _Streamed:
    """A tensor of Hugging Face. ``parts``: our names of what lies in it, and where."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[tuple[str, Place]]


def _merged(model: Pretrained, names: Mapping[str, tuple[int, ...]]) -> dict[str, _Streamed]:
    """Tensors of the folder that a model was read from."""
    source = model.source
    rules = family_of(source.config, source.path).rules
    places: dict[str, Sequence[Place]] = {}
    for name in names:
        origin = next(origin for origin in origins_of(name, rules) if origin.name in source.tensors)
        _, shape = source.tensors[origin.name]
        places[name] = [Place(origin.name, shape, origin.of)]
    return _by_tensor(places, {name: dtype for name, (dtype, _) in source.tensors.items()})


def _of_adapters(model: Pretrained, shapes: Mapping[str, tuple[int, ...]], style: Style) -> dict[str, _Streamed]:
    """Tensors of the files of a model's adapters."""
    config = adapter_config(model.assembly)
    others = (piece.name for piece in canonical_parameters(model.module) if not piece.of_adapter and _trains(piece))
    other = next(others, None)
    if other is not None:
        what = f"{other} trains beside adapters, and would not stream with them."
        raise PlanError(what, "Leave adapter out: adapters are then merged, and all weights stream.")
    num_layers = getattr(model.assembly.parts.model, "num_layers", model.assembly.site.num_layers)
    family: str = model.source.config["model_type"]
    files = adapter_files(config, shapes, model_type=family, num_layers=num_layers, style=style)
    return _by_tensor(files.places, {place.key: DTYPE for places in files.places.values() for place in places})


def _trains(piece: Canonical) -> bool:
    return piece.parameter.requires_grad


def _by_tensor(places: Mapping[str, Sequence[Place]], dtypes: Mapping[str, torch.dtype]) -> dict[str, _Streamed]:
    """Tensors by name, in the order of layers. What a rank holds in one parameter stays together."""
    tensors: dict[str, _Streamed] = {}
    for name in sorted(places, key=layer_of):
        for place in places[name]:
            streamed = tensors.setdefault(place.key, _Streamed(place.shape, dtypes[place.key], []))
            streamed.parts.append((name, place))
    return tensors


@torch.no_grad()  # of a generator: not while the caller has the tensor
def _stream(own: _Own, tensors: Mapping[str, _Streamed], writers: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    for key, streamed in tensors.items():
        tensor = torch.empty(streamed.shape, dtype=streamed.dtype, device=own.device)
        for name, place in streamed.parts:
            part = place.of(tensor)
            values = own.gathered(name)
            part.copy_(own.sent(values, part, writers[name]))
        yield key, tensor


@final
class _Own:
    """What this rank has of the tensors of a model, of which it gathers one parameter at a time."""

    def __init__(self, model: Pretrained, *, of_adapters: bool) -> None:
        module = model.module
        layout: Layout = model.layout
        self.device = next(module.parameters()).device
        self._layout = layout
        self._group = layout.open(tuple(range(layout.plan.world)))
        self._merged = MergedParameters(module)
        self._held: dict[str, tuple[Holding, Canonical]] = {}
        """What this rank writes, or must take part in gathering, by name."""
        for holding in holdings(module):
            takes_part = holding.writes(layout) or is_shared_out(holding.parameter)
            if holding.in_stage(layout) and takes_part and holding.pieces[0].of_adapter == of_adapters:
                self._held |= {piece.name: (holding, piece) for piece in holding.pieces}
        self._states: dict[str, Tensor] = {}
        if not of_adapters and writes_state("dense", layout):
            self._states = dict(router_states(module))
        self._current: tuple[Holding, Tensor] | None = None
        """The parameter that is gathered, and its values."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the tensors that this rank writes, by name, in the order of its model."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (holding, piece) in self._held.items():
            if holding.writes(self._layout) and is_first_part(piece):
                shapes[name] = whole_shape(piece)
        return shapes | {name: tuple(state.shape) for name, state in self._states.items()}

    def gathered(self, name: str) -> Tensor | None:
        """Whole values of a tensor where this rank has gathered them, which the one that writes it has.

        Collective over the ranks that hold parts of it.
        """
        if name in self._states:
            return self._states[name]
        holding, piece = self._held.get(name, (None, None))
        # All ranks forget a parameter at the same name, so that those that shard it gather it again together.
        if self._current is not None and self._current[0] is not holding:
            self._current = None
        if holding is None or piece is None:
            return None
        if self._current is None:
            self._current = holding, values_of(whole(self._merged.of(holding.pieces)))
        return holding.joined(piece, self._current[1], self._layout) if holding.writes(self._layout) else None

    def sent(self, values: Tensor | None, like: Tensor, writer: int) -> Tensor:
        """Values of the rank ``writer``, with the shape and dtype of ``like``. Collective over all ranks."""
        if self._layout.rank == writer:
            assert values is not None, "who writes a tensor has gathered it"
            values = values.to(like.dtype).contiguous()
        else:
            values = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if self._group is not None:
            dist.broadcast(values, group=self._group, group_src=writer)
        return values
