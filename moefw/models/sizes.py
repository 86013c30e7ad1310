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
    """Sizes and switches of :class:`moefw.plugins.models.decoder.Decoder`."""

    vocab_size: int = field(default=256, validator=and_(ge(2), le(WIDEST)))
    """Number of token ids, which must hold the tokenizer's (bytes: 256)."""
    pad_id: int | None = field(default=None, validator=optional(ge(0)))
    """Token id whose embedding is not trained; null: all are trained."""
    dim: int = field(default=256, validator=and_(ge(2), le(WIDEST)))
    """Width of the residual stream."""
    num_layers: int = field(default=4, validator=and_(ge(1), le(MOST)))
    """Number of layers, without those of ``mtp_layers``."""
    num_dense_layers: int = field(default=0, validator=ge(0))
    """Number of the first layers that have a plain MLP of ``dense_dim``, no experts."""
    dense_layers: tuple[int, ...] = ()
    """Numbers, from 0, of further layers that have a plain MLP, no experts."""
    dense_dim: int = field(default=1024, validator=and_(ge(1), le(WIDEST)))
    """Hidden width of plain MLPs."""
    num_experts: int = field(default=16, validator=and_(ge(1), le(MOST)))
    """Number of routed experts of a layer."""
    top_k: int = field(default=4, validator=and_(ge(1), le(MOST)))
    """Number of routed experts of a token."""
    expert_dim: int = field(default=256, validator=and_(ge(1), le(WIDEST)))
    """Hidden width of a routed expert."""
    shared_expert_dim: int = field(default=0, validator=and_(ge(0), le(WIDEST)))
    """Hidden width of the shared expert, which computes every token. 0: no shared expert."""
    shared_expert_gate: bool = False
    """Whether a sigmoid of the token multiplies the shared expert's output (Qwen2-MoE)."""
    activation: Activation = Activation()
    """Activation of experts and MLPs."""
    biased_experts: bool = False
    """Whether gate, up and down of routed experts have biases."""
    mtp_layers: int = field(default=0, validator=and_(ge(0), le(MOST)))
    """Number of layers behind all others, which predict one token more each.

    DeepSeek-V3, arXiv 2412.19437 section 2.2.
    """
    mtp_coeff: float = field(default=0.1, validator=ge(0.0))
    """Factor of the mean of the losses of ``mtp_layers``."""
    tie_embeddings: bool = False
    """Whether the head has the embedding's weights."""
    loss_chunk: int | None = field(default=None, validator=optional(ge(1)))
    """Number of tokens whose logits the loss holds at a time, and computes again in backward.

    null: it saves the logits of all tokens.
    """
    norm_eps: float = field(default=1e-6, validator=gt(0.0))
    """Number added to the mean square in RMS norms."""
    init_std: float = field(default=0.02, validator=gt(0.0))
    """Standard deviation of initial weights.

    Projections into the residual stream start at ``init_std / sqrt(2 * num_layers)`` (GPT-2), unless ``zero_init``.
    """
    embed_init_std: float = field(default=0.02, validator=gt(0.0))
    """Standard deviation of the initial embedding."""
    zero_init: bool = False
    """Whether the head and the projections into the residual stream start at zero."""

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
