"""What is left of the cost of a mismatch of one if late forwards read tentative weights: a protocol, and its runs.

    python -m experiments.amdp.tentative --minutes 30     goes on where it was; many hours of one core in all
    python -m experiments.amdp.tentative --show           what there is so far

Under rule `tentative`, the late forwards of a window read the weights moved by the optimizer's own step on the mean
of the window's gradients that are known by then. Their backwards read the newest weights. Where nothing is known,
late forwards read the prediction of rule `xpipe`. All runs are by hand in one process (`by_hand.py`), which reads off
the schedule's order which version each op reads. What is known follows from the order too, with F = 1 and B = 2.

The protocol changed once, before any judged seed of any method had run. At first the late forwards knew all that had
ended when the first of them ran. The order that trains (`amdp(rule="tentative")`) gives gradients and makes the step
earlier, so that no rank waits, and knows less; the runs are by that order now. And a backward that comes before the
update reads what its forward read (at d = 4 some do). Six runs by the first rule, on the seeds that are not judged,
were dropped. They ended at 2.0623 and 2.0919 (rate 5.66e-3), 2.0506 and 2.1003 (8e-3), 2.1326 and 2.1369 (4e-3).

The protocol, which changes for no result:

- **Task.** A GPT of `MODELS`: 8 blocks, 64 wide, on the standard library's text as bytes. 400 updates of 16 sequences
  of 64 tokens, a warm-up over 40 and a cosine down to a tenth, no clipping. A run drains only at its end. The loss is
  that of the last weights on 2,048 sequences that were held out. At n = 32 a microbatch is half a sequence, which
  only a loop by hand can train: what counts is the share of a window that reads the same weights, and of
  what is known, whole sequences count: late forwards know a little less than in a pipeline.
- **Cases.** `BLOCKS`, in the order in which they run: d ranks and as many stages, n microbatches an update, an
  optimizer, and one of `METHODS`. All have as many tokens an update, and the same batches in the same order.
- **Rates.** Each case has its own, by one rule: on both of `HELD_OUT`, which are not judged, from `FIRST` up and down
  by factors of the square root of two until the best mean loss has a worse one on either side.
- **Judged** on eight seeds, of the data's order and of the first weights: the gap of a seed is its loss over that of
  mismatch 0 with the same optimizer and d on the same seed, each at its own rate, less one. The table has the mean
  gap, its standard error, and an upper bound of 95% by Student's t. A case with fewer than eight seeds says so.
- **What should hold** of `tentative`, with either optimizer: at n = 4d a mean gap of at most 0.5% and a bound of at
  most 1%; at n = 2d a mean of at most 1%; at n = d of at most 5%. The untreated delay (`none`) should cost at least
  2% at n = 4d, else the task shows little.
- **The ablation**, at a context of 32 and n = 4d: 256 to 4,096 tokens an update.

What the methods other than `tentative` do is in `by_hand.py`. PipeDream, vNAG and SpecTrain update after every
microbatch, which is a whole batch here, so that their first stage is late by 7 updates; SpecTrain predicts with the
optimizer's own step, not with SGD's. Error feedback is that of `delay_optimizers.py`, for a delay of one.

The rows of `OPEN` belong to the protocol and have not run: a GPT of 10M and a BERT of 1M parameters take days of one
core, and the loop by hand has no BERT.

These runs on seed 100, with AdamW at d = 8 and n = 32, came before the protocol was committed, to choose the task:

    sequences   clip   rate      mismatch 0   none
    32 of 32    1      4e-3      1.9298       1.9729    (2.0021 at 2.83e-3)
    16 of 64    1      4e-3      2.0682       2.1054
    16 of 64    none   5.66e-3   2.0491       2.0940

No run of `tentative` came before it here. The rule comes from a prototype on a like task (90 runs of 300 updates,
which are not kept): there n = 32 ended .3% below to .2% above mismatch 0, and n = 16 .7% above.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import penstock as ps
from experiments.amdp import RESULTS
from experiments.amdp.by_hand import Loop, Plan, Training, plan_of, trained
from experiments.amdp.learning import Task, corpus, data_of
from experiments.common.command import options
from experiments.common.results import Row, known, runs, save, table
from penstock.models import GPTConfig

SEEDS, HELD_OUT, UPDATES, WARMUP = tuple(range(8)), (100, 101), 400, 40
FIRST: Mapping[str, float] = {"AdamW": 5.657e-3, "Muon": 1.131e-2, "NAdam": 5.657e-3}
"""Where the search for the rates of an optimizer begins."""
MODELS: Mapping[str, GPTConfig] = {
    "GPT .4M": GPTConfig(vocab_size=256, context=64, depth=8, width=64, num_heads=4),
    "GPT .4M, context 32": GPTConfig(vocab_size=256, context=32, depth=8, width=64, num_heads=4),
    "GPT 10M": GPTConfig(vocab_size=256, context=64, depth=8, width=320, num_heads=5),
}
STUDENT = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895}
"""By degrees of freedom, the t that 95% lie below."""


@dataclass(frozen=True)
class Method:
    """An order and the rule by which its ops read weights.

    Attributes:
        order: of the library. rule: of `by_hand.RULES`.
        mismatch: the most that AMDP's order may have; None for an order that takes no such bound.
        is_whole: a microbatch is a whole batch, and each has an update of its own.
    """

    order: str
    rule: str
    mismatch: int | None = 1
    is_whole: bool = False


SYNCHRONOUS = "mismatch 0"
METHODS: Mapping[str, Method] = {
    SYNCHRONOUS: Method("amdp", "none", mismatch=0),
    "none": Method("amdp", "none"),
    "xpipe": Method("amdp", "xpipe"),
    "tentative": Method("amdp", "tentative"),
    "stashing": Method("amdp", "pipedream"),
    "error feedback": Method("amdp", "feedback"),
    "half weight": Method("amdp", "half"),
    "2BW": Method("pipedream-2bw", "pipedream-2bw", None),
    "PipeDream": Method("pipedream", "pipedream", None, is_whole=True),
    "SpecTrain": Method("pipedream", "spectrain", None, is_whole=True),
    "vNAG": Method("pipedream", "vnag", None, is_whole=True),
}


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        method: of `METHODS`. optimizer: of `FIRST`.
        d: ranks, and stages. n: microbatches of an update.
        samples: sequences of an update.
        model: of `MODELS`.
    """

    method: str
    optimizer: str = "AdamW"
    d: int = 8
    n: int = 32
    samples: int = 16
    model: str = "GPT .4M"

    @property
    def synchronous(self) -> Case:
        """The case that it is compared with. Without a mismatch, n changes only the order of sums."""
        return replace(self, method=SYNCHRONOUS, n=4 * self.d)


