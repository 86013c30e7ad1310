"""The options of ``text``, which determine its prepared files."""

from __future__ import annotations

import re

from attrs import field, frozen
from attrs.validators import and_, gt, lt, min_len, optional


@frozen(kw_only=True)
class Options:
    """The text and how it is tokenized: see :class:`moefw.training.data.Text`."""

    path: str | None = field(default=None, validator=optional(min_len(1)))
    suffixes: tuple[str, ...] = ()
    tokenizer: str = field(default="bytes", validator=min_len(1))
    heldout: float = field(default=0.05, validator=and_(gt(0.0), lt(1.0)))

    @property
    def bpe_size(self) -> int | None:
        """Number of ids of a vocabulary that is made from the text; None: it is not made from it."""
        number = re.fullmatch("bpe-([0-9]{1,9})", self.tokenizer)
        return int(number[1]) if number else None
