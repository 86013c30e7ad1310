"""Steps of an optimizer with a rule on given gradients, under any layout, and what ranks compute and send for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.optimizer import build_optimizer
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.plugin import Plugin
from moefw.core.site import Machine
from moefw.plugins.optimizers.muon.rule import Orthogonalized
from moefw.runtime.naming import by_parameter, draw, initialise
from moefw.runtime.parallel.boxes import Box, boxes
from moefw.runtime.parallel.local_shards import local
from moefw.testing.announce import with_plugins
from moefw.testing.training import SMALL

LR = 1e-2
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one rank": (1, {}),
    "dp": (2, {"parallel": {}}),
    "tp": (2, {"parallel": {"dense": {"tp": 2}, "experts": {"ep": 2}}}),
    "etp": (2, {"parallel": {"experts": {"etp": 2}}}),
    "tp x etp": (2, {"parallel": {"dense": {"tp": 2}, "experts": {"etp": 2}}}),
    "FSDP on 2 ranks": (2, {"parallel": {"dense": {"shard": "all"}, "experts": {"shard": "all"}}}),
    "FSDP on 3 ranks": (3, {"parallel": {"dense": {"shard": "all"}, "experts": {"shard": "all"}}}),
    "HSDP": (4, {"parallel": {"dense": {"shard": 2}, "experts": {"shard": 2}}}),
    "ep": (2, {"parallel": {"experts": {"ep": 2}}}),
    "cp": (2, {"parallel": {"dense": {"cp": 2}}}),
    "pp": (2, {"parallel": {"pp": 2}}),
    "tp x FSDP x ep": (4, {"parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}}),
    "tp x etp x FSDP": (4, {"parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"etp": 2, "shard": "all"}}}),
}


@frozen(kw_only=True, eq=False)
class Stored:
    """A part that a rank stores of a named tensor, before and after the steps."""

    name: str
    corner: tuple[int, ...]
    whole: tuple[int, ...]
    before: Tensor
    after: Tensor


@frozen(kw_only=True, eq=False)
class Stepped:
    """What a rank stores, and of the last step the matrices at home there, and what it computed and sent.

    ``ruled``: the tensors that the rule takes. ``computed``: the number of matrices in each call of the rule. ``sent``:
    the bytes of each exchange.
    """

    stored: Sequence[Stored]
    ruled: frozenset[str]
    at_home: Sequence[str]
    computed: Sequence[int]
    sent: Sequence[int]


def whole_tree(tree: Mapping[str, Any], optimizer: Mapping[str, Any], memory: Any = ()) -> dict[str, Any]:
    """Return the spec of a small model with a layout and an optimizer."""
    return {
        **SMALL,
        "model": {**SMALL["model"], "vocab_size": 64},
        "memory": list(memory),
        "train": {**SMALL["train"], "tokens_per_step": 192, "micro_batch": 1, "optimizer": dict(optimizer)},
        **tree,
    }


def stepped(
    tree: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    *,
    steps: int = 2,
    memory: Any = (),
    plugins: tuple[type[Plugin], ...] = (),
) -> Stepped:
    """Take steps of a rate of ``LR`` on this rank, on gradients that depend on name and step alone."""
    tree = whole_tree(tree, optimizer, memory)
    world = dist.get_world_size() if dist.is_initialized() else 1
    machine = Machine(device="cpu")
    registry = with_plugins(plugins)
    assembly = assemble_tree(tree, Marks("muon"), defaults=defaults(), registry=registry, world=world, machine=machine)
    layout = open_layout(assembly, "cpu")
    shared = Shared()
    model = build_model(assembly, layout, torch.device("cpu"), shared)
    std: Any = model.init_std
    initialise(model, seed=3, std=std)
    built = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    pieces = dict(by_parameter(model))
    ruled = frozenset(piece.name for parameter in built.param_groups[-1]["params"] for piece in pieces[parameter])
    before = parts(pieces)
    computed: list[int] = []
    sent: list[int] = []
    update = Orthogonalized.update
    exchange = dist.all_to_all_single

    def updating(rule: Orthogonalized, matrices: Tensor) -> Tensor:
        computed.append(len(matrices))
        return update(rule, matrices)

    def exchanging(received: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(values.nbytes)
        return exchange(received, values, *args, **kwargs)

    for step in range(steps):
        computed.clear()
        sent.clear()
        for parameter, own in pieces.items():
            parameter.grad = torch.zeros_like(parameter)
            for box in boxes(own):
                grad = box.of(local(parameter.grad))
                grad.copy_(part_of(draw(box.name, box.whole, 1.0, seed=step), box.corner, grad.shape))
        for group in built.param_groups:
            group["lr"] = LR
        with (
            mock.patch.object(Orthogonalized, "update", updating),
            mock.patch.object(dist, "all_to_all_single", exchanging),
        ):
            built.step()
    after = parts(pieces)
    shared.close()
    stored = [
        Stored(name=box.name, corner=box.corner, whole=box.whole, before=values, after=after[name][1])
        for name, (box, values) in before.items()
    ]
    at_home = [matrix.name for turn in built._homes._turns for matrix in turn.bucket.computed]
    return Stepped(stored=stored, ruled=ruled, at_home=at_home, computed=list(computed), sent=list(sent))


def parts(pieces: Mapping[Any, Any]) -> dict[str, tuple[Box, Tensor]]:
    """Return what this rank stores of each named tensor."""
    own = ((box, box.of(local(parameter.detach())).clone()) for parameter, of in pieces.items() for box in boxes(of))
    return {box.name: (box, values) for box, values in own}


def part_of(whole: Tensor, corner: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the part of a tensor that begins at a corner."""
    return whole[tuple(slice(first, first + size) for first, size in zip(corner, sizes, strict=True))]


def joined(ranks: Sequence[Stepped], when: str) -> dict[str, Tensor]:
    """Return whole tensors, ``before`` or ``after`` the steps, by name. Copies must have the same bits."""
    whole: dict[str, Tensor] = {}
    for rank in ranks:
        for part in rank.stored:
            values = getattr(part, when)
            room = whole.setdefault(part.name, torch.full(part.whole, torch.nan))
            there = part_of(room, part.corner, values.shape)
            assert there.isnan().all() or torch.equal(there, values), f"copies of {part.name} differ"
            there.copy_(values)
    assert not any(tensor.isnan().any() for tensor in whole.values()), "each element is stored somewhere"
    return whole
