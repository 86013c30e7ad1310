from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moefw.testing import DataSourceSuite

from moefw_sample import Sample


def write(folder: Path) -> Mapping[str, Any]:
    path = folder / "lines.txt"
    path.write_text("".join(f"line {number}\n" for number in range(100)))
    return {"path": str(path)}


class TestSample(DataSourceSuite):
    plugin = Sample
    files = staticmethod(write)
