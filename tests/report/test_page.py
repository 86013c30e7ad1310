"""A page says what a run has recorded, and what it has not; names and texts of a run are text."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from gzip import decompress
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from command_line import say
from moefw.report.page import page, read_runs
from moefw.system.files import replaced_file
from synthetic_run import write_run

SECTIONS = [
    *("outcome", "loss", "speed", "step-time", "expert-load", "router-entropy", "drops", "gradients"),
    *("memory", "layout", "events", "spec", "sample"),
]
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


class Page(HTMLParser):
    """The elements of a page, with its text and scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.elements: list[str] = []
        self.script = ""
        self.scripts: list[str] = []
        self.text = ""
        self._in = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.text += " "
        self.ids += [value for name, value in attributes if name == "id" and value]
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in != "style":
            self.text += data

    def pictures(self) -> dict:
        return json.loads(self.scripts[0])


def of(*runs: Path) -> Page:
    return Page(page(read_runs(runs)))


def said(page: Page, *texts: str) -> None:
    words = re.sub(r"\s+", " ", page.text)
    for text in texts:
        assert text in words, text


def test_a_page_has_every_section_and_says_what_came_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=120, spike_at=70, resumed_at=90)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    made = of(run)
    assert [name for name in made.ids if name in SECTIONS] == SECTIONS
    said(
        made,
        "Done: 120 steps",
        f"{last['loss']:.3f} nats a token in step 120",
        f"{last['eval_bits_per_byte']:.4f} bits a byte after step 120",
        "1 spike of the loss and 1 resume, which lost 7 steps.",
        "1 of 48 were without tokens",
        "84.13 MiB planned for a rank",
        "train.lr: 1 is 2 now",
        "examples/quickstart.yaml:22",
        "return path.read_text()",
    )


def test_a_run_that_is_going_on_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", steps=50, ended=False)
    monkeypatch.setattr("moefw.report.sections.outcome.time.time", lambda: 1_795_000_000.0 + 0.36 * 50 + 4)
    said(of(run), "Still going: 50 steps", "The last step ended 4 s before this page was made.")
    monkeypatch.undo()
    said(of(run), "Without an end: 50 steps")


def test_the_least_run_has_a_page_that_says_what_would_record_the_rest(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    made = of(tmp_path)
    assert [name for name in made.ids if name in SECTIONS] == SECTIONS
    said(
        made,
        "No step had a finite loss.",
        "train.eval_every asks for them.",
        "A model with MoE layers (model.num_experts) records it.",
        "`moefw plan` makes it from the spec.",
        "A run writes it when it starts.",
    )
    assert made.pictures()["items"] == []


def test_numbers_of_strangers_are_drawn_and_other_fields_ignored(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=30)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"my_number": 3.5 * line["step"], "my_text": "x", "my_list": [1], "my_flag": True, "my_map": {"a": 1}}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (run / "events.jsonl").open("a") as events:
        events.write('{"event": "strange", "step": 3, "reason": "whatever"}\n')
    made = of(run)
    said(made, "What else was recorded", "my number 105", "strange", "whatever")
    assert "my text" not in made.text


def columns(made: Page) -> list[np.ndarray]:
    """All arrays of 32-bit floats that a page holds."""
    found: list[np.ndarray] = []

    def look(data: object) -> None:
        if isinstance(data, dict):
            if data.get("type") == "ndarray" and data["dtype"] == "float32":
                found.append(np.frombuffer(decompress(b64decode(data["array"]["data"])), np.float32))
            for item in data.values():
                look(item)
        elif isinstance(data, list):
            for item in data:
                look(item)

    look(made.pictures()["documents"])
    return found


def test_a_page_holds_the_recorded_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=150)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held = columns(of(run))
    for name in ("loss", "grad_norm", "tokens_per_s", "model_tflops_per_gpu", "lr"):
        recorded = np.array([line[name] for line in lines], np.float32)
        assert any(np.array_equal(recorded, column) for column in held), name


def test_texts_of_a_run_are_never_markup_or_script(tmp_path: Path) -> None:
    plain = of(write_run(tmp_path / "plain", steps=30))
    run = write_run(tmp_path / "<b>run", steps=30, spec={"model": {HOSTILE: HOSTILE, "num_experts": 16, "top_k": 4}})
    (run / "sample.txt").write_text(HOSTILE)
    (run / "origins.json").write_text(json.dumps({f"model.{HOSTILE}": HOSTILE}))
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": HOSTILE, "step": 30, "reason": HOSTILE, "path": HOSTILE}) + "\n")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["seconds"][HOSTILE] = 1.0
        line[HOSTILE] = 1.0
        line["loss_shares"]["$$\\alpha$$" + HOSTILE] = 0.1
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = of(run)
    assert made.elements.count("script") == plain.elements.count("script") == 3
    assert not {"img", "b"} & set(made.elements) - set(plain.elements)
    assert made.text.count(HOSTILE) >= 6
    assert "<" not in made.scripts[0]


def test_several_runs_are_compared(tmp_path: Path) -> None:
    spec = {"train": {"steps": 60, "lr": 1e-3, "seq_len": 128}}
    first = write_run(tmp_path / "first", steps=60)
    second = write_run(tmp_path / "second", steps=40, seed=1, spec=spec)
    made = of(first, second)
    said(made, "Results", "What is different", "train.lr 0.003 0.001", "steps 60 40")
    assert "outcome" not in made.ids
    assert len(made.pictures()["heats"]) == 2
    said(of(first, first), f"{first} ")


def figures(html: str) -> list[str]:
    return re.findall(r"<figure.*?</figure>", html, re.DOTALL)


def test_a_run_with_one_evaluation_is_compared_with_those_of_others(tmp_path: Path) -> None:
    often = write_run(tmp_path / "often", steps=60, eval_every=20)
    once = write_run(tmp_path / "once", steps=60, eval_every=60)
    (bits,) = [chart for chart in figures(page(read_runs([often, once]))) if "Held-out text" in chart]
    assert "once" in bits
    assert "Held-out text" not in "".join(figures(page(read_runs([once]))))


def test_every_table_of_a_comparison_has_a_title_of_its_own(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / name, steps=60, eval_every=20) for name in ("one", "two")])
    for compared in (runs, runs[:1]):
        assert page(compared).count(">Terms beside the loss<") == 1


def test_the_command_writes_the_page_whole_and_names_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=30)
    assert say("report", run).out == f"the report is in {run / 'report.html'}\n"
    first = (run / "report.html").read_text()
    other = write_run(tmp_path / "other", steps=30)
    assert say("report", run, other).out == f"the report is in {run / 'comparison.html'}\n"
    assert (run / "report.html").read_text() == first
    assert say("report", run, other, "--out", tmp_path / "both.html").code == 0
    (run / "metrics.jsonl").write_text("{\n{\n")
    assert say("report", run).refuses("metrics.jsonl:1")
    assert (run / "report.html").read_text() == first
    assert [path.name for path in run.iterdir() if "tmp" in path.name] == []
    with pytest.raises(RuntimeError), replaced_file(run / "report.html"):
        raise RuntimeError
    assert (run / "report.html").read_text() == first


def test_a_run_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    refused = say("report", tmp_path / "none")
    assert refused.refuses("none is no folder")
    assert refused.code == 2
    assert say("report", write_run(tmp_path / "run", steps=3), "--out", tmp_path / "no" / "page.html").refuses(
        "page.html"
    )
