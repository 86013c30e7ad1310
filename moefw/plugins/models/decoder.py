"""``decoder``: a decoder-only transformer with MoE layers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import ModelPlugin
from moefw.core.site import Dims, Site
from moefw.models.huggingface.families import sections_of
from moefw.models.presets import PRESETS, preset_sections
from moefw.models.sizes import Sizes


@frozen(kw_only=True)
class Decoder(Sizes, ModelPlugin):
    """Decoder-only transformer, whose layers have experts or a plain MLP."""

    name: ClassVar[str] = "decoder"

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        """Named sizes."""
        by_name = {name: preset_sections(name) for name in PRESETS}
        return {name: sections["model"] for name, sections in by_name.items() if sections is not None}

    @classmethod
    def sections(cls, preset: str) -> Mapping[str, Mapping[str, Any]] | None:
        """Sections of a spec that a preset fills; None: it is unknown.

        ``preset``: a name, or the path of a ``config.json`` of Hugging Face or of its folder. Names come first.
        """
        named = preset_sections(preset)
        is_path = "/" in preset or preset.endswith(".json") or os.path.isdir(preset)
        return sections_of(Path(preset)) if named is None and is_path else named

    def dims(self) -> Dims:
        """Sizes of the MoE layers."""
        return Dims(
            model_dim=self.dim,
            expert_dim=self.expert_dim,
            num_experts=self.num_experts,
            top_k=self.top_k,
            activation=self.activation,
            biased_experts=self.biased_experts,
        )

    def offers(self, site: Site) -> moefw.Offers:
        """Offer the model's regions outside attention and expert GEMMs. All may be kept, recomputed or offloaded.

        ``dispatch`` may only be kept or recomputed (repeated), because the experts save the rows that it returns.
        """
        regions = ["layer", "attn_norm", "attention", "mlp_norm"]
        if self.moe_layers():
            regions += ["router", "experts"]
        if self.moe_layers() and self.shared_expert_dim:
            regions += ["shared_experts"]
        if self.has_dense_layers:
            regions += ["dense_mlp"]
        treated = [(region, mechanism) for region in regions for mechanism in ("keep", "recompute", "offload")]
        if self.moe_layers():
            treated += [("dispatch", "keep"), ("dispatch", "recompute")]
        mlps = ["mlp"] if self.has_dense_layers else []
        if self.moe_layers() and self.shared_expert_dim:
            mlps += ["moe.shared_expert"]
        return moefw.offers(
            region=tuple(treated),
            adapter=tuple(f"{mlp}.{name}_proj" for mlp in mlps for name in ("gate", "up", "down")),
            split=("pp", "cp", "tp"),
            token_ids=(self.vocab_size,),
            by_pass=True,
            named_products=True,
            row_keys=True,
            layer_losses=True,
            replays=moefw.ANY,
        )

    def needs(self, site: Site) -> Iterator[moefw.Need]:
        """Yield the needs: a tp that divides the sizes that it splits, and a GEMM for the experts' formula."""
        yield self._divided("vocab_size", ", or a larger vocab_size")
        if self.has_dense_layers:
            yield self._divided("dense_dim")
        if self.moe_layers() and self.shared_expert_dim:
            yield self._divided("shared_expert_dim")
        if self.moe_layers():
            kind = self.activation.kind
            yield moefw.need("formula", kind, reason=f"the activation of the model is {kind}", option="activation")
        if self.moe_layers() and self.biased_experts:
            yield moefw.need("formula", "bias", reason="the experts of the model have biases", option="biased_experts")

    def _divided(self, option: str, otherwise: str = "") -> moefw.Need:
        reason = f"each rank of tp has an equal share of {option}"
        fix = f"Use a tp that divides {option}{otherwise}."
        return moefw.need("axis_divides", ("tp", getattr(self, option)), reason=reason, fix=fix, option=option)

    def check(self, site: Site) -> Sequence[Iterator[moefw.Problem]]:
        """Check that dense layers are layers, that a gate has a shared expert, and an activation its options."""
        return [self._check_layers(), self._check_dense_layers(), self._check_gate(), self._check_activation()]

    def _check_layers(self) -> Iterator[moefw.Problem]:
        if self.num_dense_layers > self.num_layers:
            problem = f"{self.num_dense_layers} dense layers are more than the {self.num_layers} layers."
            yield moefw.Problem(problem, "Use at most num_layers.", "num_dense_layers")

    def _check_dense_layers(self) -> Iterator[moefw.Problem]:
        for index, layer in enumerate(self.dense_layers):
            if not self.num_dense_layers <= layer < self.num_layers:
                problem = f"layer {layer} is none of the layers {self.num_dense_layers} to {self.num_layers - 1}."
                yield moefw.Problem(problem, "Layers count from 0.", f"dense_layers[{index}]")

    def _check_gate(self) -> Iterator[moefw.Problem]:
        if self.shared_expert_gate and not self.shared_expert_dim:
            yield moefw.Problem("there is no shared expert to gate.", "Set shared_expert_dim.", "shared_expert_gate")

    def _check_activation(self) -> Iterator[moefw.Problem]:
        for name in ("limit", "alpha"):
            if self.activation.kind == "swiglu" and getattr(self.activation, name) is not None:
                problem = f"{name} is no option of swiglu, which clamps nothing."
                yield moefw.Problem(problem, "Leave it out, or use kind: clamped_swiglu.", f"activation.{name}")

    def build(self, context: moefw.ModelContext) -> Any:
        """Transformer."""
        from moefw.models.transformer import Transformer

        return Transformer(self, context)


@moefw.hookimpl
def moefw_models() -> list[type[ModelPlugin]]:
    """Declare the model."""
    return [Decoder]
