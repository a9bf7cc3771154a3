"""The record that a result carries: commit, command, machine, load; nothing that names the machine or its owner."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import penstock

CHECKOUT = Path(penstock.__file__).resolve().parents[2]
"""The root of the checkout that penstock was imported from, which may be another than this file's."""
SOURCES = ("src", "experiments", "benchmarks", ":(glob)tests/*.py")
OTHER = (":!*.json", ":!*.jsonl", ":!*.md", ":!experiments/*/results/*")
"""What a result depends on, and what in it are results and pages, as git's pathspecs from the root."""


def record() -> dict[str, Any]:
    """The record of what runs now: `commit`, `command`, `machine` and its `load` of 1, 5 and 15 minutes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "commit": commit(),
        "command": command(sys.argv),
        "machine": machine() | {"memory_gib": round(memory / 2**30, 1)},
        "load": [round(each, 2) for each in os.getloadavg()],
    }


def machine() -> dict[str, Any]:
    """Processor, how many, torch's threads, and versions."""
    import torch  # here, as simulations are recorded too, and they start without it

    from penstock.tune.device import processor

    return {
        "processor": processor(),
        "num_processors": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def commit(checkout: Path = CHECKOUT, sources: Sequence[str] = (*SOURCES, *OTHER)) -> str:
    """The commit of a checkout, with `+` where sources differ from it; empty where git does not know.

    On a machine that has the files of penstock's checkout without its history, PENSTOCK_COMMIT in the environment
    says that commit. It says nothing of other checkouts.

    Args:
        checkout: its root.
        sources: what has to be as in the commit, as git's pathspecs from the root.
    """
    given = os.environ.get("PENSTOCK_COMMIT")
    if given and checkout.resolve() == CHECKOUT:
        return given
    if not (checkout / ".git").exists():  # git would take a repository around it, as of a project with a wheel in it
        return ""
    try:
        head = _git(checkout, "rev-parse", "HEAD").strip()
        return head + ("+" if _git(checkout, "status", "--porcelain", "--", *sources).strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(checkout: Path, *words: str) -> str:
    asked = ["git", "--no-optional-locks", *words]  # commits that are made meanwhile must not find the index locked
    return subprocess.run(asked, cwd=checkout, capture_output=True, text=True, check=True).stdout


def command(argv: Sequence[str]) -> str:
    """What was typed, from the root of the checkout that the script lies in.

    `python -m experiments.pipemorph.figure15 --backend threads`, `python benchmarks/uneven/run.py --times`. `--out`
    is left out: it says where the result went, and not how it was found.
    """
    path = Path(argv[0]).resolve()
    root = next((folder for folder in path.parents if (folder / "pyproject.toml").is_file()), path.parent)
    if path.suffix != ".py":
        program = ["-m", path.name]
    elif (path.parent / "__init__.py").is_file():
        program = ["-m", ".".join(path.relative_to(root).with_suffix("").parts)]
    else:
        program = [path.relative_to(root).as_posix()]
    given = [word for word in argv[1:] if not word.startswith("--out=")]
    if "--out" in given:
        del given[given.index("--out") : given.index("--out") + 2]
    return " ".join(["python", *program, *given])
