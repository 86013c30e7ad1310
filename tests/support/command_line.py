"""A command in this process, which is faster than a new process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

from attrs import frozen

from moefw.cli import main


@frozen
class Said:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def refuses(self, name: str) -> bool:
        """Return whether it failed because of a file, in one line that names the file."""
        return self.code in (1, 2) and self.err.count("\n") == 1 and name in self.err


def say(*arguments: object) -> Said:
    """Run a command. An error that it does not report as a message is raised."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
    return Said(code, out.getvalue(), err.getvalue())
