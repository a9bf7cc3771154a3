"""The site: it builds strictly and with no network, and its pages are whole in a browser at both widths."""

from __future__ import annotations

import importlib.util
import os
import posixpath
import re
import subprocess
import sys
from functools import cache
from html import unescape
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest

import penstock as ps
from documents import ROOT, SITE
from tiers import others_nightly

pytestmark = pytest.mark.timeout(400)  # the first test waits for the site to be built
PLAIN = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src"), "FORCE_COLOR": ""}
SHOWN = ("index.html", "primer.html", "gallery.html", "play.html", "tutorials/own-model.html", "papers/amdp.html",
         "reference/schedule.html", "reference/commands.html", "library.html", "faq.html", "transports.html",
         "papers-schedules.html")  # fmt: skip


ADDRESS = re.compile(r"https?://")
LOADS = re.compile(r"""(?:src(?:set)?=["']?|url\(["']?|<link[^>]+href=["'])$""")
"""What stands before an address that the browser loads by itself."""
FARTHEST = 400
"""Characters from the beginning of a tag to its address."""


def of_site(name: str) -> ModuleType:
    """A module of docs/site."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **PLAIN},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_the_gallery_has_every_schedule_of_the_library() -> None:
    gallery = of_site("gallery")
    assert sorted(one.name for one in gallery.exhibits()) == sorted(ps.library.SCHEDULES)
    for one in gallery.exhibits():
        assert eval(one.line, {"ps": ps}) == one.build(), "the line that it shows makes what it draws"


def test_every_public_name_has_its_place_in_the_reference() -> None:
    pages = of_site("pages")
    for module in pages.MODULES:
        assert pages.public_names(module), module
    assert {pages.home(name) for name in ps.__all__} <= set(pages.MODULES)


def test_links_out_of_the_pages_lead_to_what_the_site_has() -> None:
    repository = of_site("repository")
    fenced = "\n```sh\n[a](../LICENSE)\n```\n"
    text = "[tune](../benchmarks/tune/README.md#x), [code](../src/penstock/planning/warmup.py)"
    assert repository.relinked(text + fenced, "tune.md") == (
        "[tune](repository/benchmarks/tune/README.md#x), [code](repository/src/penstock/planning/warmup.py)" + fenced
    )
    back = repository.relinked("[lab](../../docs/lab.md) [raw](results.json)", "repository/benchmarks/tune/README.md")
    assert back == "[lab](../../../lab.md) [raw](results.json)"


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_the_site_asks_for_nothing_from_elsewhere(built: Path) -> None:
    """No page, style or script of the site loads anything by an address of the web."""
    for page in [*built.rglob("*.html"), *built.glob("site/*.css")]:
        text = page.read_text(encoding="utf-8")
        before = [text[max(0, found.start() - FARTHEST) : found.start()] for found in ADDRESS.finditer(text)]
        assert [each for each in before if LOADS.search(each)] == [], page


def test_what_a_page_loads_is_told_from_what_it_leads_to() -> None:
    tags = {
        '<img src="': True, "<img src=": True, '<script async src=\'': True, '<img alt="a" srcset="': True,
        '<link rel="stylesheet" href="': True, "background: url(": True, '<a class="b" href="': False,
        "<p>see ": False,
    }  # fmt: skip
    assert {tag: bool(LOADS.search(tag)) for tag in tags} == tags


LINK = re.compile(r"""<a [^>]*?href="([^"#?]+)""")


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_no_link_leads_to_what_the_site_has_not(built: Path) -> None:
    """Files of folders like .github are there, too, which mkdocs leaves out by itself."""
    there = {path.relative_to(built).as_posix() for path in [built, *built.rglob("*")]}

    @cache
    def leads(folder: str, target: str) -> bool:
        """Most links are in the navigation of every page."""
        target = unquote(target)
        inside = target.lstrip("/") if target.startswith("/") else posixpath.join(folder, target)
        return posixpath.normpath(inside) in there

    lost = []
    for page in built.rglob("*.html"):
        folder = page.parent.relative_to(built).as_posix()
        for target in set(LINK.findall(page.read_text(encoding="utf-8"))):
            if not re.match(r"[a-z]+:", target) and not leads(folder, target):
                lost.append(f"{page.relative_to(built)}: {target}")
    assert lost == []
    assert (built / "repository" / ".github" / "workflows" / "ci.yml").is_file()
    assert "/reference/commands.html" in LINK.findall((built / "404.html").read_text(encoding="utf-8"))


