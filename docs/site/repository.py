"""Links from the pages to files of the repository: what a page links to goes along with the site.

In the repository a link leads to the file itself (`../benchmarks/tune/README.md`), as everybody expects there.
The site has these files below `repository/`, Markdown as pages and all else as it is, and links lead there.

Pages that only the site has are named behind `docs/site/README.md`, which tells a reader of the repository how to get
them: `site/README.md#papers/amdp.md/figure-6` is `papers/amdp.md#figure-6` in the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
AWAY = "repository"
INSTEAD = DOCS / "site" / "README.md"
"""What links to pages that only the site has lead to in the repository."""

_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<after>\))")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def linked_files(made: dict[str, str]) -> dict[str, Path]:
    """The files outside docs/ that pages link to, and what those link to, by their places in the site.

    Args:
        made: the pages that are not in docs/, but made when the site is built: their texts, by their places.
    """
    found: dict[str, Path] = {}
    waiting = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "LICENSE", *sorted(DOCS.rglob("*.md"))]
    waiting += [file for place, text in made.items() for file in _linked(DOCS / place, text)]
    seen: set[Path] = set()
    while waiting:
        page = waiting.pop()
        if page in seen or not page.is_file():
            continue
        seen.add(page)
        if DOCS not in page.parents:
            found[place(page)] = page
        if page.suffix == ".md":
            waiting += _linked(page, page.read_text(encoding="utf-8"))
    return found


def _linked(page: Path, text: str) -> list[Path]:
    """The files of the repository that a page links to."""
    found = _LINK.finditer(_FENCE.sub("", text))
    return [_file(page, match["target"]) for match in found if _is_ours(match["target"])]


def place(file: Path) -> str:
    """Where the site has a file of the repository."""
    inside = DOCS in file.parents
    return file.relative_to(DOCS).as_posix() if inside else f"{AWAY}/{file.relative_to(ROOT).as_posix()}"


def relinked(text: str, here: str) -> str:
    """The Markdown of the page that the site has at `here`, with its links as the site needs them."""
    is_away = here.startswith(f"{AWAY}/")
    page = ROOT / here.removeprefix(f"{AWAY}/") if is_away else DOCS / here

    def moved(match: re.Match[str]) -> str:
        target = match["target"]
        if not _is_ours(target):
            return match[0]
        file = _file(page, target)
        if ROOT not in file.parents or not (file.is_file() or DOCS in file.parents):
            return match[0]
        target, anchor = place(file), match["anchor"] or ""
        if file == INSTEAD and anchor:
            target, anchor = made_page(anchor)
        link = os.path.relpath(target, os.path.dirname(here) or ".")
        return f"{match['before']}{link}{anchor}{match['after']}"

    pieces, end = [], 0
    for fence in _FENCE.finditer(text):
        pieces += [_LINK.sub(moved, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, _LINK.sub(moved, text[end:])])


def made_page(anchor: str) -> tuple[str, str]:
    """The page that only the site has, and its heading, as `#PAGE/HEADING` names them: `#papers/amdp.md/figure-6`."""
    page, _, heading = anchor.removeprefix("#").partition(".md")
    return f"{page}.md", heading.replace("/", "#", 1)


def _is_ours(target: str) -> bool:
    return "://" not in target and not target.startswith(("mailto:", "/"))


def _file(page: Path, target: str) -> Path:
    """What the link leads to; of a folder its README."""
    file = (page.parent / target).resolve()
    return file / "README.md" if file.is_dir() else file
