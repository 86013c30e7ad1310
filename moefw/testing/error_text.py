"""How a rank tells of an exception: the sentence, and the lines of the author's own code that led to it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import Final

import moefw

FRAME: Final = '\n  File "'
"""How each line of code begins in a text."""
_PACKAGE: Final = Path(moefw.__file__).parent
_PLUGINS: Final = _PACKAGE / "plugins"
_STANDARD_LIBRARY: Final = Path(sysconfig.get_path("stdlib"))
_INSTALLED: Final = Path(sysconfig.get_path("purelib"))
_LIBRARIES: Final = ("torch", "triton", "numpy", "hypothesis", "pytest", "_pytest", "pluggy", "attr", "attrs")
"""Installed packages that authors of plugins call, and whose code they do not read."""


def error_text(error: BaseException) -> str:
    """Text of an exception: ``Name: message``, then the frames of the plugin's code; at least one, the innermost.

    Its notes and its cause follow, as texts alike.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_authors(Path(frame.filename))] or frames[-1:]
    message = str(error)
    name = type(error).__name__
    lines = [f"{name}: {message}" if message else name, *getattr(error, "__notes__", ())]
    text = "\n".join([*lines, "".join(traceback.format_list(own))]).rstrip()
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text if cause is None else f"{text}\nThis came of {error_text(cause)}"


def _is_authors(file: Path) -> bool:
    """Whether a file is of a plugin or of its test."""
    if file.is_relative_to(_PLUGINS):
        return True
    if not file.is_absolute() or file.is_relative_to(_PACKAGE):
        return False
    if file.is_relative_to(_INSTALLED):
        return file.relative_to(_INSTALLED).parts[0] not in _LIBRARIES
    return not file.is_relative_to(_STANDARD_LIBRARY)
