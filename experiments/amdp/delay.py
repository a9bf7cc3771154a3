"""What full staleness costs: PipeDream's delay of up to 7 updates, under optimizers and rules made for delay.

    python -m experiments.amdp.delay --minutes 30     goes on for so long
    python -m experiments.amdp.delay --show           what there is so far

A plain loop, no pipeline: at update t stage k of 8 computes with the weights it had after t - (7 - k) updates, and
never drains. It is the worst case of every asynchronous schedule of one pipeline.

The protocol, which changes for no result:

- **Task.** The GPT of `convergence.py`: 8 blocks on 8 stages, 64 wide, bytes of the standard library's text, 300
  updates of 32 sequences of 16 tokens, warm-up over 30, a cosine down to a tenth, no clipping.
- **Ways.** `WAYS`, each with its optimizer: nothing late; late, with backwards on the weights of their forwards
  (rule `pipedream`); forwards on weights predicted as far ahead as they are late, backwards on the newest (rule
  `xpipe`); a stage's rate divided by its versions, one more than its delay, for good (`by_stage`), or by a power of
  them that falls from 1 to 0 over the first third, which is PipeMare's schedule (`anneals`).
- **Rates.** On seed 100, which nothing else counts: from `GRID` up and down by factors of two until the best is not
  at an edge. With nothing late they are those that `convergence.py` found on that seed.
- **Judged** on seeds 0, 1 and 2: the mean and each seed's loss on text held out, over the same optimizer's with
  nothing late, each at its own rate.

- **What limits the nearest way**, asked once all others had been judged: that way again at its own rate, with nothing
  late but each stage's rate lowered as before, and with every stage late by 1, by 3 and by 7 updates, each rate
  divided by its versions. These are judged alike, and search no rate.

- **Three more means**, asked for once all of these had been judged, and judged alike: error feedback, delay
  compensation, and PipeMare's discrepancy correction, in which a backward reads what its forward is taken to have
  read by how the weights have moved since. Their sums, and where these are from, are in `delay_optimizers.py`.
  Strengths are the customary ones, and for delay compensation also one 32 times as strong. No run of any of these
  ways came before.

Jobs run in the order of `WAYS`, and what has not run is told as such.

These runs on seed 100 came before the protocol was committed. Muon: nothing late at 0.016 (1.946); late at
0.008 (2.370) and 0.004 (2.348); predicted at 0.008 (2.360), with backwards on the forwards' weights at 0.016
(2.368), 0.008 (2.369) and 0.004 (2.321). As these last: with momentum 0.98 at 0.008 (2.371) and 0.8 at 0.004
(2.280), twice as far ahead with 0.9 at 0.004 (2.336), with PipeMare's rates over 100 updates at 0.008 (2.373),
by the mean of what steps moved at 0.008 (2.413), slower by stage at 0.016 (2.263), by the root of a stage's
versions at 0.008 (2.322). Rotated, which moved by its first gradient then, at 0.004: nothing late (2.077), late
(2.566), predicted (2.527), and slower by stage (2.293).
Two of that kind ended after it: predicted at 0.002, with backwards on the forwards' weights (2.319), and twice as far
ahead at 0.004 (2.344).

No text of arXiv 2606.30634, 1910.05124 or 1609.08326 was at hand: error feedback is here after an abstract,
PipeMare's rates and correction are as they are commonly described, and delay compensation is as in its authors' code.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.amdp import RESULTS
from experiments.amdp.delay_optimizers import DelayCompensation, ErrorFeedback, Stepped, WeightVelocity
from experiments.amdp.learning import NUM_STAGES, Task, corpus, cut, data_of, shown
from experiments.common.command import options
from experiments.common.results import Row, known, runs, save, table
from penstock.models import CrossEntropy, GPTConfig
from penstock.models.gpt import build_layers
from penstock.runtime.parameters.muon import mark_ends
from penstock.runtime.tensors.dtensor import standing_for

SEEDS, HELD_OUT, UPDATES = (0, 1, 2), 100, 300
CONFIG = GPTConfig(vocab_size=256, context=16, depth=8, width=64, num_heads=4)
GRID: Mapping[str, float] = {"AdamW": 1e-3, "NAdam": 2e-3, "Muon": 4e-3, "Rotated": 2e-3}
"""Where the rates of each optimizer begin; four times that where late stages have lower ones."""


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        name: in tables. optimizer: of `Stepped`.
        late: whether stages compute with old weights.
        every: by how many updates each stage is late; None for as many as under PipeDream.
        predicts: forwards read weights predicted as many updates ahead as they are late.
        by_stage: power of a stage's versions by which its rate is divided.
        anneals: of the run, the share in which PipeMare's power falls from 1 to 0.
        momentum: of Muon.
        feeds_back: the errors of late updates go into later ones.
        compensates: gradients are moved on to the newest weights; None where they are not.
        corrects: backwards read what their forwards are taken to have read; no old weights are kept.
        peak: its rate; None where it is to be found.
    """

    name: str
    optimizer: str
    late: bool = True
    every: int | None = None
    predicts: bool = False
    by_stage: float = 0.0
    anneals: float = 0.0
    momentum: float = 0.95
    feeds_back: bool = False
    compensates: DelayCompensation | None = None
    corrects: bool = False
    peak: float | None = None

    @property
    def first_peak(self) -> float:
        """Where the search for its rate begins."""
        return GRID[self.optimizer] * (4 if self.by_stage or self.anneals else 1)


