"""A rank of an emulated run with processes, started by `emulate_processes`."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.runtime.emulation.pipeline import run_rank

if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
