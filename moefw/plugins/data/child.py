"""A separate process that works on untrusted data within limits, which can only crash that process."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, final

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
class Child:
    """A Python process with ``arguments`` that answers messages (:mod:`moefw.plugins.data.encoding_child`)."""

    def __init__(self, *arguments: str) -> None:
        # A file: a pipe that nobody reads would fill up. It is closed in close().
        self._errors = tempfile.TemporaryFile(dir=temporary_folder())  # noqa: SIM115
        pipe = subprocess.PIPE
        environment = {**os.environ, "RUST_BACKTRACE": "0"}
        # A script's folder is not on its path here: our module ``tokenizers`` would hide the library.
        command = python(*arguments)
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment)

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def ask(self, head: Mapping[str, Any], parts: Sequence[bytes]) -> tuple[Mapping[str, Any], list[bytes]]:
        """Answer to a message. Raises EncodingError if it is an error, or if the process ended."""
        requests = self._process.stdin
        answers = self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            send(requests, {**head, "sizes": list(map(len, parts))}, parts)
            answer = receive(answers)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise EncodingError(self._why_it_ended())
        if "error" in answer[0]:
            raise EncodingError(answer[0]["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

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
