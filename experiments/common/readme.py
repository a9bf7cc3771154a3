"""A table in a README, between two comments that a script writes between.

<!-- guesses -->
| ... |
<!-- end of guesses -->
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def between(page: str, name: str) -> str:
    """What a page has between the two comments. Raises ValueError where they are not there."""
    _, start, rest = page.partition(f"<!-- {name} -->\n")
    inside, end, _ = rest.partition(f"<!-- end of {name} -->")
    if not (start and end):
        raise ValueError(
            f"the page has no comments <!-- {name} --> and <!-- end of {name} -->, with a table between; put both, "
            "each on a line of its own, where the table is to be"
        )
    return inside


def write_between(readme: Path, name: str, table: str | Iterable[str]) -> None:
    """Puts a table between the two comments of a page, in place of what is there.

    Args:
        table: its text, or its lines.

    Raises:
        ValueError: the comments are not there.
    """
    page = readme.read_text(encoding="utf-8")
    before, start, rest = page.partition(f"<!-- {name} -->\n")
    inside = between(page, name)
    text = "".join(f"{line}\n" for line in (table.splitlines() if isinstance(table, str) else table))
    readme.write_text(f"{before}{start}{text}{rest[len(inside) :]}", encoding="utf-8")


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table, the first cells of its rows at the left."""
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in body),
    ]
