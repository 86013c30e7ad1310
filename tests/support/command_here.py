"""A command in this process, because importing torch takes seconds. The ranks that it starts are processes."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest

from moefw.cli import main


def moefw_says(*arguments: object, code: int = 0) -> str:
    """Return the output of a command, or its errors if it ends with another exit code than 0."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == code, out.getvalue() + err.getvalue()
    assert "Traceback" not in err.getvalue()
    return err.getvalue() if code else out.getvalue()


def complaint(*arguments: object) -> str:
    """Return the one line that a command prints when it fails because of the user's input."""
    (line,) = moefw_says(*arguments, code=2).splitlines()
    return line
