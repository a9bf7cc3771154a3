"""AMDP and `1f1b` on preset tiny, each at its own learning rate from a held-out seed.

    python -m experiments.amdp.own_rates --minutes 4     goes on for so long; an hour of one core in all
    python -m experiments.amdp.own_rates --show          what there is so far

The protocol, which was committed before its first run and changes for no result:

- **Runs.** `penstock train` for 200 steps, all ranks in one process, as in `defaults.py`; all that is not named here
  is as `penstock train` has it by default. What counts is the validation loss after the last step. A run without a
  finite loss counts as worse than any other.
- **Systems.** `1f1b`; AMDP with updates as ops, with a mismatch of at most 0 and of at most 1; each with AdamW and
  with Muon. And what `--schedule amdp` does by default, with AdamW, which is the default optimizer.
- **Rates.** The peak with the least loss on seed 3, which no table counts, and the lower one of two that are equal.
  The grid of every system is half of the default rate, the default rate and its double. While the best is at an edge
  of what has run, the next factor of two beyond it runs too, so the best has one that is no better on either side.
- **The default AMDP takes the rate of `1f1b` with AdamW**, and has no grid of its own. By default it updates once a
  step, clips the whole model's gradient as `1f1b` does, and learns as it does but for the order of sums: at equal
  rates their losses were equal to five decimals on three seeds (`defaults.py`). A grid would repeat that of `1f1b`,
  and takes longer.
- **Judged** on seeds 0, 1 and 2 at these rates: mean and spread of the loss, and by how much it is above that of
  `1f1b` on the same seed, with the same optimizer, and with the best synchronous optimizer. That is the one with
  which `1f1b` has the least loss on seed 3. A share is a mean over seeds, and all three are shown.
- **The aim**: the default AMDP ends within 0.5% of `1f1b` with the same optimizer.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from experiments.amdp import RESULTS
from experiments.amdp.defaults import train
from experiments.common.command import options
from experiments.common.results import Row, known, runs, save, table

STEPS, SEEDS, HELD_OUT = 200, (0, 1, 2), 3
GRID = (0.002, 0.004, 0.008)
"""Around 0.004, which is the peak rate that `penstock train` has with either optimizer."""


@dataclass(frozen=True)
class System:
    """What is compared.

    Attributes:
        options: of `penstock train`, all but rate, seed and steps.
        like: the synchronous system with the same optimizer.
        rate_of: the system whose grid gives the rate; empty for its own.
    """

    options: str
    like: str
    rate_of: str = ""


SYNC, SYNC_MUON, DEFAULT = "1f1b", "1f1b, Muon", "amdp, as by default"
SYSTEMS: Mapping[str, System] = {
    SYNC: System("--schedule 1f1b", SYNC),
    SYNC_MUON: System("--schedule 1f1b --optimizer muon", SYNC_MUON),
    "amdp, mismatch 0": System("--schedule amdp --max-mismatch 0", SYNC),
    "amdp, mismatch 1": System("--schedule amdp --max-mismatch 1", SYNC),
    "amdp, mismatch 0, Muon": System("--schedule amdp --max-mismatch 0 --optimizer muon", SYNC_MUON),
    "amdp, mismatch 1, Muon": System("--schedule amdp --max-mismatch 1 --optimizer muon", SYNC_MUON),
    DEFAULT: System("--schedule amdp", SYNC, rate_of=SYNC),
}


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        part: "rates" on the held-out seed, or "judged".
        name: of the system.
        rate: the peak.
    """

    part: str
    name: str
    seed: int
    rate: float


def next_job(rows: Sequence[Row]) -> Job | None:
    """What the protocol asks for next, given what was found; None once it is done."""
    for name, system in SYSTEMS.items():
        if not system.rate_of and (rate := next_rate(rows, name)) is not None:
            return Job("rates", name, HELD_OUT, rate)
    done = {(row["name"], row["seed"]) for row in rows if row["part"] == "judged"}
    for seed in SEEDS:
        for name in SYSTEMS:
            if (name, seed) not in done:
                return Job("judged", name, seed, own_rate(rows, name))
    return None


def next_rate(rows: Sequence[Row], name: str) -> float | None:
    """The rate that a system tries next on the held-out seed; None once its best has a worse one on either side."""
    losses = by_rate(rows, name)
    if missing := [rate for rate in GRID if rate not in losses]:
        return missing[0]
    best = own_rate(rows, name)
    if best == min(losses):
        return _rounded(best / 2)
    return _rounded(best * 2) if best == max(losses) else None


