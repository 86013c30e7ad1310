"""Plugin declarations. Importing this imports no torch: ``build`` constructs the runtime parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import field, frozen
from attrs.validators import ge, gt, optional

from moefw.core.errors import Problem
from moefw.core.facts import ANY, Need, Offers, offers
from moefw.core.records import AdaptedWeight, Order, QKClip, TrainedParameters
from moefw.core.site import Dims, Site

if TYPE_CHECKING:
    from pathlib import Path

    from moefw.core.context import BuildContext, ModelContext
    from moefw.core.contracts import (
        Adapter,
        Attention,
        ContextAttention,
        Dispatcher,
        ExpertGemm,
        Layout,
        LayoutPlan,
        MatrixRule,
        MemoryPolicy,
        Precision,
        Router,
        StackedAdapter,
    )
    from moefw.core.data import DataSource

OPTIMIZER: Final = "optimizer"
"""Name of the region that holds the optimizer states."""


@frozen
class Plugin:
    """Base of all declarations: an attrs class whose fields are the options that a spec may set next to ``use:``."""

    name: ClassVar[str]
    left_out: ClassVar[Mapping[str, str]] = {}
    """Options that a user may look for and that the plugin does not have on purpose, each with why and what to use."""

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        """Named sets of options for ``preset:``. Options next to ``preset:`` override it."""
        return {}

    def offers(self, site: Site) -> Offers:
        """Facts that the part offers at ``site``. A pure function of the options and the site."""
        return offers()

    def needs(self, site: Site) -> Iterable[Need]:
        """Facts that the part needs from other parts at ``site``."""
        return ()

    def check(self, site: Site) -> Iterable[Problem | Iterator[Problem]]:
        """Problems of the options at ``site``, the first layer. ``Problem.where`` is an option's name.

        Each iterator among them is read by itself: an option that could not be read ends only those that look at it.
        """
        return ()

    def planned_as(self) -> Plugin:
        """The part that a plan runs in its place, where this one cannot run: one that saves, multiplies and sends as
        much on any machine. Itself: there is no other.
        """
        return self


@frozen
class AttentionPlugin(Plugin):
    """Declares attention: how a token reads the earlier tokens of its sequence."""

    def reach_at(self, layer: int) -> int | None:
        """How many earlier positions a token sees in a layer, numbered from 0. None: all.

        Layers are planned as alike only where it is the same.
        """
        return None

    def build(self, context: BuildContext) -> Attention:
        """Attention of one layer, with its parameters."""
        raise NotImplementedError


@frozen
class ContextParallelPlugin(Plugin):
    """Declares how attention exchanges keys, or heads, where the ranks of cp share sequences. Else it is not used."""

    def build(self, context: BuildContext) -> ContextAttention:
        """Core of the attention of one layer."""
        raise NotImplementedError


@frozen
class RouterPlugin(Plugin):
    """Declares a router: which experts each token goes to, with which weights."""

    def build(self, context: BuildContext) -> Router:
        """Router of one layer."""
        raise NotImplementedError


@frozen
class DispatcherPlugin(Plugin):
    """Declares a dispatcher: how rows reach the ranks of their experts, and come back."""

    def build(self, context: BuildContext) -> Dispatcher[Any, Any]:
        """Dispatcher that all equal layers of this process share."""
        raise NotImplementedError


@frozen
class GemmPlugin(Plugin):
    """Declares expert computation: the grouped GEMMs and the activation between them."""

    def build(self, context: BuildContext) -> ExpertGemm:
        """Experts of one layer on this rank, with their parameters."""
        raise NotImplementedError


@frozen
class PrecisionPlugin(Plugin):
    """Declares a precision recipe: the formats in which GEMMs get their operands."""

    rtol: ClassVar[float | None] = None
    """Largest error of an operand, and of a layer against fp64, as a share of a tensor's largest value.

    None: the recipe only casts.
    """

    row_scales: ClassVar[tuple[str, ...]] = ("input", "weight", "grad")
    """Roles whose rows (columns, if a product sums over rows) are scaled alone, so that outliers spoil no others."""

    @property
    def emulates(self) -> bool:
        """Whether products are computed in a wider format than the recipe's, on any machine, and slowly on a GPU.

        Plans take them in the recipe's format; searches for what is fast on GPUs leave the recipe out.
        """
        return False

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Compute capabilities of the GPUs that multiply the recipe's formats, with any library. Empty: all do."""
        return ()

    def build(self, context: BuildContext) -> Precision:
        """Recipe of one layer."""
        raise NotImplementedError

    def fallback(self, context: BuildContext) -> Precision:
        """Recipe of the head and of the modules that are kept in high precision."""
        return self.build(context)

    def keeps_high_precision(self, module: str) -> bool:
        """Whether a module, such as ``layers.3.moe.experts``, stays in high precision.

        It is also asked for with its layer counted from the end (``layers.-1.moe.experts``). One name suffices.
        """
        return False


