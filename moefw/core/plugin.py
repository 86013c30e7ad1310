"""What a plugin declares. Importing this imports no torch: runtime parts come in ``build``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import field, frozen
from attrs.validators import ge, optional

from moefw.core.errors import Problem
from moefw.core.facts import Need, Offers, offers
from moefw.core.site import Dims, Site

if TYPE_CHECKING:
    from pathlib import Path

    from moefw.core.context import BuildContext, ModelContext
    from moefw.core.contracts import (
        Dispatcher,
        ExpertGemm,
        Layout,
        LayoutPlan,
        MemoryPolicy,
        Precision,
        Router,
    )
    from moefw.core.data import DataSource

OPTIMIZER: Final = "optimizer"
"""The region of an optimizer's states."""


@frozen
class Plugin:
    """Base of all declarations: an attrs class whose fields are the options a user may set beside ``use:``."""

    name: ClassVar[str]
    hook: ClassVar[str]

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        """Return named sets of options that ``preset:`` may choose; options beside it win."""
        return {}

    def offers(self, site: Site) -> Offers:
        """Return what the part promises at ``site``: a pure function of the options and of the site."""
        return offers()

    def needs(self, site: Site) -> Sequence[Need]:
        """Return what the part asks of the other parts at ``site``."""
        return ()

    def check(self, site: Site) -> Sequence[Problem]:
        """Return what is wrong with the options at ``site``, the first layer; ``Problem.where`` is an option's name."""
        return ()


@frozen
class RouterPlugin(Plugin):
    """Declares a router: which experts each token goes to, with which weights."""

    hook: ClassVar[str] = "moefw_routers"

    def build(self, context: BuildContext) -> Router:
        """Return the router of one layer."""
        raise NotImplementedError


@frozen
class DispatcherPlugin(Plugin):
    """Declares a dispatcher: how rows reach the ranks of their experts, and come back."""

    hook: ClassVar[str] = "moefw_dispatchers"

    def build(self, context: BuildContext) -> Dispatcher:
        """Return the dispatcher that all equal layers of this process share."""
        raise NotImplementedError


@frozen
class GemmPlugin(Plugin):
    """Declares expert computation: the grouped GEMMs and the activation between them."""

    hook: ClassVar[str] = "moefw_gemms"

    def build(self, context: BuildContext) -> ExpertGemm:
        """Return the experts of one layer on this rank, parameters included."""
        raise NotImplementedError


@frozen
class PrecisionPlugin(Plugin):
    """Declares a precision recipe: the formats in which GEMMs get their operands."""

    hook: ClassVar[str] = "moefw_precisions"

    def build(self, context: BuildContext) -> Precision:
        """Return the recipe of one layer."""
        raise NotImplementedError

    def fallback(self, context: BuildContext) -> Precision:
        """Return what the head and the modules in high precision compute in."""
        return self.build(context)

    def keeps_high_precision(self, module: str) -> bool:
        """Whether a module stays in high precision: ``layers.3.moe.experts``, or ``layers.-1.moe.experts`` of the last.

        A module is kept so if one of its two names is.
        """
        return False


@frozen
class MemoryPlugin(Plugin):
    """Declares what happens to the activations of named regions between forward and backward."""

    hook: ClassVar[str] = "moefw_memory_policies"
    mechanism: ClassVar[str]
    joins: ClassVar[bool] = False
    """Whether policies of other mechanisms may treat the same regions beside it."""

    runs_again: ClassVar[bool] = False
    """Whether backward runs the regions again: what they save and return is dropped, and their inputs are kept."""

    passive: ClassVar[bool] = False
    """Whether the policy does nothing, so that the one of a region around it treats the region."""

    regions: tuple[str, ...]

    def needs(self, site: Site) -> Sequence[Need]:
        """Ask for each named region with this policy's mechanism."""
        reason = "a policy can only treat a region that is there and allows it"
        return [Need("region", (region, self.mechanism), reason, option="regions") for region in self.regions]

    def build(self, context: BuildContext) -> MemoryPolicy:
        """Return the policy."""
        raise NotImplementedError