PAST_THE_EDGE = """() => {
  const width = document.documentElement.clientWidth;
  const overflow = (each) => getComputedStyle(each).overflowX;
  const end = (each) => each.getBoundingClientRect().right;
  const scrolls = (each) => ["auto", "scroll"].includes(overflow(each)) && end(each) <= width + 1;
  const isKept = (each) => {
    for (let box = each.parentElement; box !== null; box = box.parentElement) if (scrolls(box)) return true;
    return false;
  };
  const isWide = (each) => each.clientWidth > 1 && each.scrollWidth > each.clientWidth + 1;
  const isBad = (each) => {
    if (end(each) > width + 1) return !isKept(each);
    if (!isWide(each)) return false;
    const how = overflow(each), inside = each.getBoundingClientRect().left + each.scrollWidth <= width + 1;
    return how === "visible" ? !inside && !isKept(each) : how === "hidden" || how === "clip";
  };
  return [...document.querySelectorAll(".md-content *, .md-footer *")]
    .filter((each) => (end(each) > width + 1 || isWide(each)) && isBad(each)
      && each.checkVisibility({opacityProperty: true, visibilityProperty: true}))
    .map((each) => `${each.tagName} ${each.className.baseVal ?? each.className}: ${each.textContent.slice(0, 60)}`);
}"""
"""What runs past the right edge of the page and lies in no box that scrolls, or is cut off by its own box."""


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize(
    ("width", "scheme"), others_nightly(product([1400, 400], ["light", "dark"]), [(1400, "light"), (400, "dark")])
)
def test_pages_are_whole_in_a_browser(built: Path, browser: Any, width: int, scheme: str) -> None:
    """No console error, no request but for files, nothing wider than the page; every picture is there."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, errors, asked = context.new_page(), [], []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    for name in SHOWN:
        page.goto((built / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate(PAST_THE_EDGE) == [], name
        broken = "[...document.images].filter(each => each.complete && !each.naturalWidth).map(each => each.src)"
        assert page.evaluate(broken) == [], name
    context.close()
    assert errors == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("browser")
def test_nothing_runs_past_the_edge_of_any_page(built: Path, browser: Any) -> None:
    """Every page of the site, on a screen and on a phone. What is wider scrolls in a box of its own.

    They are opened without their scripts, which is quicker. The test above opens some of them with scripts.
    """
    context = browser.new_context(viewport={"width": 1400, "height": 900}, java_script_enabled=False)
    page, found = context.new_page(), []
    pages = sorted(path for path in built.rglob("*.html") if path.name != "playground.html")
    for path in pages:
        page.goto(path.as_uri())
        for width in (1400, 400):
            page.set_viewport_size({"width": width, "height": 900})
            found += [f"{path.relative_to(built)} at {width}: {each}" for each in page.evaluate(PAST_THE_EDGE)]
    context.close()
    assert len(pages) > 60
    assert found == []


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_a_phone_gets_the_narrow_picture(built: Path, browser: Any) -> None:
    """A picture of 960 pixels shrunk to 370 has numbers that nobody can read."""
    shown = "[...document.querySelectorAll('a.schedule img')].map((each) => each.currentSrc)"
    for width, is_narrow in ((1400, False), (400, True)):
        page = browser.new_page(viewport={"width": width, "height": 900})
        for name in ("index.html", "primer.html", "gallery.html", "control.html"):
            page.goto((built / name).as_uri())
            sources = page.evaluate(shown)
            assert sources, name
            assert {source.endswith("-phone.svg") for source in sources} == {is_narrow}, name
        page.close()


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_figures_keep_their_size_on_a_phone_and_scroll(built: Path, browser: Any) -> None:
    """The figures of the papers are there in one width. Shrunk to 370 pixels, their labels were five pixels high."""
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.goto((built / "papers/pipemorph.html").as_uri())
    widths = page.evaluate("""[...document.querySelectorAll(".wide-picture")].map((each) =>
      [each.clientWidth, each.scrollWidth, each.querySelector("img").naturalWidth]
      .concat(getComputedStyle(each).overflowX))""")
    page.close()
    assert len(widths) > 10
    for box, inside, natural, how in widths:
        assert box <= 400
        assert inside >= natural > 400
        assert how == "auto"


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_code_goes_on_in_the_next_line_on_a_phone(built: Path, browser: Any) -> None:
    """Python and commands of the shell are read without scrolling. Grids stay as they were drawn."""
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.goto((built / "primer.html").as_uri())
    scrolls = """(language) => [...document.querySelectorAll(`.language-${language} pre > code`)]
      .map((each) => each.scrollWidth > each.clientWidth)"""
    code, grids = page.evaluate(scrolls, "python"), page.evaluate(scrolls, "console")
    page.close()
    assert code
    assert not any(code)
    assert any(grids)


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_bars_in_names_of_options_have_no_backslash(built: Path) -> None:
    text = unescape((built / "reference/commands.html").read_text(encoding="utf-8"))
    assert "<code>NAME|FILE...</code>" in text
    assert "\\|" not in text


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_search_works_from_files_alone(built: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto((built / "index.html").as_uri())
    page.locator("input.md-search__input").click()
    page.keyboard.type("simulate_mesh")
    page.locator("a.md-search-result__link", has_text="ps.simulation.simulate_mesh").wait_for()
    page.close()


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_a_schedule_of_the_gallery_opens_in_the_playground(built: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto((built / "gallery.html").as_uri())
    address = page.locator("a[href*='s=zb&']").first.get_attribute("href")
    page.goto((built / "gallery.html").as_uri().replace("gallery.html", str(address)))
    page.locator("#proof", has_text="Proved").wait_for()
    assert page.input_value("#grid") == str(ps.build("zb", 4, 8, warmup=[7, 5, 3, 1]))
    page.close()
