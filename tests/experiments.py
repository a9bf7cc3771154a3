"""Imports the scripts of an experiment, whose folder is on the path as it is when they run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDERS = Path(__file__).parents[1] / "experiments"


@contextmanager
def scripts(experiment: str) -> Iterator[Callable[[str], Any]]:
    """What imports a script by its name.

    Other experiments have scripts of the same names: theirs are put aside, and ours are forgotten at the end.
    """
    folder = FOLDERS / experiment
    own = {path.stem for path in folder.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(folder))
        for name in own:
            sys.modules.pop(name, None)
        sys.modules |= others
