"""The built-in plugins, found in their folder: the first line of a module names the parts that it declares."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

import moefw.plugins

_NAME: Final = r"``([\w-]+)``"
_ANNOUNCEMENT: Final = re.compile(rf'"""{_NAME}(?:(?:, | and ){_NAME})*: ')


@cache
def built_in() -> Mapping[str, str]:
    """Module of each built-in part, by name. Nothing is imported.

    A plugin is a module, or a package, in a folder of ``moefw/plugins``. Its text begins with the names of its parts:
    ``gpipe``, ``1f1b`` and ``zero-bubble``: one stage a rank. What begins otherwise is shared by plugins.
    """
    folder = Path(moefw.plugins.__path__[0])
    modules: dict[str, str] = {}
    for path in sorted((*folder.glob("*/*.py"), *folder.glob("*/*/__init__.py"))):
        with path.open(encoding="utf-8") as text:
            announcement = _ANNOUNCEMENT.match(text.readline())
        if announcement:
            place = path.parent if path.name == "__init__.py" else path.with_suffix("")
            module = ".".join(("moefw.plugins", *place.relative_to(folder).parts))
            modules |= dict.fromkeys(re.findall(_NAME, announcement[0]), module)
    return modules
