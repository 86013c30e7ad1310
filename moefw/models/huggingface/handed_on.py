"""The files that belong to a model and lie beside its weights: they are handed on as they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from moefw.core.errors import CheckpointError
from moefw.system.untrusted_files import read_regular

CHAT: Final = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
"""What a conversation with a model needs besides ``tokenizer.json``."""
HANDED_ON: Final = (*CHAT, "tokenizer.json", "tokenizer.model", "added_tokens.json", "vocab.json", "merges.txt")
CONFIG: Final = "config.json"
BASE_CONFIG: Final = "base_config.json"
"""What a run calls the ``config.json`` of the model with which it began: a run is no folder of Hugging Face."""
MAX_BYTES: Final = 1 << 28
"""256 MiB, ten times the size of the tokenizers with the largest vocabularies."""


def hand_on(source: Path, target: Path) -> None:
    """Copy a file that lies beside a model; do nothing if there is none.

    Raises CheckpointError if it cannot be read or is no regular file, and OSError if ``target`` cannot be written.
    """
    if not os.path.lexists(source):
        return
    try:
        content = read_regular(source, max_bytes=MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror}.", "Download it again.") from error
    target.write_bytes(content)
