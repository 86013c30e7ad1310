"""A script in a copy of a process: what it starts with ``python -m`` is a copy, too.

Arguments: the module of the script, and its own arguments.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import copies

run = subprocess.run


def run_copy(command: Sequence[Any], *, check: bool = False, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as ``subprocess.run`` would."""
    if [*command[:2]] != [sys.executable, "-m"]:
        return run(command, check=check, **how)
    done = copies.run(*command[2:], cwd=how["cwd"])
    if check:
        done.check_returncode()
    return done


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with mock.patch.object(subprocess, "run", run_copy):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
