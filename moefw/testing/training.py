"""Short training runs on the ranks of a pool, to compare layouts and plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.optimizer import build_optimizer
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks, Tree
from moefw.core.contracts import Layout
from moefw.core.plugin import Plugin
from moefw.core.site import Machine
from moefw.core.stages import Batch
from moefw.runtime.adapters import begin_adapters
from moefw.runtime.naming import by_parameter, initialise, joined, state_tensors
from moefw.runtime.parallel.local_shards import whole
from moefw.testing.announce import with_plugins
from moefw.training.engine import Engine, StepResult

SMALL: Mapping[str, Any] = {
    "model": {
        "vocab_size": 61,
        "dim": 32,
        "num_layers": 3,
        "num_dense_layers": 1,
        "dense_dim": 64,
        "num_experts": 8,
        "top_k": 2,
        "expert_dim": 16,
        "shared_expert_dim": 16,
    },
    "attention": {"use": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "routing": {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias", "rate": 0.01}]},
    "train": {"steps": 20, "tokens_per_step": 128, "micro_batch": 2, "seq_len": 16, "lr": 1e-3},
    "run": {"device": "cpu", "seed": 3},
}
"""A transformer of one dense layer and two MoE layers with a shared expert. It trains in milliseconds."""


@dataclass(kw_only=True)
class Run:
    """Results of a short run, and this rank's tensors by canonical name."""

    results: list[StepResult]
    first: dict[str, Tensor]
    last: dict[str, Tensor]
    state: dict[str, Tensor]


Read = Callable[[Assembly, Layout], Callable[[int], list[Batch]]]
"""Returns a function of the step that reads this rank's micro-batches."""


def short_run(
    tree: Tree,
    steps: int,
    padded: bool = False,
    packed: bool = False,
    read: Read | None = None,
    plugins: tuple[type[Plugin], ...] = (),
    prompts: bool = False,
    rehearsals: int = 0,
) -> Run:
    """Train on random tokens that depend on the step alone; each rank takes its share of the sequences.

    ``padded``: sequences have unequal numbers of valid tokens, and some have none. ``packed``: each holds documents of
    unequal length, whose positions start anew. ``read``: other tokens. ``plugins`` need not be installed. ``prompts``:
    some valid tokens have no loss. ``rehearsals``: how often each step is rehearsed.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    assembly = assemble_tree(
        tree,
        Marks("short run"),
        defaults=defaults(),
        registry=with_plugins(plugins),
        world=world,
        machine=Machine(device="cpu"),
    )
    layout = open_layout(assembly, "cpu")
    shared = Shared()
    model = build_model(assembly, layout, torch.device("cpu"), shared)
    std: Any = model.init_std
    initialise(model, seed=assembly.spec.run.seed, std=std)
    begin_adapters(model)
    train = assembly.spec.train
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    engine = Engine.of(model, optimizer, layout, train)
    first = _weights(model, layout)
    batches = read(assembly, layout) if read else partial(_drawn, assembly, layout, padded, packed, prompts)
    results = []
    for step in range(steps):
        for _ in range(rehearsals):
            engine.rehearse(batches(step), _no_clock)
        results.append(engine.step(batches(step), train.lr, _no_clock))
    state = {name: tensor.clone() for name, tensor in state_tensors(model).items()}
    shared.close()
    return Run(results=results, first=first, last=_weights(model, layout), state=state)


def _drawn(assembly: Assembly, layout: Layout, padded: bool, packed: bool, prompts: bool, step: int) -> list[Batch]:
    """This rank's micro-batches of a step. Each rank draws the global batch, and takes its part along dp."""
    train = assembly.spec.train
    vocabulary = getattr(assembly.parts.model, "vocab_size", 2)
    generator = torch.Generator().manual_seed(step)
    shape = (train.tokens_per_step // train.seq_len, train.seq_len + 1)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    numbers = step * len(tokens) + torch.arange(len(tokens))
    own_tokens, own_numbers = (
        of_all.tensor_split(layout.size("dp"))[layout.index("dp")] for of_all in (tokens, numbers)
    )
    batches = []
    pieces = zip(own_tokens.split(train.micro_batch), own_numbers.split(train.micro_batch), strict=True)
    for ids, seeds in pieces:
        batch = Batch(
            ids_BS=ids[:, :-1],
            labels_BS=ids[:, 1:],
            seeds_B=seeds,
            mask_BS=_mask(seeds, train.seq_len, padded),
            loss_mask_BS=_answers(seeds, train.seq_len) if prompts else None,
        )
        batches.append(_packed(batch) if packed else batch)
    return batches


def _mask(numbers: Tensor, seq_len: int, padded: bool) -> Tensor | None:
    """Which tokens are valid: from none to all of a sequence, by its number."""
    if not padded:
        return None
    valid = (numbers * 7 % 17) * seq_len // 16
    return torch.arange(seq_len) < valid.unsqueeze(1)


def _answers(numbers: Tensor, seq_len: int) -> Tensor:
    """Which labels are trained on: two of every five, from a place on that depends on the number of the sequence."""
    return (torch.arange(seq_len) + numbers.unsqueeze(1)) % 5 >= 3


def _packed(batch: Batch) -> Batch:
    """Batch cut into documents, at places that depend on the number of the sequence."""
    assert batch.seeds_B is not None
    place_S = torch.arange(batch.ids_BS.shape[1])
    begins_BS = ((place_S + batch.seeds_B.unsqueeze(1)) % 5 == 0) | (place_S == 0)
    first_BS = torch.where(begins_BS, place_S, 0).cummax(1).values
    return replace(batch, documents_BS=begins_BS.cumsum(1), positions_BS=place_S - first_BS)


def _weights(model: torch.nn.Module, layout: Layout) -> dict[str, Tensor]:
    """Copy of every parameter by canonical name, parts joined."""
    weights = {}
    for parameter, pieces in by_parameter(model):
        values = whole(parameter.detach())
        for piece in pieces:
            tensor = piece.of(values).clone()
            weights[piece.name] = tensor
            if piece.shard is not None:
                weights[piece.name] = joined(tensor, piece.shard, layout.group(piece.shard.axis))
    return weights


@contextmanager
def _no_clock(section: str, *passes: object) -> Iterator[None]:
    yield
