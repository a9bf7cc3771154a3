"""Makes README.md and pyproject.toml fit for the package index: what leads into the repository leads to its host.

    python .ci/for_the_index.py URL REVISION [FOLDER]

In the repository links are relative, and no host is named. Run it on a checkout that is thrown away afterwards.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\])\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def readme(text: str, url: str, revision: str) -> str:
    """Its Markdown with links and pictures that hold anywhere."""

    def led(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        way = "raw" if match["picture"] else "blob"
        return f"{match['picture']}{match['text']}({url}/{way}/{revision}/{target})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(led, part) for part in parts)


def project(text: str, url: str, revision: str) -> str:
    """pyproject.toml with the addresses of the project."""
    urls = {
        "Repository": url,
        "Documentation": f"{url}/blob/{revision}/docs/index.md",
        "Changelog": f"{url}/blob/{revision}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    table = "\n".join(["[project.urls]", *(f'{name} = "{address}"' for name, address in urls.items()), "", ""])
    return text.replace("[project.scripts]\n", f"{table}[project.scripts]\n", 1)


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    url, revision = arguments[0].rstrip("/"), arguments[1]
    folder = Path(arguments[2] if len(arguments) == 3 else ".")
    for name, changed in (("README.md", readme), ("pyproject.toml", project)):
        file = folder / name
        file.write_text(changed(file.read_text(encoding="utf-8"), url, revision), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
