"""Write ``tests/snapshots/deep_ep.json``: the signatures of the DeepEP library that the adapters call.

The sources are parsed, not imported. The wheel holds ``Buffer`` and ``ElasticBuffer``; ``HybridEPBuffer`` is only on
the branch ``hybrid-ep`` of the git repository::

    pip download --no-deps sgl-deep-ep==0.1.2.post1
    git show hybrid-ep:deep_ep/hybrid_ep_buffer.py > hybrid_ep_buffer.py
    python scripts/snapshot_deep_ep.py sgl_deep_ep-*.whl hybrid_ep_buffer.py $(git rev-parse hybrid-ep)
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "tests" / "snapshots" / "deep_ep.json"
METHODS = {
    "Buffer": (
        "__init__",
        "destroy",
        "get_dispatch_config",
        "get_combine_config",
        "get_dispatch_layout",
        "dispatch",
        "combine",
    ),
    "ElasticBuffer": ("__init__", "destroy", "dispatch", "combine"),
    "EventOverlap": ("__init__", "current_stream_wait"),
    "HybridEPBuffer": ("__init__", "dispatch_with_permute", "combine_with_unpermute"),
}
FILES = {
    "Buffer": "deep_ep/buffers/legacy.py",
    "ElasticBuffer": "deep_ep/buffers/elastic.py",
    "EventOverlap": "deep_ep/utils/event.py",
}
EXPORTS, HANDLES = "deep_ep/__init__.py", "deep_ep/buffers/elastic.py"


class Wheel:
    """The sources of a wheel, packed or unpacked."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """Return the paths of all files."""
        if self.path.is_dir():
            return [str(one.relative_to(self.path)) for one in self.path.rglob("*") if one.is_file()]
        with zipfile.ZipFile(self.path) as archive:
            return archive.namelist()

    def text(self, name: str) -> str:
        """Return one file."""
        if self.path.is_dir():
            return (self.path / name).read_text()
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(name).decode()

    def distribution(self) -> dict[str, str]:
        """Return the distribution's name and version, from its metadata."""
        (name,) = (one for one in self.names() if one.endswith(".dist-info/METADATA"))
        head = self.text(name).split("\n\n")[0]
        fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        return {"distribution": fields["Name"], "version": fields["Version"]}


def classes(source: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a source file by name."""
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    """Return a method of a class. Raises KeyError if it is missing."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise KeyError(f"{owner.name}.{name}")


def signature(function: ast.FunctionDef) -> dict[str, Any]:
    """Return name, kind and default of each parameter, without ``self``."""
    arguments = function.args
    assert arguments.vararg is None and arguments.kwarg is None and not arguments.posonlyargs  # noqa: PT018
    defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    both = [("POSITIONAL_OR_KEYWORD", *pair) for pair in zip(arguments.args, [*defaults, *arguments.defaults])]
    both += [("KEYWORD_ONLY", *pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
    parameters = []
    for kind, argument, default in both if static else both[1:]:
        given = {} if default is None else {"default": ast.unparse(default)}
        parameters.append({"name": argument.arg, "kind": kind, **given})
    return {"static": static, "parameters": parameters}


def fields(owner: ast.ClassDef) -> list[str]:
    """Return the attributes that a constructor assigns."""
    assigned = [node for node in ast.walk(method(owner, "__init__")) if isinstance(node, ast.Assign)]
    return [target.attr for node in assigned for target in node.targets if isinstance(target, ast.Attribute)]


def rank_counts(function: ast.FunctionDef) -> list[int]:
    """Return the keys of the table of configurations."""
    (table,) = (node for node in ast.walk(function) if isinstance(node, ast.Dict))
    return [key.value for key in table.keys if isinstance(key, ast.Constant) and isinstance(key.value, int)]


def handle_fields(function: ast.FunctionDef) -> list[str]:
    """Return the attributes in the last item of the returned tuple, in order."""
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)][-1]
    assert isinstance(returned, ast.Tuple)
    handle = returned.elts[-1]
    assert isinstance(handle, ast.Tuple)
    return [one.attr for one in handle.elts if isinstance(one, ast.Attribute)]


def exported(source: str) -> Iterator[str]:
    """Yield the public names that a package's ``__init__`` imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if not alias.name.startswith("_") and not alias.asname)


def snapshot(wheel: Wheel, hybrid_ep: Path, commit: str) -> dict[str, Any]:
    """Return everything that the test-suite compares against."""
    found = {name: classes(wheel.text(path))[name] for name, path in FILES.items()}
    found["HybridEPBuffer"] = classes(hybrid_ep.read_text())["HybridEPBuffer"]
    buffer, hybrid = found["Buffer"], found["HybridEPBuffer"]
    return {
        "sources": {"deep_ep": wheel.distribution(), "hybrid_ep": {"branch": "hybrid-ep", "commit": commit}},
        "exports": sorted(exported(wheel.text(EXPORTS))),
        "methods": {
            name: {one: signature(method(owner, one)) for one in METHODS[name]} for name, owner in found.items()
        },
        "fields": {"EPHandle": fields(classes(wheel.text(HANDLES))["EPHandle"])},
        "handles": {"HybridEPBuffer": handle_fields(method(hybrid, "dispatch_with_permute"))},
        "ranks": {one: rank_counts(method(buffer, one)) for one in ("get_dispatch_config", "get_combine_config")},
    }


def main() -> None:
    """Read the command line and write the snapshot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the released wheel, or the folder it was unpacked to")
    parser.add_argument("hybrid_ep", type=Path, help="hybrid_ep_buffer.py")
    parser.add_argument("commit", help="the commit that hybrid_ep_buffer.py comes from")
    given = parser.parse_args()
    written = snapshot(Wheel(given.wheel), given.hybrid_ep, given.commit)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(written, indent=1) + "\n")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
