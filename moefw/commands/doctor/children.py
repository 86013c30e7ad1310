"""Runs probes in child processes, as a broken CUDA library may crash the interpreter."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from attrs import asdict

from moefw.commands.doctor.capability import Capability
from moefw.commands.doctor.probes import probe_of
from moefw.core.probes import ProbeError
from moefw.system.python import python


def ask(names: Sequence[str], *, deadline: float) -> list[Capability]:
    """Run probes in one child. If a probe kills it, run the remaining ones in a new child."""
    answers: list[Capability] = []
    pending = list(names)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())}
    while pending:
        left_s = max(deadline - time.monotonic(), 0.0)
        command = python("-m", __package__, *pending)
        fix = ""
        try:
            child = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=left_s
            )
            output = child.stdout
            why = _death(child)
        except subprocess.TimeoutExpired as late:
            why = f"no answer within {left_s:.0f} s" if left_s else "no time was left to try it"
            output = late.stdout or b""
            fix = "Try a longer --timeout."
        lines = output.splitlines()
        answers += [Capability(**json.loads(line)) for line in lines]
        del pending[: len(lines)]
        if pending:
            answers.append(_unusable(pending.pop(0), why, fix))
    return answers


def _import_path() -> list[str]:
    """Import path of this process for a child: all but the working folder, unless the user's PYTHONPATH names it."""
    named = filter(None, [os.environ.get("PYTHONPATH")])
    return [*named, *(path for path in sys.path if path not in ("", os.getcwd()))]


def _death(child: subprocess.CompletedProcess[bytes]) -> str:
    if child.returncode < 0:
        return f"it kills the interpreter ({signal.Signals(-child.returncode).name})"
    last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return " ".join([f"it ends the interpreter with exit code {child.returncode}", *last])


def answer(names: Iterable[str]) -> None:
    """Run as the child: write one JSON line per probe to stdout, without any output of libraries."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in names:
        print(json.dumps(asdict(_try(name))), file=out, flush=True)
    os._exit(0)


def _try(name: str) -> Capability:
    probe = probe_of(name)
    try:
        installed, detail = probe.run()
    except ProbeError as error:
        if error.missing:
            return Capability(name, "missing", detail=str(error), fix=probe.fix)
        return _unusable(name, str(error))
    except (Exception, SystemExit) as error:
        sentence = re.split(r"\n|(?<=\.)\s", str(error).strip())[0]
        return _unusable(name, f"{type(error).__name__}: {sentence[:200]}")
    return Capability(name, "available", installed, detail)


def _unusable(name: str, why: str, fix: str = "") -> Capability:
    probe = probe_of(name)
    try:
        installed = version(probe.distribution)
    except PackageNotFoundError:
        installed = ""
    return Capability(name, "unusable", installed, why, fix or probe.fix)
