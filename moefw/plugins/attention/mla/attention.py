"""Multi-head latent attention, its heads split over the ranks of tp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

import moefw
from moefw.core.records import HeadRows, LogitPart, RowGroups
from moefw.core.stages import Batch
from moefw.plugins.attention.mla.options import Options
from moefw.runtime.attention.attend import behind
from moefw.runtime.attention.mask import Mask
from moefw.runtime.attention.rope import Table, rope_table, rotate
from moefw.runtime.compute.product import SharedInput
from moefw.runtime.modules import Adapted, Linear, RMSNorm, RowParallelLinear, in_heads
from moefw.runtime.parallel.tensor_parallel import TensorParallel

Kept = tuple[Tensor, ...]


@final
class LatentAttention(nn.Module, moefw.CachedAttention):
    """Each rank of tp makes the latents of its tokens, gathers those of all, and computes an equal share of heads."""

    def __init__(self, options: Options, context: moefw.BuildContext) -> None:
        super().__init__()
        self.options = options
        self.tp = TensorParallel(context.layout)
        dim = context.site.dims.model_dim
        precision = context.recipe("attention")
        heads = self.tp.shard(0)
        self._key_dim = options.nope_dim + options.rope_dim
        queries = options.num_heads * self._key_dim
        into_q, into_kv, up_q, up_kv, out_of = (
            precision.at(f"{name}_proj", groups=1) for name in ("q_a", "kv_a", "q_b", "kv_b", "o")
        )

        def adapted(name: str) -> Adapted:
            return f"attention.{name}", context.adapter

        self.q_proj: Linear | None = None
        if options.q_rank is None:
            self.q_proj = Linear(dim, queries, up_q, shard=heads, adapted=adapted("q_proj"))
        else:
            self.q_a_proj = Linear(dim, options.q_rank, into_q, bias=options.in_bias, adapted=adapted("q_a_proj"))
            self.q_a_norm = RMSNorm(options.q_rank, options.norm_eps)
            self.q_b_proj = Linear(options.q_rank, queries, up_q, shard=heads, adapted=adapted("q_b_proj"))
        latents = options.kv_rank + options.rope_dim
        self.kv_a_proj = Linear(dim, latents, into_kv, bias=options.in_bias, adapted=adapted("kv_a_proj"))
        self.kv_a_norm = RMSNorm(options.kv_rank, options.norm_eps)
        keys_and_values = options.num_heads * (options.nope_dim + options.v_dim)
        self.kv_b_proj = Linear(options.kv_rank, keys_and_values, up_kv, shard=heads, adapted=adapted("kv_b_proj"))
        values = options.num_heads * options.v_dim
        self.o_proj = RowParallelLinear(values, dim, out_of, self.tp, bias=options.out_bias, adapted=adapted("o_proj"))
        self._attend = context.core(options.attend())
        self._down = context.region("mla_down_proj", self._mla_down_proj)
        self._up = context.region("mla_up_proj", self._mla_up_proj)
        self._core = context.region("core_attn", self._core_attn)
        self._project_out = context.region("attn_proj", self._attn_proj)

    def tables(self, batch: Batch) -> Table:
        """Table of rotary positions."""
        return rope_table(self.options.rope, self.options.rope_dim, batch)

    def forward(self, x_tD: Tensor, tables: Table, batch: Batch) -> Tensor:
        """``(t, D)`` for this rank's part of the tokens of ``batch``: B sequences of S positions."""
        q, k, v = self._up(*self._down(x_tD, batch), tables, batch)
        out_tD: Tensor = self._project_out(self._core(q, k, v, Mask.of(batch)), batch)
        return out_tD

    def extend(self, x_tD: Tensor, tables: Table, batch: Batch, past: Kept | None) -> tuple[Tensor, Kept]:
        """``(t, D)``, and latents ``(B, positions, kv_rank)`` and rotated shared keys of all tokens.

        The heads of all tokens are made of these latents again.
        """
        q_T, kv_T = self._down(x_tD, batch)
        q = self._queries(q_T, tables, batch)
        kept = behind(past, self._latents(kv_T, tables, batch))
        out_tD: Tensor = self._project_out(self._core(q, *self._keys_and_values(kept, batch.rows), Mask()), batch)
        return out_tD, kept

    def logit_rows(self) -> Mapping[str, HeadRows]:
        """Rows of the last projections to queries and keys. The key with positions, which heads share, stays."""
        options = self.options
        queries = "q_b_proj" if self.q_proj is None else "q_proj"
        of_queries: tuple[tuple[LogitPart, int], ...] = (("query", options.nope_dim), ("lone_query", options.rope_dim))
        return {
            f"{queries}.weight": HeadRows(heads=options.num_heads, parts=of_queries),
            "kv_b_proj.weight": HeadRows(
                heads=options.num_heads, parts=(("key", options.nope_dim), ("other", options.v_dim))
            ),
        }

    def _mla_down_proj(self, x_tD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return, for all tokens, the latents of queries (or the tokens themselves), ``(T, q_rank)`` or ``(T, D)``.

        And the latents of keys and values with the shared keys, ``(T, kv_rank + rope_dim)``, neither normalised yet.
        """
        rows = batch.own_rows
        shared = SharedInput(x_tD)  # quantized once for both products
        q_t = self.q_a_proj(x_tD, rows, shared) if self.q_proj is None else x_tD
        kv_t = self.kv_a_proj(x_tD, rows, shared)
        # Gathered behind the projections, because latents are narrower than tokens.
        return self.tp.gather(q_t), self.tp.gather(kv_t)

    def _mla_up_proj(self, q_T: Tensor, kv_T: Tensor, table: Table, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys ``(B, heads, S, nope_dim + rope_dim)``, and values ``(B, heads, S, v_dim)``."""
        q = self._queries(q_T, table, batch)
        k, v = self._keys_and_values(self._latents(kv_T, table, batch), batch.rows)
        # A view would hold the product's keys until backward, beside those that are saved with their rotated part.
        return q, k, v.contiguous()

    def _queries(self, q_T: Tensor, table: Table, batch: Batch) -> Tensor:
        """Queries ``(B, heads, S, nope_dim + rope_dim)``."""
        options = self.options
        rows = batch.rows
        q_T = self.q_b_proj(self.q_a_norm(q_T), rows) if self.q_proj is None else self.q_proj(q_T, rows)
        q = in_heads(q_T, batch, self._key_dim)
        q_nope, q_rope = q.split([options.nope_dim, options.rope_dim], -1)
        return torch.cat([q_nope, rotate(q_rope, table, options.rope)], -1).transpose(1, 2)

    def _latents(self, kv_T: Tensor, table: Table, batch: Batch) -> Kept:
        """Latents ``(B, S, kv_rank)``, normalised, and keys ``(B, S, rope_dim)``, rotated."""
        options = self.options
        latent_T, k_rope_T = kv_T.split([options.kv_rank, options.rope_dim], -1)
        k_rope = rotate(in_heads(k_rope_T, batch, options.rope_dim), table, options.rope)
        return self.kv_a_norm(latent_T).view(*batch.ids_BS.shape, options.kv_rank), k_rope.squeeze(2)

    def _keys_and_values(self, kept: Kept, rows: RowGroups | None) -> tuple[Tensor, Tensor]:
        """Keys ``(B, heads, S, nope_dim + rope_dim)`` and values ``(B, heads, S, v_dim)``."""
        latent_BSr, k_rope_BSd = kept
        options = self.options
        width = options.nope_dim + options.v_dim
        kv_T = self.kv_b_proj(latent_BSr.flatten(0, 1), rows)
        kv = kv_T.view(*latent_BSr.shape[:-1], kv_T.shape[-1] // width, width)
        k_nope, v = kv.split([options.nope_dim, options.v_dim], -1)
        # All heads share one rotated key.
        k_rope = k_rope_BSd.unsqueeze(2).expand(*k_nope.shape[:-1], -1)
        return torch.cat([k_nope, k_rope], -1).transpose(1, 2), v.transpose(1, 2)

    def _core_attn(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """``(T, heads * v_dim)``."""
        out = self._attend(q, k, v, mask, scale=self.options.scale)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def _attn_proj(self, out: Tensor, batch: Batch) -> Tensor:
        out_tD: Tensor = self.o_proj(out, batch.rows)
        return out_tD
