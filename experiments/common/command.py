"""What the commands share: their options, and running several one after the other."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path


def options(about: str | None, out: Path | None = None, *, show: bool = False) -> argparse.ArgumentParser:
    """A parser that shows the whole docstring of the command.

    Args:
        out: the folder of the raw results and the charts, where `--out` gives no other.
        show: whether there is `--show`, which only prints.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if show:
        parser.add_argument("--show", action="store_true", help="only print what was found last")
    if out is not None:
        parser.add_argument("--out", type=Path, default=out, help="folder of the raw results and the charts")
    return parser


def run_all(paper: str, runs: Iterable[Sequence[str]]) -> None:
    """Runs a paper's commands, each with its options, and prints how long each took; ends where one fails."""
    for name, *given in runs:
        began = time.perf_counter()
        print(f"\n## {name} {' '.join(given)}", flush=True)
        code = subprocess.run([sys.executable, "-m", f"experiments.{paper}.{name}", *given]).returncode
        print(f"({time.perf_counter() - began:.0f} s)", flush=True)
        if code != 0:
            raise SystemExit(code)
