"""``chat``: conversations, of which answers train."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import DataSourcePlugin
from moefw.plugins.data.chat.options import ChatOptions


@frozen(kw_only=True)
class Chat(ChatOptions):
    """Conversations of JSON lines or Parquet files, rendered by the chat template of a tokenizer; answers train.

    A row has ``messages``, ``conversations`` (ShareGPT), or ``prompt`` and ``completion``, and may have ``tools``. A
    token trains if it overlaps what the template marks with ``{% generation %}``. A template without marks is rendered
    of the messages before and up to each answer, whose texts have to be prefixes of the whole. A row is held out by a
    hash of its conversation, so equal ones are on one side.
    """

    name: ClassVar[str] = "chat"

    def prepare(self, cache_dir: Path) -> moefw.DataSource:
        """Prepared data, from ``cache_dir`` if they are there already. Raises DataError."""
        from moefw.plugins.data.chat.prepare import prepare_chats

        return prepare_chats(self, cache_dir)


@moefw.hookimpl
def moefw_data_sources() -> list[type[DataSourcePlugin]]:
    """Declare the data source."""
    return [Chat]
