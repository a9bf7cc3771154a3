"""Pages in a browser: on a screen and on a phone, light and dark, nothing is cropped and nothing fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.analyze import analyze_trace
from penstock.analyze.page import to_page as analysis_page
from penstock.draw import to_html
from penstock.formats.traces import read_trace
from penstock.report import to_page as report_page
from report_cases import CROPPED, story_of
from trace_samples import study_sample

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

COLORS = """() => [...document.querySelectorAll("svg")].map((svg) => {
  const found = {};
  for (const bar of svg.querySelectorAll("rect[class^=k]"))
    found[bar.textContent.match(/[A-Z]/)[0]] = getComputedStyle(bar).fill;
  return found;
})"""
"""The colour of each kind of op in each picture of a page."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    many = ps.simulate(ps.build("zb-h1", 32, 128), ps.Costs.uniform(32))
    for name, text in {
        "report": report_page(story_of()),
        "analysis": analysis_page(
            analyze_trace(read_trace([str(study_sample(num_steps=4).write(folder / "run.parquet"))]))
        ),
        "timelines": to_html([many, ps.simulate(ps.build("1f1b", 4, 8))], titles=["large", "a title of its own"]),
    }.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["report", "analysis", "timelines"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cropped(browser: Any, pages: Path, name: str, scheme: str) -> None:
    for width in (1400, 400):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page, errors = context.new_page(), []
        page.on("console", lambda said, errors=errors: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        page.goto((pages / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CROPPED) == []
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 21, 29)"
        assert dark == (scheme == "dark")
        assert errors == []
        context.close()


def test_pictures_in_one_notebook_keep_their_colours(browser: Any) -> None:
    """Styles of a picture in a page hold for the whole page, unless they are bound to the picture."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    shown = [ps.build(name, 2, 4)._repr_html_() for name in ("1f1b", "zb-h1", "amdp")]
    page.set_content("<p class='text'>a text of the notebook</p>" + "".join(shown))
    colors = page.evaluate(COLORS)
    alone = []
    for each in shown:
        page.set_content(each)
        alone += page.evaluate(COLORS)
    assert colors == alone
    assert colors[0]["B"] != colors[1]["I"]
    page.set_content("<p class='text'>a text of the notebook</p>" + shown[0])
    assert page.evaluate("getComputedStyle(document.querySelector('p')).fill") == "rgb(0, 0, 0)"
    context.close()


def test_bars_that_touch_leave_no_stripes(browser: Any, pages: Path) -> None:
    """The 32 forwards of the first rank are one blue at every pixel, though each is three pixels and a bit wide."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.goto((pages / "timelines.html").as_uri())
    colors = page.evaluate("""() => {
      const canvas = document.getElementById("chart");
      const row = canvas.getContext("2d").getImageData(0, 68, canvas.width, 1);
      const found = [];
      for (let x = 75; x < 140; x++) found.push([...row.data.slice(4 * x, 4 * x + 3)]);
      return found;
    }""")
    assert max(max(channel) - min(channel) for channel in zip(*colors, strict=True)) <= 3  # which rounding makes
    context.close()