def own_rate(rows: Sequence[Row], name: str) -> float:
    """The rate with the least loss on the held-out seed, of what has run; the lower of two that are equal."""
    losses = by_rate(rows, SYSTEMS[name].rate_of or name)
    return min(losses, key=lambda rate: (losses[rate], rate))


def by_rate(rows: Sequence[Row], name: str) -> dict[float, float]:
    """A system's losses on the held-out seed."""
    mine = [row for row in rows if (row["part"], row["name"]) == ("rates", name)]
    return {row["rate"]: math.inf if row["loss"] is None else row["loss"] for row in mine}


def best_synchronous(rows: Sequence[Row]) -> str:
    """The one of the two synchronous systems that has the least loss on the held-out seed."""
    return min((SYNC, SYNC_MUON), key=lambda name: min(by_rate(rows, name).values()))


def _rounded(rate: float) -> float:
    """As results keep it."""
    return round(rate, 5)


def run(job: Job) -> Row:
    loss, seconds = train(f"{SYSTEMS[job.name].options} --lr {job.rate} --steps {STEPS} --seed {job.seed}")
    return {**asdict(job), "loss": loss if math.isfinite(loss) else None, "seconds": seconds}


def judged(rows: Sequence[Row], name: str) -> dict[int, float]:
    """A system's losses at its own rate, by seed."""
    mine = [row for row in rows if (row["part"], row["name"]) == ("judged", name)]
    return {row["seed"]: math.inf if row["loss"] is None else row["loss"] for row in mine}


def over(rows: Sequence[Row], name: str, other: str) -> list[float]:
    """By seed, how much more a system's loss is than another's, each at its own rate; where both are there."""
    mine, its = judged(rows, name), judged(rows, other)
    return [mine[seed] / its[seed] - 1 for seed in SEEDS if seed in mine and seed in its]


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The losses by rate, then what is judged."""
    yield f"validation loss by peak rate, seed {HELD_OUT}"
    tuned = [name for name, system in SYSTEMS.items() if not system.rate_of and by_rate(rows, name)]
    rates = sorted({rate for name in tuned for rate in by_rate(rows, name)})
    found: list[tuple[str, dict[float, float]]] = [(name, by_rate(rows, name)) for name in tuned]
    yield from table(
        ["run", *(f"{rate:g}" for rate in rates)],
        [[name, *(f"{losses[rate]:.4f}" if rate in losses else "" for rate in rates)] for name, losses in found],
    )
    if any(row["part"] == "judged" for row in rows):
        seeds = ", ".join(map(str, SEEDS))
        yield f"mean (least to most) of seeds {seeds}; the best in the last column is {best_synchronous(rows)}"
        yield from table(["run", "rate", "loss", "over its 1f1b", "by seed", "over the best"], _judged(rows))
    spent = f"{sum(row['seconds'] for row in rows) / 60:.0f} minutes of one core"
    yield f"{len(rows)} runs, {spent}; the protocol is {'done' if next_job(rows) is None else 'not done'}"


def _judged(rows: Sequence[Row]) -> Iterator[list[str]]:
    for name, system in SYSTEMS.items():
        if not (losses := judged(rows, name).values()):
            continue
        loss = f"{statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
        own, best = over(rows, name, system.like), over(rows, name, best_synchronous(rows))
        each = ", ".join(f"{share:+.2%}" for share in own)
        yield [name, f"{own_rate(rows, name):g}", loss, mean_of(own), each, mean_of(best)]


def mean_of(shares: Sequence[float]) -> str:
    return f"{statistics.mean(shares):+.2%}" if shares else "-"


def main() -> None:
    parser = options(__doc__, RESULTS, show=True)
    parser.add_argument("--minutes", type=float, default=4.0, help="begin no run after so many")
    given = parser.parse_args()
    rows, earlier, began = known(given.out, "own_rates"), runs(given.out, "own_rates"), time.monotonic()
    while not given.show and time.monotonic() - began <= 60 * given.minutes and (job := next_job(rows)) is not None:
        rows.append(run(job))
        save(given.out, "own_rates", rows, seeds=(*SEEDS, HELD_OUT), earlier=earlier)
        print(*asdict(job).values(), rows[-1]["loss"], flush=True)
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
