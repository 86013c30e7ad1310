"""The sizes of the transformer, on which its modules and their memory depend."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen
from attrs.validators import and_, ge, gt, le, optional

from moefw.core.site import Activation

WIDEST = 2**22
"""Upper limit of a matrix's columns. Larger values are mistakes."""
MOST = 2**14
"""Upper limit of the numbers of layers, heads and experts. Larger values are mistakes."""


@frozen(kw_only=True)
class Sizes:
    """Sizes and switches: see :class:`moefw.models.decoder.Decoder`."""

    vocab_size: int = field(default=256, validator=and_(ge(2), le(WIDEST)))
    pad_id: int | None = field(default=None, validator=optional(ge(0)))
    dim: int = field(default=256, validator=and_(ge(2), le(WIDEST)))
    num_layers: int = field(default=4, validator=and_(ge(1), le(MOST)))
    num_dense_layers: int = field(default=0, validator=ge(0))
    dense_layers: tuple[int, ...] = ()
    dense_dim: int = field(default=1024, validator=and_(ge(1), le(WIDEST)))
    num_experts: int = field(default=16, validator=and_(ge(1), le(MOST)))
    top_k: int = field(default=4, validator=and_(ge(1), le(MOST)))
    expert_dim: int = field(default=256, validator=and_(ge(1), le(WIDEST)))
    shared_expert_dim: int = field(default=0, validator=and_(ge(0), le(WIDEST)))
    shared_expert_gate: bool = False
    activation: Activation = Activation()
    biased_experts: bool = False
    mtp_layers: int = field(default=0, validator=and_(ge(0), le(MOST)))
    mtp_coeff: float = field(default=0.1, validator=ge(0.0))
    tie_embeddings: bool = False
    loss_chunk: int | None = field(default=None, validator=optional(ge(1)))
    norm_eps: float = field(default=1e-6, validator=gt(0.0))
    init_std: float = field(default=0.02, validator=gt(0.0))
    embed_init_std: float = field(default=0.02, validator=gt(0.0))
    zero_init: bool = False

    def moe_layers(self) -> Sequence[int]:
        """Numbers of the layers with experts. Those that predict further tokens are behind all others."""
        layers = range(self.num_dense_layers, self.num_layers + self.mtp_layers)
        if not self.dense_layers:
            return layers
        return [layer for layer in layers if layer not in self.dense_layers]

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has no experts."""
        return len(self.moe_layers()) < self.num_layers + self.mtp_layers
