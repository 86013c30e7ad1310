"""What the transformer takes: its layers region by region, and the vocabulary around them.

Shapes: T own tokens, G those of all ranks of tp, D model dim, V vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from moefw.ledger.parts import (
    FP32,
    INT64,
    Extent,
    LayerMemory,
    ModelMemory,
    Moment,
    PartMemory,
    Region,
    Tensor,
    Weight,
)
from moefw.models.attention_memory import ATTENTION, attention
from moefw.models.mlp_memory import mlp
from moefw.models.sizes import Sizes


def model_memory(options: Sizes, extent: Extent, moe: Mapping[int, Sequence[PartMemory]]) -> ModelMemory:
    """Return all layers and what lies outside of them."""

    @cache
    def layer(kind: str, first: bool, number: int) -> LayerMemory:
        return _layer(options, extent.at(number), moe.get(number), kind=kind, first=first)

    numbers = range(options.num_layers)
    alike = _alike(extent, moe, options.num_layers)
    layers = tuple(layer("moe" if n in moe else "dense", n == 0, alike[n]) for n in numbers)
    stream, norms = _stream(options, extent), Weight(shape=(options.dim,), unit="root")
    shape, unit = (options.vocab_size // extent.tp, options.dim), "root" if options.tie_embeddings else "embed"
    table = Weight(shape=shape, unit=unit, split=True)
    head = () if options.tie_embeddings else (Weight(shape=shape, unit="head", split=True),)
    return ModelMemory(
        layers=layers,
        weights=(norms, table, *head),
        saves=_outside(options, extent, table.elements),
        moments=_moments(options, extent),
        last_moment=_last(extent, stream, table),
        stream_bytes=stream,
    )


def _alike(extent: Extent, moe: Mapping[int, Sequence[PartMemory]], num_layers: int) -> list[int]:
    """Return for each layer the number of the first one that is like it, but for being the first of the model."""
    seen: dict[tuple[object, ...], int] = {}
    modules = ("attention", "mlp", "moe.experts", "moe.shared_expert")
    found = []
    for number in range(num_layers):
        formats = tuple(extent.at(number).formats_of(module) for module in modules)
        found.append(seen.setdefault((number in moe, formats), number))
    return found


def _layer(options: Sizes, extent: Extent, moe: Sequence[PartMemory] | None, *, kind: str, first: bool) -> LayerMemory:
    stream = _stream(options, extent)
    entering, between = (Tensor(name=name, nbytes=stream) for name in ("stream in", "stream between"))
    scale = extent.tokens * FP32
    x = extent.tokens_given()
    attn, attn_weights = attention(options, extent, first=first)
    norm = Weight(shape=(options.dim,), unit="root")
    inside = [_norm("attn_norm", entering, scale, "attention x"), attn, _norm("mlp_norm", between, scale, x.name)]
    weights, states = [norm, norm, *attn_weights], 4 * extent.formats_of(ATTENTION).state
    if moe is None:
        region, own = mlp("dense_mlp", options.dense_dim, options, extent, module="mlp", unit="mlp")
        inside.append(region)
        weights += own
        states += 3 * extent.formats_of("mlp").state
    else:
        shared: tuple[Region, ...] = ()
        if options.shared_expert_dim:
            size, unit = options.shared_expert_dim, "shared"
            region, own = mlp("shared_experts", size, options, extent, module="moe.shared_expert", unit=unit)
            shared = (region,)
            weights += own
            states += 3 * extent.formats_of("moe.shared_expert").state
        inside += _moe(extent, moe, shared)
        weights += [weight for part in moe for weight in part.weights]
        states += sum(part.buffers for part in moe)
    region = Region(name="layer", given=(entering, *attn.given[1:]), inside=tuple(inside))
    return LayerMemory(kind=kind, region=region, weights=tuple(weights), buffers=states)


def _moe(extent: Extent, parts: Sequence[PartMemory], shared: tuple[Region, ...]) -> list[Region]:
    """Return router, dispatch, shared expert, experts and combine in the order in which they run."""
    router, dispatcher, gemm = parts
    dispatch, combine = dispatcher.regions[:1], dispatcher.regions[1:]
    given = (*extent.rows_given(), *extent.keys_given())
    experts = Region(name="experts", given=given, inside=gemm.regions, unit="experts")
    return [*router.regions, *shared, *dispatch, experts, *combine]


def _stream(options: Sizes, extent: Extent) -> int:
    return extent.tokens * options.dim * extent.formats_of("head").stream


def _norm(name: str, x: Tensor, scale: int, returns: str) -> Region:
    """RMSNorm saves its input and 1 / rms of each token."""
    saves = (x, Tensor(name=f"{name} scale", nbytes=scale))
    return Region(
        name=name, given=(x,), returns=(returns,), saves=saves, forward_bytes=x.nbytes, backward_bytes=4 * x.nbytes
    )


def _outside(options: Sizes, extent: Extent, vocabulary_elements: int) -> tuple[Tensor, ...]:
    """What embedding, final norm, head and loss save."""
    tokens, vocabulary = extent.all_tokens, options.vocab_size // extent.tp
    formats, stream = extent.formats_of("head"), _stream(options, extent)
    saves = {
        "stream out": stream,
        "final norm scale": extent.tokens * FP32,
        "head x": tokens * options.dim * formats.stream,
        "log softmax": tokens * vocabulary * FP32,
        "tokens, loss and its weight": INT64 + 2 * FP32,
    }
    if _draws(options, extent):
        saves["keys of tokens"] = tokens * INT64
    if extent.tp > 1:
        saves["ids and labels here, and masks"] = tokens * (2 * INT64 + 3)
        saves["tokens, loss and its weight"] = INT64 + FP32
    copies = extent.weight_copy("head", vocabulary_elements, "head")
    if options.tie_embeddings and formats.copy:
        copies = (Tensor(name="copy of head", nbytes=vocabulary_elements * formats.copy, weights=True),)
    return (*(Tensor(name=name, nbytes=nbytes) for name, nbytes in saves.items()), *copies)


def _draws(options: Sizes, extent: Extent) -> bool:
    """Return whether backward of a GEMM on tokens draws from their keys."""
    modules = (ATTENTION, "mlp", "moe.shared_expert")
    return any(extent.at(number).formats_of(module).keyed for number in range(options.num_layers) for module in modules)


def _last(extent: Extent, stream: int, table: Weight) -> Moment:
    """The embedding's gradient, whole, beside the fp32 gradient of what it returned for all tokens."""
    gradient = extent.all_tokens * table.shape[1] * FP32
    return Moment(
        name="backward of the embedding", passing=table.elements * FP32 + gradient + stream, gathered=("embed",)
    )


def _moments(options: Sizes, extent: Extent) -> tuple[Moment, ...]:
    """The loss: forward holds logits, and fp32 ones beside; backward two fp32 gradients, with tp one and a cast one."""
    formats = extent.formats_of("head")
    logits = extent.all_tokens * options.vocab_size // extent.tp
    cast = formats.stream if formats.stream < FP32 else 0
    second = FP32 if extent.tp == 1 else cast
    table = options.vocab_size // extent.tp * options.dim
    computed = formats.gathered if extent.shards["dense"] > 1 or formats.copy == 0 else formats.copy + FP32
    head = logits * formats.stream + table * computed + 2 * extent.all_tokens * options.dim * formats.stream
    units = ("head",)
    return (
        Moment(name="forward of the loss", passing=logits * (FP32 + cast), gathered=units),
        Moment(name="backward of the loss", passing=logits * (FP32 + second), gathered=units),
        Moment(name="backward of the head", passing=head - logits * FP32, gathered=units),
    )
