"""Plant each fault of tests/planted_faults.yaml in a copy of the code, and run the tests that must catch it.

Prints which test caught a fault first. Exits with 1 if one is not caught.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from attrs import frozen
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
FAULTS = ROOT / "tests" / "planted_faults.yaml"


@frozen
class Fault:
    """A description of the fault, the lines of a file that it replaces, and the tests that must fail."""

    what: str
    file: str
    was: str
    becomes: str
    test: str

    def plant(self, code: Path) -> None:
        """Change a copy of the code. Raises ValueError unless the lines occur exactly once."""
        path = code / self.file
        text = path.read_text()
        if text.count(self.was) != 1:
            raise ValueError(f"{self.file} holds {self.was!r} {text.count(self.was)} times")
        path.write_text(text.replace(self.was, self.becomes))

    def caught(self) -> str:
        """Return the first test that fails in a copy with the fault; empty if none does."""
        with tempfile.TemporaryDirectory() as folder:
            code = Path(folder)
            tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
            for name in tracked.splitlines():
                (code / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, code / name)
            self.plant(code)
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not deep", self.test],
                cwd=code,
                env={**os.environ, "CI": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{code}:{code / 'kernels'}"},
                capture_output=True,
                text=True,
            )
        first = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return first[1] if done.returncode == 1 and first else ""


@click.command()
@click.argument("tests", nargs=-1)
@click.option("--jobs", default=2, show_default=True)
def main(tests: tuple[str, ...], jobs: int) -> None:
    """Plant the faults that TESTS must catch, those of all tests without any."""
    faults = [Fault(**fault) for fault in YAML(typ="safe").load(FAULTS)]
    chosen = [fault for fault in faults if not tests or any(test in fault.test for test in tests)]
    escaped = 0
    with ThreadPoolExecutor(jobs) as pool:
        for fault, caught in zip(chosen, pool.map(Fault.caught, chosen), strict=True):
            escaped += not caught
            click.echo(f"{caught or 'ESCAPED ' + fault.test}\n  {fault.what}")
    click.echo(f"{len(chosen)} faults, {len(chosen) - escaped} caught")
    sys.exit(bool(escaped))


if __name__ == "__main__":
    main()
