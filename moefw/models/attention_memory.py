"""What attention takes on one rank of tp: its regions and weights."""

from __future__ import annotations

from attrs import frozen

from moefw.ledger.parts import FP32, RankShape, Region, Tensor, Weight
from moefw.models.sizes import Sizes

ATTENTION = "attention"


@frozen
class Heads:
    """Heads of one rank: queries, the keys that they need, and those that attention gets.

    ``split``: whether tp divides the key-value heads; if not, each rank holds the weights of all.
    """

    queries: int
    keys: int
    attended: int
    split: bool

    @staticmethod
    def of(options: Sizes, tp: int) -> Heads:
        """Return those of the first rank."""
        queries = options.num_heads // tp
        needed = [head * options.num_kv_heads // options.num_heads for head in range(queries)]
        keys = needed[-1] + 1
        even = queries % keys == 0 and needed == [head * keys // queries for head in range(queries)]
        return Heads(queries, keys, keys if even else queries, options.num_kv_heads % tp == 0)


def attention(options: Sizes, shape: RankShape, *, first: bool) -> tuple[Region, list[Weight]]:
    """Return the region ``attention`` and its weights. In the ``first`` layer, RoPE's table is counted.

    ``qkv`` saves what the projections read; with norms of queries and keys these and a scale for each head; cosines and
    sines as it casts them. ``core_attn``: queries, keys, values, its result, and the fp32 log-sum-exp of each row.
    """
    formats, heads, d = shape.formats_of(ATTENTION), Heads.of(options, shape.tp), options.head_dim
    g, b = shape.all_tokens, formats.stream
    x = Tensor(name="attention x" if shape.tp == 1 else "gathered attention x", nbytes=g * options.dim * b)
    given = Tensor(name="attention x", nbytes=shape.tokens * options.dim * b)
    q, k, v = _heads(g * d * b, heads)
    out = Tensor(name="attention out", nbytes=q.nbytes)
    reads = formats.kept_inputs([f"{name}_proj" for name in "qkv"], x, g, options.dim)
    sizes = {"q_proj": heads.queries * d, "k_proj": heads.keys * d, "v_proj": heads.keys * d}
    copies = tuple(
        copy for name, size in sizes.items() for copy in shape.weight_copy(name, size * options.dim, ATTENTION)
    )
    table = _table(options, shape) if first else ()
    qkv = Region(
        name="qkv",
        given=(given, *table),
        returns=(q.name, k.name, v.name),
        saves=(*reads, *copies, *_normed(options, g, heads, b), *_rope(options, shape, b, first=first)),
        forward_bytes=q.nbytes * 2 + k.nbytes,
        backward_bytes=3 * x.nbytes + q.nbytes,
    )
    sums = Tensor(name="log-sum-exp", nbytes=g * heads.queries * FP32)
    core = Region(
        name="core_attn",
        given=(q, k, v),
        returns=(out.name,),
        saves=(q, k, v, out, sums),
        backward_bytes=3 * q.nbytes + 2 * k.nbytes,
    )
    width = heads.queries * d
    proj = Region(
        name="attn_proj",
        given=(out,),
        saves=(
            *formats.kept_input("o_proj", out, g, width),
            *shape.weight_copy("o_proj", width * options.dim, ATTENTION),
        ),
        forward_bytes=x.nbytes + given.nbytes,
        backward_bytes=x.nbytes + q.nbytes,
    )
    return Region(name=ATTENTION, given=(given, *table), inside=(qkv, core, proj), unit=ATTENTION), _weights(
        options, shape, heads
    )


def _heads(each: int, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    sizes = {"queries": heads.queries, "keys": heads.attended, "values": heads.attended}
    q, k, v = (Tensor(name=name, nbytes=each * count) for name, count in sizes.items())
    return q, k, v


def _normed(options: Sizes, tokens: int, heads: Heads, b: int) -> tuple[Tensor, ...]:
    if not options.qk_norm:
        return ()
    counts = {"queries": heads.queries, "keys": heads.keys}
    sizes = {
        f"{what} of {name}": tokens * count * size
        for name, count in counts.items()
        for what, size in (("norm input", options.head_dim * b), ("scales", FP32))
    }
    return tuple(Tensor(name=name, nbytes=nbytes) for name, nbytes in sizes.items())


def _table(options: Sizes, shape: RankShape) -> tuple[Tensor, ...]:
    """Return cosines and sines in fp32, which all layers share."""
    each = shape.seq_len * (options.head_dim // 2) * FP32
    return tuple(Tensor(name=name, nbytes=each) for name in ("cosines", "sines"))


def _rope(options: Sizes, shape: RankShape, b: int, *, first: bool) -> tuple[Tensor, ...]:
    """Return what queries and keys are turned by: the table, or a copy of it for each of both."""
    if b == FP32:
        return _table(options, shape) if first else ()
    names = (f"{part} for {of}" for of in ("queries", "keys") for part in ("cosines", "sines"))
    return tuple(Tensor(name=name, nbytes=shape.seq_len * (options.head_dim // 2) * b) for name in names)


def _weights(options: Sizes, shape: RankShape, heads: Heads) -> list[Weight]:
    keys = options.num_kv_heads // shape.tp if heads.split else options.num_kv_heads
    rows = (heads.queries * options.head_dim, keys * options.head_dim, keys * options.head_dim)
    split = (True, heads.split, heads.split)
    into = [Weight(shape=(size, options.dim), unit=ATTENTION, split=one) for size, one in zip(rows, split, strict=True)]
    norms = [Weight(shape=(options.head_dim,), unit=ATTENTION)] * (2 if options.qk_norm else 0)
    out_of = Weight(shape=(options.dim, heads.queries * options.head_dim), unit=ATTENTION, split=True)
    return [*into, out_of, *norms]
