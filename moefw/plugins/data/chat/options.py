"""Options of conversations. They determine prepared files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date as Date
from typing import Any, Final, Literal

from attrs import evolve, field, frozen
from attrs.validators import and_, ge, gt, lt, min_len, optional

import moefw
from moefw.core.plugin import DataSourcePlugin
from moefw.core.site import Site
from moefw.plugins.data.options import absolute, missing
from moefw.plugins.data.tables import INSTALL, PACKAGE

TrainOn = Literal["assistant", "each", "last", "all"]
TooLong = Literal["truncate", "drop", "error"]
CONVERSATION: Final = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that are the conversation's."""


@frozen(kw_only=True)
class ChatOptions(DataSourcePlugin):
    """Conversations in rows, of which answers train. One is held out by a hash of its content."""

    path: str = field(validator=min_len(1))
    """File or folder; of a folder, the files that end in ``.jsonl`` and ``.parquet`` are read."""
    tokenizer: str = field(validator=min_len(1))
    """Folder of a model's tokenizer, or the ``tokenizer.json`` in it."""
    template: str | None = field(default=None, validator=optional(min_len(1)))
    """File of a chat template. null: that of the tokenizer's folder."""
    variables: Mapping[str, bool | int | float | str] = field(factory=dict, hash=False)
    """Variables of the template beside the conversation, such as ``{enable_thinking: false}``."""
    train_on: TrainOn = "assistant"
    """Tokens that train: of all answers (``assistant``), of the last one (``last``), or of the whole text (``all``).

    ``each`` makes a sample of each answer, with all that inference sees before it.
    """
    max_tokens: int | None = field(default=None, validator=optional(ge(2)))
    """Number of tokens from which a sample is too long. null: none is."""
    too_long: TooLong = "error"
    """What becomes of a sample that is too long."""
    date: str | None = None
    """Day that templates get as today, such as ``2026-01-31``. null: a template that asks for it is an error."""
    heldout: float = field(default=0.05, validator=and_(gt(0.0), lt(1.0)))
    """Share of conversations that training never sees."""

    def needs(self, site: Site) -> Sequence[moefw.Need]:
        """Also the need of the library that reads a Parquet file."""
        is_table = self.path.endswith(".parquet")
        reads = [moefw.need("package", PACKAGE, reason="it reads Parquet files", fix=INSTALL)] if is_table else []
        return [*super().needs(site), *reads]

    def check(self, site: Site) -> Sequence[moefw.Problem]:
        """Problems of a date that is none, and of variables that each conversation sets."""
        problems = []
        if self.date is not None and not _is_date(self.date):
            problems.append(moefw.Problem(f"{self.date!r} is no date.", "Write for example 2026-01-31.", "date"))
        for name in CONVERSATION:
            if name in self.variables:
                what = f"{name} is what each conversation sets."
                problems.append(moefw.Problem(what, "Take it out.", f"variables.{name}"))
        return problems

    def check_files(self) -> Iterator[moefw.Problem]:
        """Problems of a path, a tokenizer or a template that is not there."""
        yield from missing(self.path, "path")
        yield from missing(self.tokenizer, "tokenizer")
        if self.template is not None:
            yield from missing(self.template, "template")

    def anchored(self) -> Any:
        """Same conversations, tokenizer and template, with absolute paths."""
        template = None if self.template is None else absolute(self.template)
        return evolve(self, path=absolute(self.path), tokenizer=absolute(self.tokenizer), template=template)


def _is_date(text: str) -> bool:
    with suppress(ValueError):
        Date.fromisoformat(text)
        return True
    return False
