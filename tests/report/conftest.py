"""Pages are those of a user."""

from __future__ import annotations

import pytest

from bare_runs import write_page
from moefw.commands import report


@pytest.fixture(autouse=True)
def _whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_write_page", write_page)
