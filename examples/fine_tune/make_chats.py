"""Writes conversations as JSON lines, from the documentation of the standard library: ``make_chats.py FILE``."""

from __future__ import annotations

import ast
import json
import pathlib
import sys
import sysconfig
from collections.abc import Iterator

LONGEST = 300
"""The most characters of an answer."""


def main(file: pathlib.Path) -> None:
    """Write a conversation a line: a question about each function and class, and what its documentation says first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
            for name, answer in documented(path):
                question = f"What does {path.stem}.{name} do?"
                messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                lines.write(json.dumps({"messages": messages}) + "\n")


def documented(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the first paragraph of the documentation of each function and class of a module."""
    module = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = (ast.get_docstring(node) or "").partition("\n\n")[0]
            if first:
                yield node.name, " ".join(first.split())[:LONGEST]


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
