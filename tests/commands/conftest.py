"""Distributions that are installed for the duration of a test."""

import sys
import textwrap

import pytest


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs distributions of one module each for the duration of a test; the source may be any module."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(distribution, source, *, names=(), module=None, commands=()):
        module = module or distribution.replace("-", "_")
        info = tmp_path / f"{distribution}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        entries = "".join(f"{name} = {module}\n" for name in names)
        entries += "[moefw.commands]\n" + "".join(f"{name} = {module}:{name}\n" for name in commands)
        (info / "entry_points.txt").write_text(f"[moefw]\n{entries}")
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))

    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]
