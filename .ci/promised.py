"""Reads JUnit reports, says what was skipped, and fails if any of it was promised or a phase ran nothing.

Tests under tests/gpu may be skipped: they need a device that not every machine has. So may those whose reason begins
with "needs NAME", where NAME is in the list that `--missing="NAME ..."` gives.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET


def main(arguments: list[str]) -> int:
    paths = [each for each in arguments if not each.startswith("--missing=")]
    missing = [name for each in arguments if each not in paths for name in each.partition("=")[2].split()]
    excuses = tuple(f"needs {name}" for name in missing)
    broken: list[str] = []
    ran = dict.fromkeys(paths, 0)
    for path in paths:
        for case in ET.parse(path).iter("testcase"):
            skipped = case.find("skipped")
            if skipped is None:
                ran[path] += 1
                continue
            name = f"{case.get('classname')}.{case.get('name')}"
            excused = bool(excuses) and (skipped.get("message") or "").startswith(excuses)
            promised = not (excused or name.startswith("tests.gpu.") or skipped.get("type") == "pytest.xfail")
            print(f"{'promised, but ' if promised else ''}skipped: {name}: {skipped.get('message')}")
            if promised:
                broken.append(name)
    print(f"{sum(ran.values())} tests ran in {len(paths)} phases, {len(broken)} promised ones were skipped")
    return 1 if broken or 0 in ran.values() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