@frozen
class OptimizerMemoryPlugin(MemoryPlugin):
    """Declares what happens to the states of the optimizer between steps: its region is ``optimizer``, always.

    ``build`` returns a :class:`moefw.OptimizerPolicy`, maybe more than once: what is costly is ``context.shared``.
    """

    joins: ClassVar[bool] = True

    regions: tuple[str, ...] = field(default=(OPTIMIZER,), init=False)

    def needs(self, site: Site) -> Sequence[Need]:
        """Ask the optimizer to allow the mechanism for its states."""
        reason = "the states belong to the optimizer, which says how they may be treated"
        fix = "Use an optimizer that offers it, or take the policy out."
        return [Need("region", (OPTIMIZER, self.mechanism), reason, fix=fix)]


@frozen
class LayoutPlugin(Plugin):
    """Declares how ranks are arranged into meshes."""

    hook: ClassVar[str] = "moefw_layouts"

    ranks_per_node: int | None = field(default=None, validator=optional(ge(1)), kw_only=True)
    """So many neighbouring ranks share a fast link; null: those of one machine, as the launcher says."""

    def plan(self, world: int | None) -> LayoutPlan:
        """Arrange ``world`` ranks, or the smallest world that fits. Pure; raises PlanError if none fits."""
        raise NotImplementedError

    def build(self, plan: LayoutPlan, device: str) -> Layout | None:
        """Return ``plan`` on this rank of an initialised world; None: its groups are opened as they are asked for."""
        return None


@frozen
class ModelPlugin(Plugin):
    """Declares the transformer around the MoE layers."""

    hook: ClassVar[str] = "moefw_models"

    def dims(self) -> Dims:
        """Return the sizes of the MoE layers."""
        raise NotImplementedError

    def moe_layers(self) -> Sequence[int]:
        """Return the numbers of the layers that are MoE layers; may be empty."""
        raise NotImplementedError

    def build(self, context: ModelContext) -> Any:
        """Return the model, a ``torch.nn.Module``; ``context.moe_layer(i)`` gives layer i's MoE layer."""
        raise NotImplementedError


@frozen
class DataSourcePlugin(Plugin):
    """Declares where text and tokens come from."""

    hook: ClassVar[str] = "moefw_data_sources"

    def prepare(self, cache_dir: Path) -> DataSource:
        """Tokenize once into files of which a run reads what it needs; reuse them the next time. Raises DataError."""
        raise NotImplementedError

    def anchored(self) -> DataSourcePlugin:
        """Return the same source for whoever stands in another folder: paths in it are absolute."""
        return self


@frozen
class OptimizerPlugin(Plugin):
    """Declares an optimizer.

    One whose states memory policies may treat offers pairs ``("optimizer", mechanism)`` as ``region``, in the order in
    which they apply, from the update outwards, and names its states. Its update goes element by element, so that
    any rows of a parameter may be updated alone, as plain tensors, on any device.
    """

    hook: ClassVar[str] = "moefw_optimizers"

    def states(self) -> Sequence[str]:
        """Return the keys of the states that are shaped like a parameter, fp32, zero at first and updated in place.

        Beside them there may be ``step``, a scalar that counts the updates.
        """
        return ()

    def build(self, parameters: Mapping[str, Any], lr: float) -> Any:
        """Return a ``torch.optim.Optimizer`` over the parameters, given by canonical name."""
        raise NotImplementedError


@frozen
class SchedulePlugin(Plugin):
    """Declares the learning rate over the steps."""

    hook: ClassVar[str] = "moefw_schedules"

    def factor(self, step: int, steps: int) -> float:
        """Return what the learning rate is multiplied with in ``step`` (from 0) of ``steps``."""
        raise NotImplementedError


FAMILIES: tuple[type[Plugin], ...] = (
    ModelPlugin,
    RouterPlugin,
    DispatcherPlugin,
    GemmPlugin,
    PrecisionPlugin,
    MemoryPlugin,
    LayoutPlugin,
    DataSourcePlugin,
    OptimizerPlugin,
    SchedulePlugin,
)
