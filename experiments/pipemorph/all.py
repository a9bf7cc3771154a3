"""All figures one after the other, then the table of simulated against measured.

    python experiments/pipemorph/all.py                        a quarter of an hour
    python experiments/pipemorph/all.py --backend threads      twenty-five minutes

Measured runs sleep most of their time; those that are not measured compute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

SIMULATED = (
    "figure1", "figure5", "figure8", "figure14", "figure15", "figure16", "figure17", "figure18", "figure19",
    "figure20", "figure22", "memory", "reaction", "uneven",
)  # fmt: skip
MEASURED = (
    "figure5", "figure14", "figure15", "reaction", "figure17", "memory", "figure1", "uneven", "figure18", "figure22",
    "figure16", "figure19",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("simulate", "threads"), default="simulate")
    backend = parser.parse_args().backend
    folder = Path(__file__).parent
    runs = [[name, "--backend", backend] for name in (SIMULATED if backend == "simulate" else MEASURED)]
    if backend == "threads":
        runs += [["figure21"], ["table"]]
    for name, *options in runs:
        began = time.perf_counter()
        print(f"\n## {name} {' '.join(options)}", flush=True)
        code = subprocess.run([sys.executable, str(folder / f"{name}.py"), *options]).returncode
        print(f"({time.perf_counter() - began:.0f} s)", flush=True)
        if code != 0:
            raise SystemExit(code)


if __name__ == "__main__":
    main()
