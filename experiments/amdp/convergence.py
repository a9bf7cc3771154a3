"""Figure 7 by a protocol that was fixed before any run of it: GPT and BERT, three seeds, each paper's own optimizer.

    python -m experiments.amdp.convergence --minutes 4     goes on for so long; five hours of one core in all
    python -m experiments.amdp.convergence --processes 2   two runs at a time; what each comes to is the same
    python -m experiments.amdp.convergence --show          what there is so far

The protocol, which changes for no result:

- **Task.** A GPT and a BERT of 8 blocks on 8 stages, 64 wide, on the standard library's text as bytes: 300 batches
  of 32 sequences of 16 tokens, a sequence a microbatch, so that a window is 4d. No clipping. Warm-up over 30 batches,
  then a cosine down to a tenth. Pipelines drain every 50 batches, where the loss on text held out is measured.
- **Rows.** The 20 of `figure7.py`, each with the optimizer that its paper names (`NAMED`), and six more with Muon.
  vNAG's momentum rises with `0.96^(t psi)`: psi = 0.004 is for the 40,000 updates of AMDP's figure, and is scaled to
  a run's own.
- **Rates, table 1.** Of each optimizer the best without delay: whole batches on seed 100, which no table counts, over
  a grid by factors of two that goes on until the best is not at its edge. An update for every sequence has that over
  32 (SGD) or the root of 32.
- **Rates, table 2.** Of each row its own best of that rate, a half and a quarter, on seed 100; the grid goes on below
  while the lowest is best.
- **Judged** on seeds 0, 1, 2 of data and first weights: mean and spread of the last loss. What diverges counts as
  such.
- **Time to loss.** Each row's batches to the worse of AMDP's and the synchronous mean, times what a batch takes on
  the paper's ranks by simulation, against the fastest of the paper's four synchronous schedules, and against the best
  that the library has within AMDP's memory.

How runs are carried out may change where it changes results by rounding alone: runs of a row that are ready at once
are trained as one model (`together.py`), microbatches of a window that meet the same weights are one (`merging.py`),
and a window of a synchronous row is one microbatch, as in rates and tuning.

What an earlier figure 7 did otherwise: one seed, half of the best rate (chosen once the gaps were seen), AdamW for
every method but two. Its task had been changed too, from windows of 2d to 4d, after AMDP was 6 to 7% behind.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.amdp import RESULTS, figure7
from experiments.amdp.figure7 import SHOWN, chart_of, reached
from experiments.amdp.learning import Method, Task, by_method, goes_together, shown, train_together
from experiments.amdp.methods import simulate
from experiments.amdp.synchronous import best_synchronous
from experiments.amdp.timing import PAPER, batch_seconds
from experiments.common.command import options
from experiments.common.results import Row, draw, facts, known, runs, save, table
from penstock.draw.chart import Axis, Figure
from penstock.models import BERTConfig, GPTConfig

SEEDS, HELD_OUT = (0, 1, 2), 100
MODELS: Mapping[str, GPTConfig | BERTConfig] = {
    "GPT": GPTConfig(vocab_size=256, context=16, depth=8, width=64, num_heads=4),
    "BERT": BERTConfig(vocab_size=259, context=16, depth=8, width=64, num_heads=4),
}
FIRST: Mapping[str, float] = {"AdamW": 4e-3, "Adam": 4e-3, "NAdam": 4e-3, "Muon": 4e-3, "SGD": 0.2}
"""Where the grid of each optimizer begins, with a half and the double beside."""
LATER = 40_000
"""Updates of the paper's figure 7."""

NAMED: Mapping[str, tuple[str, str]] = {
    "synchronous": ("AdamW", "AMDP, section 4.1, for all it compares"),
    "amdp": ("AdamW", "AMDP, section 4.1"),
    "pipedream-2bw": ("Adam", "Narayanan et al. 2021, section 5"),
    "xpipe": ("Adam", "Guan et al. 2019: the prediction is Adam's"),
    "pipedream": ("SGD", "Narayanan et al. 2019: SGD with momentum, for all models but one"),
    "vnag": ("NAdam", "Ajanthan et al. 2025"),
    "spectrain": ("SGD", "Chen et al. 2018: the prediction is the momentum's"),
    "no rule": ("AdamW", "no paper: what a delay does where nothing is done about it"),
}
"""By the first word of a row's name its optimizer, and who says so."""
OWN: Mapping[str, str] = {"synchronous, NAdam": "NAdam", "synchronous, SGD": "SGD"}

