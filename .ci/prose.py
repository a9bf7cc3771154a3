"""Looks for sentences that readers stumbled over: in the README, the pages of docs/, docstrings and messages.

    python .ci/prose.py

Each rule names what is wrong, what to write instead, and an example that it finds. What is bad English anywhere, such
as clichés, padding and archaisms, is found by proselint. Spelling is codespell's business.
"""

from __future__ import annotations

import ast
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).parents[1]


class Rule(NamedTuple):
    pattern: re.Pattern[str]
    instead: str
    example: str


def rule(pattern: str, instead: str, example: str) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), instead, example)


COUNTED = (
    "stages?|ops?|microbatch(?:es)?|activations?|process(?:es)?|copies|numbers?|weights|tokens|samples|bytes|ms|times|"
    "messages?|forwards?|backwards?|entry|entries|lines?|lists?|threads?|devices?|layers?|counts?|caps?|rows?|modules?|"
    "tapes?|workers?|dispatchers?|queues?"
)
EACH = "rank|stage|microbatch|queue|replica|gather|pipeline"
"""Not a step or a second: "ms a step" is said everywhere."""
VERBS = (
    "runs?|may|holds?|hosts?|takes?|has|packs?|calls?|needs?|that|while|must|keeps|goes|from|can|does|of a|shares|is"
)
"""What follows where a rank is not counted by, but does something: "the op a rank runs next"."""

RULES = (
    rule(
        rf"(?<!counts )\b(?:{COUNTED})(?<!counts) an? (?:{EACH})\b(?!'s|,? (?:{VERBS})\b|, or each|\()",
        "per rank, per stage, ...",
        "two stages a rank, down and up",
    ),
    rule(r"\bops (?:above|below) [\d,]+", "schedules with more than 50,000 ops", "ops above 50,000"),
    rule(
        r"(?<=[.;:] )(?:told|reported|said) (?:is|are)\b",
        "the report says",
        "It ends. Told is how much longer it took",
    ),
    rule(r"^(?:told|reported|said) (?:is|are|of)\b", "the report says", "Told is how much longer a step took"),
    rule(
        r"\b(?:how it|errors?|deviations?|shares?) (?:is|are) told\b|\btold in the\b",
        "is reported",
        "the errors told in the report",
    ),
    rule(r"\bis said (?:what|how|which|that)\b", "name who says it", "Before the run is said what is proved"),
    rule(r"\b(?:sums?|adds? up) alike\b", "in the same way", "to one that sums alike"),
    rule(
        r"\bwhat one in \w+ \w+ reached\b",
        "name the threshold",
        "A rise to what one in thirty numbers reached before",
    ),
    rule(r"\bno choice of [\w ]+ gives\b", "no combination adds up to", "no choice of the towers gives 8.2"),
    rule(r"\bor passes into it\b", "one holds a whole number of the other", "fits into a pass, or passes into it"),
    rule(
        r"\bone an? (?:rank|stage|microbatch|layer|message)\b", "one per rank, one per stage, ...", "give one a rank"
    ),
    rule(
        r"\bone \w+ a layer\b",
        "per rank, per stage, ...",
        "a list with one number a layer",
    ),
    rule(
        r"\bentries, one per \w+ is needed\b",
        "give one per rank, 4 in all",
        "f has 2 entries, one per rank is needed",
    ),
    rule(r"\bfits no whole number of times\b", "divides", "a window fits no whole number of times into a pass"),
    rule(r"\b(?:this run|it) is steered\b|\bsteering needs\b", "adapts, adapting", "this run is steered"),
    rule(r"\bruns apart\b(?! from)", "runs asynchronously", "an op that runs apart"),
    rule(r"\b(?:captain|helm|herald)s?\b", "coordinator, agent, notice", "the captain decides"),
    Rule(re.compile(r"\b([a-z]{2,}) \1\b(?<!that that)"), "the word once", "what the the rank holds"),
)


LEFT_OUT = (
    "typography.symbols",  # quotes and dots are typed as in code
    "typography.diacritical_marks",  # "resume" is a verb here
    "lexical_illusions",  # it takes a title and the next line for one sentence; the last rule above looks instead
    "spelling.consistency",  # `penstock analyze` and `color=` are names
    "misc.preferred_forms",  # `sans-serif` is a word of CSS
    "misc.illogic",  # "more than {number} in all" is fine
    "misc.phrasal_adjectives.ly",  # a multiply-add is no adverb
)
CHECKS: Any = {
    "max_errors": 1000,
    # The first name that fits a check counts.
    "checks": dict.fromkeys(LEFT_OUT, False) | {k: on for k, on in DEFAULT["checks"].items() if k not in LEFT_OUT},
}
CheckRegistry().register_many(__register__)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sources() -> list[Path]:
    return [*sorted((ROOT / "src" / "penstock").rglob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and table rows without code, each with its line."""
    text = re.sub(r"^```.*?^```$", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    for number, line in _paragraphs(text):
        yield number, re.sub(r"`[^`]*`", "`…`", line)


def prose_of_source(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings, and the texts of messages: strings with at least four words."""
    tree = ast.parse(text)
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            said = "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            said = node.value
        else:
            continue
        if len(re.findall(r"[a-z]{2,}", said)) < 4:
            continue
        for number, paragraph in _paragraphs(said):
            # What is drawn, styles and scripts of pages, and commands are no prose.
            if not re.search(r"rank \d+ *\||[{};]\s*$|^penstock ", paragraph):
                yield node.lineno + number - 1, re.sub(r"`[^`]*`", "`…`", paragraph)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Lines that belong together, joined; a table's rows stay alone, and what is drawn is left out."""
    held: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        alone = line.lstrip().startswith("|")
        if held and (not line.strip() or alone):
            yield first, " ".join(held)
            held = []
        if alone:
            yield number, line
        elif line.strip() and not re.search(r"\S {2,}\S", line):  # which is drawn, not written
            first = first if held else number
            held.append(line.strip())


def found(paragraphs: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    for number, paragraph in paragraphs:
        for each in RULES:
            for match in each.pattern.finditer(paragraph):
                yield number, match[0], each.instead


def found_by_proselint(paragraphs: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """As `found`, by proselint. It is given all paragraphs of a file at once: one by one takes ten times as long."""
    numbers, texts = zip(*paragraphs, strict=True) if (paragraphs := list(paragraphs)) else ((), ())
    begins = list(accumulate((len(each) + 2 for each in texts), initial=1))  # it puts a line break in front
    content = "\n\n".join(texts) + "\n"
    for each in LintFile("prose", content).lint(CHECKS):
        begin, end = each.check_result.span
        yield numbers[bisect_right(begins, begin) - 1], content[begin - 1 : end - 1], each.check_result.message


def main() -> int:
    count = 0
    for files, prose in ((pages(), prose_of_page), (sources(), prose_of_source)):
        for file in files:
            paragraphs = list(prose(file.read_text(encoding="utf-8")))
            for number, words, instead in sorted({*found(iter(paragraphs)), *found_by_proselint(paragraphs)}):
                print(f"{file.relative_to(ROOT)}:{number}: {words!r}: {instead}")
                count += 1
    print(f"{count} places" if count else "prose: no sentence to mend")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
