"""All tables and figures one after the other.

    python experiments/amdp/all.py                what is simulated: half an hour
    python experiments/amdp/all.py --measured     tables 3 and 4 on emulated devices too
    python experiments/amdp/all.py --learning     and what is learnt: an hour of one core more

Of `figure7.py`, `rates.py`, `table5.py` and `mismatch.py` what is there already is kept: move `results/` away to
begin anew.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

SIMULATED = ("table1", "figure6", "figure8", "table3", "table4", "mismatch")
MEASURED = ("table3", "table4")
LEARNING = ("tuning", "figure7", "rates", "table5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", action="store_true", help="tables 3 and 4 on emulated devices too")
    parser.add_argument("--learning", action="store_true", help="learning rates, figure 7 and table 5 too")
    given = parser.parse_args()
    runs = [[name, *(["--measured"] if given.measured and name in MEASURED else [])] for name in SIMULATED]
    runs += [[name] for name in LEARNING if given.learning]
    for name, *options in runs:
        began = time.perf_counter()
        print(f"\n## {name} {' '.join(options)}", flush=True)
        code = subprocess.run([sys.executable, str(Path(__file__).with_name(f"{name}.py")), *options]).returncode
        print(f"({time.perf_counter() - began:.0f} s)", flush=True)
        if code != 0:
            raise SystemExit(code)


if __name__ == "__main__":
    main()
