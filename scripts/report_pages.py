"""Pages of ``moefw report`` in a browser: runs are trained or made up, and their pages are opened in Chromium.

    python scripts/report_pages.py [--images RUN] [--keep FOLDER]

Needs Chromium (of Debian's package ``chromium``) and ``pip install playwright``; without them nothing is checked, and
a line says so. ``--images`` only writes the pictures of the documentation, of the report of RUN.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

from synthetic_run import write_run  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 3_000_000
MOST_CPU_S = 0.1
LEAST_CONTRAST = 4.5
NARROW = 390
MOST_BUCKETS = 800
SMALL = (
    *("model.dim=64", "model.expert_dim=32", "model.vocab_size=300", "data.tokenizer=bpe-300", "precision.use=fp32"),
    *("attention.num_heads=2", "attention.num_kv_heads=1", "attention.head_dim=32", "train.eval_tokens=512"),
    *("train.tokens_per_step=512", "train.micro_batch=2", "train.seq_len=64", "train.eval_every=10"),
)
"""Overrides of the quickstart that make a step take milliseconds."""

CANVASES = """() => {
  const canvases = []
  const visit = (node) => {
    for (const child of node.querySelectorAll("*")) {
      if (child.tagName == "CANVAS" && child.width > 100) canvases.push(child)
      if (child.shadowRoot) visit(child.shadowRoot)
    }
  }
  return [...document.querySelectorAll(".picture")].map((picture) => {
    canvases.length = 0
    visit(picture)
    const colours = new Set()
    for (const canvas of canvases) {
      const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", {willReadFrequently: true})
      copy.drawImage(canvas, 0, 0)
      const data = copy.getImageData(0, 0, canvas.width, canvas.height).data
      for (let at = 0; at < data.length; at += 4) {
        if (data[at + 3] > 40) colours.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2])
      }
    }
    return colours.size
  })
}"""
"""Number of colours in each picture."""
CONTRASTS = """() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[0-9.]+/g).map(Number).map((value) => {
      const part = value / 255
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4
    })
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const contrast = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a)
    return (high + 0.05) / (low + 0.05)
  }
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor
      if (colour != "rgba(0, 0, 0, 0)") return colour
    }
  }
  const least = {}
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((node) => node.nodeType == 3 && node.textContent.trim())
    if (!text || ["SCRIPT", "NOSCRIPT"].includes(element.tagName)) continue
    const name = element.tagName + "." + element.className
    const found = contrast(getComputedStyle(element).color, behind(element))
    least[name] = Math.min(found, least[name] ?? 99)
  }
  return least
}"""
"""Least contrast of text by element and class."""


def main() -> int:
    """Make pages, look at them, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, metavar="RUN", help="write the pictures of the documentation instead")
    parser.add_argument("--only", nargs="+", choices=PAGES, default=list(PAGES), help="which pages")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep runs, pages and pictures of them here")
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    try:
        import playwright  # noqa: F401
    except ImportError:
        chromium = None
    if chromium is None:
        print("report pages in a browser: skipped, as Chromium or Playwright is not installed")
        return 0
    with tempfile.TemporaryDirectory() as scratch, opened(chromium) as browser:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if options.images:
            write_images(browser, options.images, folder)
            return 0
        for name, make in PAGES.items():
            if name not in options.only:
                continue
            began_s = time.perf_counter()
            out = folder / f"{name}.html"
            runs = make(folder / name)
            command = [sys.executable, "-m", "moefw", "report", *map(str, runs), "--out", str(out)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            size = out.stat().st_size
            assert size <= MOST_BYTES, f"{out} has {size:,} bytes"
            told = look(browser, out, runs, folder / name)
            print(f"{name}: {size / 1e6:.2f} MB, {told}, {time.perf_counter() - began_s:.0f} s in all", flush=True)
    return 0


@contextmanager
def opened(chromium: str) -> Iterator[Any]:
    """A headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def train(run: Path, *overrides: str, resume: bool = False) -> list[str]:
    """Command that trains a small quickstart."""
    spec = ROOT / "examples" / "quickstart.yaml"
    more = ["--resume"] if resume else []
    return [sys.executable, "-m", "moefw", "train", str(spec), *SMALL, f"run.dir={run}", *overrides, *more]


def quickstart(folder: Path) -> list[Path]:
    """The quickstart, small."""
    subprocess.run(train(folder / "run", "train.steps=40"), check=True, capture_output=True)
    return [folder / "run"]


def killed(folder: Path) -> list[Path]:
    """A run that was killed between two checkpoints, and resumed."""
    run = folder / "run"
    every = "train.checkpoint_every=10"
    process = subprocess.Popen(
        train(run, "train.steps=100000", every),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 14:
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(3)  # ranks leave once their launcher is gone
    subprocess.run(train(run, "train.steps=60", every, resume=True), check=True, capture_output=True)
    return [run]


def pipeline(folder: Path) -> list[Path]:
    """Four ranks: two stages of a pipeline, each with experts over two ranks."""
    command = train(folder / "run", "train.steps=20", "parallel.pp=2", "train.micro_batch=1", "model.num_layers=4")
    subprocess.run(command, check=True, capture_output=True)
    return [folder / "run"]


def two_runs(folder: Path) -> list[Path]:
    """Two runs of different lengths."""
    spec = {"train": {"steps": 900, "lr": 1e-3, "seq_len": 128}}
    return [write_run(folder / "first", steps=1200), write_run(folder / "second", steps=900, seed=1, spec=spec)]


def long(folder: Path) -> list[Path]:
    """20,000 steps of 58 layers with 256 experts."""
    return [write_run(folder / "run", steps=20_000, layers=58, experts=256, eval_every=1000, spike_at=10_312)]


def two_long(folder: Path) -> list[Path]:
    """The same run twice."""
    return [folder.parent / "long" / "run", folder.parent / "long" / "run"]


def hostile(folder: Path) -> list[Path]:
    """A run whose texts try to be markup and script."""
    text = "</script><script>window.hacked = 1</script><img src=https://example.invalid onerror='window.hacked = 1'>"
    run = write_run(folder / "<img src=x>", steps=30, spec={"model": {text: text}})
    (run / "sample.txt").write_text(text)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["seconds"]["$$\\alpha$$" + text] = 0.1
        line["$$x$$" + text] = 1.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [run]


PAGES: dict[str, Callable[[Path], list[Path]]] = {
    "quickstart": quickstart,
    "killed": killed,
    "pipeline": pipeline,
    "two-runs": two_runs,
    "long": long,
    "two-long": two_long,
    "hostile": hostile,
}


@contextmanager
def shown(browser: Any, page: Path, **context: Any) -> Iterator[Any]:
    """A page in a context of its own, which asks for nothing and says nothing."""
    noises: list[str] = []
    opened_context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **context})
    tab = opened_context.new_page()
    tab.on("console", lambda message: noises.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: noises.append(f"error: {error}"))
    tab.on("request", lambda request: noises.append(f"request: {request.url}"))
    tab.goto(page.as_uri())
    if context.get("java_script_enabled", True):
        tab.wait_for_function("document.documentElement.dataset.drawn")
    yield tab
    opened_context.close()
    asked = [
        noise for noise in noises if noise != f"request: {page.as_uri()}" and not noise.startswith("request: data:")
    ]
    assert not asked, asked


def look(browser: Any, page: Path, runs: list[Path], pictures: Path) -> str:
    """Check a page in light, dark, narrow and without scripts; return what was measured, in words."""
    for scheme in ("light", "dark"):
        with shown(browser, page, color_scheme=scheme) as tab:
            tab.screenshot(path=f"{pictures}-{scheme}.png", full_page=True)
            check_colours(tab)
            if scheme == "light":
                told = check_answers(tab)
                check_numbers(tab, runs)
                tab.emulate_media(color_scheme="dark")
                tab.wait_for_timeout(100)
                check_colours(tab)
    with shown(browser, page, viewport={"width": NARROW, "height": 844}, device_scale_factor=1) as tab:
        tab.screenshot(path=f"{pictures}-narrow.png", full_page=True)
        wide = tab.evaluate("document.documentElement.scrollWidth")
        assert wide <= NARROW, f"{page} is {wide} pixels wide on a screen of {NARROW}"
    with shown(browser, page, java_script_enabled=False) as tab:
        tab.screenshot(path=f"{pictures}-without-scripts.png", full_page=True)
        assert tab.locator("noscript p").is_visible()
        assert tab.locator(".picture:visible").count() == 0
        assert tab.locator("td:visible").count() > 20
    return told


def check_colours(tab: Any) -> None:
    """Text has contrast, and pictures have the colours of the page."""
    poor = {name: found for name, found in tab.evaluate(CONTRASTS).items() if found < LEAST_CONTRAST}
    assert not poor, f"too little contrast: {poor}"
    assert all(colours > 3 for colours in tab.evaluate(CANVASES)), "a picture is empty"
    soft = tab.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--soft').trim()")
    axes = tab.evaluate(
        "Bokeh.documents[0].roots().flatMap((figure) => [...figure.references()])"
        ".filter((model) => model.type.endsWith('Axis')).map((model) => model.major_label_text_color)"
    )
    assert set(axes) == {soft}, axes
    assert tab.evaluate("window.hacked") is None


def check_answers(tab: Any) -> str:
    """CPU time of a move of the pointer over the loss, and of the slider; both show something new."""
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def cpu_s() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")

    def of_each(acts: list[Callable[[], Any]]) -> float:
        began_s = cpu_s()
        for act in acts:
            act()
            tab.evaluate("new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)))")
        return (cpu_s() - began_s) / len(acts)

    picture = tab.locator(".picture").first
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    places = [box["x"] + box["width"] * share / 10 for share in range(2, 9)]
    hover_s = of_each([lambda x=x: tab.mouse.move(x, box["y"] + box["height"] / 2) for x in places])
    assert tab.locator(".bk-tooltip-content").first.inner_text().strip(), "nothing is told at the pointer"
    tab.mouse.move(0, 0)
    slider = tab.locator("input[type=range]").first
    last = int(slider.get_attribute("max"))
    output = tab.locator("output").first
    told = output.inner_text()
    slide_s = of_each([lambda at=at: slide(tab, at) for at in range(0, last, max(last // 7, 1))])
    assert output.inner_text() != told, "the slider shows no other steps"
    assert max(hover_s, slide_s) <= MOST_CPU_S, f"hover {hover_s:.3f} s, slider {slide_s:.3f} s"
    return f"hover {1e3 * hover_s:.0f} ms, slider {1e3 * slide_s:.0f} ms of CPU"


def slide(tab: Any, at: int) -> None:
    """Move the first slider."""
    tab.evaluate(
        "(at) => { const input = document.querySelector('input[type=range]'); input.value = at;"
        " input.dispatchEvent(new Event('input')) }",
        at,
    )


def check_numbers(tab: Any, runs: list[Path]) -> None:
    """The losses that the browser holds are those that were recorded, extremes of buckets included."""
    held = tab.evaluate(
        "[...new Set(Bokeh.documents[0].roots().flatMap((figure) => [...figure.references()]))]"
        ".filter((model) => model.type == 'ColumnDataSource').flatMap((model) => Object.values(model.data))"
        ".map((column) => Array.from(column))"
    )
    for run in runs:
        losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for extreme in (min, max):
            expected = bucketed(losses, extreme)
            assert any(same(column, expected) for column in held), f"{run}: the losses are not those that were recorded"


def bucketed(values: list[float], extreme: Callable[[list[float]], float]) -> list[float]:
    """The extreme value of each bucket of steps."""
    width = 1
    while (len(values) - 1) // width >= MOST_BUCKETS:
        width *= 2
    return [extreme(values[begin : begin + width]) for begin in range(0, len(values), width)]


def same(column: list[Any], recorded: list[float]) -> bool:
    """Whether a column of 32-bit floats holds these numbers."""
    return len(column) == len(recorded) and all(
        isinstance(value, int | float) and abs(value - there) <= 1e-6 * abs(there)
        for value, there in zip(column, recorded)
    )


def write_images(browser: Any, run: Path, folder: Path) -> None:
    """Write the first screens of a run's report, in light and dark."""
    page = folder / "report.html"
    subprocess.run([sys.executable, "-m", "moefw", "report", str(run), "--out", str(page)], check=True)
    for scheme in ("light", "dark"):
        size = {"width": 1160, "height": 1240}
        with shown(browser, page, color_scheme=scheme, viewport=size, device_scale_factor=1) as tab:
            tab.screenshot(path=IMAGES / f"report-{scheme}.png")


if __name__ == "__main__":
    sys.exit(main())
