"""What the transformer takes: its layers region by region, and the vocabulary around them.

Shapes: T own tokens, G those of all ranks of tp, D model dim, V vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from moefw.ledger.parts import (
    FP32,
    INT64,
    LayerMemory,
    ModelMemory,
    PartMemory,
    PeakCandidate,
    RankShape,
    Region,
    Tensor,
    Weight,
)
from moefw.models.attention_memory import ATTENTION, attention
from moefw.models.mlp_memory import mlp
from moefw.models.sizes import Sizes


def model_memory(options: Sizes, shape: RankShape, moe: Mapping[int, Sequence[PartMemory]]) -> ModelMemory:
    """Return all layers and what lies outside of them."""

    @cache
    def layer(kind: str, first: bool, number: int) -> LayerMemory:
        return _layer(options, shape.at(number), moe.get(number), kind=kind, first=first)

    numbers = range(options.num_layers)
    alike = _alike(shape, moe, options.num_layers)
    layers = tuple(layer("moe" if n in moe else "dense", n == 0, alike[n]) for n in numbers)
    stream, norms = _stream(options, shape), Weight(shape=(options.dim,), unit="root")
    sizes, unit = (options.vocab_size // shape.tp, options.dim), "root" if options.tie_embeddings else "embed"
    table = Weight(shape=sizes, unit=unit, split=True)
    head = () if options.tie_embeddings else (Weight(shape=sizes, unit="head", split=True),)
    return ModelMemory(
        layers=layers,
        weights=(norms, table, *head),
        saves=_outside(options, shape, table.elements),
        peak_candidates=_peak_candidates(options, shape),
        last_peak_candidate=_last(shape, stream, table),
        stream_bytes=stream,
    )


def _alike(shape: RankShape, moe: Mapping[int, Sequence[PartMemory]], num_layers: int) -> list[int]:
    """Return for each layer the number of the first one that is like it, but for being the first of the model."""
    seen: dict[tuple[object, ...], int] = {}
    modules = ("attention", "mlp", "moe.experts", "moe.shared_expert")
    found = []
    for number in range(num_layers):
        formats = tuple(shape.at(number).formats_of(module) for module in modules)
        found.append(seen.setdefault((number in moe, formats), number))
    return found


def _layer(
    options: Sizes, shape: RankShape, moe: Sequence[PartMemory] | None, *, kind: str, first: bool
) -> LayerMemory:
    stream = _stream(options, shape)
    entering, between = (Tensor(name=name, nbytes=stream) for name in ("stream in", "stream between"))
    scale = shape.tokens * FP32
    x = shape.tokens_given()
    attn, attn_weights = attention(options, shape, first=first)
    norm = Weight(shape=(options.dim,), unit="root")
    inside = [_norm("attn_norm", entering, scale, "attention x"), attn, _norm("mlp_norm", between, scale, x.name)]
    weights, states = [norm, norm, *attn_weights], 4 * shape.formats_of(ATTENTION).state
    if moe is None:
        region, own = mlp("dense_mlp", options.dense_dim, options, shape, module="mlp", unit="mlp")
        inside.append(region)
        weights += own
        states += 3 * shape.formats_of("mlp").state
    else:
        shared: tuple[Region, ...] = ()
        if options.shared_expert_dim:
            size, unit = options.shared_expert_dim, "shared"
            region, own = mlp("shared_experts", size, options, shape, module="moe.shared_expert", unit=unit)
            shared = (region,)
            weights += own
            states += 3 * shape.formats_of("moe.shared_expert").state
        inside += _moe(shape, moe, shared)
        weights += [weight for part in moe for weight in part.weights]
        states += sum(part.buffers for part in moe)
    region = Region(name="layer", given=(entering, *attn.given[1:]), inside=tuple(inside))
    return LayerMemory(kind=kind, region=region, weights=tuple(weights), buffers=states)


def _moe(shape: RankShape, parts: Sequence[PartMemory], shared: tuple[Region, ...]) -> list[Region]:
    """Return router, dispatch, shared expert, experts and combine in the order in which they run."""
    router, dispatcher, gemm = parts
    dispatch, combine = dispatcher.regions[:1], dispatcher.regions[1:]
    given = (*shape.rows_given(), *shape.keys_given())
    experts = Region(name="experts", given=given, inside=gemm.regions, unit="experts")
    return [*router.regions, *shared, *dispatch, experts, *combine]


def _stream(options: Sizes, shape: RankShape) -> int:
    return shape.tokens * options.dim * shape.formats_of("head").stream


def _norm(name: str, x: Tensor, scale: int, returns: str) -> Region:
    """RMSNorm saves its input and 1 / rms of each token."""
    saves = (x, Tensor(name=f"{name} scale", nbytes=scale))
    return Region(
        name=name, given=(x,), returns=(returns,), saves=saves, forward_bytes=x.nbytes, backward_bytes=4 * x.nbytes
    )


def _outside(options: Sizes, shape: RankShape, vocabulary_elements: int) -> tuple[Tensor, ...]:
    """What embedding, final norm, head and loss save."""
    tokens, vocabulary = shape.all_tokens, options.vocab_size // shape.tp
    formats, stream = shape.formats_of("head"), _stream(options, shape)
    saves = {
        "stream out": stream,
        "final norm scale": shape.tokens * FP32,
        "head x": tokens * options.dim * formats.stream,
        "log softmax": tokens * vocabulary * FP32,
        "tokens, loss and its weight": INT64 + 2 * FP32,
    }
    if _draws(options, shape):
        saves["keys of tokens"] = tokens * INT64
    if shape.tp > 1:
        saves["ids and labels here, and masks"] = tokens * (2 * INT64 + 3)
        saves["tokens, loss and its weight"] = INT64 + FP32
    copies = shape.weight_copy("head", vocabulary_elements, "head")
    if options.tie_embeddings and formats.copy:
        copies = (Tensor(name="copy of head", nbytes=vocabulary_elements * formats.copy, weights=True),)
    return (*(Tensor(name=name, nbytes=nbytes) for name, nbytes in saves.items()), *copies)


def _draws(options: Sizes, shape: RankShape) -> bool:
    """Return whether backward of a GEMM on tokens draws from their keys."""
    modules = (ATTENTION, "mlp", "moe.shared_expert")
    return any(shape.at(number).formats_of(module).keyed for number in range(options.num_layers) for module in modules)


def _last(shape: RankShape, stream: int, table: Weight) -> PeakCandidate:
    """The embedding's gradient, whole, beside the fp32 gradient of what it returned for all tokens."""
    gradient = shape.all_tokens * table.shape[1] * FP32
    return PeakCandidate(
        name="backward of the embedding", passing=table.elements * FP32 + gradient + stream, gathered=("embed",)
    )


def _peak_candidates(options: Sizes, shape: RankShape) -> tuple[PeakCandidate, ...]:
    """The loss: forward holds logits, and fp32 ones beside; backward two fp32 gradients, with tp one and a cast one."""
    formats = shape.formats_of("head")
    logits = shape.all_tokens * options.vocab_size // shape.tp
    cast = formats.stream if formats.stream < FP32 else 0
    second = FP32 if shape.tp == 1 else cast
    table = options.vocab_size // shape.tp * options.dim
    computed = formats.gathered if shape.shards["dense"] > 1 or formats.copy == 0 else formats.copy + FP32
    head = logits * formats.stream + table * computed + 2 * shape.all_tokens * options.dim * formats.stream
    units = ("head",)
    return (
        PeakCandidate(name="forward of the loss", passing=logits * (FP32 + cast), gathered=units),
        PeakCandidate(name="backward of the loss", passing=logits * (FP32 + second), gathered=units),
        PeakCandidate(name="backward of the head", passing=head - logits * FP32, gathered=units),
    )
