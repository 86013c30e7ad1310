"""Grouped-query attention, its heads split over the ranks of tp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn

import moefw
from moefw.core.contracts import Named
from moefw.core.records import Canonical, HeadRows, Shard
from moefw.core.stages import Batch
from moefw.plugins.attention.gqa.norm import NormAcrossHeads
from moefw.plugins.attention.gqa.options import Options
from moefw.runtime.attention.attend import behind
from moefw.runtime.attention.mask import Mask
from moefw.runtime.attention.rope import Table, rope_table, rotate
from moefw.runtime.compute.product import SharedInput
from moefw.runtime.modules import Linear, RMSNorm, RowParallelLinear, in_heads
from moefw.runtime.parallel.tensor_parallel import TensorParallel

Kept = tuple[Tensor, ...]


@final
class Sinks(nn.Module, Named):
    """A learned score for each head that joins the softmax over its keys, and has no value."""

    def __init__(self, num_heads: int, shard: Shard | None) -> None:
        super().__init__()
        self.shard = shard
        self.weight = nn.Parameter(torch.empty(shard.shape((num_heads,)) if shard else num_heads))

    def canonical(self) -> Iterator[Canonical]:
        """Yield ``weight`` (num_heads)."""
        yield Canonical("weight", self.weight, shard=self.shard, role="vector")


@final
class GroupedQueryAttention(nn.Module, moefw.CachedAttention):
    """Each rank of tp computes an equal share of the queries.

    Where tp does not divide the key-value heads, every rank holds all of them and computes those of its queries.
    """

    def __init__(self, options: Options, context: moefw.BuildContext) -> None:
        super().__init__()
        self.options = options
        self.tp = TensorParallel(context.layout)
        dim = context.site.dims.model_dim
        width = options.head_dim
        precision = context.recipe("attention")
        # The key-value head of each query of this rank.
        heads = options.num_heads // self.tp.size
        first_query = self.tp.index * heads
        kv_heads = [
            query * options.num_kv_heads // options.num_heads for query in range(first_query, first_query + heads)
        ]
        first = kv_heads[0]
        count = kv_heads[-1] + 1 - first
        # If tp divides the key-value heads, a rank holds its share. Otherwise it holds all of them and projects only to
        # those of its queries, or, under a norm across heads, which needs all, projects to all and then selects.
        is_split = options.num_kv_heads % self.tp.size == 0
        kv_shard = self.tp.shard(0) if is_split else None
        kv_rows: slice | None = None
        self._used: slice | None = None
        if not is_split and options.qk_norm == "all":
            self._used = slice(first, first + count)
        elif not is_split:
            kv_rows = slice(first * width, (first + count) * width)
        queries = options.num_heads * width
        keys = options.num_kv_heads * width
        into_q, into_k, into_v, out_of = (precision.at(f"{name}_proj", groups=1) for name in "qkvo")
        q, k, v, o = ((f"attention.{name}_proj", context.adapter) for name in "qkvo")
        qkv_bias = options.qkv_bias
        self.q_proj = Linear(dim, queries, into_q, shard=self.tp.shard(0), bias=qkv_bias, adapted=q)
        self.k_proj = Linear(dim, keys, into_k, shard=kv_shard, rows=kv_rows, bias=qkv_bias, adapted=k)
        self.v_proj = Linear(dim, keys, into_v, shard=kv_shard, rows=kv_rows, bias=qkv_bias, adapted=v)
        self.o_proj = RowParallelLinear(queries, dim, out_of, self.tp, bias=options.out_bias, adapted=o)
        self.q_norm = self._norm(queries, self.tp.shard(0))
        self.k_norm = self._norm(keys, kv_shard)
        self.sinks = Sinks(options.num_heads, self.tp.shard(0)) if options.sinks else None
        # The core lets equally many neighbouring queries share a key. Where this rank's queries do not, each gets a
        # copy of its key: ``_spread`` is the head to copy for each query.
        is_even = heads % count == 0 and kv_heads == [first + head * count // heads for head in range(heads)]
        self._spread = None if is_even else [head - first for head in kv_heads]
        self._attend = context.core(options.attend())
        self._window = options.window_at(context.site.layer)
        self.reach = options.reach_at(context.site.layer)
        self._project_in = context.region("qkv", self._qkv)
        self._core = context.region("core_attn", self._core_attn)
        self._project_out = context.region("attn_proj", self._attn_proj)

    def _norm(self, width: int, shard: Shard | None) -> nn.Module | None:
        """Norm of queries or of keys; ``width`` is that of all heads, ``shard`` this rank's part of it."""
        if self.options.qk_norm == "none":
            return None
        if self.options.qk_norm == "head":
            return RMSNorm(self.options.head_dim, self.options.norm_eps)
        return NormAcrossHeads(width, self.options.norm_eps, shard, self.tp.group)

    def tables(self, batch: Batch) -> Table:
        """Table of rotary positions."""
        return rope_table(self.options.rope, self.options.head_dim, batch)

    def forward(self, x_tD: Tensor, tables: Table, batch: Batch) -> Tensor:
        """``(t, D)`` for this rank's part of the tokens of ``batch``: B sequences of S positions."""
        return self._attended(x_tD, tables, batch, None)[0]

    def extend(self, x_tD: Tensor, tables: Table, batch: Batch, past: Kept | None) -> tuple[Tensor, Kept]:
        """``(t, D)``, and rotated keys and values of all tokens, each ``(B, heads, positions, head_dim)``."""
        return self._attended(x_tD, tables, batch, past)

    def logit_rows(self) -> Mapping[str, HeadRows]:
        """Rows of the projections to queries and keys, and of their biases."""
        options = self.options
        rows = {
            "q_proj": HeadRows(heads=options.num_heads, parts=(("query", options.head_dim),)),
            "k_proj": HeadRows(heads=options.num_kv_heads, parts=(("key", options.head_dim),)),
        }
        tensors = ("weight", "bias") if options.qkv_bias else ("weight",)
        return {f"{name}.{tensor}": of_heads for name, of_heads in rows.items() for tensor in tensors}

    def _attended(self, x_tD: Tensor, tables: Table, batch: Batch, past: Kept | None) -> tuple[Tensor, Kept]:
        q, *own = self._project_in(x_tD, tables, batch)
        kept = behind(past, own)
        k, v = kept
        out_tD: Tensor = self._project_out(self._core(q, k, v, Mask.of(batch, self._window)), batch)
        return out_tD, kept

    def _qkv(self, x_tD: Tensor, table: Table, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``(B, heads, S, head_dim)``, and keys and values of fewer heads."""
        options = self.options
        x_TD = self.tp.gather(x_tD)
        shared = SharedInput(x_TD)  # quantized once for the three products
        # (T, D) -> (T, heads * head_dim) -> (B, S, heads, head_dim)
        q = in_heads(self.q_proj(x_TD, batch.rows, shared), batch, options.head_dim)
        k = in_heads(self.k_proj(x_TD, batch.rows, shared), batch, options.head_dim)
        v = in_heads(self.v_proj(x_TD, batch.rows, shared), batch, options.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self._used is not None:
            k = k[:, :, self._used]
            v = v[:, :, self._used]
        if options.clip is not None:
            q, k, v = (tensor.clamp(-options.clip, options.clip) for tensor in (q, k, v))
        q = rotate(q, table, options.rope)
        k = rotate(k, table, options.rope)
        if self._spread is not None:
            k = k[:, :, self._spread]
            v = v[:, :, self._spread]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _core_attn(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """``(T, heads * head_dim)``, from ``(B, heads, S, head_dim)``."""
        out = self._attend(q, k, v, mask, sinks_H=None if self.sinks is None else self.sinks.weight)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def _attn_proj(self, out: Tensor, batch: Batch) -> Tensor:
        out_tD: Tensor = self.o_proj(out, batch.rows)
        return out_tD