MAIN = (SYNCHRONOUS, "none", "tentative", "xpipe")
OTHERS = ("stashing", "error feedback", "half weight", "2BW", "PipeDream", "SpecTrain")
BLOCKS: Sequence[Sequence[Case]] = (
    *(
        [Case(method, optimizer, 8, n) for method in MAIN if n == 32 or method != SYNCHRONOUS]
        for optimizer in ("AdamW", "Muon")
        for n in (32, 16, 8)
    ),
    *([Case(method, optimizer, 4, 16) for method in MAIN] for optimizer in ("AdamW", "Muon")),
    [Case(method) for method in OTHERS],
    [Case(method, "NAdam") for method in (SYNCHRONOUS, "vNAG")],
    [Case(method, "Muon") for method in OTHERS],
    *(
        [Case(method, samples=samples, model="GPT .4M, context 32") for method in (SYNCHRONOUS, "none", "tentative")]
        for samples in (8, 16, 32, 64, 128)
    ),
)
OPEN: Sequence[Case] = [Case(method, optimizer, 8, n, model="GPT 10M")
                        for optimizer in ("AdamW", "Muon") for n in (32, 16, 8) for method in MAIN]  # fmt: skip
"""Cases of the protocol that these cores can't run; those of the BERT are the same."""


@dataclass(frozen=True)
class Job:
    """One run: a case on a seed, at the rate that is `step` square roots of two above the first one."""

    case: Case
    seed: int
    step: int

    @property
    def peak(self) -> float:
        return FIRST[self.case.optimizer] * math.sqrt(2) ** self.step


