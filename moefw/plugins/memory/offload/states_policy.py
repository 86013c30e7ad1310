"""Offload of optimizer states: their memory, and the device of their update."""

from __future__ import annotations

from typing import Literal, final

from moefw.plugins.memory.offload.pool import Allocate
from moefw.plugins.memory.offload.states import HostStates
from moefw.plugins.memory.offload.states_streamed import StreamedStates
from moefw.plugins.memory.offload.states_updated_there import StatesUpdatedThere
from moefw.plugins.memory.offload.streams import Transfers
from moefw.runtime.memory.optimizer_states import OptimizerPolicy, OptimizerStates


@final
class OffloadStatesPolicy(OptimizerPolicy):
    """Puts states into memory from ``allocate``, and updates them on the ``host`` or on the ``device``."""

    def __init__(
        self, transfers: Transfers, allocate: Allocate, *, update: Literal["host", "device"], bucket_bytes: int
    ) -> None:
        self.transfers, self.allocate, self.bucket_bytes = transfers, allocate, bucket_bytes
        self._kind: type[HostStates] = StreamedStates if update == "device" else StatesUpdatedThere

    def treat(self, states: OptimizerStates) -> OptimizerStates:
        """Return ``states`` in host memory."""
        return self._kind(states, self.transfers, self.allocate, bucket_bytes=self.bucket_bytes)
