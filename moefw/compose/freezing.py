"""Weights that do not train (``train.freeze``): which ones, and in which dtype a rank holds them.

A frozen parameter is held as the folder has it, in bf16 as a rule, and never as an fp32 master, which alone could be
more than a rank has memory for. So it must be known when the parameter is made, and canonical names are known when the
model is there: the model is built twice, first without memory, and the parameters of both are numbered as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from moefw.core.errors import Problem, SpecError
from moefw.models.huggingface.config import read_config
from moefw.models.huggingface.families import family_of
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.origins import origins_of
from moefw.runtime.naming import by_parameter


def built_with_frozen(
    build_without_memory: Callable[[], nn.Module],
    build: Callable[[], nn.Module],
    patterns: Sequence[str],
    weights: Path,
) -> nn.Module:
    """Model from ``build``, in which the parameters whose canonical names match are frozen.

    ``build_without_memory`` makes the same parameters in the same order on ``meta``, sharded by nothing. ``weights``:
    the folder whose dtypes they have. Raises SpecError for patterns that would freeze a part of a parameter.
    """
    with _numbered() as numbers:
        model = build_without_memory()
    dtypes = _frozen(model, patterns, weights)
    by_number = {
        numbers[module, key]: dtypes[parameter]
        for module in model.modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter in dtypes
    }
    with _numbered(by_number):
        return build()


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a canonical name matches one of the patterns, in which ``*`` stands for any characters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def _numbered(frozen: Mapping[int, torch.dtype] | None = None) -> Iterator[dict[tuple[nn.Module, str], int]]:
    """Number the parameters of modules, in the order in which they are registered first; yield the numbers.

    Those of the numbers in ``frozen`` are replaced, before the next one is made, by frozen ones of these dtypes.
    """
    numbers: dict[tuple[nn.Module, str], int] = {}
    dtypes = frozen or {}

    def on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if (module, name) in numbers:
            return None  # it is replaced, such as by a sharded one
        number = len(numbers)
        numbers[module, name] = number
        if number not in dtypes or not parameter.requires_grad:  # a tied one is frozen already
            return None
        return nn.Parameter(torch.empty_like(parameter, dtype=dtypes[number]), requires_grad=False)

    handle = register_module_parameter_registration_hook(on_registration)  # type: ignore[arg-type]
    try:
        yield numbers
    finally:
        handle.remove()


def _frozen(model: nn.Module, patterns: Sequence[str], weights: Path) -> dict[nn.Parameter, torch.dtype]:
    """Parameters of a model that are frozen, each with its dtype."""
    frozen: dict[nn.Parameter, torch.dtype] = {}
    problems: list[Problem] = []
    dtype_of = _stored_dtypes(weights)
    for parameter, pieces in by_parameter(model):
        names = [piece.name for piece in pieces if not piece.of_adapter]
        held = [name for name in names if matches(name, patterns)]
        if held and len(held) < len(names):
            trained = next(name for name in names if name not in held)
            what = f"train.freeze names {held[0]} and not {trained}, which are one parameter."
            problems.append(
                Problem(what, "Freeze both or none. With gemm: loop, each expert has parameters of its own.")
            )
        elif held:
            in_bf16 = all(dtype_of(name) is torch.bfloat16 for name in names)
            frozen[parameter] = torch.bfloat16 if in_bf16 else torch.float32  # which holds the others exactly
    if problems:
        raise SpecError(problems)
    return frozen


def _stored_dtypes(weights: Path) -> Callable[[str], torch.dtype]:
    """Function that returns the dtype in which a folder has the tensor of a name; without the folder, bf16."""
    if not weights.is_dir():
        return lambda name: torch.bfloat16
    tensors = Folder(weights).tensors
    rules = family_of(read_config(weights), weights).rules

    def dtype_of(name: str) -> torch.dtype:
        places = (tensors[origin.name] for origin in origins_of(name, rules) if origin.name in tensors)
        return next((place.dtype for place in places), torch.bfloat16)

    return dtype_of