@frozen
class MemoryPolicyPlugin(Plugin):
    """Declares a policy for the activations that named regions save between forward and backward."""

    mechanism: ClassVar[str]
    joins: ClassVar[bool] = False
    """Whether policies with other mechanisms may also treat the same regions."""

    rounds: ClassVar[bool] = False
    """Whether it stores regions in a format of its own, with other bits. A region has one such policy at most."""

    runs_again: ClassVar[bool] = False
    """Whether backward recomputes the regions: their saved tensors and outputs are dropped, their inputs are kept."""

    passive: ClassVar[bool] = False
    """Whether the policy does nothing, so that the policy of an enclosing region applies."""

    rtol: ClassVar[float] = 0.0
    """Largest change of a gradient of one layer, as a share of its largest value. 0: no bit changes."""

    regions: tuple[str, ...]
    """Names of the regions that the policy treats, such as ``attention`` or ``moe_act``."""

    def needs(self, site: Site) -> Sequence[Need]:
        """Need for each named region to allow this policy's mechanism.

        A layer that runs again also needs a dispatcher that brings rows in the same order each time.
        """
        reason = "a policy can only treat a region that is there and allows it"
        needs = [Need("region", (region, self.mechanism), reason, option="regions") for region in self.regions]
        if self.runs_again and "layer" in self.regions:
            reason = "a layer that runs again dispatches again, and goes backward along its first dispatch"
            fix = "Name regions inside the layer: attention, router, dispatch, experts."
            needs.append(Need("repeats", True, reason, fix=fix, option="regions"))
        return needs

    def build(self, context: BuildContext) -> MemoryPolicy:
        """Policy."""
        raise NotImplementedError


@frozen
class OptimizerMemoryPolicyPlugin(MemoryPolicyPlugin):
    """Declares a policy for the optimizer states between steps. Its region is always ``optimizer``.

    ``build`` returns a :class:`moefw.OptimizerPolicy`. It may run more than once: make costly objects with
    ``context.shared``.
    """

    joins: ClassVar[bool] = True

    update_rtol: ClassVar[float] = 0.0
    """Largest deviation from updates without the policy, where it is more than 0.05, which suffices for bf16.

    Of a state as a share of its tensor's largest value, of a parameter as a share of the learning rate.
    """

    regions: tuple[str, ...] = field(default=(OPTIMIZER,), init=False)

    def offers(self, site: Site) -> Offers:
        """Offer: between steps nothing is replayed."""
        return offers(replays=ANY)

    def needs(self, site: Site) -> Sequence[Need]:
        """Need for the optimizer to allow the mechanism for its states."""
        reason = "the states belong to the optimizer, which says how they may be treated"
        fix = "Use an optimizer that offers it, or take the policy out."
        return [Need("region", (OPTIMIZER, self.mechanism), reason, fix=fix)]


@frozen
class AdapterPlugin(Plugin):
    """Declares adapters: what trains beside weights that stay as they are."""

    freezes: ClassVar[tuple[str, ...]] = ("*",)
    """Patterns of the names of weights that are frozen, where ``train.freeze`` names none."""

    @property
    def draws(self) -> bool:
        """Whether adapters draw random numbers in training, from the keys of rows (``RowGroups.keys_R``)."""
        return False

    def adapts(self, weight: str) -> bool:
        """Whether a weight gets an adapter, given its name in its layer, such as ``attention.q_proj``."""
        raise NotImplementedError

    def build(self, context: BuildContext, weight: AdaptedWeight) -> Adapter:
        """Adapter of one matrix."""
        raise NotImplementedError

    def build_stacked(self, context: BuildContext, weight: AdaptedWeight) -> StackedAdapter:
        """Adapters of the matrices of all experts of ``weight``."""
        raise NotImplementedError

    @property
    def begins_with(self) -> str | None:
        """Folder of an adapter in files of PEFT whose values a run begins with; None: with those of ``build``."""
        return None

    def peft_config(self, base: str | None) -> Any | None:
        """Configuration with which PEFT computes the same beside the model ``base``; None: PEFT has no such adapters.

        A :class:`moefw.models.huggingface.adapter_config.AdapterConfig`.
        """
        return None

    def anchored(self) -> AdapterPlugin:
        """Same adapters with absolute paths, so that a spec works from any folder."""
        return self


@frozen
class LayoutPlugin(Plugin):
    """Declares how ranks are arranged into meshes."""

    ranks_per_node: int | None = field(default=None, validator=optional(ge(1)), kw_only=True)
    """Number of neighbouring ranks that share a fast link. null: those of one machine, as the launcher sets it."""

    def plan(self, world: int | None) -> LayoutPlan:
        """Plan for ``world`` ranks, or the smallest world that fits. Pure; raises PlanError if none fits."""
        raise NotImplementedError

    def build(self, plan: LayoutPlan, device: str) -> Layout | None:
        """``plan``, opened on this rank of an initialised world. None: moefw opens each group at first use."""
        return None


