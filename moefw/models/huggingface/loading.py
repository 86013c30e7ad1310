"""Fills a model of ours from the tensors of a Hugging Face folder.

Names and shapes are checked before anything is changed, and values as they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moefw.core.errors import CheckpointError, Problem
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.origins import Origin, Rule, origins_of
from moefw.runtime.naming import by_parameter, state_tensors
from moefw.runtime.parallel.local_shards import all_of, is_held_as_codes
from moefw.runtime.pipeline.stage import names_in_stages

UNUSED: Final = r".*rotary_emb\.inv_freq|model\.layers\.\d+\.(shared_head\.head|embed_tokens)\.weight"
"""Tensors that folders hold and no model needs: angles of RoPE, and what MTP layers share with the model."""
ROUTER: Final = ".router."


def placed(
    model: nn.Module, folder: Folder, rules: Sequence[Rule], *, num_experts: int
) -> tuple[dict[str, Origin], set[str]]:
    """Origin of each parameter and state of routers on this rank, and all tensors that the model takes.

    Raises CheckpointError with every tensor that is missing, left over or of another shape.
    """
    origins: dict[str, Origin] = {}
    problems: list[Problem] = []
    own = dict(wanted(model))
    names = names_in_stages(own, model)
    for name, shape in own.items():
        places = [origin for origin in origins_of(name, rules) if origin.name in folder.tensors]
        if not places:
            usual = next(origins_of(name, rules), None)
            if usual is None:
                what = f"{folder.path} has no place for {name}: its family has no such tensor."
                problems.append(Problem(what, "Leave out the option that adds it."))
            else:
                problems.append(Problem(f"{folder.path} lacks {usual.name} of shape {shape}.", _fix(name)))
        elif len(tensors := sorted({place.name for place in places})) > 1:
            what = f"{folder.path} holds {name} twice: in {tensors[0]} and in {tensors[1]}."
            problems.append(Problem(what, "Remove one of them."))
        elif folder.shape(places[0]) != shape:
            tensor = places[0].name
            what = f"{folder.path}: {tensor} is {folder.tensors[tensor].shape}, which holds no {shape}"
            problems.append(Problem(f"{what} for {name}.", "Use the config.json of the same model."))
        else:
            origins[name] = places[0]
    claimed = {origin.name for name in names for origin in _everywhere(name, rules, num_experts)}
    claimed |= {name for name, stored in folder.tensors.items() if 0 in stored.shape}  # they hold nothing
    for name in sorted(folder.tensors.keys() - claimed):
        if not problems and not re.fullmatch(UNUSED, name) and not _may_be_left(name, model):
            what = f"{folder.path} holds {name}, which the model does not have."
            problems.append(Problem(what, "Use the config.json of the same model."))
    if problems:
        raise CheckpointError(problems)
    return origins, claimed & folder.tensors.keys()


@torch.no_grad()
def fill(
    model: nn.Module,
    folder: Folder,
    origins: Mapping[str, Origin],
    group: ProcessGroup | None,
    *,
    frozen_alone: bool = False,
) -> None:
    """Fill parameters and the routers' states on this rank from where :func:`placed` has found them. Collective.

    ``frozen_alone``: only the parameters that do not train, because a checkpoint has the rest.
    Raises CheckpointError on all ranks of ``group`` if one of them has read NaN or infinity; the model is then useless.
    """
    with folder.reading(group) as read:
        for parameter, pieces in by_parameter(model):
            if pieces[0].of_adapter or (frozen_alone and parameter.requires_grad):
                continue
            read_whole = read.codes if is_held_as_codes(parameter) else read
            with all_of(parameter) as values:
                for piece in pieces:
                    whole = read_whole(origins[piece.name])
                    piece.of(values).copy_(whole if piece.shard is None else piece.shard.of(whole))
        for name, state in () if frozen_alone else router_states(model):
            state.copy_(read(origins[name]))


def wanted(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every tensor of this rank that a folder has by name, with its whole shape: not those of adapters."""
    for parameter, pieces in by_parameter(model):
        empty = torch.empty(parameter.shape, device="meta")
        for piece in pieces:
            if piece.of_adapter:
                continue
            part = piece.of(empty)
            yield piece.name, tuple(piece.shard.whole(part.shape) if piece.shard else part.shape)
    yield from ((name, tuple(state.shape)) for name, state in router_states(model))


def router_states(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the state that a folder holds: of routers, not of recipes."""
    return ((name, state) for name, state in state_tensors(model).items() if ROUTER in name)


def _everywhere(name: str, rules: Sequence[Rule], num_experts: int) -> Iterator[Origin]:
    """Yield the origins of a tensor, and of the same one of all other experts, which other ranks may hold."""
    layer, experts, rest = name.partition(".moe.experts.")
    if not experts:
        yield from origins_of(name, rules)
        return
    _, _, matrix = rest.partition(".")
    for expert in range(num_experts):
        yield from origins_of(f"{layer}{experts}{expert}.{matrix}", rules)


def _may_be_left(name: str, model: nn.Module) -> bool:
    """Whether a tensor belongs to a layer that predicts a further token and that the spec leaves out."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    layers: int = len(model.layers)  # type: ignore[arg-type]
    tied = name == "lm_head.weight" and not any(own.startswith("head.") for own, _ in model.named_parameters())
    return tied or (layer is not None and int(layer[1]) >= layers)


def _fix(name: str) -> str:
    further = re.search(r"\.(enorm|hnorm|eh_proj|post_norm)\.", name)
    return "Use model.mtp_layers: 0." if further else "Use the config.json of the same model."
