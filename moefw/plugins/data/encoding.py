"""Runs a ``tokenizer.json`` in a separate process: it is untrusted data, which can only crash that process."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from moefw.plugins.data import encoding_child
from moefw.plugins.data.encoding_child import receive, send
from moefw.system.folders import temporary_folder
from moefw.system.python import python


class EncodingError(Exception):
    """A text cannot be encoded: ``reason`` is why, ``text`` its index among those of the call. Or ids not decoded."""

    def __init__(self, reason: str, text: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.text = text


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
        if self._process.poll() is not None:
            self.close()
            self._start()

    def _start(self) -> None:
        # A script's folder is not on its path here: our module ``tokenizers`` would hide the library.
        command = python(encoding_child.__file__)
        # A file: a pipe that nobody reads would fill up. It is closed in close().
        self._errors = tempfile.TemporaryFile(dir=temporary_folder())  # noqa: SIM115
        pipe = subprocess.PIPE
        environment = {**os.environ, "RUST_BACKTRACE": "0"}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment)
        try:
            self._ask([self._content])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _ask(self, parts: Sequence[bytes], *, decode: bool = False) -> list[bytes]:
        requests = self._process.stdin
        answers = self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            send(requests, {"decode": decode, "sizes": list(map(len, parts))}, parts)
            answer = receive(answers)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise EncodingError(self._why_it_ended())
        head, parts_of_answer = answer
        if "error" in head:
            raise EncodingError(head["error"])
        return parts_of_answer

    def _why_it_ended(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").split("\n")
        said = next((line.strip() for line in lines if line.strip()), "")
        if code == -signal.SIGXCPU:
            return "it took more time than any text needs"
        if "memory allocation" in said or "MemoryError" in said:
            return "it took more memory than any text needs"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the process that runs it ended {how}{': ' + said if said else ''}"

    def __enter__(self) -> EncodingProcess:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