@dataclass(frozen=True)
class Job:
    """One run: a way, at a peak learning rate, on a seed."""

    way: str
    seed: int
    peak: float

    @property
    def key(self) -> tuple[str, int, float]:
        return self.way, self.seed, self.peak


WAYS = (
    Way("Muon, synchronous", "Muon", late=False, peak=1.6e-2),
    Way("Muon, late, predicted, slower by stage, momentum 0.8", "Muon", predicts=True, by_stage=1.0, momentum=0.8),
    Way("Muon, late, predicted, slower by stage", "Muon", predicts=True, by_stage=1.0),
    Way("Muon, late, predicted", "Muon", predicts=True),
    Way("Muon, late", "Muon"),
    Way("Muon, late, slower by stage", "Muon", by_stage=1.0),
    Way("Muon, late, predicted, PipeMare's rates", "Muon", predicts=True, anneals=1 / 3),
    Way("AdamW, synchronous", "AdamW", late=False, peak=4e-3),
    Way("AdamW, late, predicted, slower by stage", "AdamW", predicts=True, by_stage=1.0),
    Way("AdamW, late, predicted", "AdamW", predicts=True),
    Way("AdamW, late", "AdamW"),
    Way("NAdam, synchronous", "NAdam", late=False, peak=8e-3),
    Way("NAdam, late", "NAdam"),
    Way("Rotated, synchronous", "Rotated", late=False),
    Way("Rotated, late, predicted, slower by stage", "Rotated", predicts=True, by_stage=1.0),
    Way("Rotated, late", "Rotated"),
    Way("Rotated, nothing late, slower by stage", "Rotated", late=False, by_stage=1.0, peak=2e-3),
    *(
        Way(f"Rotated, all late by {every}, predicted, slower", "Rotated", True, every, True, 1.0, peak=2e-3)
        for every in (1, 3, 7)
    ),
    Way("Rotated, late, error feedback, slower by stage", "Rotated", feeds_back=True, by_stage=1.0),
    Way(
        "Muon, late, error feedback, slower by stage, momentum 0.8",
        "Muon",
        feeds_back=True,
        by_stage=1.0,
        momentum=0.8,
    ),
    Way("Muon, late, error feedback", "Muon", feeds_back=True),
    Way(
        "Rotated, late, predicted, slower by stage, compensated",
        "Rotated",
        predicts=True,
        by_stage=1.0,
        compensates=DelayCompensation(2.0),
    ),
    Way("AdamW, late, compensated", "AdamW", compensates=DelayCompensation(2.0)),
    Way("AdamW, late, corrected", "AdamW", corrects=True),
    Way("AdamW, late, corrected, PipeMare's rates", "AdamW", corrects=True, anneals=1 / 3),
    Way("Muon, late, corrected, PipeMare's rates", "Muon", corrects=True, anneals=1 / 3),
    Way("AdamW, late, error feedback", "AdamW", feeds_back=True),
    Way("AdamW, late, compensated 32 times as strongly", "AdamW", compensates=DelayCompensation(64.0)),
    Way("AdamW, late, compensated, constant lambda", "AdamW", compensates=DelayCompensation(0.04, adaptive=False)),
)


