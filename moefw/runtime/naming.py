"""Canonical names: every parameter, expert by expert, under a name that is the same in every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moefw.core.contracts import ExpertGemm, Meter, Named, Router, Stateful
from moefw.core.records import Canonical, ParameterRole, Shard, Side
from moefw.runtime.parallel.local_shards import all_of, is_held_as_codes


def canonical_parameters(model: nn.Module) -> Iterator[Canonical]:
    """Yield every parameter on this rank under its canonical name, experts one by one.

    Here, once for all routers, their parameters get the role ``router``, and embeddings of torch theirs.
    """
    return _named(model, "", None)


def _named(module: nn.Module, prefix: str, role: ParameterRole | None) -> Iterator[Canonical]:
    """Yield the parameters of a module, as it names them or as torch does, under a prefix.

    ``role``: that of all parameters of a module around this one.
    """
    role = role or _role_of_all(module)
    for piece in _own(module):
        yield evolve(piece, name=f"{prefix}{piece.name}", role=role or piece.role)
    if not isinstance(module, Named):
        for name, child in module.named_children():
            yield from _named(child, f"{prefix}{name}.", role)


def _own(module: nn.Module) -> Iterator[Canonical]:
    """Yield the parameters that a module names, or those that are its own and not of a child."""
    if isinstance(module, Named):
        yield from module.canonical()
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield Canonical(name, parameter)


def _role_of_all(module: nn.Module) -> ParameterRole | None:
    """Role of all parameters of a module, if its class says it; None: each piece says its own."""
    if isinstance(module, Router):
        return "router"
    return "embedding" if isinstance(module, nn.Embedding) else None


def by_parameter(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[Canonical]]]:
    """Yield every parameter with its canonical pieces."""
    pieces: dict[nn.Parameter, list[Canonical]] = {}
    for piece in canonical_parameters(model):
        pieces.setdefault(piece.parameter, []).append(piece)
    yield from pieces.items()


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of routed experts, which are on the expert mesh."""
    gemms = [module for module in model.modules() if isinstance(module, ExpertGemm)]
    return {parameter for gemm in gemms for parameter in gemm.parameters()}


def by_side(model: nn.Module) -> dict[Side, dict[str, Stateful]]:
    """Stateful parts by mesh and name, in the order of the layers."""
    experts = {part for gemm in _experts(model).values() for part in gemm.modules()}
    parts = {name: part for name, part in model.named_modules() if isinstance(part, Stateful)}
    return {
        "dense": {name: part for name, part in parts.items() if part not in experts},
        "experts": {name: part for name, part in parts.items() if part in experts},
    }


def states(model: nn.Module) -> dict[Side, dict[str, Tensor]]:
    """Saved state by mesh and canonical name. State of routed experts is split by expert."""
    dense = by_side(model)["dense"].items()
    experts = _experts(model).items()
    return {
        "dense": {f"{prefix}.{name}": tensor for prefix, part in dense for name, tensor in _saved(part)},
        "experts": {f"{prefix}.{name}": tensor for prefix, gemm in experts for name, tensor in _by_expert(gemm)},
    }


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Saved state by canonical name."""
    return {name: tensor for side in states(model).values() for name, tensor in side.items()}


def _experts(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertGemm)}


def _saved(part: Stateful) -> Iterator[tuple[str, Tensor]]:
    return ((state.name, getattr(part, state.name)) for state in part.state_spec() if state.saved)


def _by_expert(experts: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield views of the meters' saved state as ``{e}.gate_up.scale``, independent of how a GEMM stacks its experts."""
    numbers = dict.fromkeys(piece.name.split(".", 1)[0] for piece in experts.canonical())
    by_name: dict[str, list[Tensor]] = {}
    for meter in experts.modules():
        if isinstance(meter, Meter):
            for name, tensor in _saved(meter):
                by_name.setdefault(f"{meter.gemm}.{name}", []).extend(tensor.unbind())
    for name, tensors in by_name.items():
        for number, tensor in zip(numbers, tensors, strict=True):
            yield f"{number}.{name}", tensor


def joined(part: Tensor, shard: Shard, group: ProcessGroup | None) -> Tensor:
    """Whole tensor of which each rank of ``group`` holds a part. A scalar is whole. Collective."""
    if not part.dim():
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(shard.count)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, shard.dim)


def initialise(model: nn.Module, *, seed: int, std: Callable[[str], float | None]) -> None:
    """Fill every parameter from a generator keyed by seed and canonical name, so that all layouts give the same bits.

    ``std(name)`` is the standard deviation of a normal distribution cut at three deviations; None means ones. Those of
    adapters say their own. Weights that are held as codes become zeros.
    """
    _initialise(by_parameter(model), seed, std)


def initialise_adapters(model: nn.Module, *, seed: int) -> None:
    """Fill the parameters of adapters alone, as :func:`initialise` does."""
    of_adapters = ((parameter, pieces) for parameter, pieces in by_parameter(model) if pieces[0].of_adapter)
    _initialise(of_adapters, seed, lambda name: None)


@torch.no_grad()
def _initialise(
    parameters: Iterable[tuple[nn.Parameter, Sequence[Canonical]]], seed: int, std: Callable[[str], float | None]
) -> None:
    for parameter, pieces in parameters:
        with all_of(parameter) as values:
            if is_held_as_codes(parameter):
                values.zero_()  # the folder alone has its codes
                continue
            for piece in pieces:
                deviation = piece.adapter_std if piece.of_adapter else std(piece.name)
                _draw(piece, piece.of(values), seed, deviation)


def _draw(piece: Canonical, target: Tensor, seed: int, deviation: float | None) -> None:
    """Fill ``target``, this rank's part of the named tensor."""
    if deviation is None:
        target.fill_(1.0)
        return
    if piece.shard is None:
        target.copy_(draw(piece.name, target.shape, deviation, seed=seed))
        return
    # All ranks draw the whole tensor, and each keeps its part.
    whole = draw(piece.name, piece.shard.whole(target.shape), deviation, seed=seed)
    target.copy_(piece.shard.of(whole))


def draw(name: str, shape: Sequence[int], deviation: float, *, seed: int) -> Tensor:
    """Fp32 values of a normal distribution cut at three deviations, the same for a name and seed.

    Values beyond are drawn again. Equal in every PyTorch version, unlike ``trunc_normal_``.
    """
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)  # 63 bits: seeds are int64
    drawn = torch.empty(shape).normal_(0.0, deviation, generator=generator)
    while (beyond := drawn.abs() > 3 * deviation).any():
        drawn = torch.where(beyond, torch.empty(shape).normal_(0.0, deviation, generator=generator), drawn)
    return drawn
