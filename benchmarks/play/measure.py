"""How soon the playground shows a schedule, and how long a frame takes while a slider is dragged.

    python benchmarks/play/measure.py          measures, and writes results.json and the table of README.md

Needs Chromium and playwright. *First schedule* is the time from opening the file until a schedule is proved, timed
and drawn. *Frame* is the time from one frame of the browser to the next while the delay of a link is moved in each of
60 frames, at 32 ranks and 128 microbatches: each frame simulates twice and paints the timelines. The drag begins two
seconds after the schedule is shown, about as soon as a hand finds the slider. An earlier protocol began at once: the
page runs a large schedule unseen in these seconds, so that the browser has compiled what a drag runs.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from playwright.sync_api import Page, sync_playwright

from experiments.common.readme import write_between
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.play import save

FOLDER = Path(__file__).parent
OPENINGS, FRAMES = 7, 60
REST = 2000
"""Milliseconds."""
LARGE = "#s=zb-h1&p=32&n=128"

DRAG = """async (frames) => {
  const input = document.querySelector("#links .slider:nth-child(3) input"), found = [];
  const frame = () => new Promise(requestAnimationFrame);
  let last = 0, updates = Number(document.body.dataset.updates);
  for (let k = -3; k < frames; k++) {
    await frame();
    const now = performance.now();
    if (k >= 0) found.push(now - last);
    last = now;
    input.value = 1 + ((k + 3) % 30);
    input.dispatchEvent(new Event("input", { bubbles: true }));
  }
  await frame();
  if (Number(document.body.dataset.updates) < updates + frames) throw new Error("a frame showed no update");
  return found;
}"""


def opened(browser: Any, url: str, width: int, scheme: str) -> tuple[Page, float]:
    """A page with its first schedule, and how many milliseconds that took."""
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    began = time.perf_counter()
    page.goto(url)
    while not page.evaluate("document.body.dataset.updates > 0"):
        page.wait_for_timeout(5)
    return page, 1e3 * (time.perf_counter() - began)


def main() -> None:
    known, rows = record(), []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        file = Path(folder) / "play.html"
        save(file)
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for width, scheme in ((1400, "light"), (400, "dark")):
            first = []
            for _ in range(OPENINGS):
                page, took = opened(browser, file.as_uri(), width, scheme)
                page.context.close()
                first.append(took)
            page, _ = opened(browser, file.as_uri() + LARGE, width, scheme)
            page.wait_for_timeout(REST)
            frames = sorted(page.evaluate(DRAG, FRAMES))
            page.context.close()
            rows.append({"width": width, "scheme": scheme, "first_ms": first, "frames_ms": frames})
        version = browser.version
        browser.close()
    found = {**known, "chromium": version, "rows": rows}
    save_summary(FOLDER / "results.json", found)
    write_between(FOLDER / "README.md", "results", table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The table of the README."""
    lines = [
        "| page | first schedule, median | slowest | frame, median | 95% | slowest |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        first, frames = row["first_ms"], sorted(row["frames_ms"])
        most = frames[int(0.95 * (len(frames) - 1))]
        lines.append(
            f"| {row['width']} px, {row['scheme']} | {median(first):.0f} ms | {max(first):.0f} ms "
            f"| {median(frames):.0f} ms | {most:.0f} ms | {frames[-1]:.0f} ms |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
