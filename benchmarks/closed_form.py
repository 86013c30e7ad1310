"""The work of a published row in closed form, as the planner measures it, for many rows in a second.

A row has no spec, and measuring its layout takes seconds. So the products of a layer are written down here from its
model's sizes, which are those of a preset or of a Hugging Face ``config.json``; a test holds them to the planner's.
Transfers of tensors, the update and the sums of gradients are those of Megatron's distributed optimizer. Dispatchers
need no transfers here: :mod:`moefw.planner.time.costs` has their volumes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from attrs import evolve, field, frozen

from moefw.models.huggingface.families import sections_of
from moefw.models.presets import preset_sections
from moefw.planner.cluster import Cluster
from moefw.planner.report import AGAIN, OnHost, Position, Product, Transfer, Updated, Work, model_flops
from moefw.planner.time.nodes import ALL_GATHER, REDUCE_SCATTER, Nodes

BF16: Final = 2
FP32: Final = 4
MOMENTS_BYTES: Final = 2 * FP32
"""Bytes of the moments of a parameter."""
STATES_BYTES: Final = FP32 + MOMENTS_BYTES
"""Bytes of the states of a parameter that wait on a host: of its master, too."""
SHARDED_WEIGHTS: Final = 3
"""The stage of ZeRO that shards weights."""


@frozen(kw_only=True)
class Layout:
    """Layout of a row. ``expert_tp``: ranks that share an expert.

    ``zero``: 1, or 3 where weights are sharded, too, and gathered in each micro-batch.
    """

    gpus: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    chunks: int = 1
    ep: int = 1
    expert_tp: int = 1
    zero: int = 1
    node_gpus: int = 8

    @property
    def dp(self) -> int:
        """Copies of a pipeline."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def dense_dp(self) -> int:
        """Copies of weights outside of experts."""
        return self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Copies of an expert."""
        return max(1, self.gpus // (self.pp * self.ep * self.expert_tp))


@frozen(kw_only=True)
class Sizes:
    """Sizes of a model. ``attention``: options of its attention. ``mtp``: layers that predict one token more."""

    dim: int
    vocab: int
    layers: int
    dense_layers: int
    dense_dim: int
    experts: int
    top_k: int
    expert_dim: int
    shared_dim: int
    groups: int
    top_groups: int
    mtp: int
    attention: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, model: str, *, layers: int | None = None, mtp: int = 0) -> Sizes:
        """Sizes of a preset, or of the ``config.json`` at a path. ``layers``: as many, in place of its own number,
        one of them dense: as SimuMax measures four layers of DeepSeek-V3, by their memory.
        """
        found = _sections(model)
        options = found["model"]
        groups = found.get("routing", {}).get("groups") or {}
        dense = options.get("num_dense_layers", 0)
        return cls(
            dim=options["dim"],
            vocab=options["vocab_size"],
            layers=layers or options["num_layers"],
            dense_layers=min(dense, 1) if layers else dense,
            dense_dim=options.get("dense_dim", 0),
            experts=options["num_experts"],
            top_k=options["top_k"],
            expert_dim=options["expert_dim"],
            shared_dim=options.get("shared_expert_dim", 0),
            groups=groups.get("count", 1),
            top_groups=groups.get("keep", 1),
            mtp=mtp,
            attention=found["attention"],
        )

    @property
    def attention_weights(self) -> int:
        """Elements of the matrices of an attention."""
        return sum(columns * summed for _, columns, summed, _ in _linears(self))

    @property
    def value_width(self) -> int:
        """Width of the values of all heads."""
        options = self.attention
        return int(options["num_heads"] * options.get("v_dim", options.get("head_dim", 0)))

    @property
    def key_width(self) -> int:
        """Width of the keys of a head."""
        options = self.attention
        return int(options["nope_dim"] + options["rope_dim"]) if options["use"] == "mla" else int(options["head_dim"])


@cache
def _sections(model: str) -> Mapping[str, Mapping[str, Any]]:
    found = preset_sections(model)
    return sections_of(Path(model)) if found is None else found


def _linears(sizes: Sizes) -> Iterator[tuple[str, int, int, bool]]:
    """Yield region, columns, summed width of each matrix of attention, and whether tp shares out its columns.

    Those of ``attn_proj`` are shared out by what they sum over; those for which it is False are on every rank.
    """
    options = sizes.attention
    heads = options["num_heads"]
    if options["use"] == "mla":
        if options["q_rank"]:
            yield "mla_down_proj", options["q_rank"], sizes.dim, False
        yield "mla_down_proj", options["kv_rank"] + options["rope_dim"], sizes.dim, False
        width = heads * sizes.key_width
        yield "mla_up_proj", width, options["q_rank"] or sizes.dim, True
        yield "mla_up_proj", heads * (options["nope_dim"] + options["v_dim"]), options["kv_rank"], True
    else:
        yield "qkv", heads * options["head_dim"], sizes.dim, True
        for _ in range(2):
            yield "qkv", options["num_kv_heads"] * options["head_dim"], sizes.dim, True
    yield "attn_proj", sizes.dim, sizes.value_width, True


@frozen(kw_only=True)
class Rows:
    """What a rank computes in a micro-batch: sequences of ``length`` tokens, with operands of ``dtype``.

    ``states_on_host``: whether the optimizer's states wait in host memory from step to step.
    """

    sizes: Sizes
    layout: Layout
    sequences: int
    length: int
    dtype: str
    recompute: tuple[str, ...] = ()
    dispatcher: str = "alltoall"
    states_on_host: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the rank's sequences."""
        return self.sequences * self.length // self.layout.cp

    @property
    def stream(self) -> int:
        """Tokens of the residual stream, which ranks of tp share."""
        return self.tokens // self.layout.tp

    @property
    def flops_per_token(self) -> float:
        """Operations that the model asks for, as Megatron counts them."""
        of_ranks = sum(model_flops(position.work) for position in self.positions())
        return of_ranks * self.layout.tp * self.layout.cp / (self.sequences * self.length)

    def layer(self, number: int, count: int, *, is_dense: bool, is_mtp: bool = False) -> Iterator[Work]:
        """Yield the work of ``count`` layers like that of this number."""
        for region, products, transfers in self._regions(number, is_dense=is_dense, is_mtp=is_mtp):
            for phase, kinds in (("forward", ("fprop",)), ("backward", ("dgrad", AGAIN, "wgrad"))):
                of_phase = tuple(each for each in products if each.during in kinds)
                yield _work(number, count, region, phase, of_phase, transfers)
            if region in self.recompute:
                again = tuple(each for each in products if each.during == "fprop")
                yield _work(number, count, region, "recompute", again, ())
        if self.layout.zero == SHARDED_WEIGHTS:
            yield from self._shards(number, count, "attention", self._sums(self._weights_of_layer(is_dense=is_dense)))
            if not is_dense:
                yield from self._shards(number, count, "experts", self._sums_of_experts(1))

    def _regions(
        self, number: int, *, is_dense: bool, is_mtp: bool
    ) -> Iterator[tuple[str, Sequence[Product], Sequence[Transfer]]]:
        """Yield the regions of a layer with their products, and the transfers of forward; backward has as many."""
        sizes = self.sizes
        tp = self.layout.tp
        tensor = self._tensor_transfer()
        yield "attn_norm", (), ()
        by_region: dict[str, list[Product]] = {}
        for region, columns, summed, is_shared in _linears(sizes):
            if region == "attn_proj":
                summed //= tp
            elif is_shared:
                columns //= tp
            rows = self.tokens if is_shared else self.stream
            by_region.setdefault(region, []).extend(self._linear(rows, columns, summed))
        first = next(region for region in by_region if region != "mla_down_proj")
        for region, products in by_region.items():
            yield region, products, tensor if region in (first, "attn_proj") else ()
        yield "core_attn", [*self._core(number)], ()
        yield "layer", [*self._linear(self.stream, sizes.dim, 2 * sizes.dim, "bfloat16")] if is_mtp else [], ()
        yield "mlp_norm", (), ()
        if is_dense:
            dense = [*self._mlp(sizes.dense_dim)]
            yield "dense_mlp", dense, tensor * 2
            return
        yield "router", [*self._linear(self.stream, sizes.experts, sizes.dim, "float32")], ()
        if sizes.shared_dim:
            yield "shared_experts", [*self._mlp(sizes.shared_dim)], tensor * 2
        yield "dispatch", (), self._movements()
        rows = self.stream * sizes.top_k * self.layout.expert_tp
        groups = max(1, sizes.experts // self.layout.ep)
        width = sizes.expert_dim // self.layout.expert_tp
        yield "expert_fc1", [*self._grouped(rows, 2 * width, sizes.dim, groups)], ()
        yield "expert_fc2", [*self._grouped(rows, sizes.dim, width, groups)], ()

    def _linear(self, rows: int, columns: int, summed: int, dtype: str = "") -> Iterator[Product]:
        """Yield the three products of a linear layer."""
        kind = dtype or self.dtype
        yield Product("mm", kind, (rows, columns, summed), 1, "fprop")
        yield Product("mm", kind, (rows, summed, columns), 1, "dgrad")
        yield Product("mm", kind, (columns, summed, rows), 1, "wgrad")

    def _mlp(self, width: int) -> Iterator[Product]:
        width //= self.layout.tp
        for _ in range(2):
            yield from self._linear(self.tokens, width, self.sizes.dim)
        yield from self._linear(self.tokens, self.sizes.dim, width)

    def _grouped(self, rows: int, columns: int, summed: int, groups: int) -> Iterator[Product]:
        yield Product("_grouped_mm", self.dtype, (rows, columns, summed), groups, "fprop")
        yield Product("_grouped_mm", self.dtype, (rows, summed, columns), groups, "dgrad")
        yield Product("_grouped_mm", self.dtype, (columns, summed, rows), groups, "wgrad")

    def _core(self, number: int) -> Iterator[Product]:
        """Yield the products of an attention core. Ranks of cp share out the pairs of tokens evenly."""
        sizes = self.sizes
        options = sizes.attention
        heads = options["num_heads"] // self.layout.tp
        window = options.get("window")
        seen = self.length * (self.length + 1) // 2
        if window and number not in options.get("full_layers", ()):
            seen = sum(min(token + 1, window) for token in range(self.length))
        groups = heads * self.sequences
        scores = groups * seen // self.layout.cp
        widths = sizes.key_width + sizes.value_width // options["num_heads"]
        queries = groups * self.length // self.layout.cp
        shape = queries, self.length
        yield Product("attention", "bfloat16", (*shape, widths), groups, "fprop", scores=scores)
        yield Product("attention", "bfloat16", (*shape, 2 * widths), groups, "dgrad", scores=scores)
        yield Product("attention", "bfloat16", (*shape, sizes.key_width), groups, AGAIN, scores=scores)

    def _tensor_transfer(self) -> tuple[Transfer, ...]:
        """Gather or sum of the residual stream over tp."""
        tp = self.layout.tp
        if tp == 1:
            return ()
        nbytes = self.stream * self.sizes.dim * BF16 * (tp - 1)
        is_inside = tp <= self.layout.node_gpus
        return (Transfer("all-gather", "tp", tp, nbytes if is_inside else 0, 0 if is_inside else nbytes),)

    def _movements(self) -> tuple[Transfer, ...]:
        """Dispatch and combine of ``alltoall``, which sends a row to each expert of a token; others have formulas."""
        ep = self.layout.ep
        if ep == 1 or self.dispatcher != "alltoall":
            return ()
        nbytes = self.stream * self.sizes.top_k * self.sizes.dim * BF16
        inside = max(1, min(ep, self.layout.node_gpus // self.layout.expert_tp))
        node, network = nbytes * (inside - 1) // ep, nbytes * (ep - inside) // ep
        span = self.layout.expert_tp * (ep - 1)
        moved = (Transfer("all-to-all", "ep", ep, node, network, span=span),)
        if self.layout.expert_tp > 1:
            # Ranks that share an expert gather its rows, and sum the parts of their results.
            moved += (Transfer("all-gather", "etp", self.layout.expert_tp, nbytes * (self.layout.expert_tp - 1), 0),)
        weights = self.stream * self.sizes.top_k * FP32
        return *(moved * 2), Transfer("all-to-all", "ep", ep, weights, 0)

    def outside(self, held: Collection[str]) -> Iterator[Work]:
        """Yield the work outside of layers of a position: what goes to other stages, and the head, if it is held.

        The head computes the loss of the main model and of each mtp layer.
        """
        products = [*self._head()] if "head" in held else []
        yield _work(None, 1, "outside", "forward", products[:1], self._send())
        yield _work(None, 1, "outside", "backward", products[1:], self._send())
        if self.layout.zero == SHARDED_WEIGHTS:
            yield from self._shards(None, 1, "outside", self._sums(self._weights_of_ends(held)))

    def _head(self) -> Iterator[Product]:
        sizes = self.sizes
        yield from self._linear(self.tokens * (1 + sizes.mtp), sizes.vocab // self.layout.tp, sizes.dim, "bfloat16")

    def positions(self) -> tuple[Position, ...]:
        """All positions on pp."""
        return tuple(
            Position(at=(at,), peak_bytes=None, work=tuple(self._position(at))) for at in range(self.layout.pp)
        )

    def _position(self, at: int) -> Iterator[Work]:
        sizes = self.sizes
        layout = self.layout
        held = [unit for stage in stages_of(sizes, layout)[at :: layout.pp] for unit in stage]
        dense = sum(unit == "dense" for unit in held)
        moe = sum(unit in ("moe", "mtp") for unit in held)
        mtp = sum(unit == "mtp" for unit in held)
        windowed = sizes.attention.get("window")
        if dense:
            yield from self.layer(0, dense, is_dense=True)
        if moe - mtp and windowed:
            yield from self.layer(0, (moe - mtp + 1) // 2, is_dense=False)
            yield from self.layer(1, (moe - mtp) // 2, is_dense=False)
        elif moe - mtp:
            yield from self.layer(sizes.dense_layers, moe - mtp, is_dense=False)
        if mtp:
            yield from self.layer(sizes.layers, mtp, is_dense=False, is_mtp=True)
        yield from self.outside(held)
        yield from self._once(dense, moe, self._weights_of_ends(held))

    def _send(self) -> tuple[Transfer, ...]:
        """What a position sends in a pass, of all its stages."""
        layout = self.layout
        if layout.pp == 1:
            return ()
        nbytes = self.stream * self.sizes.dim * BF16
        between = layout.gpus // layout.pp
        is_inside = between < layout.node_gpus
        send = Transfer(
            kind="send",
            group="pp",
            ranks=layout.pp,
            node=nbytes if is_inside else 0,
            network=0 if is_inside else nbytes,
            span=between * (layout.pp - 1),
        )
        return (send,) * layout.chunks

    def _weights_of_layer(self, *, is_dense: bool) -> int:
        """Weights of a layer outside of experts."""
        sizes = self.sizes
        mlp = 3 * sizes.dense_dim if is_dense else 3 * sizes.shared_dim + sizes.experts
        return sizes.attention_weights + sizes.dim * mlp

    def _weights_of_ends(self, held: Collection[str]) -> int:
        """Weights of the embedding and of the head, of those that are held."""
        return (("head" in held) + ("embedding" in held)) * self.sizes.vocab * self.sizes.dim

    def _once(self, dense: int, moe: int, ends: int) -> Iterator[Work]:
        """Yield the update of a step and, where weights are not sharded, its sums of gradients and gathers of weights.

        Those are of so many dense layers, MoE layers and weights of the ends.
        """
        layout = self.layout
        plain = dense * self._weights_of_layer(is_dense=True) + moe * self._weights_of_layer(is_dense=False) + ends
        if layout.zero != SHARDED_WEIGHTS:
            sums = (*self._sums(plain), *self._sums_of_experts(moe))
            yield _work(None, 1, "outside", "gradients", (), sums)
        updated = plain / layout.tp / layout.dense_dp + moe * self._weights_of_experts / layout.expert_dp
        states = round(STATES_BYTES * updated) if self.states_on_host else 0
        yield evolve(
            _work(None, 1, "outside", "optimizer", (), ()),
            on_host=OnHost(out=states, back=states),
            updated=Updated(parameters=round(updated), states=round(MOMENTS_BYTES * updated)),
        )

    @property
    def _weights_of_experts(self) -> int:
        """Weights of the experts of a rank in a layer."""
        sizes = self.sizes
        return 3 * sizes.dim * sizes.expert_dim * sizes.experts // (self.layout.ep * self.layout.expert_tp)

    def _sums(self, plain: int) -> Sequence[Transfer]:
        """Sums of gradients and gathers of weights outside of experts, so many of all ranks of tp."""
        return [*self._sum(plain // self.layout.tp, self.layout.dense_dp, self.layout.tp)]

    def _sums_of_experts(self, layers: int) -> Sequence[Transfer]:
        """The same of the experts of so many layers."""
        stride = self.layout.ep * self.layout.expert_tp
        return [*self._sum(layers * self._weights_of_experts, self.layout.expert_dp, stride)]

    def _shards(self, number: int | None, count: int, region: str, transfers: Sequence[Transfer]) -> Iterator[Work]:
        """Yield what a micro-batch does with sharded weights: it gathers them in both passes, and sums gradients."""
        gathers = [each for each in transfers if each.kind == ALL_GATHER]
        yield _work(number, count, region, "forward", (), gathers)
        yield _work(number, count, region, "backward", (), transfers)

    def _sum(self, elements: int, ranks: int, stride: int) -> Iterator[Transfer]:
        """Yield a sum of gradients in fp32, whose parts stay on ranks, and a gather of the updated weights in bf16.

        Ranks are ``stride`` apart. Those are the formats of plans; the software says which are its own.
        """
        if ranks == 1:
            return
        inside = max(1, min(ranks, self.layout.node_gpus // stride))
        span = stride * (ranks - 1)
        for kind, itemsize in ((REDUCE_SCATTER, FP32), (ALL_GATHER, BF16)):
            to_each = elements * itemsize // ranks
            yield Transfer(kind, "dp", ranks, to_each * (inside - 1), to_each * (ranks - inside), span=span)


def stages_of(sizes: Sizes, layout: Layout) -> list[list[str]]:
    """What each stage holds, in order: embedding, layers and the head count as one each, and are split evenly.

    That is ``account_for_embedding_in_pipeline_split`` of Megatron. With mtp layers it is Megatron-Bridge's layouts of
    DeepSeek-V3: the embedding counts as nothing, and the last stage has what is left.
    """
    dense = ["dense"] * sizes.dense_layers
    moe = ["moe"] * (sizes.layers - sizes.dense_layers)
    units = ["embedding", *dense, *moe, *["mtp"] * sizes.mtp, "head"]
    number = layout.pp * layout.chunks
    if sizes.mtp:
        each = -(-(len(units) - 1) // number)
        cuts = [min(1 + each * stage, sizes.layers + 1) if stage else 0 for stage in range(number)]
        return [units[begin:end] for begin, end in pairwise([*cuts, len(units)])]
    each, more = divmod(len(units), number)
    stages = []
    begin = 0
    for stage in range(number):
        end = begin + each + (stage < more)
        stages.append(units[begin:end])
        begin = end
    return stages


def _work(
    layer: int | None,
    layers: int,
    region: str,
    phase: str,
    products: Sequence[Product],
    transfers: Sequence[Transfer],
) -> Work:
    return Work(
        layer=layer,
        layers=layers,
        region=region,
        phase=phase,
        products=tuple(products),
        transfers=tuple(transfers),
        operators=0,
        nbytes=0,
    )


def node_of(cluster: Cluster) -> int:
    """GPUs of a node of a cluster that layouts use: a power of two."""
    return Nodes.of(cluster, 1).real