def run(job: Job, way: Way, num_updates: int = UPDATES) -> Row:
    """Trains a way and returns its row; a run that diverges has a `final` of None."""
    torch.set_num_threads(1)
    began = time.process_time()
    task = Task(CONFIG, num_batches=num_updates, warmup=num_updates // 10, samples=32, seed=job.seed)
    loop = Loop(way, task, job.peak)
    fine = all(math.isfinite(loop.update(number)) for number in range(num_updates))
    return {
        "way": job.way,
        "seed": job.seed,
        "peak": job.peak,
        "updates": num_updates,
        "final": loop.evaluate() if fine else None,
        "seconds": time.process_time() - began,
    }


class Loop:
    """The loop of one way."""

    def __init__(self, way: Way, task: Task, peak: float) -> None:
        self._way, self._task, self._peak = way, task, peak
        self._batches, self._held_out = data_of(task, corpus(), task.seed)
        layers = build_layers(CONFIG, seed=task.seed)
        self._model, self._loss_of = nn.Sequential(*layers), CrossEntropy()
        self._parameters: list[nn.Parameter] = []
        self._versions: list[int] = []
        for stage, part in enumerate(cut(CONFIG)):
            module = nn.ModuleList([layers[place] for place in part])
            mark_ends(module, stage == NUM_STAGES - 1)
            for parameter in module.parameters():
                self._parameters.append(parameter)
                self._versions.append(1 + (NUM_STAGES - 1 - stage if way.every is None else way.every))
        self.delays = [versions - 1 if way.late else 0 for versions in self._versions]
        weights = [standing_for(each, each.detach().clone()).requires_grad_(False) for each in self._parameters]
        feedback = ErrorFeedback(self.delays) if way.feeds_back else None
        self._stepped = Stepped(way.optimizer, weights, way.momentum, self._momentum_decay(), feedback)
        self.weights = self._stepped.weights
        self._velocity = WeightVelocity(self.weights, self.delays) if way.corrects else None
        self._squares = [torch.zeros_like(weight) for weight in self.weights] if way.compensates else []
        self._to_read = [
            [weight.clone() for _ in range(1 + delay)]
            for weight, delay in zip(self.weights, self.delays, strict=True)
        ]
        """Of each weight what the forwards to come read, the next one first."""

    def _momentum_decay(self) -> float:
        """NAdam's momentum rises over the run as over the 40,000 updates of its paper's."""
        return 0.004 * 40_000 / self._task.num_batches

    def update(self, number: int) -> float:
        """A forward, its backward and the step from the newest weights; returns the loss."""
        forward = [reads.pop(0) for reads in self._to_read]
        self._fill(forward)
        inputs, targets = self._batches(number)
        self._model.zero_grad()
        loss: Tensor = self._loss_of(self._model(inputs), targets)
        if self._way.predicts:  # as under XPipe's rule the backward reads the newest
            self._fill(self.weights)
        elif self._velocity is not None:
            self._fill(self._velocity.read())
        loss.backward()
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        with torch.no_grad():
            if (compensates := self._way.compensates) is not None:
                each = zip(gradients, self.weights, forward, self._squares, strict=True)
                gradients = [compensates.compensated(g, newest - read, square) for g, newest, read, square in each]
            self._stepped.step(gradients, self._rates(number))
            later = self._later(number + 1)
            for reads, weight in zip(self._to_read, later, strict=True):
                reads.append(weight)
            if self._velocity is not None:
                self._velocity.update(self.weights)
        return float(loss.detach())

    def _rates(self, number: int) -> list[float]:
        rate, way = self._task.rate(number, self._peak), self._way
        power = way.by_stage
        if way.anneals:
            power += 1 - min(number / (way.anneals * self._task.num_batches), 1.0)
        return [rate / versions**power for versions in self._versions]

    def _later(self, number: int) -> list[Tensor]:
        """What forwards will read that begin now."""
        if not self._way.predicts:
            return [weight.clone() for weight in self.weights]
        rates = self._rates(min(number, self._task.num_batches - 1))
        ahead = zip(self.weights, self._stepped.next_directions(), rates, self.delays, strict=True)
        return [weight - rate * delay * direction for weight, direction, rate, delay in ahead]

    @torch.no_grad()
    def evaluate(self) -> float:
        """The newest weights' mean loss over the text held out."""
        self._fill(self.weights)
        losses = [float(self._loss_of(self._model(x), y)) for x, y in self._held_out]
        return statistics.mean(losses)

    def _fill(self, weights: Sequence[Tensor]) -> None:
        """The model has these weights."""
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.data.copy_(weight)


def next_job(rows: Sequence[Row]) -> Job | None:
    """What the protocol asks for next; None once it is done."""
    done = {(row["way"], row["seed"], row["peak"]): row["final"] for row in rows}
    for way in WAYS:
        found = {
            peak: math.inf if final is None else final
            for (name, seed, peak), final in done.items()
            if (name, seed) == (way.name, HELD_OUT)
        }
        peak = way.peak or _next_peak(way.first_peak, found)
        if way.peak is None and peak is not None:
            return Job(way.name, HELD_OUT, peak)
        for seed in SEEDS:
            job = Job(way.name, seed, way.peak or best_peak(found))
            if job.key not in done:
                return job
    return None


def best_peak(finals: Mapping[float, float]) -> float:
    """The rate with the least loss; of those alike the least rate."""
    return min(finals, key=lambda peak: (finals[peak], peak))


def _next_peak(first: float, finals: Mapping[float, float]) -> float | None:
    for peak in (first, first * 2, first / 2):
        if peak not in finals:
            return peak
    best = best_peak(finals)
    if best == max(finals):
        return best * 2
    return best / 2 if best == min(finals) else None


def judged(rows: Sequence[Row], name: str) -> dict[int, float | None]:
    """The losses of a way by seed, without the one that its rate was found on."""
    return {row["seed"]: row["final"] for row in rows if row["way"] == name and row["seed"] in SEEDS}


def over_synchronous(rows: Sequence[Row], way: Way) -> float | None:
    """By how much its losses are above those of its optimizer with nothing late, a mean over seeds that ended."""
    base = judged(rows, f"{way.optimizer}, synchronous")
    pairs = [(final, base.get(seed)) for seed, final in judged(rows, way.name).items()]
    over = [own / beside - 1 for own, beside in pairs if own is not None and beside is not None]
    return statistics.mean(over) if over else None


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """A row a way: its rate, its losses, and what they are over the optimizer's with nothing late."""
    body = []
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way.name]
        tried = {row["peak"]: row["final"] for row in mine if row["seed"] == HELD_OUT}
        finals = judged(rows, way.name)
        if not tried and not finals:
            continue
        best = way.peak or best_peak({peak: math.inf if final is None else final for peak, final in tried.items()})
        cells = [way.name, f"{best:g}", shown(tried[best]) if best in tried else "-"]
        each = [shown(final) for final in finals.values()]
        mean = over_synchronous(rows, way)
        body.append([*cells, " ".join(each) or "-", "-" if mean is None else f"{mean:+.2%}", str(len(finals))])
    yield from table(["way", "rate", "seed 100", "judged", "over synchronous", "seeds"], body)
    yield f"{len(rows)} runs; {'the protocol is done' if next_job(rows) is None else 'not done'}"


def main() -> None:
    parser = options(__doc__, RESULTS, show=True)
    parser.add_argument("--minutes", type=float, default=4.0, help="begin no run after so many")
    given = parser.parse_args()
    rows, earlier, began = known(given.out, "delay"), runs(given.out, "delay"), time.monotonic()
    ways = {way.name: way for way in WAYS}
    while not given.show and time.monotonic() - began < 60 * given.minutes and (job := next_job(rows)) is not None:
        rows.append(run(job, ways[job.way]))
        save(given.out, "delay", rows, seeds=(*SEEDS, HELD_OUT), earlier=earlier)
        print(f"{job.way}, seed {job.seed}, {job.peak:g}: {shown(rows[-1]['final'])}", flush=True)
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
