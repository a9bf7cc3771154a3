"""Writes how long each file of tests takes, from the JUnit reports that `make test REPORTS=FOLDER` leaves.

    .ci/durations.py FOLDER/*.xml > tests/durations.txt

A line has the seconds of a file, its number of tests and its path; the slowest file comes first. Times are those of
the machine and the load of that run.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter


def lines(reports: list[str]) -> list[str]:
    """The lines for these reports: skipped tests count neither as tests nor as seconds."""
    seconds: Counter[str] = Counter()
    num_tests: Counter[str] = Counter()
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            path = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
            if case.find("skipped") is None:
                seconds[path] += float(case.get("time", 0))  # type: ignore[assignment]
                num_tests[path] += 1
    found = sorted(num_tests, key=lambda path: (-seconds[path], path))
    return [f"{seconds[path]:8.1f} {num_tests[path]:5} {path}" for path in found]


if __name__ == "__main__":
    print("\n".join(lines(sys.argv[1:])))
