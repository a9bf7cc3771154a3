"""All tables and figures one after the other.

python experiments/flexpipe/all.py                what is simulated: half an hour of one core
python experiments/flexpipe/all.py --measured     figures 12, 13 and 16 on emulated devices, as found last: minutes
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

SIMULATED = ("figure2", "figure12", "figure13", "figure14", "figure15", "figure16", "table5", "assumptions")
MEASURED = ("figure12", "figure13", "figure16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", action="store_true", help="only run what was found last on emulated devices")
    given = parser.parse_args()
    for name in MEASURED if given.measured else SIMULATED:
        began = time.perf_counter()
        options = ["--measured"] if given.measured else []
        print(f"\n## {name} {' '.join(options)}", flush=True)
        code = subprocess.run([sys.executable, str(Path(__file__).with_name(f"{name}.py")), *options]).returncode
        print(f"({time.perf_counter() - began:.0f} s)", flush=True)
        if code != 0:
            raise SystemExit(code)


if __name__ == "__main__":
    main()
