"""Reads JUnit reports, says what was skipped, and fails if any of it was promised or a phase ran nothing.

Only tests under tests/gpu may be skipped: they need a device that not every machine has.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET


def main(paths: list[str]) -> int:
    broken: list[str] = []
    ran = dict.fromkeys(paths, 0)
    for path in paths:
        for case in ET.parse(path).iter("testcase"):
            skipped = case.find("skipped")
            if skipped is None:
                ran[path] += 1
                continue
            name = f"{case.get('classname')}.{case.get('name')}"
            promised = not name.startswith("tests.gpu.") and skipped.get("type") != "pytest.xfail"
            print(f"{'promised, but ' if promised else ''}skipped: {name}: {skipped.get('message')}")
            if promised:
                broken.append(name)
    print(f"{sum(ran.values())} tests ran in {len(paths)} phases, {len(broken)} promised ones were skipped")
    return 1 if broken or 0 in ran.values() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
