"""Which tests one worker runs one after another, where `pytest -n` runs tests side by side.

    @pytest.mark.xdist_group("lab")        what a machine has one of, or what is dear to start: a lab, a browser
    @pytest.fixture(scope="module")        what the tests of a file share is made once, and not once for each worker

A group is that of a whole file. pytest-xdist's own `--dist loadgroup` puts a group into the names of tests, which
pytest 9.2 no longer lets it do: every test was a group of its own, and no message said so.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

GROUP = re.compile(r'^[^#\n]*xdist_group\("(\w+)"\)', re.MULTILINE)
SHARES = re.compile(r'^@pytest\.fixture\([^)\n]*scope="module"', re.MULTILINE)


@cache
def group_of_file(path: Path) -> str | None:
    """The name of the file's group; none where its tests have nothing in common."""
    text = path.read_text(encoding="utf-8")
    named = set(GROUP.findall(text))
    if len(named) > 1:
        raise ValueError(
            f"{path} has the groups {', '.join(sorted(named))}: put tests of each into a file of its own"
        )
    if named:
        return named.pop()
    return str(path) if SHARES.search(text) else None


def scheduler(config: Any, log: Any) -> Any:
    """What hands tests out to the workers by these groups, the largest first."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of_file(Path(config.rootpath, nodeid.partition("::")[0])) or nodeid

    return ByGroup(config, log)
