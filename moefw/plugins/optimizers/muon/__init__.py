"""``muon``: orthogonalized momentum for matrices, and AdamW for everything else."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, instance_of, le, lt, max_len, min_len, optional

import moefw
from moefw.core.facts import Offers
from moefw.core.plugin import OPTIMIZER, OptimizerPlugin
from moefw.core.records import ParameterRole, QKClip, TrainedParameters
from moefw.core.site import Site
from moefw.plugins.optimizers.torch_adamw import fused_adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
DECAYING_UNDER_ADAMW: Final[tuple[ParameterRole, ...]] = ("head",)


@frozen(kw_only=True)
class Muon(OptimizerPlugin):
    """Muon (arXiv 2502.16982) as ``torch.optim.Muon``, for whole matrices on every layout.

    Each matrix of a product is updated by its momentum with all singular values near 1, gate and up apart, and each
    expert's alone. Embedding, head, norms, biases and other vectors are updated by AdamW.
    """

    name: ClassVar[str] = "muon"

    momentum: float = field(default=0.95, validator=and_(ge(0.0), lt(1.0)))
    """Share of the momentum, a mean of gradients, that a step keeps."""
    nesterov: bool = True
    """Whether a step goes along a mean of gradient and momentum, rather than along the momentum."""
    weight_decay: float = field(default=0.1, validator=ge(0.0))
    """Weight decay of matrices: a step takes this share, times the learning rate, off each weight."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of the learning rate by the shape of a matrix of n rows and m columns.

    ``original``: sqrt(max(1, n / m)). ``match_rms_adamw``: 0.2 sqrt(max(n, m)), with which an update is about as large
    as one of AdamW, so that both take the same learning rate.
    """
    newton_schulz: Literal["bf16", "fp32"] = "bf16"
    """Dtype of the products of the Newton-Schulz iteration. With ``bf16``, layouts differ by its rounding."""
    ns_steps: int = field(default=5, validator=and_(ge(1), le(99)))
    """Number of iterations."""
    ns_coefficients: tuple[float, ...] = field(
        default=COEFFICIENTS,
        converter=tuple,
        validator=[deep_iterable(instance_of((int, float))), min_len(3), max_len(3)],
    )
    """The three coefficients of an iteration, ``a X + (b A + c A A) X`` with ``A = X X^T``."""
    eps: float = field(default=1e-7, validator=gt(0.0))
    """Smallest norm by which a matrix is divided before the first iteration."""
    router: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the matrices of routers."""
    bucket_bytes: int = field(default=1 << 26, validator=ge(1))
    """Largest size in bytes, fp32, of the matrices that a rank computes between two exchanges, unless one is larger."""
    qk_clip: float | None = field(default=None, validator=optional(gt(0.0)))
    """Largest attention logit of a head: above it, a step scales the head's weights down (QK-Clip); null: no limit."""
    qk_clip_alpha: float = field(default=0.5, validator=and_(ge(0.0), le(1.0)))
    """Share of that scale, as an exponent, that queries take; their keys take the rest."""
    adamw_lr: float = field(default=1.0, validator=gt(0.0))
    """Factor of the learning rate for AdamW."""
    adamw_beta1: float = field(default=0.9, validator=and_(ge(0.0), lt(1.0)))
    """Share of AdamW's first moment that a step keeps."""
    adamw_beta2: float = field(default=0.95, validator=and_(ge(0.0), lt(1.0)))
    """Share of AdamW's second moment that a step keeps."""
    adamw_eps: float = field(default=1e-8, validator=gt(0.0))
    """Number added to the root of AdamW's second moment."""
    adamw_weight_decay: float = field(default=0.1, validator=ge(0.0))
    """Weight decay of the head, the only tensor that decays under AdamW."""

    def offers(self, site: Site) -> Offers:
        """Offer an elementwise update besides the rule, with all states in bf16 or in 8 bits, and off the device."""
        regions = ((OPTIMIZER, "bf16"), (OPTIMIZER, "8bit"), (OPTIMIZER, "offload"))
        return moefw.offers(update=("elementwise",), region=regions)

    def states(self) -> tuple[str, ...]:
        """Names of AdamW's moments."""
        return ("exp_avg", "exp_avg_sq")

    def nonnegative_states(self) -> tuple[str, ...]:
        """Name of AdamW's second moment."""
        return ("exp_avg_sq",)

    def rule(self) -> moefw.MatrixRule:
        """Rule of matrices."""
        import torch

        from moefw.plugins.optimizers.muon.rule import Orthogonalized

        return Orthogonalized(
            roles=("matrix", "router") if self.router == "muon" else ("matrix",),
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            adjust_lr=self.adjust_lr,
            dtype=torch.float32 if self.newton_schulz == "fp32" else torch.bfloat16,
            steps=self.ns_steps,
            coefficients=self.ns_coefficients,
            eps=self.eps,
            bucket_bytes=self.bucket_bytes,
        )

    def qk_clipping(self) -> QKClip | None:
        """Clip of attention logits (Kimi K2, arXiv 2507.20534 section 2.1)."""
        return None if self.qk_clip is None else QKClip(threshold=self.qk_clip, alpha=self.qk_clip_alpha)

    def build(self, parameters: TrainedParameters, lr: float) -> Any:
        """Fused ``torch.optim.AdamW`` over all that the rule does not take."""
        return fused_adamw(
            parameters,
            lr,
            betas=(self.adamw_beta1, self.adamw_beta2),
            eps=self.adamw_eps,
            weight_decay=self.adamw_weight_decay,
            decaying=DECAYING_UNDER_ADAMW,
            lr_factor=self.adamw_lr,
        )


@moefw.hookimpl
def moefw_optimizers() -> list[type[OptimizerPlugin]]:
    """Declare the optimizer."""
    return [Muon]
