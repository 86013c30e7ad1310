"""Rows for experts, and the dense formula in fp64 that experts are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.core.records import Canonical
from moefw.core.stages import ExpertBatch
from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.runtime.compute.wgrads import Wgrads
from moefw.runtime.forward_context import forward_with
from moefw.runtime.memory.dropped import drops, output_of
from moefw.runtime.naming import initialise
from moefw.runtime.phases import Phase
from moefw.testing.layer_case import LayerCase, whole_piece
from moefw.testing.oracle import expert_output
from moefw.testing.suites.merging import draw_adapters
from moefw.testing.suites.runs import open_context, row_alignment
from moefw.testing.suites.watch import same_bits, worst_error

Results = dict[str, Tensor]
"""``out``, and gradients: of ``rows``, ``row_weights`` and each parameter by canonical name."""


@frozen(kw_only=True)
class GemmCase:
    """Numbers of rows: valid and padding rows in each expert's group, and undefined rows after the last group."""

    counts: tuple[int, ...]
    padding: tuple[int, ...] = ()
    tail: int = 0
    seed: int = 0

    def sizes(self, alignment: int) -> list[int]:
        """Sizes of the groups, padding included."""
        padding = self.padding or (0,) * len(self.counts)
        return [-(-(count + more) // alignment) * alignment for count, more in zip(self.counts, padding, strict=True)]

    def valid(self, alignment: int) -> list[Tensor]:
        """Indices of each expert's valid rows."""
        sizes = self.sizes(alignment)
        starts = [sum(sizes[:expert]) for expert in range(len(sizes))]
        return [torch.arange(start, start + count) for start, count in zip(starts, self.counts, strict=True)]

    def batch(self, dim: int, dtype: torch.dtype, *, alignment: int = 1, on_host: bool = True) -> ExpertBatch:
        """Rows as a dispatcher returns them; undefined ones are NaN."""
        sizes = self.sizes(alignment)
        generator = torch.Generator().manual_seed(self.seed)
        end = sum(sizes)
        rows_RD = torch.zeros(end + self.tail, dim)
        weights_R = torch.zeros(end + self.tail)
        for places in self.valid(alignment):
            rows_RD[places] = torch.randn(len(places), dim, generator=generator)
            weights_R[places] = torch.rand(len(places), generator=generator) + 0.2
        rows_RD[end:] = torch.nan
        weights_R[end:] = torch.nan
        return ExpertBatch(
            rows_RD=rows_RD.to(dtype).requires_grad_(),
            row_weights_R=weights_R.requires_grad_(),
            counts_e=torch.tensor(self.counts, dtype=torch.int32),
            offsets_e=torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32),
            counts_host=tuple(sizes) if on_host else None,
        )

    def probe(self, dim: int, dtype: torch.dtype, *, alignment: int = 1) -> Tensor:
        """Gradient from combine: zero for padding, undefined (NaN) after the last group."""
        end = sum(self.sizes(alignment))
        probe_RD = torch.zeros(end + self.tail, dim)
        places = torch.cat(self.valid(alignment))
        probe_RD[places] = torch.randn(len(places), dim, generator=torch.Generator().manual_seed(self.seed + 1))
        probe_RD[end:] = torch.nan
        return probe_RD.to(dtype)


def rows(experts: int, *, padded: bool = False, tail: bool = False) -> st.SearchStrategy[GemmCase]:
    """Strategy for rows, with experts that have none, one or all of them."""
    some = st.lists(st.sampled_from([0, 0, 1, 2, 3, 7]), min_size=experts, max_size=experts)

    def of_one_expert(chosen: int, count: int) -> list[int]:
        return [count if expert == chosen else 0 for expert in range(experts)]

    all_in_one = st.builds(of_one_expert, st.integers(0, experts - 1), st.integers(0, 9))
    padding = st.tuples(*[st.integers(0, 4)] * experts)
    return st.builds(
        GemmCase,
        counts=(some | all_in_one).map(tuple),
        padding=padding if padded else st.just(()),
        tail=st.integers(1, 5) if tail else st.just(0),
        seed=st.integers(0, 10**6),
    )


def computed(experts: Any, batch: ExpertBatch, probe_RD: Tensor) -> Results:
    """Experts' output and all gradients by name; missing ones are zero."""
    (phase,) = drops((Phase(experts.__call__),))
    out_RD: Tensor = phase(batch)
    return {"out": out_RD.detach(), **backward(experts, batch, out_RD, probe_RD)}


def backward(experts: Any, batch: ExpertBatch, out_RD: Tensor, probe_RD: Tensor) -> Results:
    """All gradients by name; missing ones are zero."""
    variables = _variables(experts, batch)
    grads = torch.autograd.grad(out_RD, variables, probe_RD.to(out_RD.dtype), allow_unused=True)
    return _by_name(experts, variables, grads)


def computed_late(experts: Any, batch: ExpertBatch, probe_RD: Tensor) -> Results:
    """Output and gradients, those of weights computed after those of the inputs."""
    later = Wgrads()
    variables = _variables(experts, batch)
    with forward_with(wgrads=later):
        out_RD: Tensor = experts(batch)
    torch.autograd.backward(out_RD, probe_RD.to(out_RD.dtype))
    later.run()
    results = {"out": out_RD.detach(), **_by_name(experts, variables, [variable.grad for variable in variables])}
    for variable in variables:
        variable.grad = None
    return results


def computed_in_step(experts: Any, inputs: Sequence[tuple[ExpertBatch, Tensor]]) -> Results:
    """Sums of the parameters' gradients over batches that are the micro-batches of one step."""
    with shared_by_micro_batches(experts.parameters()):
        for batch, probe_RD in inputs:
            out_RD: Tensor = experts(batch)
            torch.autograd.backward(out_RD, probe_RD.to(out_RD.dtype))
    last_batch, _ = inputs[-1]
    variables = _variables(experts, last_batch)
    results = _by_name(experts, variables, [variable.grad for variable in variables])
    for variable in variables:
        variable.grad = None
    return {name: grad for name, grad in results.items() if name not in ("rows", "row_weights")}


@torch.no_grad()
def round_to_bf16(experts: Any) -> None:
    """Give each parameter values that bf16 holds, as weights of a folder have."""
    for parameter in experts.parameters():
        parameter.copy_(parameter.bfloat16())


def freeze(experts: Any) -> None:
    """Replace each parameter by a frozen one in bf16."""
    for module in experts.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            module.register_parameter(name, nn.Parameter(parameter.detach().bfloat16(), requires_grad=False))


def computed_frozen(experts: Any, batch: ExpertBatch, probe_RD: Tensor) -> dict[str, Results]:
    """Output and gradients of rows and their weights, by the way in which experts whose weights are frozen are run."""
    variables = [batch.rows_RD, batch.row_weights_R]
    later = Wgrads()
    ways: dict[str, AbstractContextManager[object]] = {
        "alone": nullcontext(),
        "in a step": shared_by_micro_batches(experts.parameters()),
        "with weight gradients left for later": forward_with(wgrads=later),
    }
    results = {}
    for way, context in ways.items():
        with context:
            out_RD: Tensor = experts(batch)
            grads = torch.autograd.grad(out_RD, variables, probe_RD.to(out_RD.dtype))
        later.run()
        results[way] = {"out": out_RD.detach(), "rows": grads[0], "row_weights": grads[1]}
    return results


def _variables(experts: Any, batch: ExpertBatch) -> list[Tensor]:
    """Tensors that get gradients: rows, their weights, and the parameters."""
    return [batch.rows_RD, batch.row_weights_R, *experts.parameters()]


def _by_name(experts: Any, variables: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Results:
    """Gradients of :func:`_variables` by name, those of parameters by canonical name."""
    pieces: list[Canonical] = list(experts.canonical())
    filled = [torch.zeros_like(v) if g is None else g for v, g in zip(variables, grads, strict=True)]
    by_parameter = {id(variable): grad for variable, grad in zip(variables, filled, strict=True)}
    by_name = {piece.name: whole_piece(piece, piece.of(by_parameter[id(piece.parameter)])) for piece in pieces}
    return {"rows": filled[0], "row_weights": filled[1], **by_name}


def parameters_of(experts: Any) -> Results:
    """Copy of each parameter by canonical name, zero where this rank has no part of it."""
    return {piece.name: whole_piece(piece, piece.of(piece.parameter.detach())).clone() for piece in experts.canonical()}


def dense(
    weights: Mapping[str, Tensor],
    case: GemmCase,
    batch: ExpertBatch,
    probe_RD: Tensor,
    alignment: int,
    clamp: tuple[float, float] | None = None,
) -> Results:
    """Output of each valid row's expert times the row's weight in fp64, zero elsewhere, and its gradients.

    See :func:`moefw.testing.oracle.expert_output`.
    """
    leaves = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    rows_RD = batch.rows_RD.detach().double().nan_to_num(0.0).requires_grad_()
    weights_R = batch.row_weights_R.detach().double().nan_to_num(0.0).requires_grad_()
    out_RD = torch.zeros_like(rows_RD)
    for expert, places in enumerate(case.valid(alignment)):
        out = expert_output(rows_RD[places], leaves, f"{expert}.", clamp)
        out_RD = out_RD.index_add(0, places, weights_R[places].unsqueeze(1) * out)
    variables = {"rows": rows_RD, "row_weights": weights_R, **leaves}
    grads = torch.autograd.grad(out_RD, list(variables.values()), probe_RD.double().nan_to_num(0.0), allow_unused=True)
    named = zip(variables.items(), grads, strict=True)
    filled = {name: torch.zeros_like(value) if grad is None else grad for (name, value), grad in named}
    return {"out": out_RD.detach(), **filled}


def terms_of_row_weights(expected: Results, batch: ExpertBatch, probe_RD: Tensor) -> float:
    """Size of the terms that add up to the gradient of a row's weight, as they may nearly cancel.

    The gradient is the product of the probe with the row before it is weighted; by Cauchy and Schwarz, the product of
    their norms bounds it.
    """
    out_RD = expected["out"]
    probe_RD = probe_RD.double()[: len(out_RD)]
    sizes_R = probe_RD.norm(dim=1) * _unweighted(out_RD, batch).norm(dim=1)
    return sizes_R.nan_to_num(0.0).max().item() if len(sizes_R) else 0.0


def _unweighted(out_RD: Tensor, batch: ExpertBatch) -> Tensor:
    """Outputs of rows divided by the rows' weights; 0 where those are 0."""
    weights_R1 = batch.row_weights_R.detach().double()[: len(out_RD)].unsqueeze(1)
    return torch.where(weights_R1 > 0, out_RD / weights_R1, 0.0)


def shapes_of(experts: Iterable[int], dim: int, expert_dim: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of experts by canonical name."""
    sizes = {"gate": (expert_dim, dim), "up": (expert_dim, dim), "down": (dim, expert_dim)}
    shapes: dict[str, tuple[int, ...]] = {}
    for expert, (part, size) in itertools.product(experts, sizes.items()):
        shapes[f"{expert}.{part}_proj.weight"] = size
        if bias:
            shapes[f"{expert}.{part}_proj.bias"] = size[:1]
    return shapes


@frozen(eq=False)
class Named:
    """Canonical names on a rank: whole shapes by name, repeated names, the rank's experts."""

    shapes: dict[str, tuple[int, ...]]
    twice: tuple[str, ...]
    experts: tuple[int, ...]
    uncovered: tuple[str, ...]
    """Parameters with a value that has no name, or more than one."""


def named_on_this_rank(layer_case: LayerCase) -> Named:
    """Build the experts of a layer case and return their canonical names."""
    context, assembly = open_context(layer_case)
    experts: Any = assembly.parts.gemm.build(context)
    # Each name adds 1 to the values that it covers, in a tensor beside the parameter.
    marks = {id(parameter): torch.zeros_like(parameter) for parameter in experts.parameters()}
    shapes: dict[str, tuple[int, ...]] = {}
    twice = []
    for piece in experts.canonical():
        part = piece.of(piece.parameter)
        if piece.name in shapes:
            twice.append(piece.name)
        shapes[piece.name] = piece.shard.whole(part.shape) if piece.shard else tuple(part.shape)
        if id(piece.parameter) in marks:
            piece.of(marks[id(piece.parameter)]).add_(1.0)
    uncovered = [name for name, parameter in experts.named_parameters() if (marks[id(parameter)] != 1.0).any()]
    return Named(shapes, tuple(twice), tuple(context.local_experts), tuple(uncovered))


def experts_of(layer_case: LayerCase) -> tuple[Any, Assembly]:
    """Build the experts of a layer case on this rank, with random parameters."""
    context, assembly = open_context(layer_case)
    experts: Any = assembly.parts.gemm.build(context)
    if isinstance(experts, nn.Module):
        initialise(experts, seed=0, std=lambda _: 0.3)
        draw_adapters(experts, seed=0)
    return experts, assembly


def computed_on_this_rank(layer_case: LayerCase, case: GemmCase) -> Results:
    """Build the experts of a layer case and compute with this rank's parts of them."""
    experts, assembly = experts_of(layer_case)
    alignment = row_alignment(assembly)
    dtype = assembly.parts.precision.build(open_context(layer_case)[0]).residual_dtype
    batch = case.batch(layer_case.dim, dtype, alignment=alignment)
    probe_RD = case.probe(layer_case.dim, dtype, alignment=alignment)
    return computed(experts, batch, probe_RD)


def diagnosis(
    weights: Results,
    case: GemmCase,
    batch: ExpertBatch,
    probe: Tensor,
    alignment: int,
    clamp: tuple[float, float] | None,
    out_RD: Tensor,
    rtol: float,
) -> str:
    """Possible cause of a wrong output; empty if none is known."""
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    swapped = {}
    for name, weight in weights.items():
        expert, projection, kind = name.split(".")
        swapped[f"{expert}.{swap.get(projection, projection)}.{kind}"] = weight
    out_swapped_RD = dense(swapped, case, batch, probe, alignment, clamp)["out"][: len(out_RD)]
    if worst_error(out_RD, out_swapped_RD) <= rtol:
        return "It fits if canonical() has gate_proj and up_proj the wrong way round."
    expected_RD = dense(weights, case, batch, probe, alignment, clamp)["out"][: len(out_RD)]
    if worst_error(out_RD, _unweighted(expected_RD, batch)) <= rtol:
        return "It fits if the row weights are left out."
    return ""


def saved_bytes(experts: Any, batch: ExpertBatch) -> int:
    """Bytes that a forward in a layer saves for backward, without parameters and input rows."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*experts.parameters(), batch.rows_RD)}
    sizes: dict[int, int] = {}
    alive = []  # else the address of a tensor that is freed might be that of a later one

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and output_of(tensor) is None:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with (
        forward_with(outputs=WeakValueDictionary()),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        experts(batch)
    return sum(sizes.values())


def differing(first: Results, second: Results) -> str:
    """Names of the tensors that differ in a bit."""
    return ", ".join(key for key, value in first.items() if not same_bits(value, second[key]))
