"""Turns a dense model into one with experts, which computes the same at first (arXiv 2410.07524).

A layer's MLP is cut into G slices of its hidden dim, and each slice is copied. Expert ``c * G + g`` is copy c of slice
g. The G experts of a copy are a virtual group: they share their router row, so a token that chooses one of them chooses
all, and gets every slice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import torch
from attrs import frozen
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.data import TOKENIZER
from moefw.core.errors import CheckpointError, MoefwError, Problem, SpecError
from moefw.models.huggingface.loading import wanted
from moefw.runtime.finite import all_finite
from moefw.runtime.naming import draw
from moefw.training.checkpoint.choice import way_out
from moefw.training.checkpoint.manifest import Damage
from moefw.training.checkpoint.reading import opened as opened_checkpoint
from moefw.training.importing import opened as opened_folder
from moefw.training.new_run import on_meta, write_run
from moefw.training.resume import candidates

Scaling = Literal["exact", "paper"]
POWERS: Final[Mapping[Scaling, Mapping[str, float]]] = {
    "exact": {"gate": 0.0, "up": 1 / 2, "down": 1 / 2},
    "paper": {"gate": 1 / 3, "up": 1 / 3, "down": 1 / 3},
}
"""The powers of the scale in each matrix. Those of the paper would be exact if ``silu(s * x)`` were ``s * silu(x)``."""
HIDDEN: Final = {"gate": 0, "up": 0, "down": 1}
"""The hidden dim of each matrix of an MLP."""


@frozen(kw_only=True)
class Upcycling:
    """What a dense MLP becomes: ``num_experts`` experts of 1 / ``granularity`` of its size, ``top_k`` for a token.

    ``pre_softmax``: weights are a softmax over all experts, not over the chosen ones.
    """

    num_experts: int
    top_k: int
    granularity: int = 1
    pre_softmax: bool = False
    scaling: Scaling = "exact"

    @property
    def copies(self) -> int:
        """The number of virtual groups, each of which holds the MLP once."""
        return self.num_experts // self.granularity

    @property
    def scale(self) -> float:
        """The factor that an expert's output needs, so that the sum over a token's experts is the MLP's.

        A token gets each slice ``K / G`` times. Its weights are 1 / K on average, or 1 / E with ``pre_softmax``
        (``moe_use_upcycling`` of Megatron Core does the same).
        """
        inverse_mean_weight = self.num_experts if self.pre_softmax else self.top_k
        return inverse_mean_weight * self.granularity / self.top_k

    def factor(self, matrix: str) -> float:
        """Factor of the ``gate``, ``up`` or ``down`` matrix of an expert."""
        return float(self.scale ** POWERS[self.scaling][matrix])

    def problems(self, dense_dim: int) -> Iterator[Problem]:
        """Yield what does not divide."""
        slices = f"granularity {self.granularity}"
        if self.num_experts % self.granularity:
            yield Problem(f"{slices} does not divide {self.num_experts} experts.", "Copies are whole: change one.")
        if self.top_k % self.granularity:
            what = f"{slices} does not divide top-k {self.top_k}: a token would not get every slice as often."
            yield Problem(what, "Use a multiple of the granularity.")
        if dense_dim % self.granularity:
            yield Problem(f"{slices} does not divide the MLP's {dense_dim} hidden values.", "Use a divisor.")


@frozen(eq=False)
class Dense:
    """A dense model: how it was assembled, its parameters by name, and where its tokenizer may lie.

    ``reading`` gives the function that reads a parameter, and raises CheckpointError at exit with all those that hold
    NaN or infinity.
    """

    assembly: Assembly
    reading: Callable[[], AbstractContextManager[Callable[[str], Tensor]]]
    tokenizer: Path


def dense_of_folder(source: Path, run_dir: Path) -> Dense:
    """Model of a Hugging Face folder. Raises SpecError or CheckpointError as an import does."""
    assembly, _, folder, origins = opened_folder(source, run_dir)

    @contextmanager
    def reading() -> Iterator[Callable[[str], Tensor]]:
        with folder.reading() as read:
            yield lambda name: read(origins[name])

    return Dense(assembly, reading, source / TOKENIZER)


def dense_of_run(assembly: Assembly) -> Dense:
    """Model in a run's last checkpoint. Raises CheckpointError if there is none, or it is damaged."""
    run_dir = Path(assembly.spec.run.dir)
    ((_, checkpoint),) = candidates(run_dir, "last")
    with way_out(checkpoint):
        reader = opened_checkpoint(checkpoint)
    saved = {name: tensor.shape for name, tensor in reader.tensors.items()}
    problems = [
        Problem(f"{checkpoint} holds {saved.get(f'model/{name}')} for {name}, and its spec says {shape}.")
        for name, shape in wanted(on_meta(assembly))
        if saved.get(f"model/{name}") != shape
    ]
    if problems:
        raise CheckpointError(problems)

    @contextmanager
    def reading() -> Iterator[Callable[[str], Tensor]]:
        with way_out(checkpoint), all_finite(checkpoint, Damage) as looked_at:
            yield lambda name: looked_at(name, reader.read(f"model/{name}"))

    return Dense(assembly, reading, run_dir / TOKENIZER)


