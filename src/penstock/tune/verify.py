"""Runs the best candidates, one process per rank, and compares measured and predicted steps."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from penstock.formats.native import to_json
from penstock.host_process import num_cores
from penstock.train.settings import Settings
from penstock.tune.device import others
from penstock.tune.job import WorkerAnswer, run_job
from penstock.tune.search import RankedCandidate, TuneCandidate, settings_of
from penstock.tune.trial import WARM_UPS

DISTURBED = 0.25
"""Cores that other programs may take from the ranks in a step that counts. A step is too short to measure fewer."""

FEWEST = 3
"""If there are so many undisturbed steps, the others are left out."""


@dataclass(frozen=True)
class MeasuredCandidate:
    """The measured steps of a candidate.

    Attributes:
        step: the median step (ms); a step lasts until its slowest rank is done. Steps in which other programs took
            cores from the ranks are left out, if there are enough others.
        makespan: of the same steps, from first op to last, their median.
        undisturbed: how many of the `steps` were undisturbed.
        others: cores that other programs kept busy in the steps that counted; None if that is not known.
        steps: every step.
        peak_bytes: for each rank of a replica, the most bytes of tensors that it held in a step; the highest
            of all replicas.
    """

    step: float
    makespan: float
    undisturbed: int
    others: float | None
    steps: tuple[float, ...]
    peak_bytes: tuple[float, ...] = ()

    @property
    def quiet(self) -> bool:
        """Whether only undisturbed steps counted."""
        return self.undisturbed >= FEWEST


def verify(
    best: Sequence[RankedCandidate],
    settings: Settings,
    num_steps: int = 10,
    rounds: int = 2,
    say: Callable[[str], None] | None = None,
) -> dict[TuneCandidate, MeasuredCandidate]:
    """Runs each candidate `rounds` times, in alternation with those of as many ranks.

    An interrupt returns what was measured so far.

    Args:
        say: is told which run begins, and how long each takes.

    Raises:
        RanksFailed: a run failed.
    """
    progress = None if say is None else progress_of(best, num_steps, rounds, say)
    answers: dict[TuneCandidate, list[WorkerAnswer]] = {}
    by_ranks: dict[int, list[TuneCandidate]] = {}
    for ranked in best:
        by_ranks.setdefault(ranked.candidate.num_ranks, []).append(ranked.candidate)
    try:
        for num_ranks, group in by_ranks.items():
            order = [candidate for turn in range(rounds) for candidate in (group if turn % 2 == 0 else group[::-1])]
            run_job(
                [trial_task(candidate, settings, num_steps) for candidate in order],
                num_ranks,
                settings.threads or 1,
                progress,
                lambda number, answer, order=order: answers.setdefault(order[number], []).append(answer),  # type: ignore[misc]
            )
    except KeyboardInterrupt:
        if not answers:
            raise
    return {candidate: measured_of(each) for candidate, each in answers.items()}


def progress_of(
    best: Sequence[RankedCandidate], num_steps: int, rounds: int, say: Callable[[str], None]
) -> Callable[[str], None]:
    """What says, with the text of a candidate whose run begins, which run it is, and about how long each takes: as
    predicted, or as those before it took.
    """
    names, num_runs = [str(each.candidate) for each in best], rounds * len(best)
    predicted = (WARM_UPS + num_steps + 1) * fmean(each.prediction.step for each in best) / 1e3
    begun, start = itertools.count(), time.monotonic()

    def begin(name: str) -> None:
        number = next(begun)
        each = (time.monotonic() - start) / number if number else predicted
        said = f"run {number + 1} of {num_runs}, about {max(1, round(each))} s each"
        say(f"{said}: candidate {names.index(name) + 1} of {len(names)}, {name}")

    return begin


def trial_task(candidate: TuneCandidate, settings: Settings, num_steps: int) -> dict[str, Any]:
    """The task that runs a candidate."""
    return {
        "do": "run",
        "text": str(candidate),
        "settings": dataclasses.asdict(settings_of(candidate, settings)),
        "schedule": to_json(candidate.plan.schedule),
        "steps": num_steps,
    }


def _peaks(answers: Sequence[WorkerAnswer]) -> tuple[float, ...]:
    """For each rank of a replica, the highest of all replicas and rounds."""
    highest: dict[int, float] = {}
    for rank in (rank for answer in answers for rank in answer.ranks):
        place = rank["pipeline_rank"]
        highest[place] = max(highest.get(place, 0.0), float(rank["peak_bytes"]))
    return tuple(highest[place] for place in sorted(highest))


class TrialStep(NamedTuple):
    """One step of a run: its time and makespan (ms), and cores that other programs kept busy."""

    step: float
    makespan: float
    others: float | None
    undisturbed: bool


def measured_of(answers: Sequence[WorkerAnswer]) -> MeasuredCandidate:
    """One value from the answers of all rounds."""
    found: list[TrialStep] = []
    for answer in answers:
        spare = max(0, num_cores() - len(answer.ranks))
        for number, makespan in enumerate(answer.ranks[0]["makespans"]):
            busy = others([rank["clocks"][number] for rank in answer.ranks])
            step = max(rank["steps"][number] for rank in answer.ranks)
            found.append(TrialStep(step, makespan, busy, busy is None or busy <= spare + DISTURBED))
    undisturbed = [each for each in found if each.undisturbed]
    counted = undisturbed if len(undisturbed) >= FEWEST else found
    known = [each.others for each in counted if each.others is not None]
    return MeasuredCandidate(
        median(each.step for each in counted),
        median(each.makespan for each in counted),
        len(undisturbed),
        fmean(known) if known else None,
        tuple(each.step for each in found),
        _peaks(answers),
    )
