"""Runs a ``tokenizer.json`` in a separate process: it is untrusted data, which can only crash that process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from moefw.plugins.data import encoding_child
from moefw.plugins.data.child import Child, EncodingError


@final
class EncodingProcess:
    """Encodes on all cores that the process may use, and decodes; a context manager, and its child ends with it.

    Raises EncodingError if loading fails. A child that a text has ended is replaced by another one.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._start()

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.integer[Any]]]:
        """Ids of each UTF-8 text, nothing added at its ends. Raises EncodingError."""
        try:
            parts = self._ask(texts)
        except EncodingError:
            parts = [self._ask_alone(number, text) for number, text in enumerate(texts)]
        return [np.frombuffer(part, dtype=np.uint32) for part in parts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens by their names; ids past the vocabulary are left out.

        Raises EncodingError.
        """
        self._restart_if_ended()
        (text,) = self._ask([np.array(ids, dtype=np.uint32).tobytes()], decode=True)
        return text.decode()

    def _ask_alone(self, number: int, text: bytes) -> bytes:
        """Ids of one text, as a batch does not report which of its texts fails."""
        self._restart_if_ended()
        try:
            (part,) = self._ask([text])
        except EncodingError as error:
            raise EncodingError(error.reason, number) from error
        return part

    def _restart_if_ended(self) -> None:
        if self._child.has_ended:
            self.close()
            self._start()

    def _start(self) -> None:
        self._child = Child(encoding_child.__file__)
        try:
            self._ask([self._content])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        self._child.close()

    def _ask(self, parts: Sequence[bytes], *, decode: bool = False) -> list[bytes]:
        _, answer = self._child.ask({"decode": decode}, parts)
        return answer

    def __enter__(self) -> EncodingProcess:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
