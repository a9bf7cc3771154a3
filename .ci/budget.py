"""Fails when a group of src/penstock's folders has more lines of code, files or classes than .ci/budget.toml allows.

Blank lines, comments and docstrings are not counted. Limits only fall:

    .ci/budget.py           compares
    .ci/budget.py --lower   writes today's figures where they are below a limit
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "penstock"
LIMITS = Path(__file__).with_name("budget.toml")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def weigh(text: str) -> Counter[str]:
    """Counts the lines of code and the classes of one file."""
    documentation: set[int] = set()
    num_classes = 0
    for node in ast.walk(ast.parse(text)):
        num_classes += isinstance(node, ast.ClassDef)
        body = getattr(node, "body", None)
        for part in body if isinstance(body, list) else []:
            if (
                isinstance(part, ast.Expr)
                and isinstance(part.value, ast.Constant)
                and isinstance(part.value.value, str)
            ):
                documentation.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return Counter(lines=len(code - documentation), files=1, classes=num_classes)


def weigh_folders() -> dict[str, Counter[str]]:
    """Returns what each folder right under penstock has; "." stands for the files beside the folders."""
    folders: dict[str, Counter[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        folders.setdefault(parts[0] if len(parts) > 1 else ".", Counter()).update(weigh(path.read_text()))
    return folders


def main(arguments: list[str]) -> int:
    text = LIMITS.read_text()
    folders = weigh_folders()
    groups = tomllib.loads(text)
    known = {folder for group in groups.values() for folder in group["folders"]}
    errors = [f"src/penstock/{each} is in no group of .ci/budget.toml: add it to one" for each in {*folders} - known]
    for name, group in groups.items():
        found: Counter[str] = Counter()
        for folder in group["folders"]:
            found.update(folders.get(folder, Counter()))
        for unit in ("lines", "files", "classes"):
            if found[unit] > group[unit]:
                errors.append(
                    f"{name} ({', '.join(group['folders'])}) has {found[unit]:,} {unit}, and its limit is "
                    f"{group[unit]:,}: take out {found[unit] - group[unit]:,} in the same change; limits only fall"
                )
            elif "--lower" in arguments:
                text = re.sub(rf"(?ms)(^\[{name}\]$.*?^{unit} = )\d+", rf"\g<1>{found[unit]}", text, count=1)
    if "--lower" in arguments:
        LIMITS.write_text(text)
    print("\n".join(errors), end="\n" if errors else "")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