def upcycle(dense: Dense, how: Upcycling, run_dir: Path) -> None:
    """Write ``run_dir``: a run at step 0 whose layers all have experts. At most one tensor of ``dense`` is held.

    Raises SpecError with all that does not fit, and CheckpointError with all tensors that are not finite, or if
    ``run_dir`` holds something.
    """
    assembly = _assembled(dense.assembly, how, run_dir)
    model: Any = on_meta(assembly)

    def fill(tensors: Mapping[str, Tensor]) -> None:
        with dense.reading() as read:
            for source, targets in _pieces(tensors).items():
                values = read(source)
                for target, matrix, expert in targets:
                    if matrix is None:
                        tensors[target].copy_(values)
                    else:
                        piece = values.chunk(how.granularity, HIDDEN[matrix])[expert % how.granularity]
                        tensors[target].copy_(piece).mul_(how.factor(matrix))
        for name in filter(_is_router, tensors):
            tensors[name].copy_(_router(model, name, tensors[name].shape[1], how, assembly.spec.run.seed))

    write_run(assembly, model, run_dir, fill, dense.tokenizer)


def _assembled(dense: Assembly, how: Upcycling, run_dir: Path) -> Assembly:
    resolved = dense.resolved()
    problems = [] if not dense.layers else [Problem(f"layers {[*dense.layers]} have experts.", "Name a dense model.")]
    problems += how.problems(resolved["model"]["dense_dim"])
    sizes = {
        "num_experts": how.num_experts,
        "top_k": how.top_k,
        "expert_dim": max(resolved["model"]["dense_dim"] // how.granularity, 1),
        **{"num_dense_layers": 0, "dense_layers": []},
    }
    tree: dict[str, Any] = {
        **{name: resolved[name] for name in ("attention", "data")},
        "model": resolved["model"] | sizes,
        "routing": {"use": "topk", "score": "softmax", "pre_softmax": how.pre_softmax or None},
        "run": {"dir": str(run_dir)},
    }
    try:
        assembly = assemble_tree(tree, Marks("upcycle"), defaults=defaults(), world=1)
    except MoefwError as error:
        problems += error.problems
    if problems:
        raise SpecError(problems)
    return assembly


def _pieces(tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[str, str | None, int]]]:
    """Parameters that are made of each dense tensor, each with its expert's matrix and number, if it has any."""
    pieces: dict[str, list[tuple[str, str | None, int]]] = {}
    for name in tensors:
        match = re.fullmatch(r"(.*)\.moe\.experts\.(\d+)\.((gate|up|down)_proj\.weight)", name)
        if match:
            block, expert, weight, matrix = match.groups()
            pieces.setdefault(f"{block}.mlp.{weight}", []).append((name, matrix, int(expert)))
        elif not _is_router(name):
            pieces[name] = [(name, None, 0)]
    return pieces


def _is_router(name: str) -> bool:
    return name.endswith(".moe.router.weight")


def _router(model: nn.Module, name: str, dim: int, how: Upcycling, seed: int) -> Tensor:
    """Rows ``(E, D)``: one for each virtual group, drawn as in training, and repeated for its experts."""
    std: Any = model.init_std
    rows_CD = draw(name, torch.Size((how.copies, dim)), std(name), seed=seed)
    return rows_CD.repeat_interleave(how.granularity, 0)
