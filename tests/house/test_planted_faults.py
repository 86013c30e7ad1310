"""Every fault of tests/planted_faults.yaml can be planted: the lines that it replaces are there, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
FAULTS = YAML(typ="safe").load(ROOT / "tests" / "planted_faults.yaml")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["what"][:60])
def test_a_planted_fault_replaces_lines_that_are_there_once(fault: dict[str, str]) -> None:
    assert (ROOT / fault["file"]).read_text().count(fault["was"]) == 1, fault["was"]
    assert (ROOT / fault["test"].split("::")[0]).is_file(), fault["test"]
