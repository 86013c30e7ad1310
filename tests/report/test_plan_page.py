"""A page of a plan needs no other file and no script, and says what the command prints, as text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from command_line import say
from small_spec import small_spec

ALONE = {"meta", "link", "br"}
"""Elements without an end tag."""


class Page(HTMLParser):
    """The elements and words of a page whose elements are all closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.ids: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(html)
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.ids += [value for name, value in attributes if name == "id" and value]
        if tag not in ALONE:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words += f" {data}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))


def page_of(tmp_path: Path, *asked: object) -> tuple[Page, str]:
    out = tmp_path / "page.html"
    said = say("plan", *asked, "--html", out)
    assert f"the page is in {out}" in said.out
    html = out.read_text()
    return Page(html), html


def test_a_page_of_a_plan_has_what_was_printed(tmp_path: Path) -> None:
    spec = small_spec(tmp_path, ranks=2)
    page, html = page_of(tmp_path, spec, "--cluster", "h100", "--tokens", "1e9")
    assert page.ids == ["outcome", "time", "try", "memory", "work", "spec"]
    assert "script" not in page.elements
    assert not re.findall(r'(?:src|href)="(?!#|data:)', html)
    data = json.loads(say("plan", spec, "--cluster", "h100", "--json").out)
    for category in data["seconds"]:
        assert category in page.words
    assert f"give or take {data['time']['error_percent']:.0f} %" in page.words
    assert "GPU-hours" in page.words
    assert data["try"][0]["trials"][0]["because"] in page.words
    assert "train.micro_batch" in page.words
    assert "all-to-all" in page.words


def test_a_page_without_a_cluster_has_no_time(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, small_spec(tmp_path))
    assert page.ids == ["outcome", "memory", "work", "spec"]


def test_a_page_of_two_plans_tells_them_apart(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, small_spec(tmp_path), "--cluster", "h100", "--compare", "train.micro_batch=4")
    assert page.ids == ["outcome", "differences", "memory", "work", "seconds"]
    assert "B trains" in page.words
    assert "train.micro_batch=4" in page.words


def test_names_in_a_spec_are_text(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, small_spec(tmp_path), 'run.dir="<script>alert(1)</script>/run"')
    assert "script" not in page.elements
    assert "<script>alert(1)</script>/run" in page.words


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    said = say("plan", small_spec(tmp_path), "--html", tmp_path / "missing" / "page.html")
    assert said.code == 2
    assert "--html" in said.err