WITH_MUON = (
    Method("synchronous, Muon", "1f1b", optimizer="Muon"),
    Method("amdp, Muon", "amdp", optimizer="Muon"),
    Method("amdp, predicting, Muon", "amdp", optimizer="Muon", rule="xpipe"),
    Method("xpipe, Muon", "xpipe", optimizer="Muon"),
    Method("pipedream-2bw, Muon", "pipedream-2bw", optimizer="Muon"),
    Method("pipedream, Muon", "pipedream", window=1, samples=32, optimizer="Muon"),
)


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        part: "rates": of an optimizer without delay; "table 1"; "own": a row's own rate; "table 2".
        name: of the row; in "rates" the optimizer.
    """

    part: str
    model: str
    name: str
    seed: int
    peak: float

    @property
    def key(self) -> dict[str, Any]:
        return {**asdict(self), "peak": round(self.peak, 5)}


def task_of(model: str, seed: int, num_batches: int = 300) -> Task:
    return Task(MODELS[model], num_batches=num_batches, every=min(50, num_batches), warmup=30, seed=seed)


METHODS = tuple(method for method in figure7.METHODS if method.name != figure7.LATE)
"""Rule `tentative` came after this protocol."""


def row_of(name: str, num_batches: int = 300) -> Method:
    """A row's method with the optimizer that its paper names; its rate is the job's."""
    (method,) = [each for each in (*METHODS, *WITH_MUON) if each.name == name]
    if method not in WITH_MUON:
        optimizer = OWN.get(name) or next(named for start, (named, _) in NAMED.items() if name.startswith(start))
        if name.startswith("pipedream-2bw"):
            optimizer = NAMED["pipedream-2bw"][0]
        method = replace(method, optimizer=optimizer)
    if method.optimizer == "NAdam":
        updates = num_batches * (32 if _is_each(method) else 1)
        method = replace(method, optimizer_options={"momentum_decay": 0.004 * LATER / updates})
    return method


def _is_each(method: Method) -> bool:
    """Whether it updates after every sequence."""
    return method.window == 1 and method.samples is None


ROWS = tuple(row_of(each.name) for each in (*METHODS, *WITH_MUON))
DELAYED = tuple(method.name for method in ROWS if not method.is_synchronous)


def next_job(rows: Sequence[Row]) -> Job | None:
    """What the protocol asks for next, given what was found; None once it is done."""
    return next(ready_jobs(rows), None)


def ready_jobs(rows: Sequence[Row]) -> Iterator[Job]:
    """All runs that the protocol asks for and whose rates are known by now, in its order."""
    done = {tuple(row[key] for key in ("part", "model", "name", "seed", "peak")): row["final"] for row in rows}

    def finals(part: str, model: str, name: str) -> dict[float, float]:
        return {
            peak: math.inf if final is None else final
            for (a, b, c, _, peak), final in done.items()
            if (a, b, c) == (part, model, name)
        }

    def missing(jobs: Iterable[Job]) -> list[Job]:
        return [job for job in jobs if tuple(job.key.values()) not in done]

    for model in MODELS:
        best: dict[str, float] = {}
        for optimizer, first in FIRST.items():
            found = finals("rates", model, optimizer)
            if peaks := _next_peaks([first, first / 2, first * 2], found):
                yield from (Job("rates", model, optimizer, HELD_OUT, peak) for peak in peaks)
            else:
                best[optimizer] = _best(found)
        judged = [method for method in ROWS if method.optimizer in best]
        yield from missing(
            Job("table 1", model, method.name, seed, _rate(method, best[method.optimizer]))
            for seed in SEEDS
            for method in judged
        )
        for method in judged:
            if method.is_synchronous:
                continue
            start = _rate(method, best[method.optimizer])
            found = finals("own", model, method.name)
            grid = [start, start / 2, start / 4]
            if peaks := _next_peaks(grid, found, upwards=False):
                yield from (Job("own", model, method.name, HELD_OUT, peak) for peak in peaks)
            elif round(own := _best(found), 5) != round(start, 5):  # else table 1 has it
                yield from missing(Job("table 2", model, method.name, seed, own) for seed in SEEDS)


def _rate(method: Method, best: float) -> float:
    if not _is_each(method):
        return best
    return best / 32 if method.optimizer == "SGD" else best / math.sqrt(32)


def _best(finals: Mapping[float, float]) -> float:
    return min(finals, key=lambda peak: (finals[peak], peak))


def _next_peaks(grid: Sequence[float], finals: Mapping[float, float], upwards: bool = True) -> list[float]:
    """The next rates to try: those of the grid, and on by factors of two while the best lies at an edge."""
    if left := [peak for peak in grid if round(peak, 5) not in finals]:
        return left
    best = _best(finals)
    if best == min(finals):
        return [best / 2]
    return [best * 2] if upwards and best == max(finals) else []


def together(jobs: Iterable[Job]) -> list[tuple[Job, ...]]:
    """Jobs in their order, those of one row that can be one model in one tuple."""
    groups: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        own = () if _joins(job) else (job,)
        groups.setdefault((job.part, job.model, job.name, *own), []).append(job)
    return [tuple(group) for group in groups.values()]


def _joins(job: Job) -> bool:
    return job.part != "rates" and goes_together(row_of(job.name), num_rates=2 if job.part == "own" else 1)


def run(jobs: Sequence[Job], num_batches: int = 300) -> list[Row]:
    """The rows of jobs that are trained as one model: their keys, and what they came to."""
    methods = []
    for job in jobs:
        if job.part == "rates":
            method = replace(row_of("synchronous", num_batches), optimizer=job.name, samples=32)
            if job.name == "NAdam":
                method = replace(method, optimizer_options={"momentum_decay": 0.004 * LATER / num_batches})
        else:
            method = row_of(job.name, num_batches)
            if method.is_synchronous and method.window is None:
                method = replace(method, samples=32)
        if method.seed is not None:
            method = replace(method, seed=job.seed + 1)
        methods.append(replace(method, peak=job.peak))
    found = train_together(methods, [task_of(job.model, job.seed, num_batches) for job in jobs])
    kept = ("optimizer", "final", "mismatch", "updates", "seconds", "curve")
    return [
        {**job.key, **{name: row[name] for name in kept}, "together": len(jobs)}
        for job, row in zip(jobs, found, strict=True)
    ]


def lines(rows: Sequence[Row], times: Sequence[Row] = ()) -> Iterator[str]:
    """Both tables, as far as they are there, with time to loss where that was simulated."""
    for model in MODELS:
        for part in ("table 1", "table 2"):
            mine = [row for row in rows if (row["model"], row["part"]) == (model, part)]
            if mine:
                yield f"{model}, {part}: last validation loss, mean (spread) over seeds"
                yield from _table(rows, mine, model)
        if of_model := [row for row in times if row["model"] == model]:
            yield f"{model}, table 1: to a loss of {of_model[0]['target']:.3f} on the paper's ranks, simulated"
            body = [
                [row["name"], f"{row['batches']:.0f}", f"{row['batch_seconds']:.3f}", f"{row['seconds']:.0f}"]
                for row in of_model
            ]
            yield from table(["row", "batches", "s a batch", "s"], body)
    spent = f"{sum(row['seconds'] for row in rows) / 60:.0f} minutes of one core"
    yield f"{len(rows)} runs, {spent}; the protocol is {'done' if next_job(rows) is None else 'not done'}"


def _table(rows: Sequence[Row], mine: Sequence[Row], model: str) -> Iterator[str]:
    body = []
    for name in (method.name for method in ROWS):
        if not (of_row := [row for row in mine if row["name"] == name]):
            continue
        over = over_synchronous(rows, model, of_row)
        body.append(
            [name, of_row[0]["optimizer"], f"{of_row[0]['peak']:g}", str(of_row[0]["mismatch"]),
             _spread([row["final"] for row in of_row]), "-" if over is None else f"{over:+.2%}", str(len(of_row))]
        )  # fmt: skip
    yield from table(["row", "optimizer", "rate", "mismatch", "loss", "over its synchronous", "seeds"], body)


LIKE = {"AdamW": "synchronous", "Adam": "synchronous", "NAdam": "synchronous, NAdam", "SGD": "synchronous, SGD",
        "Muon": "synchronous, Muon"}  # fmt: skip
"""By optimizer the row that a row is beside: whole batches of the same samples, at the rate that is best for them."""


def over_synchronous(rows: Sequence[Row], model: str, of_row: Sequence[Row]) -> float | None:
    """By how much a row's last losses are above the synchronous ones with the same optimizer, a mean over seeds.

    None where one diverged, or has nothing beside it yet.
    """
    base = {
        row["seed"]: row["final"]
        for row in rows
        if (row["part"], row["model"], row["name"]) == ("table 1", model, LIKE[of_row[0]["optimizer"]])
    }
    pairs = [(row["final"], base.get(row["seed"])) for row in of_row]
    found = [own / beside - 1 for own, beside in pairs if own is not None and beside is not None]
    return statistics.mean(found) if len(found) == len(pairs) else None


def _spread(finals: Sequence[float | None]) -> str:
    known_ones = [final for final in finals if final is not None]
    if len(known_ones) < len(finals):
        return f"{len(finals) - len(known_ones)} of {len(finals)} diverged"
    return f"{shown(statistics.mean(known_ones))} ({max(known_ones) - min(known_ones):.4f})"


def mean_curves(rows: Sequence[Row], model: str) -> list[Row]:
    """Of each row of table 1 that ended on all seeds the mean over these of its losses and of its curve."""
    found = []
    for method in ROWS:
        of_row = [row for row in rows if (row["part"], row["model"], row["name"]) == ("table 1", model, method.name)]
        if of_row and all(row["final"] is not None for row in of_row):
            places = zip(*(row["curve"] for row in of_row), strict=True)
            curve = [(place[0][0], statistics.mean(loss for _, loss in place)) for place in places]
            found.append(
                {"method": method.name, "final": statistics.mean(r["final"] for r in of_row), "curve": curve}
            )
    return found


def times_to_loss(rows: Sequence[Row]) -> list[Row]:
    """How long rows of table 1 take on the paper's ranks to the worse of AMDP's and the synchronous loss, simulated.

    Synchronous training is there twice: by the fastest of the paper's four schedules, and by the best that the
    library has within AMDP's memory. Rows that never come to that loss are left out.
    """
    found: list[Row] = []
    for model in MODELS:
        by = by_method(mean_curves(rows, model))
        if not {"synchronous", "amdp"} <= set(by):
            continue
        target = max(by[name]["final"] for name in ("synchronous", "amdp"))
        setup = replace(PAPER, model=model)
        best = best_synchronous(setup)
        ways = {
            "synchronous, the fastest of the paper's four": (
                "synchronous",
                batch_seconds(row_of("synchronous"), setup),
            ),
            f"synchronous, {best.method}": (
                "synchronous",
                setup.window * setup.tokens / best.ktokens(simulate(best)) / 1000,
            ),
            **{name: (name, batch_seconds(row_of(name), setup)) for name in DELAYED if name in by},
        }
        for name, (learns, seconds) in ways.items():
            batches = reached(by[learns], target)
            if batches is not None:
                found.append(
                    {"model": model, "target": target, "name": name, "batches": batches, "batch_seconds": seconds,
                     "seconds": batches * seconds}
                )  # fmt: skip
    return found


def chart(rows: Sequence[Row], model: str) -> Figure:
    """Mean validation loss by batch of each method of the paper's figure, and of AMDP with Muon."""
    return chart_of(
        mean_curves(rows, model),
        {**SHOWN, "amdp, Muon": ("navy", "dotted")},
        title=f"Figure 7 by the protocol, {model}: loss by batch",
        note=f"means over {len(SEEDS)} seeds; each with its paper's optimizer at the rate best without delay",
        x=Axis("batches of 32 sequences"),
    )


