"""``alltoall``: one row per (token, expert), sent directly to the expert's rank."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import DispatcherPlugin
from moefw.plugins.dispatchers.wire_option import SendsRows


@frozen(kw_only=True)
class AllToAll(SendsRows):
    """Sends K*(P-1)/P rows per token over the expert-parallel ranks. Best where K is small compared with P."""

    name: ClassVar[str] = "alltoall"

    def build(self, context: moefw.BuildContext) -> moefw.Dispatcher:
        """Return the dispatcher of this process."""
        from moefw.plugins.dispatchers.alltoall.dispatcher import AllToAllDispatcher

        return AllToAllDispatcher(context.expert_group(), **self.settled(context))


@moefw.hookimpl
def moefw_dispatchers() -> list[type[DispatcherPlugin]]:
    """Declare the dispatcher."""
    return [AllToAll]
