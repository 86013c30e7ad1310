"""Weights that do not train (``train.freeze``): which ones, and in which dtype or as which codes a rank holds them.

A frozen parameter is held as the folder has it, in bf16 as a rule, or as its codes (``train.frozen_weights``), and
never as an fp32 master, which alone could be more than a rank has memory for. So it must be known when the parameter is
made, and canonical names are known when the model is there: the model is built twice, first without memory, and the
parameters of both are numbered as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from moefw.core.errors import ContractError, Problem, SpecError
from moefw.core.records import Canonical
from moefw.models.embedding import Embedding
from moefw.models.huggingface.config import read_config
from moefw.models.huggingface.families import family_of
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.origins import Origin, origins_of
from moefw.runtime.compute.code_formats import CodeFormat
from moefw.runtime.compute.coded_weight import CodedWeight
from moefw.runtime.modules import Linear
from moefw.runtime.naming import by_parameter

Form = torch.dtype | CodeFormat
"""The dtype of the values of a frozen parameter, or the format of the codes as which it is held."""
DECODE = "or use train.frozen_weights: decoded."


def built_with_frozen(
    build_without_memory: Callable[[], nn.Module],
    build: Callable[[], nn.Module],
    patterns: Sequence[str],
    weights: Path,
    *,
    as_stored: bool,
) -> nn.Module:
    """Model from ``build``, in which the parameters whose canonical names match are frozen.

    ``build_without_memory`` makes the same parameters in the same order on ``meta``, sharded by nothing. ``weights``:
    the folder as which they are held, as values or, ``as_stored``, as its codes. Raises SpecError for patterns that
    would freeze a part of a parameter, and for codes that a rank cannot hold.
    """
    with _numbered() as numbers:
        model = build_without_memory()
    pieces = _frozen_pieces(model, patterns)
    forms = _dtypes(pieces, weights)
    if as_stored:
        forms |= _formats(model, pieces, weights)
    by_number = {
        numbers[module, key]: forms[parameter]
        for module in model.modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter in forms
    }
    with _numbered(by_number):
        return build()


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a canonical name matches one of the patterns, in which ``*`` stands for any characters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def _numbered(frozen: Mapping[int, Form] | None = None) -> Iterator[dict[tuple[nn.Module, str], int]]:
    """Number the parameters of modules, in the order in which they are registered first; yield the numbers.

    Those of the numbers in ``frozen`` are replaced, before the next one is made, by frozen ones of these forms.
    """
    numbers: dict[tuple[nn.Module, str], int] = {}
    forms = frozen or {}

    def on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if (module, name) in numbers:
            return None  # it is replaced, such as by a sharded one
        number = len(numbers)
        numbers[module, name] = number
        if number not in forms or not parameter.requires_grad:  # a tied one is frozen already
            return None
        return nn.Parameter(_empty_as(forms[number], parameter), requires_grad=False)

    handle = register_module_parameter_registration_hook(on_registration)  # type: ignore[arg-type]
    try:
        yield numbers
    finally:
        handle.remove()


def _empty_as(form: Form, parameter: Tensor) -> Tensor:
    """Tensor of the shape of a parameter in another form, without its values."""
    if isinstance(form, CodeFormat):
        return CodedWeight.empty(parameter.shape, form, parameter.device)
    return torch.empty_like(parameter, dtype=form)


Pieces = Mapping[nn.Parameter, Sequence[Canonical]]
"""Frozen parameters, each with its canonical tensors."""


def _frozen_pieces(model: nn.Module, patterns: Sequence[str]) -> Pieces:
    """Parameters of a model that are frozen. Raises SpecError for parameters of which a part is."""
    frozen: dict[nn.Parameter, Sequence[Canonical]] = {}
    problems: list[Problem] = []
    for parameter, pieces in by_parameter(model):
        own = [piece for piece in pieces if not piece.of_adapter]
        held = [piece.name for piece in own if matches(piece.name, patterns)]
        if held and len(held) < len(own):
            trained = next(piece.name for piece in own if piece.name not in held)
            what = f"train.freeze names {held[0]} and not {trained}, which are one parameter."
            problems.append(
                Problem(what, "Freeze both or none. With gemm: loop, each expert has parameters of its own.")
            )
        elif held:
            frozen[parameter] = own
    if problems:
        raise SpecError(problems)
    return frozen


def _dtypes(frozen: Pieces, weights: Path) -> dict[nn.Parameter, Form]:
    """Dtypes of frozen parameters as values; without the folder, bf16."""
    if not weights.is_dir():
        return dict.fromkeys(frozen, torch.bfloat16)
    folder = Folder(weights)
    origin_of = _origins(folder)

    def dtype(piece: Canonical) -> torch.dtype:
        origin = origin_of(piece.name)
        return torch.bfloat16 if origin is None else folder.tensors[origin.name].dtype

    dtypes: dict[nn.Parameter, Form] = {}
    for parameter, pieces in frozen.items():
        in_bf16 = all(dtype(piece) is torch.bfloat16 for piece in pieces)
        dtypes[parameter] = torch.bfloat16 if in_bf16 else torch.float32  # which holds the others exactly
    return dtypes


def _formats(model: nn.Module, frozen: Pieces, weights: Path) -> dict[nn.Parameter, Form]:
    """Formats of the frozen parameters that the folder has as codes. Raises SpecError for those that cannot be held."""
    if not weights.is_dir():
        what = f"train.frozen_weights: as_stored holds weights as train.weights has them, and {weights} is no folder."
        raise SpecError(what, f"Bring the folder, {DECODE}")
    folder = Folder(weights)
    origin_of = _origins(folder)
    looked_up = {module.weight for module in model.modules() if isinstance(module, Embedding)}
    computed_rows = _computed_rows(model)
    formats: dict[nn.Parameter, Form] = {}
    problems: list[Problem] = []
    for parameter, pieces in frozen.items():
        origins = {piece: origin for piece in pieces if (origin := origin_of(piece.name)) is not None}
        form = next((form for origin in origins.values() if (form := folder.format(origin)) is not None), None)
        if form is None:
            continue
        formats[parameter] = form
        in_form = [piece.name for piece, origin in origins.items() if folder.format(origin) == form]
        others = [piece.name for piece in origins if piece.name not in in_form]
        if others:
            what = f"{weights} has {in_form[0]} in {form.name} and {others[0]} not, which are one parameter."
            problems.append(Problem(what, "Use train.frozen_weights: decoded."))
        elif parameter in looked_up:
            what = f"{weights} has {in_form[0]} in {form.name}, and its rows are looked up, not multiplied."
            problems.append(Problem(what, "Use train.frozen_weights: decoded."))
        else:
            problems += _cut_blocks(parameter, origins, folder, form, computed_rows.get(parameter))
    if problems:
        raise SpecError(problems)
    return formats


def _cut_blocks(
    parameter: nn.Parameter,
    origins: Mapping[Canonical, Origin],
    folder: Folder,
    form: CodeFormat,
    computed_rows: slice | None,
) -> Iterator[Problem]:
    """Yield the first block of a parameter that the layout or its pieces cut, if there is one."""
    for piece, origin in origins.items():
        try:
            whole = folder.codes_without_bytes(origin)
            part = whole if piece.shard is None else piece.shard.of(whole)
            held = CodedWeight.empty(parameter.shape, form, parameter.device)
            target = piece.of(held)
            if part.shape == target.shape:  # if not, reading the folder says what is wrong with it
                target.copy_(part)
            if computed_rows is not None:
                held[computed_rows]  # a cut, which is refused within a block
        except ContractError as error:
            yield evolve(error.problems[0], where=piece.name)
            return


def _computed_rows(model: nn.Module) -> dict[nn.Parameter, slice]:
    """The only rows that are computed here, of the weights of which a rank holds more."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    return {linear.weight: linear.rows for linear in linears if linear.rows is not None}


def _origins(folder: Folder) -> Callable[[str], Origin | None]:
    """Function that returns where a folder has the tensor of a name; None: it has none."""
    rules = family_of(read_config(folder.path), folder.path).rules

    def origin_of(name: str) -> Origin | None:
        return next((origin for origin in origins_of(name, rules) if origin.name in folder.tensors), None)

    return origin_of
