"""The page that authors of plugins for earlier versions of the hook interface read, and the errors that name it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from moefw.core import hooks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / hooks.UPGRADE_PAGE).read_text()
VERSION = int(hooks.API_VERSION.partition(".")[0])
SECTIONS = dict(re.findall(r"^## (From \d+ to \d+)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))
RENAMED = [
    pytest.param(before, today, id=f"{before.split('`')[1]}")
    for before, today in re.findall(r"^\| (`.+?) \| (`.+?) \|$", PAGE, flags=re.MULTILINE)
]


def exists(path: str) -> bool:
    """Return whether a dotted path leads to a module, or to a name in one."""
    module, *names = path.split(".")
    value = importlib.import_module(module)
    for name in names:
        module = f"{module}.{name}"
        if not hasattr(value, name):
            try:
                importlib.import_module(module)
            except ModuleNotFoundError:
                return False
        value = getattr(value, name)
    return True


def test_each_version_has_a_section_that_says_what_an_author_changes() -> None:
    assert list(SECTIONS) == [f"From {version} to {version + 1}" for version in range(1, VERSION)]
    assert all(section.strip() for section in SECTIONS.values())


@pytest.mark.parametrize(("before", "today"), RENAMED)
def test_what_was_renamed_has_its_name_of_today_and_no_other(before: str, today: str) -> None:
    old, new = before.strip("`").split("`, `"), today.strip("`").split("`, `")
    assert len(old) == len(new), "each old name has a new one"
    assert [name for name in new if not exists(name)] == []
    assert [name for name in old if exists(name)] == []


def test_contributors_are_told_to_write_the_next_section() -> None:
    assert hooks.UPGRADE_PAGE in (ROOT / "CONTRIBUTING.md").read_text()
