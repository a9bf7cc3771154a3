"""Runs the best candidates for real, one process a rank, and sets measured beside predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from penstock.formats.native import to_json
from penstock.models import GPTConfig
from penstock.train.settings import Settings
from penstock.tune.search import Candidate, Ranked
from penstock.tune.work import Answer, carry_out


@dataclass(frozen=True)
class Measured:
    """What a candidate took.

    Attributes:
        step: the median step (ms); a step lasts until its slowest rank is done.
        makespan: of the median step, from its first op to its last.
        others: cores that other programs kept busy meanwhile; None if that is not known.
        steps: every step that was counted.
    """

    step: float
    makespan: float
    others: float | None
    steps: tuple[float, ...]


def verify(
    best: Sequence[Ranked],
    settings: Settings,
    config: GPTConfig,
    num_steps: int = 10,
    rounds: int = 2,
    say: Callable[[str], None] | None = None,
) -> dict[Candidate, Measured]:
    """Runs each candidate `rounds` times, in alternation among those with as many ranks.

    An interrupt returns what was measured so far.

    Raises:
        RanksFailed: a run failed.
    """
    answers: dict[Candidate, list[Answer]] = {}
    by_ranks: dict[int, list[Candidate]] = {}
    for ranked in best:
        by_ranks.setdefault(ranked.candidate.shape.pp, []).append(ranked.candidate)
    try:
        for num_ranks, group in by_ranks.items():
            order = [candidate for turn in range(rounds) for candidate in (group if turn % 2 == 0 else group[::-1])]
            carry_out(
                [trial_task(candidate, settings, config, num_steps) for candidate in order],
                num_ranks,
                settings.threads or 1,
                None if say is None else lambda text: say(f"running {text}"),
                lambda number, answer, order=order: answers.setdefault(order[number], []).append(answer),  # type: ignore[misc]
            )
    except KeyboardInterrupt:
        if not answers:
            raise
    return {candidate: measured_of(told) for candidate, told in answers.items()}


def trial_task(candidate: Candidate, settings: Settings, config: GPTConfig, num_steps: int) -> dict[str, Any]:
    """The task that runs a candidate."""
    return {
        "do": "run",
        "text": str(candidate),
        "settings": dataclasses.asdict(settings),
        "vocab_size": config.vocab_size,
        "schedule": to_json(candidate.plan.schedule),
        "cut": [len(layers) for layers in candidate.cut],
        "recompute": candidate.recompute,
        "microbatch_size": candidate.shape.microbatch_size,
        "steps": num_steps,
    }


def measured_of(told: Sequence[Answer]) -> Measured:
    """One value from the answers of all rounds."""
    steps = [max(each) for answer in told for each in zip(*(rank["steps"] for rank in answer.ranks), strict=True)]
    spans = [span for answer in told for span in answer.ranks[0]["makespans"]]
    others = [answer.others for answer in told if answer.others is not None]
    return Measured(median(steps), median(spans), max(others) if others else None, tuple(steps))
