"""Gather what a GPU machine without a network may lack into the ignored folder ``.offline``.

    python benchmarks/gather_wheels.py [PACKAGE ...]

Run it where there is a network, copy the working tree with the folder, and run ``on_gpu.py`` there. Each package lies
in a folder of its own, and ``on_gpu.py`` uses only those that are not installed there. Without names these are
moefw's small dependencies, what its tests import, and the libraries that it is compared with.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import record

ROOT = Path(__file__).parent.parent
FOLDER = record.GATHERED.parent
ABI = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
ABI += ["--platform=manylinux2014_x86_64", "--platform=manylinux_2_28_x86_64"]
PACKAGES = ("ruamel.yaml", "pluggy", "attrs", "click", "rich", "markdown-it-py", "mdurl", "pygments", "packaging")
PACKAGES += ("bokeh", "tornado", "xyzservices")
PACKAGES += ("safetensors", "tokenizers", "pytest", "iniconfig", "pytest-timeout", "hypothesis", "sortedcontainers")
PACKAGES += ("liger-kernel", "scattermoe")
MOST_BYTES = 60 << 20


def main() -> None:
    """Gather, print what was found and what was not. Exits with 1 if the folder is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    shutil.rmtree(FOLDER, ignore_errors=True)
    for package in parser.parse_args().packages:
        into = FOLDER / package
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", *ABI]
        done = subprocess.run([*command, "--target", into, package], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(into, ignore_errors=True)
            why = done.stderr.strip().splitlines()
            print(f"{package:18} not gathered: {why[-1] if why else 'pip says nothing'}")
        else:
            print(f"{package:18} {nbytes(into) / 1e6:6.1f} MB")
    record.GATHERED.parent.mkdir(exist_ok=True)
    record.GATHERED.write_text(record.commit() + "\n")
    print(f"{nbytes(FOLDER) / 1e6:.1f} MB in {FOLDER}")
    if nbytes(FOLDER) > MOST_BYTES:
        sys.exit(f"gather_wheels: more than {MOST_BYTES / 1e6:.0f} MB. Name fewer packages.")


def nbytes(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
