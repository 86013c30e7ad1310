"""Command line of the Python processes that moefw starts."""

from __future__ import annotations

import sys


def python(*arguments: str) -> list[str]:
    """Command that runs this Python on ``arguments``, without the folder of work or of a script on its import path.

    ``-m`` and ``-c`` put the working folder first on that path, and a script its own folder: a file there that has the
    name of a library would be imported in its place.
    """
    return [sys.executable, "-P", *arguments]
