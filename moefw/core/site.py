"""Sites: the sizes, layout and machine that a part's offers and needs depend on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import evolve, field, frozen
from attrs.validators import gt, optional

if TYPE_CHECKING:
    from moefw.core.contracts import LayoutPlan


@frozen(kw_only=True)
class Activation:
    """What an expert computes of its gate g and its up u."""

    kind: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """Formula: ``swiglu``, ``silu(g) * u``, or ``clamped_swiglu``, that of gpt-oss (arXiv 2508.10925).

    The latter is ``g' * sigmoid(alpha * g') * (u' + 1)`` with ``g' = min(g, limit)`` and
    ``u' = min(max(u, -limit), limit)``.
    """
    limit: float | None = field(default=None, validator=optional(gt(0.0)))
    """Limit of ``clamped_swiglu``; null: 7. No option of ``swiglu``."""
    alpha: float | None = field(default=None, validator=optional(gt(0.0)))
    """Factor in the sigmoid of ``clamped_swiglu``; null: 1.702. No option of ``swiglu``."""

    @property
    def clamp(self) -> tuple[float, float] | None:
        """``limit`` and ``alpha``; None: nothing is clamped."""
        if self.kind != "clamped_swiglu":
            return None
        return self.limit or 7.0, self.alpha or 1.702


@frozen(kw_only=True)
class Dims:
    """The sizes of an MoE layer: D model dim, F expert hidden dim, E experts, K top-k; and the formula of its experts.

    ``biased_experts``: whether gate, up and down of an expert have biases.
    """

    model_dim: int
    expert_dim: int
    num_experts: int
    top_k: int
    activation: Activation = Activation()
    biased_experts: bool = False


@frozen(kw_only=True)
class Machine:
    """Hardware that a spec is for, by default of this machine. ``device`` is the device type of tensors.

    ``capability``: the lowest compute capability of its GPUs, such as 9.0. None without a GPU, or if it is unknown.
    ``name``: what messages call it.
    """

    device: str = "cpu"
    num_devices: int = 1
    capability: str | None = None
    name: str = "this machine"

    def has_package(self, name: str) -> bool:
        """Whether ``name`` is installed (not whether it works: ``moefw doctor`` imports it).

        For ``package.part``: whether the folder of ``package`` holds a file ``part.*`` at any depth. Imports nothing.
        """
        package, _, part = name.partition(".")
        try:
            spec = importlib.util.find_spec(package)
        except (ModuleNotFoundError, ValueError):
            return False
        if spec is None:
            return False
        if not part:
            return True
        folders = spec.submodule_search_locations or ()
        return any(any(Path(folder).rglob(f"{part}.*")) for folder in folders)


@frozen(kw_only=True)
class Site:
    """One place in the model: the layer's sizes and number, the layout of ranks, the machine.

    ``num_layers`` includes dense layers and those that predict further tokens. ``ranks_per_node`` is None if only the
    launcher knows it. ``trains`` is False if the model will only compute: what no training could use is fine then.
    Parts are asked what they offer and need at each layer, or once for all if none of them reads ``layer``.
    """

    dims: Dims
    layer: int
    num_layers: int
    layout: LayoutPlan
    ranks_per_node: int | None
    machine: Machine
    trains: bool = True

    def at(self, layer: int) -> Site:
        """This site at another layer."""
        return evolve(self, layer=layer)
