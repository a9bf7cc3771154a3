"""Ranks killed, delegates killed and disks filled at every step of a switch, a delegation and a move; then resumed.

    python benchmarks/faults/kill.py --out kill.json
    python benchmarks/faults/kill.py --every 10 --from 3         a sample
    python benchmarks/faults/kill.py --only "delegating: fill"

Each run must end with one message that names what happened, leave no process and nothing in /dev/shm, and go on from
its newest checkpoint with the losses of a run that nothing disturbed, to the bit. Exits with 1 where one does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.record import record
from experiments.common.summary import save_summary
from fault_runs import Fault, apart, filling, may_mount, points, undisturbed, without_delegates, wrong


def chosen(every: int, start: int, only: str) -> list[Fault]:
    faults = [*points(), *without_delegates(), *(filling() if may_mount() else [])]
    return [fault for fault in faults[start::every] if only in str(fault)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only each so many")
    parser.add_argument("--from", type=int, default=0, dest="start", help="the first one")
    parser.add_argument("--only", default="", help="only those whose line has this text")
    parser.add_argument("--out", default=None, help="write every outcome here as JSON")
    given = parser.parse_args(arguments)
    if not may_mount():
        print("no disk is filled: that needs tmpfs mounts", flush=True)
    known, rows, expected = record(), [], {}
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as name:
        for number, fault in enumerate(chosen(given.every, given.start, given.only)):
            if fault.phase not in expected:
                expected[fault.phase] = undisturbed(fault.phase, Path(name, f"plain-{len(expected)}"))
            outcome = apart(fault, Path(name, str(number)))
            mistakes = wrong(fault, outcome, expected[fault.phase])
            rows.append({"fault": str(fault), "code": outcome.code, "said": outcome.said, "wrong": mistakes})
            print(f"{'wrong' if mistakes else 'right'}  {fault}", *mistakes, sep="\n      ", flush=True)
    num_wrong = sum(bool(row["wrong"]) for row in rows)
    print(f"{len(rows)} runs, {num_wrong} wrong; exit codes {dict(Counter(row['code'] for row in rows))}")
    if given.out is not None:
        value = {**known, "wrong": num_wrong, "rows": rows}
        save_summary(Path(given.out), value)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
