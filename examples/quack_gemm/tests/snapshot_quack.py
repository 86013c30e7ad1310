"""Write ``quack_kernels-<version>.json`` beside this file: the functions that ``moefw_quack`` calls, as of a release.

The source in the wheel is parsed, not imported. ``--commit`` names the commit that it equals but for its version::

    pip download --no-deps quack-kernels==0.6.5
    python snapshot_quack.py quack_kernels-0.6.5-*.whl --commit c8ec3170057987da0ec99883736f381ea1937cf3
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCE = "quack/gemm_interface.py"
FUNCTIONS = ("gemm", "gemm_add_inplace", "gemm_dgated", "gemm_gated")

Parameters = list[dict[str, str]]


def parameters(function: ast.FunctionDef) -> Parameters:
    """Name of each parameter, and its default as source code."""
    given = function.args
    assert not any((given.posonlyargs, given.vararg, given.kwonlyargs, given.kwarg))
    required = len(given.args) - len(given.defaults)
    named = [{"name": parameter.arg} for parameter in given.args]
    for parameter, default in zip(named[required:], given.defaults, strict=True):
        parameter["default"] = ast.unparse(default)
    return named


def signatures(source: str) -> dict[str, Parameters]:
    """Parameters of the functions, some of which are other names of a function."""
    body = ast.parse(source).body
    defined = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in defined:
            (target,) = node.targets
            defined[ast.unparse(target)] = defined[node.value.id]
    return {name: parameters(defined[name]) for name in FUNCTIONS}


def snapshot(wheel: Path, commit: str) -> dict[str, Any]:
    """Source and signatures."""
    name, version, *_ = wheel.name.split("-")
    with zipfile.ZipFile(wheel) as archive:
        source = archive.read(SOURCE).decode()
    return {
        "source": {"distribution": name.replace("_", "-"), "version": version, "commit": commit},
        "functions": signatures(source),
    }


def main() -> None:
    """Read the command line and write the snapshot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the released wheel of quack-kernels")
    parser.add_argument("--commit", required=True, help="the commit of Dao-AILab/quack with the same source")
    arguments = parser.parse_args()
    written = snapshot(arguments.wheel, arguments.commit)
    target = FOLDER / f"quack_kernels-{written['source']['version']}.json"
    target.write_text(json.dumps(written, indent=1) + "\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
