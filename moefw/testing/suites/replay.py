"""The check of a plugin that offers ``replays``: steps of a whole model with it have the bits of eager ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import pytest

from moefw.core.errors import MoefwError
from moefw.core.facts import ANY
from moefw.core.kinds import Kind, kind_of
from moefw.core.plugin import Plugin
from moefw.testing.host_waits import available
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.replays import Comparison, compared
from moefw.testing.suites.base import Suite
from moefw.testing.suites.runs import whole_model

REPLAYS: Final = 2
SIZES: Final = {"vocab_size": 64, "num_layers": 1, "num_dense_layers": 0}
PARTS: Final[Mapping[str, Any]] = {
    "precision": {"use": "bf16"},
    "gemm": {"use": "grouped"},
    "routing": {"use": "topk", "balance": [{"kind": "aux_loss", "coeff": 0.01}]},
    "memory": [],
}
"""Parts that replay."""
DISPATCH: Final[Mapping[int, Mapping[str, Any]]] = {
    1: {"use": "alltoall"},
    2: {"use": "alltoall", "rank_capacity": 2.0, "on_overflow": "rerun", "max_tokens": 64},
}
"""The dispatcher, by the number of ranks that share the experts."""


class ReplayChecks(Suite):
    """The check of kinds whose plugins may offer ``replays``, on ranks of its own, each with a counted device."""

    _replay_worlds: ClassVar[Sequence[int]] = (1,)
    """Numbers of ranks, which share the experts, on which steps of a plugin that offers ``replays`` are replayed."""
    _counted_pool: RankPool

    @pytest.fixture(autouse=True)
    def _moefw_counted(self, moefw_counted_pool: RankPool) -> None:
        self._counted_pool = moefw_counted_pool

    @property
    def _replay_sizes(self) -> Mapping[str, int]:
        """Sizes of the model in which steps are replayed that the plugin needs."""
        return {}

    def test_steps_that_it_offers_to_replay_have_the_bits_of_eager_ones(self) -> None:
        """Operators, shapes and numbers depend on no value, and the host reads none: so ``train.graphs`` needs it.

        Steps run on a device that counts the waits of its host. The fourth one is recorded, and later ones run the same
        operators again on new tokens.
        """
        self.must_repeat()
        if not available():
            pytest.skip("this torch has no devices that are written in Python")
        worlds = [world for world in self._replay_worlds if world <= max(self.profile.worlds)]
        cases = {world: self._fitting_model(world) for world in worlds}
        offered = {world: _offered(case, kind_of(self.plugin)) for world, case in cases.items()}
        if not any(_covers(offered[world], world) for world in worlds):
            pytest.skip(f"{self.plugin.name} does not offer replays")
        for world in worlds:
            for found in self._compared(cases[world], world) if _covers(offered[world], world) else ():
                says = f"{self.plugin.name} offers replays {offered[world]}. On {world} ranks,"
                assert not found.failure, f"{says} {found.failure}"
                wrong = ", ".join(found.differing[:3])
                assert not wrong, f"{says} a replayed step differs from an eager one: {wrong}."

    def _compared(self, case: LayerCase, world: int) -> Sequence[Comparison]:
        return self._counted_pool.run(compared, world, case, REPLAYS)

    def _fitting_model(self, world: int) -> LayerCase:
        """Case of a small transformer with the plugin; skip the check if it does not go with parts that replay here."""
        case = self._whole_model(world)
        try:
            case.resolve()
        except MoefwError as error:
            pytest.skip(f"{self.plugin.name} does not run here with parts that replay: {error}")
        return case

    def _whole_model(self, world: int) -> LayerCase:
        """Case of a small transformer with the plugin, whose other parts replay."""
        parts = {
            **self.parts,
            **PARTS,
            "dispatch": DISPATCH[world],
            "parallel": self._replay_layout(world),
            **kind_of(self.plugin).spec(self.chosen),
        }
        plugins: tuple[type[Plugin], ...] = (self.plugin,)
        return whole_model(world, parts=parts, plugins=plugins, micro_batch=1, sizes={**SIZES, **self._replay_sizes})

    def _replay_layout(self, world: int) -> Mapping[str, Any]:
        """Layout of so many ranks: they share the experts."""
        return {"experts": {"ep": world}}


def _offered(case: LayerCase, kind: Kind) -> Any:
    """What the plugin of a kind offers in a case."""
    assembly = case.assemble()
    placed = getattr(assembly.parts, kind.key)
    (part,) = placed if kind.many else (placed,)
    return part.offers(assembly.site.at(0)).get("replays", ())


def _covers(offered: Any, world: int) -> bool:
    """Whether an offer is one for so many ranks that share experts."""
    return offered == ANY or ("alone" if world == 1 else "shared") in offered
