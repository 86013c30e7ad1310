"""What a loop over experts takes. Shapes: legend in :mod:`moefw.core.stages`; H = 2F."""

from __future__ import annotations

from collections.abc import Iterator

from moefw.ledger.parts import PartMemory, RankShape, Region, Tensor, Weight

EXPERTS = "moe.experts"


def memory(shape: RankShape) -> PartMemory:
    """Return the weights of each expert, and a call of each region for each expert.

    Autograd saves gate and up joined, the rows, and of ``w * silu(g) * u`` every factor; a recipe with operands by pass
    saves H alone of it.
    """
    dims, e = shape.dims, shape.local_experts
    d, f, b = dims.model_dim, dims.expert_dim // shape.etp, shape.formats_of(EXPERTS).stream
    into = Weight(shape=(f, d), unit="experts", side="experts")
    out_of = Weight(shape=(d, f), unit="experts", side="experts")
    regions = tuple(region for expert in range(e) for region in _expert(shape, expert))
    outputs = Region(name="experts", forward_bytes=2 * shape.rows * d * b, backward_bytes=shape.rows * d * b)
    weights, state = (into,) * 2 * e + (out_of,) * e, 2 * e * shape.formats_of(EXPERTS).state
    return PartMemory(weights=weights, buffers=state, regions=(*regions, outputs))


def _expert(shape: RankShape, expert: int) -> Iterator[Region]:
    dims, formats = shape.dims, shape.formats_of(EXPERTS)
    d, f, n, b = dims.model_dim, dims.expert_dim // shape.etp, shape.group_rows, formats.stream
    rows, row_weights, _ = shape.rows_given()
    h = Tensor(name=f"pre-activation of {expert}", nbytes=n * 2 * f * b)
    a = Tensor(name=f"activation of {expert}", nbytes=n * f * b)
    joined = Tensor(name=f"gate and up of {expert}", nbytes=2 * f * d * formats.gathered, weights=True)
    grads = (shape.rows + 2 * n) * d * b
    yield Region(
        name="expert_fc1",
        given=(rows, *shape.keys_given()),
        returns=(h.name,),
        saves=(*_input(shape, f"gate_up of {expert}", rows, n, d), *shape.keys_given(), joined),
        forward_bytes=(expert + 1) * n * d * b,
        backward_bytes=grads + n * 2 * f * b + 2 * f * d * b,
        weight_elements=2 * f * d,
    )
    yield Region(
        name="moe_act",
        given=(h, row_weights),
        returns=(a.name,),
        saves=_factors(shape, expert, h, row_weights),
        forward_bytes=(expert + 1) * n * d * b,
        backward_bytes=grads + 4 * n * f * b,
    )
    yield Region(
        name="expert_fc2",
        given=(a, *shape.keys_given()),
        saves=(
            *_input(shape, "down", a, n, f),
            *shape.keys_given(),
            *shape.weight_copy(f"down of {expert}", f * d, EXPERTS, "experts"),
        ),
        forward_bytes=(expert + 1) * n * d * b,
        backward_bytes=grads + n * f * b + f * d * b,
        weight_elements=f * d,
    )


def _input(shape: RankShape, reader: str, x: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    """Return what a GEMM saves of an input: its codes, one expert's, or the whole tensor that it lies in."""
    return shape.formats_of(EXPERTS).kept_input(reader, x, rows, columns)


def _factors(shape: RankShape, expert: int, h: Tensor, row_weights: Tensor) -> tuple[Tensor, ...]:
    formats, n, f = shape.formats_of(EXPERTS), shape.group_rows, shape.dims.expert_dim // shape.etp
    if formats.inputs is not None:
        return (row_weights, *formats.kept_activation(h, n, 2 * f))
    factors = (Tensor(name=f"{name} of {expert}", nbytes=n * f * formats.stream) for name in ("silu", "product"))
    weights = row_weights
    if formats.stream < 4:
        weights = Tensor(name=f"row weights of {expert}", nbytes=n * formats.stream)
    return (h, *factors, weights)
