"""The plain MLP of dense layers and shared experts, and the gate of a shared expert."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from moefw.core.contracts import Precision
from moefw.core.site import Activation
from moefw.core.stages import Batch
from moefw.runtime.compute.product import SharedInput
from moefw.runtime.modules import Adapted, Linear, RowParallelLinear
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw_kernels.swiglu import swiglu


@final
class SwiGLU(nn.Module):
    """``W2 act(W1 x, W3 x)``: a dense MLP or a shared expert, its hidden dim split over the ranks of tp.

    ``adapted``: its name in its layer, and what has the adapters of its weights.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        precision: Precision,
        tp: TensorParallel,
        activation: Activation = Activation(),  # noqa: B008
        *,
        adapted: Adapted | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.clamp = activation.clamp
        gate, up, down = (precision.at(f"{name}_proj", groups=1) for name in ("gate", "up", "down"))

        def named(weight: str) -> Adapted | None:
            return None if adapted is None else (f"{adapted[0]}.{weight}", adapted[1])

        self.gate_proj = Linear(dim, hidden_dim, gate, shard=tp.shard(0), adapted=named("gate_proj"))
        self.up_proj = Linear(dim, hidden_dim, up, shard=tp.shard(0), adapted=named("up_proj"))
        self.down_proj = RowParallelLinear(hidden_dim, dim, down, tp, adapted=named("down_proj"))

    def forward(self, x_tD: Tensor, batch: Batch) -> Tensor:
        """``(t, D)`` for this rank's part of the tokens of ``batch``."""
        x_TD = self.tp.gather(x_tD)
        rows = batch.rows
        shared = SharedInput(x_TD)
        gate_TF = self.gate_proj(x_TD, rows, shared)
        up_TF = self.up_proj(x_TD, rows, shared)
        out_tD: Tensor = self.down_proj(swiglu(gate_TF, up_TF, self.clamp), rows)
        return out_tD


@final
class GatedSharedExpert(nn.Module):
    """``sigmoid(v . x) * mlp(x)``; the gate's vector v (D) is fp32."""

    def __init__(self, mlp: SwiGLU, dim: int) -> None:
        super().__init__()
        self.mlp = mlp
        self.gate = nn.Parameter(torch.empty(dim))

    def forward(self, x_tD: Tensor, batch: Batch) -> Tensor:
        """``(t, D)`` for this rank's part of the tokens of ``batch``."""
        gate_t = torch.mv(x_tD, self.gate.to(x_tD.dtype)).sigmoid()
        out_tD: Tensor = gate_t.unsqueeze(1) * self.mlp(x_tD, batch)
        return out_tD
