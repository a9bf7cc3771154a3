"""The record of a run, which every result carries: commit, command, machine, seeds, and how busy the machine was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("src", "experiments", ":!experiments/*/results/*", ":!experiments/*.md")
"""What a result depends on."""


def record(seeds: Sequence[int] = ()) -> dict[str, Any]:
    """The record of what runs now.

    Args:
        seeds: of all that was drawn; none where nothing was.
    """
    from penstock.bench.machine import machine  # here, as it loads torch, which simulation starts without

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "commit": commit(),
        "command": command(sys.argv),
        "machine": machine() | {"memory_gib": round(memory / 2**30, 1)},
        "seeds": list(seeds),
        "load": [round(each, 2) for each in os.getloadavg()],
    }


def commit() -> str:
    """The commit that is checked out, with `+` where sources differ from it; empty where git does not know.

    On a machine that has the files of a checkout without its history, PENSTOCK_COMMIT in the environment says it.
    """
    if given := os.environ.get("PENSTOCK_COMMIT"):
        return given
    try:
        head = _git("rev-parse", "HEAD").strip()
        return head + ("+" if _git("status", "--porcelain", "--", *SOURCES).strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def command(argv: Sequence[str]) -> str:
    """What was typed: `python -m experiments.pipemorph.figure15 --backend threads`. `--out` is left out."""
    path = Path(argv[0]).resolve()
    inside = path.suffix == ".py" and path.is_relative_to(ROOT)
    program = ".".join(path.relative_to(ROOT).with_suffix("").parts) if inside else path.name
    given = list(argv[1:])
    if "--out" in given:
        del given[given.index("--out") : given.index("--out") + 2]
    return " ".join(["python -m", program, *given])


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
