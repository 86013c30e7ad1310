"""Write ``tests/snapshots/transformer_engine-<version>.json``: the API that ``backend: te`` calls, as of a release.

The sources in the wheel are parsed, not imported. The compiled part is in another distribution. For its functions, the
snapshot holds the ways in which Transformer Engine itself calls them::

    pip download --no-deps transformer-engine==2.20.2
    python scripts/snapshot_transformer_engine.py transformer_engine-2.20.2-*.whl
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "tests" / "snapshots"
ROOT = "transformer_engine/pytorch/"
FUNCTIONS = dict.fromkeys(("general_gemm", "general_grouped_gemm"), "cpp_extensions/gemm.py")
QUANTIZERS = {
    "Float8BlockQuantizer": "tensor/float8_blockwise_tensor.py",
    "MXFP8Quantizer": "tensor/mxfp8_tensor.py",
    "Float8CurrentScalingQuantizer": "tensor/float8_tensor.py",
    "Float8Quantizer": "tensor/float8_tensor.py",
    "NVFP4Quantizer": "tensor/nvfp4_tensor.py",
}
STORAGES = {
    "Float8BlockwiseQTensorStorage": "tensor/storage/float8_blockwise_tensor_storage.py",
    "MXFP8TensorStorage": "tensor/storage/mxfp8_tensor_storage.py",
    "Float8TensorStorage": "tensor/storage/float8_tensor_storage.py",
    "NVFP4TensorStorage": "tensor/storage/nvfp4_tensor_storage.py",
}
COMPILED = ("split_quantize",)


class Wheel:
    """The sources of a wheel."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            self._texts = {
                name: archive.read(name).decode()
                for name in archive.namelist()
                if name.endswith((".py", ".dist-info/METADATA"))
            }

    def distribution(self) -> dict[str, str]:
        """Return the distribution's name and version, from its metadata."""
        (text,) = (text for name, text in self._texts.items() if name.endswith("METADATA"))
        fields = dict(line.split(": ", 1) for line in text.split("\n\n")[0].splitlines() if ": " in line)
        return {"distribution": fields["Name"], "version": fields["Version"]}

    def tree(self, path: str) -> ast.Module:
        """Return a parsed source of ``transformer_engine.pytorch``."""
        return ast.parse(self._texts[ROOT + path])

    def trees(self) -> Iterator[ast.Module]:
        """Yield all parsed sources of ``transformer_engine.pytorch``."""
        yield from (ast.parse(text) for name, text in self._texts.items() if name.startswith(ROOT))


def found(tree: ast.Module | ast.ClassDef, name: str) -> Any:
    """Return a class or function by name. Raises KeyError if it is missing."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise KeyError(name)


def signature(function: ast.FunctionDef, *, bound: bool) -> list[dict[str, Any]]:
    """Return name, kind and default of each parameter, without the first if ``bound``."""
    given = function.args
    assert not given.posonlyargs
    defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults))
    both = [("POSITIONAL_OR_KEYWORD", *pair) for pair in zip(given.args, [*defaults, *given.defaults])][bound:]
    if given.vararg:
        both.append(("VAR_POSITIONAL", given.vararg, None))
    both += [("KEYWORD_ONLY", *pair) for pair in zip(given.kwonlyargs, given.kw_defaults)]
    if given.kwarg:
        both.append(("VAR_KEYWORD", given.kwarg, None))
    return [
        {"name": one.arg, "kind": kind, **({} if default is None else {"default": ast.unparse(default)})}
        for kind, one, default in both
    ]


def fields(owner: ast.ClassDef) -> list[str]:
    """Return the attributes of ``self`` that a constructor assigns."""
    assigned = [node for node in ast.walk(found(owner, "__init__")) if isinstance(node, ast.Assign)]
    return sorted({one.attr for node in assigned for one in node.targets if isinstance(one, ast.Attribute)})


def metadata(storage: ast.ClassDef) -> list[str]:
    """Return the keys of the dictionary that ``get_metadata`` returns."""
    (returned,) = (node for node in ast.walk(found(storage, "get_metadata")) if isinstance(node, ast.Dict))
    return [key.value for key in returned.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def members(enum: ast.ClassDef) -> list[str]:
    """Return the names of an enumeration."""
    assigned = [node for node in enum.body if isinstance(node, ast.Assign)]
    return [one.id for node in assigned for one in node.targets if isinstance(one, ast.Name)]


def exports(tree: ast.Module) -> list[str]:
    """Return the names that a package imports for others."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return sorted({alias.asname or alias.name for node in imports for alias in node.names})


def calls(wheel: Wheel, name: str) -> list[dict[str, Any]]:
    """Return the ways in which Transformer Engine calls a function of its compiled part."""
    ways = {
        (len(node.args), tuple(sorted(one.arg for one in node.keywords if one.arg)))
        for tree in wheel.trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"tex.{name}"
    }
    return [{"positional": positional, "keywords": list(keywords)} for positional, keywords in sorted(ways)]


def snapshot(wheel: Wheel) -> dict[str, Any]:
    """Return everything that the test-suite compares against."""
    base = found(wheel.tree("quantized_tensor.py"), "Quantizer")
    quantizers = {name: found(wheel.tree(path), name) for name, path in QUANTIZERS.items()}
    storages = {name: found(wheel.tree(path), name) for name, path in STORAGES.items()}
    return {
        "source": wheel.distribution(),
        "exports": exports(wheel.tree("__init__.py")),
        "dtypes": members(found(wheel.tree("constants.py"), "DType")),
        "functions": {name: signature(found(wheel.tree(path), name), bound=False) for name, path in FUNCTIONS.items()},
        "quantizer": {"fields": fields(base), "__call__": signature(found(base, "__call__"), bound=True)},
        "quantizers": {name: signature(found(one, "__init__"), bound=True) for name, one in quantizers.items()},
        "storages": {
            name: {
                "metadata": metadata(one),
                "__new__": signature(found(one, "__new__"), bound=True),
                "update_usage": signature(found(one, "update_usage"), bound=True),
            }
            for name, one in storages.items()
        },
        "compiled": {name: calls(wheel, name) for name in COMPILED},
    }


def main() -> None:
    """Read the command line and write the snapshot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the released wheel of transformer-engine")
    written = snapshot(Wheel(parser.parse_args().wheel))
    target = FOLDER / f"transformer_engine-{written['source']['version']}.json"
    target.write_text(json.dumps(written, indent=1) + "\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
