"""What `penstock train --schedule amdp` does by default, against `1f1b` with the same optimizer, on preset tiny.

    python -m experiments.amdp.defaults --minutes 4     goes on for so long; half an hour of one core in all
    python -m experiments.amdp.defaults --show          what there is so far

Each run is a command, all ranks in one process: the validation loss after its last step. Where nothing is said of
updates, AMDP learns as a synchronous schedule and the whole model's gradient is clipped. Where updates are ops, four
stages clip by half of `--clip` each; where a run says `--clip 2`, each clips by 1, as stages did before they shared
the clipping out.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.amdp import RESULTS
from experiments.common.command import options
from experiments.common.results import Row, facts, known, runs, save, table

SYNC, AMDP, SHARES = "1f1b", "amdp", "amdp, mismatch 0, each stage clips its share"
OPTIONS = {
    SYNC: "--schedule 1f1b",
    AMDP: "--schedule amdp",
    SHARES: "--schedule amdp --max-mismatch 0",
    "amdp, each stage clips by 1": "--schedule amdp --max-mismatch 0 --clip 2",
    "amdp, mismatch 1": "--schedule amdp --max-mismatch 1",
    "amdp, mismatch 1, each stage clips by 1": "--schedule amdp --max-mismatch 1 --clip 2",
    "amdp, predicting, each stage clips by 1": "--schedule amdp --rule xpipe --clip 2",
    "amdp, windows of 2d, mismatch 1, each stage clips by 1": (
        "--schedule amdp --microbatches 8 --max-mismatch 1 --clip 2"
    ),
    "1f1b, Muon": "--schedule 1f1b --optimizer muon",
    "amdp, mismatch 1, Muon": "--schedule amdp --max-mismatch 1 --optimizer muon",
    "amdp, predicting, Muon": "--schedule amdp --rule xpipe --optimizer muon",
}
"""The last of AdamW's is what `--schedule amdp` did until it was measured, and `SHARES` what it did after that."""

CASES = (
    *((name, 400, seed) for seed in (0, 1, 2) for name in (SYNC, SHARES)),
    *((name, 400, 0) for name in tuple(OPTIONS)[3:5]),
    *((name, 200, seed) for seed in (0, 1, 2) for name in (SYNC, tuple(OPTIONS)[7])),
    *((name, 200, 0) for name in OPTIONS if name not in (SYNC, AMDP, SHARES, "amdp, mismatch 1", tuple(OPTIONS)[7])),
    *((name, 200, 1) for name in tuple(OPTIONS)[5:7]),
    *((AMDP, 400, seed) for seed in (2, 0, 1)),
)
"""(name, steps, seed), in the order in which they run."""


def run(name: str, steps: int, seed: int) -> Row:
    loss, seconds = train(f"{OPTIONS[name]} --steps {steps} --seed {seed}")
    return {"name": name, "steps": steps, "seed": seed, "loss": loss, "seconds": seconds}


def train(given: str) -> tuple[float, float]:
    """The validation loss after the last step of `penstock train` with these options, and the seconds of a core."""
    from penstock.cli import main as penstock

    folder = Path(tempfile.mkdtemp())
    line = f"{given} --in-process --threads 1 --sample 0 --evaluate-every 0"
    printed, began = io.StringIO(), time.process_time()
    try:
        with contextlib.redirect_stdout(printed):
            code = penstock(["train", *line.split(), "--save-every", "0", "--json", "--out", str(folder / "run")])
    finally:
        shutil.rmtree(folder)
    if code != 0:
        raise SystemExit(f"penstock train {line} ended with {code}")
    loss: float = json.loads(printed.getvalue())["loss"]
    return loss, time.process_time() - began


def over(rows: Sequence[Row], name: str, steps: int) -> list[float]:
    """By seed, how much more a run's loss is than that of 1f1b with the same optimizer; where both are there."""
    like = "1f1b, Muon" if "Muon" in name else SYNC
    by = {(row["name"], row["seed"]): row["loss"] for row in rows if row["steps"] == steps}
    return [by[name, seed] / by[like, seed] - 1 for seed in (0, 1, 2) if {(name, seed), (like, seed)} <= by.keys()]


def lines(rows: Sequence[Row]) -> Iterator[str]:
    body = []
    for name, steps in dict.fromkeys((row["name"], row["steps"]) for row in rows):
        losses = [row["loss"] for row in rows if (row["name"], row["steps"]) == (name, steps)]
        each = over(rows, name, steps)
        shares = ", ".join(f"{share:+.2%}" for share in each)
        mean = f"{statistics.mean(each):+.2%}" if each else "-"
        body.append([name, str(steps), f"{statistics.mean(losses):.4f}", mean, shares])
    yield from table(["run", "steps", "loss", "over its 1f1b", "by seed"], body)
    yield f"{len(rows)} of {len(CASES)} runs"


def main() -> None:
    parser = options(__doc__, RESULTS, show=True)
    parser.add_argument("--minutes", type=float, default=4.0, help="begin no run after so many")
    given = parser.parse_args()
    rows, earlier, began = known(given.out, "defaults"), runs(given.out, "defaults"), time.monotonic()
    done = {(row["name"], row["steps"], row["seed"]) for row in rows}
    for case in CASES:
        if given.show or case in done or time.monotonic() - began > 60 * given.minutes:
            continue
        rows.append(run(*case))
        note = facts(given.out, "defaults").get("note", "")
        save(given.out, "defaults", rows, seeds=(0, 1, 2), earlier=earlier, note=note)
        print(*case, f"{rows[-1]['loss']:.4f}", flush=True)
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
