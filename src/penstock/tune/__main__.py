"""A rank that measures or verifies, started by the tuner."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.tune.job import run_rank

if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
