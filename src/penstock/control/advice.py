"""Links that are late and for which nothing is changed: the reason, and what would help, by simulation.

link 2:3 is 120 ms late, and the plan stays:
  why     no other plan within the ranks' caps saves 2% (by simulation 633 ms a step now, 628 at best)
  helps   521 ms with 2 more activations per rank (--set host_memory=2)
          540 ms with schedule zb-h2, up to 7 activations held (--schedule zb-h2)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.control.configuration import Configuration, Job, peaks
from penstock.control.decide import Measured, candidates, predict, score
from penstock.control.events import Link, show_link
from penstock.dispatch import Dispatch
from penstock.library.registry import buildable

MORE = (1, 2, 4, 8)
"""Extra activations of the largest stage that each rank may hold; these numbers are tried one after the other."""
OTHERS = ("zb", "zb-h2", "zb-h1", "1f1b", "gpipe")
"""Library schedules of one stage per rank that are tried as another start."""


class Obstacle(StrEnum):
    """Why nothing is changed."""

    MEMORY = "memory"
    NOISE = "noise"
    ABSORBED = "absorbed"
    TAKEN_BACK = "taken back"
    PRICE = "price"
    PAUSE = "pause"
    NODES = "nodes"
    """No other place of the nodes is faster, or they cannot move."""
    UNKNOWN = "unknown cause"
    """Steps are slower, and what is known of links, ops and nodes explains less than half of it."""


@dataclass(frozen=True)
class Help:
    """Something that would help.

    Attributes:
        what: what would help, in words.
        option: the option that gives it.
        ms: the simulated iteration time with it, in ms.
    """

    what: str
    option: str
    ms: float

    def __str__(self) -> str:
        return f"{self.ms:.4g} ms {self.what} ({self.option})"


@dataclass(frozen=True)
class Unanswered:
    """Links that are late, or ops that are slow, for which nothing was changed.

    Attributes:
        iteration: the iteration after which this was reported.
        obstacle: what stood in the way.
        why: the reason in words.
        cause: links with their delay (ms); a stage with slow ops counts as a link to itself.
        before: median measured step before it began, in ms.
        now: median measured step since, in ms.
        simulated: simulated iteration time of what runs, in ms.
        helps: what would help, the smallest change first.
        nodes: on a mesh, the late and slow links between nodes, in words.

    Examples:
        >>> import penstock as ps
        >>> why = ps.control.Unanswered(
        ...     30, "memory", "no room for more warm-up", (((2, 3), 60.0),), 212.0, 330.0, 325.0
        ... )
        >>> why.obstacle, why.now - why.before
        ('memory', 118.0)
    """

    iteration: int
    obstacle: Obstacle
    why: str
    cause: tuple[tuple[Link, float], ...]
    before: float
    now: float
    simulated: float
    helps: tuple[Help, ...] = ()
    nodes: str = ""

    def __str__(self) -> str:
        late = [causes_in_words(dict(self.cause))] if self.cause else []
        late += [self.nodes] if self.nodes else []
        if self.obstacle is Obstacle.UNKNOWN:
            said = f"steps are slower, and the cause is not known: {self.why}"
            return f"{said}; {' and '.join(late)}" if late else said
        said = f"{' and '.join(late)}, and the plan stays: {self.why}"
        if self.helps:
            said += f"; a step takes {self.simulated:.4g} ms by simulation, and would take "
            said += " or ".join(map(str, self.helps))
        return said


def causes_in_words(cause: Mapping[Link, float]) -> str:
    """The late links and slow stages of a cause."""
    links = [f"link {show_link(key)} is {ms:.3g} ms late" for key, ms in sorted(cause.items()) if key[0] != key[1]]
    stages = [f"ops of stage {key[0]} are slow" for key in sorted(cause) if key[0] == key[1]]
    return " and ".join(links + stages)


def what_would_help(job: Job, now: Configuration, measured: Measured) -> tuple[Help, ...]:
    """The least additional memory per rank with which some candidate saves `job.least_gain`, and the library schedule
    that would be the fastest to start with, if it saves as much. Both are simulated under the links as measured.
    """
    enough = predict(job, now, measured.scenarios) * (1 - job.least_gain)
    found = []
    for more in MORE:
        more_job, option = _with_more(job, more * max(job.costs.activation))
        ms = min(score(more_job, measured, each).ms for each in candidates(more_job, now, measured))
        if ms <= enough:
            many = "activation" if more == 1 else "activations"
            found.append(Help(f"with {more} more {many} per rank", option, ms))
            break
    others = sorted(_others(job, measured), key=lambda each: each.ms)[:1]
    return tuple(sorted((*found, *(each for each in others if each.ms <= enough)), key=lambda each: each.ms))


def _with_more(job: Job, more: float) -> tuple[Job, str]:
    """The job with more room per rank, and the option that gives it: in host memory if links may be delegated,
    otherwise on the device.
    """
    if job.may_delegate:
        limits, largest = tuple(limit + more for limit in job.host_limits), max(job.costs.activation)
        amount = f"{max(limits) / largest:.4g}" if largest <= 1024 else f"{max(limits):.0f}B"
        return replace(job, host_memory=limits), f"--set host_memory={amount}"
    caps = tuple(cap + more for cap in job.start.caps)
    return replace(job, start=replace(job.start, caps=caps)), f"ps.AdaptOptions(memory_limit={caps})"


def _others(job: Job, measured: Measured) -> Iterator[Help]:
    """Each of `OTHERS` under each dispatch that may be chosen. Each may hold what its own order needs."""
    start = job.start.schedule
    names = OTHERS if start.num_stages == job.num_ranks else ()
    for _, schedule in buildable(names, job.num_ranks, start.num_microbatches):
        caps = tuple(peaks(schedule, job.costs))
        held = max(caps) / max(job.costs.activation)
        words = f"with schedule {schedule.name}, up to {held:.3g} activations held", f"--schedule {schedule.name}"
        for dispatch in dict.fromkeys((Dispatch.FROZEN, *job.dispatches)) if schedule.name != start.name else ():
            ms = predict(job, Configuration(schedule, dispatch, (), caps), measured.scenarios)
            yield Help(*words, ms)