def carry_out(rows: list[Row], minutes: float, processes: int) -> Iterator[list[Row]]:
    """Runs what the protocol asks for, some at a time, and gives rows once they are in `rows`."""
    began = time.monotonic()
    running: dict[Future[list[Row]], tuple[Job, ...]] = {}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        while True:
            if time.monotonic() - began < 60 * minutes:
                busy = {job for jobs in running.values() for job in jobs}
                waiting = together(job for job in ready_jobs(rows) if job not in busy)
                for jobs in waiting[: processes - len(running)]:
                    running[pool.submit(run, jobs)] = jobs
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                rows += future.result()
                yield future.result()


def main() -> None:
    parser = options(__doc__, RESULTS, show=True)
    parser.add_argument("--minutes", type=float, default=4.0, help="begin no run after so many")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--times", action="store_true", help="simulate time to loss and draw: some minutes")
    given = parser.parse_args()
    rows, earlier = known(given.out, "convergence"), runs(given.out, "convergence")
    if not given.show:
        for found in carry_out(rows, given.minutes, given.processes):
            save(given.out, "convergence", rows, seeds=(*SEEDS, HELD_OUT), earlier=earlier)
            for row in found:
                print(
                    f"{row['part']}, {row['model']}, {row['name']}, seed {row['seed']}, {row['peak']:g}: "
                    f"{shown(row['final'])}",
                    flush=True,
                )
    if given.times:
        save(
            given.out,
            "convergence",
            rows,
            seeds=(*SEEDS, HELD_OUT),
            earlier=earlier,
            times=times_to_loss(rows),
        )
        for model in MODELS:
            draw(given.out, f"convergence-{model.lower()}", chart(rows, model))
    print("\n".join(lines(rows, facts(given.out, "convergence").get("times", ()))))


if __name__ == "__main__":
    main()
