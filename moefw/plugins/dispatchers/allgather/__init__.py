"""``allgather``: every rank gathers all tokens of its expert-parallel group and picks those of its experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.plugins.dispatchers.wire_option import SendsRows

if TYPE_CHECKING:
    from moefw.core.context import ExpertGroup


@frozen(kw_only=True)
class AllGather(SendsRows):
    """Moves P-1 rows per token each way, independent of the routing. Best where P is small compared with K."""

    name: ClassVar[str] = "allgather"

    def among(self, experts: ExpertGroup, context: moefw.BuildContext) -> moefw.Dispatcher[Any, Any]:
        """Dispatcher of this process."""
        from moefw.plugins.dispatchers.allgather.dispatcher import AllGatherDispatcher

        return AllGatherDispatcher(experts, **self.settled(context))


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [AllGather]