Finals = Mapping[tuple[Case, int], Mapping[int, float]]
"""By case and step the last loss of each seed; infinite if the run diverged."""


def run(job: Job, num_updates: int = UPDATES) -> float | None:
    """Trains and returns the last weights' loss on the text held out; None for a run that diverges."""
    torch.set_num_threads(1)
    case = job.case
    task = Task(MODELS[case.model], case.samples, num_batches=num_updates, warmup=WARMUP, seed=job.seed)
    rates = [task.rate(number, job.peak) for number in range(num_updates)]
    training = Training(task.config, case.d, case.optimizer, rates, clip=None, seed=job.seed)
    loop = Loop(training, _plan(case.method, case.d, case.n, case.samples, num_updates), METHODS[case.method].rule)
    batches, held_out = data_of(task, corpus(), job.seed)
    trained(loop, batches, num_updates)
    loss = loop.evaluate(held_out)
    return loss if math.isfinite(loss) else None


@functools.lru_cache(maxsize=4)
def _plan(name: str, d: int, n: int, samples: int, num_updates: int) -> Plan:
    method = METHODS[name]
    window = 1 if method.is_whole else n
    bound = {} if method.mismatch is None else {"max_mismatch": method.mismatch}
    rule = {"rule": "tentative"} if method.rule == "tentative" else {}
    schedule = ps.build(method.order, d, window * num_updates, window=window, **bound, **rule)
    parts = max(1, n // samples)  # microbatches of a sequence
    known = {key: set(found) for key, found in ps.schedule.known_to(schedule).items()}
    whole = {
        key: frozenset(m for m in found if {*range(m // parts * parts, m // parts * parts + parts)} <= found)
        for key, found in known.items()
    }
    return plan_of(schedule, method.rule, whole)


def ready_jobs(rows: Sequence[Row]) -> Iterator[Job]:
    """The runs that the protocol asks for and whose rates are known by now, block by block.

    In a block rates come first, and then seed by seed all cases, so that pairs are there early.
    """
    finals = finals_of(rows)
    for block in BLOCKS:
        judged: dict[Case, int] = {}
        for case in block:
            steps = next_steps(finals, case)
            for step in steps:
                done = finals.get((case, step), {})
                yield from (Job(case, seed, step) for seed in HELD_OUT if seed not in done)
            if not steps:
                judged[case] = best_step(finals, case)
        for seed in SEEDS:
            for case, step in judged.items():
                if seed not in finals[case, step]:
                    yield Job(case, seed, step)


def next_steps(finals: Finals, case: Case) -> list[int]:
    """The steps that the search for a case's rate asks for; none once the best has a worse one on either side."""
    tried = _tried(finals, case)
    if missing := [step for step in (0, 1, -1) if step not in tried]:
        return missing
    best = best_step(finals, case)
    return [step for step in (best + 1, best - 1) if step not in tried]


def best_step(finals: Finals, case: Case) -> int:
    """The step with the least mean loss over the seeds that are not judged; of those alike the lowest."""
    tried = _tried(finals, case)
    return min(tried, key=lambda step: (tried[step], step))


def _tried(finals: Finals, case: Case) -> dict[int, float]:
    """By step the mean loss over the seeds that are not judged, where all have run."""
    return {
        step: statistics.mean(found[seed] for seed in HELD_OUT)
        for (of_case, step), found in finals.items()
        if of_case == case and set(HELD_OUT) <= set(found)
    }


def finals_of(rows: Sequence[Row]) -> Finals:
    return {
        (_case_of(row), row["step"]): {
            int(seed): math.inf if final is None else final for seed, final in row["finals"].items()
        }
        for row in rows
    }


def _case_of(row: Row) -> Case:
    return Case(**{name: row[name] for name in asdict(Case(""))})


def add(rows: list[Row], job: Job, final: float | None, seconds: float) -> None:
    """Puts a run into the row of its case and rate."""
    for row in rows:
        if (_case_of(row), row["step"]) == (job.case, job.step):
            row["finals"] |= {str(job.seed): final}
            row["seconds"] += seconds
            return
    rows.append(
        {**asdict(job.case), "step": job.step, "peak": job.peak, "finals": {str(job.seed): final}, "seconds": seconds}
    )


@dataclass(frozen=True)
class Gap:
    """Mean gap over mismatch 0 in parts of one, its standard error and upper bound, over so many seeds."""

    mean: float
    error: float
    bound: float
    num_seeds: int


def gap_of(rows: Sequence[Row], case: Case) -> Gap | None:
    """None if fewer than two seeds have run in both cases, or a run diverged."""
    finals = finals_of(rows)
    if next_steps(finals, case) or next_steps(finals, case.synchronous):
        return None
    own = finals[case, best_step(finals, case)]
    beside = finals[case.synchronous, best_step(finals, case.synchronous)]
    gaps = [own[seed] / beside[seed] - 1 for seed in SEEDS if seed in own and seed in beside]
    if len(gaps) < 2 or not all(map(math.isfinite, gaps)):
        return None
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    mean = statistics.mean(gaps)
    return Gap(mean, error, mean + STUDENT[len(gaps) - 1] * error, len(gaps))


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """A row a case that has begun: its rate, its mean loss, and its gap over mismatch 0."""
    finals, body = finals_of(rows), []
    for case in [case for block in BLOCKS for case in block]:
        if not (tried := _tried(finals, case)):
            continue
        step, is_found = best_step(finals, case), not next_steps(finals, case)
        own = finals[case, step]
        judged = [own[seed] for seed in SEEDS if seed in own] if is_found else []
        gap = None if case.method == SYNCHRONOUS else gap_of(rows, case)
        shown = ("-", "-") if gap is None else (f"{gap.mean:+.2%} ± {gap.error:.2%}", f"{gap.bound:+.2%}")
        body.append(
            [case.method, case.optimizer, str(case.d), str(case.n), _tokens(case),
             f"{Job(case, 0, step).peak:.2g}" + ("" if is_found else " so far"), f"{tried[step]:.4f}",
             f"{statistics.mean(judged):.4f}" if judged else "-", *shown, str(len(judged))]
        )  # fmt: skip
    head = ["method", "optimizer", "d", "n", "tokens", "rate", "held-out seeds", "loss", "over mismatch 0", "95%"]
    yield from table([*head, "seeds"], body)
    num = sum(len(row["finals"]) for row in rows)
    spent = sum(row["seconds"] for row in rows) / 60
    state = "not done" if next(ready_jobs(rows), None) else "done"
    yield f"{num} runs, {spent:.0f} minutes of one core; the protocol is {state}; {len(OPEN)} cases are left open"


def _tokens(case: Case) -> str:
    return str(case.samples * MODELS[case.model].context)


def _timed(job: Job) -> tuple[float | None, float]:
    began = time.process_time()
    return run(job), time.process_time() - began


def carry_out(rows: list[Row], minutes: float, processes: int) -> Iterator[Job]:
    """Runs what the protocol asks for, some at a time, and gives each run once it is in `rows`."""
    began = time.monotonic()
    running: dict[Future[tuple[float | None, float]], Job] = {}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        while True:
            if time.monotonic() - began < 60 * minutes:
                waiting = (job for job in ready_jobs(rows) if job not in running.values())
                for _ in range(processes - len(running)):
                    if (job := next(waiting, None)) is not None:
                        running[pool.submit(_timed, job)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                add(rows, job, *future.result())
                yield job


def main() -> None:
    parser = options(__doc__, RESULTS, show=True)
    parser.add_argument("--minutes", type=float, default=4.0, help="begin no run after so many")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    given: Any = parser.parse_args()
    rows, earlier = known(given.out, "tentative"), runs(given.out, "tentative")
    for job in () if given.show else carry_out(rows, given.minutes, given.processes):
        save(given.out, "tentative", rows, seeds=(*SEEDS, *HELD_OUT), earlier=earlier)
        final = finals_of(rows)[job.case, job.step][job.seed]
        print(f"{job.case}, seed {job.seed}, {job.peak:.2g}: {final:.4f}", flush=True)
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