@frozen
class PipelinePlugin(Plugin):
    """Declares a pipeline schedule: where stages lie, and the order in which each rank runs them. Needs no torch."""

    layout: str | None = field(default=None, kw_only=True)
    """Stages, in the letters of Megatron-LM; null: layers are spread evenly.

    ``E`` embedding, ``t`` layer, ``m`` layer that predicts a further token, ``L`` loss, ``|`` between stages, ``*3`` or
    ``(...)*3`` for repetition. With null, layers that predict further tokens lie in the last stage.
    """

    @property
    def chunks(self) -> int:
        """The number of stages of each rank of pp."""
        return 1

    @property
    def merges(self) -> bool:
        """Whether orders have pairs: a forward and the backward of another micro-batch run phase by phase."""
        return False

    def rank_of(self, stage: int, ranks: int) -> int:
        """Position on pp, of ``ranks``, that holds a stage."""
        return stage % ranks

    def check_batches(self, ranks: int, micro_batches: int) -> Iterable[Problem]:
        """Why so many micro-batches cannot run, with the nearest number that can."""
        return ()

    def order(self, ranks: int, micro_batches: int) -> Order:
        """Passes of each of ``ranks`` positions on pp, in order, or pairs of them. Each waits for what it needs."""
        raise NotImplementedError


@frozen
class ModelPlugin(Plugin):
    """Declares the transformer around the MoE layers."""

    @classmethod
    def sections(cls, preset: str) -> Mapping[str, Mapping[str, Any]] | None:
        """Sections of a spec that a preset fills, ``{"model": {...}, "attention": {...}}``.

        None: it is unknown. A spec overrides them option by option. Raises SpecError for a preset that is known and
        cannot be read.
        """
        options = cls.presets().get(preset)
        if options is None:
            return None
        return {"model": options}

    def dims(self) -> Dims:
        """Sizes of the MoE layers."""
        raise NotImplementedError

    def moe_layers(self) -> Sequence[int]:
        """Numbers of the MoE layers. May be empty."""
        raise NotImplementedError

    def build(self, context: ModelContext) -> Any:
        """Model, a ``torch.nn.Module``. ``context.moe_layer(i)`` returns the MoE layer of layer ``i``.

        With a pp above 1, it is also a :class:`moefw.runtime.pipeline.stage.Pipelined`.
        """
        raise NotImplementedError


@frozen
class DataSourcePlugin(Plugin):
    """Declares a source of text and tokens."""

    weight: float = field(default=1.0, validator=gt(0.0), kw_only=True)
    """Share of a blend's sequences, relative to the weights of its other parts. Means nothing outside a blend."""

    def needs_to_train(self, site: Site) -> Iterable[Need]:
        """Needs that training on the data has of other parts, such as ``token_ids``, if the options tell.

        A model that is only built, exported or read need not offer it.
        """
        return ()

    def check_files(self) -> Iterable[Problem]:
        """Problems of files that the options name and this machine lacks, for ``moefw check``. No file is opened.

        ``Problem.where`` is an option's name. Prepared data may be there without them, so training does not ask.
        """
        return ()

    def prepare(self, cache_dir: Path) -> DataSource:
        """Tokenize once into files, and reuse them in later runs. A run reads only what it needs. Raises DataError."""
        raise NotImplementedError

    def anchored(self) -> DataSourcePlugin:
        """Same source with absolute paths, so that it works from any folder."""
        return self


@frozen
class OptimizerPlugin(Plugin):
    """Declares an optimizer.

    It offers ``update=("elementwise",)``: any rows or columns of a parameter that are updated alone, as plain tensors
    on any device, get the bits that they get in the whole. Ranks store parts of parameters, so no other update is the
    same under every layout.

    To allow memory policies on its states, an optimizer names them in ``states``, and offers pairs
    ``("optimizer", mechanism)`` as ``region``, in the order in which they apply, from the update outwards. This is the
    promise of ``update``, too.
    """

    def states(self) -> Sequence[str]:
        """Keys of the states with a parameter's shape: fp32, initially zero, updated in place.

        There may also be ``step``, a scalar that counts the updates.
        """
        return ()

    def nonnegative_states(self) -> Sequence[str]:
        """Keys among those of ``states`` of which no value is ever below zero, such as a mean of squares."""
        return ()

    def rule(self) -> MatrixRule | None:
        """Rule that updates whole matrices; None: all updates are those of ``build``.

        The runtime brings each matrix together, whole, wherever its parts are stored. Policies treat its states, too.
        With a rule, ``states`` names all states of the optimizer from ``build``.
        """
        return None

    def qk_clipping(self) -> QKClip | None:
        """Clip of attention logits behind each update; None: there is none. The runtime measures logits, and clips.

        It needs an attention that offers ``logits=("weights",)``.
        """
        return None

    def build(self, parameters: TrainedParameters, lr: float) -> Any:
        """``torch.optim.Optimizer`` over the parameters that no rule takes, a mapping from names in the model.

        A group with a number ``lr_factor`` gets the learning rate of each step times this factor.

        ``parameters.facts[name]``: the role of a parameter, its mesh, and the whole shapes of its named tensors.
        """
        raise NotImplementedError


@frozen
class SchedulePlugin(Plugin):
    """Declares a learning-rate schedule."""

    def factor(self, step: int, steps: int) -> float:
        """Factor of the learning rate in ``step`` (from 0) of ``steps``."""
        raise NotImplementedError
