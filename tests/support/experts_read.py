"""The experts whose weights are read from a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from moefw.compose import pretrained
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.origins import Origin


@contextmanager
def experts_read() -> Iterator[set[int]]:
    """Yield a set to which each expert is added when a weight of it is read."""
    seen = set[int]()

    class Seeing(Folder):
        def read(self, origin: Origin) -> Tensor:
            if ".experts." in origin.name:
                first = origin.cut[0] if origin.cut else origin.name.split(".experts.")[1].split(".")[0]
                seen.add(int(first))
            return super().read(origin)

    usual, pretrained.Folder = pretrained.Folder, Seeing  # type: ignore[misc]
    try:
        yield seen
    finally:
        pretrained.Folder = usual  # type: ignore[misc]
