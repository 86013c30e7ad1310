"""The kinds of plugin: one table, from which hooks, sections, suites, templates and commands follow. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import field, frozen

from moefw.core.plugin import (
    AdapterPlugin,
    AttentionPlugin,
    ContextParallelPlugin,
    DataSourcePlugin,
    DispatcherPlugin,
    GemmPlugin,
    LayoutPlugin,
    MemoryPolicyPlugin,
    ModelPlugin,
    OptimizerPlugin,
    PipelinePlugin,
    Plugin,
    PrecisionPlugin,
    RouterPlugin,
    SchedulePlugin,
)


@frozen(kw_only=True)
class Kind:
    """A kind of plugin. ``name`` is its one word: of hooks, templates, suites, options of pytest, and docs.

    ``section`` is the path of a spec that chooses it, ``many`` whether it chooses several. ``base`` is the class of the
    declarations, ``contract`` that of what ``build`` returns (None: the declaration does the work itself), as
    ``module:Class``, because importing it may import torch. ``noun`` is the name in a sentence, ``summary`` says what
    such plugins do. ``guide`` is a page under ``docs``. ``why_not`` says why there is no suite, template and guide.
    """

    name: str
    section: str
    base: type[Plugin]
    contract: str | None
    summary: str
    many: bool = False
    noun: str = field()
    guide: str | None = None
    why_not: str = ""

    @noun.default
    def _noun(self) -> str:
        return self.name.replace("_", " ")

    @property
    def plural(self) -> str:
        """The name of several, as in the hook."""
        return f"{self.name.removesuffix('y')}ies" if self.name.endswith("y") else f"{self.name}s"

    @property
    def hook(self) -> str:
        """The hook that declares plugins of the kind."""
        return f"moefw_{self.plural}"

    @property
    def key(self) -> str:
        """The key that chooses it, the last of its section."""
        return self.section.rpartition(".")[2]

    @property
    def one(self) -> str:
        """The noun with its article."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"

    def spec(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        """Spec that chooses a plugin of the kind, and nothing else."""
        section: Any = [choice] if self.many else choice
        for key in reversed(self.section.split(".")):
            section = {key: section}
        return dict(section)

    @property
    def option(self) -> str:
        """The option of pytest that names a plugin to certify."""
        return f"--moefw-{self.name.replace('_', '-')}"

    @property
    def suite(self) -> str | None:
        """The class of ``moefw.testing`` that certifies it."""
        words = self.name.split("_")
        return None if self.why_not else "".join(word.capitalize() for word in words) + "Suite"


_TABLE: Final = (
    Kind(
        name="model",
        section="model",
        base=ModelPlugin,
        contract="torch.nn:Module",
        summary="Transformers around the MoE layers.",
        why_not="A model is right if it equals another implementation of its family, which only its author has.",
    ),
    Kind(
        name="attention",
        section="attention",
        base=AttentionPlugin,
        contract="moefw.core.contracts:Attention",
        summary="How a token reads the earlier tokens of its sequence.",
        guide="guides/write-an-attention.md",
    ),
    Kind(
        name="context_parallel",
        section="context_parallel",
        base=ContextParallelPlugin,
        contract="moefw.core.contracts:ContextAttention",
        summary="How attention exchanges keys, or heads, where the ranks of cp share sequences.",
        noun="context parallelism",
        guide="guides/write-a-context-parallelism.md",
    ),
    Kind(
        name="router",
        section="routing",
        base=RouterPlugin,
        contract="moefw.core.contracts:Router",
        summary="Which experts each token goes to, with which weights.",
        guide="guides/write-a-router.md",
    ),
    Kind(
        name="dispatcher",
        section="dispatch",
        base=DispatcherPlugin,
        contract="moefw.core.contracts:Dispatcher",
        summary="How rows reach the ranks of their experts, and come back.",
        guide="guides/write-a-dispatcher.md",
    ),
    Kind(
        name="gemm",
        section="gemm",
        base=GemmPlugin,
        contract="moefw.core.contracts:ExpertGemm",
        summary="How experts compute: the grouped GEMMs and the activation between them.",
        noun="GEMM",
        guide="guides/write-a-gemm.md",
    ),
    Kind(
        name="precision",
        section="precision",
        base=PrecisionPlugin,
        contract="moefw.core.contracts:Precision",
        summary="The formats in which GEMMs get their operands.",
        noun="precision recipe",
        guide="guides/write-a-precision.md",
    ),
    Kind(
        name="memory_policy",
        section="memory",
        base=MemoryPolicyPlugin,
        contract="moefw.core.contracts:MemoryPolicy",
        summary="What happens to what regions save for backward, and to optimizer states.",
        many=True,
        guide="guides/write-a-memory-policy.md",
    ),
    Kind(
        name="adapter",
        section="adapter",
        base=AdapterPlugin,
        contract="moefw.core.contracts:Adapter",
        summary="What trains beside weights that stay as they are.",
        guide="guides/write-an-adapter.md",
    ),
    Kind(
        name="layout",
        section="parallel",
        base=LayoutPlugin,
        contract="moefw.core.contracts:Layout",
        summary="How ranks are arranged into meshes.",
        guide="guides/write-a-layout.md",
    ),
    Kind(
        name="pipeline",
        section="pipeline",
        base=PipelinePlugin,
        contract=None,
        summary="Where pipeline stages lie, and the order in which each rank runs them.",
        noun="pipeline schedule",
        guide="guides/write-a-pipeline.md",
    ),
    Kind(
        name="data_source",
        section="data",
        base=DataSourcePlugin,
        contract="moefw.core.data:DataSource",
        summary="Where text and its token ids come from.",
        guide="guides/write-a-data-source.md",
    ),
    Kind(
        name="optimizer",
        section="train.optimizer",
        base=OptimizerPlugin,
        contract="torch.optim:Optimizer",
        summary="How gradients change parameters.",
        guide="guides/write-an-optimizer.md",
    ),
    Kind(
        name="schedule",
        section="train.schedule",
        base=SchedulePlugin,
        contract=None,
        summary="How the learning rate changes over the steps.",
        noun="learning-rate schedule",
        guide="guides/write-a-schedule.md",
    ),
)

KINDS: Final[Mapping[str, Kind]] = {kind.name: kind for kind in _TABLE}
"""The kinds by name, in the order in which commands list them."""

CERTIFIED: Final[Mapping[str, Kind]] = {name: kind for name, kind in KINDS.items() if kind.suite}
"""Those with a suite, a template and a guide."""


def kind_of(declaration: type[Plugin]) -> Kind:
    """Kind of a declaration: the one whose base it extends. Raises TypeError if there is none."""
    for kind in _TABLE:
        if issubclass(declaration, kind.base):
            return kind
    raise TypeError(f"{declaration.__name__} extends none of the classes of plugins")
