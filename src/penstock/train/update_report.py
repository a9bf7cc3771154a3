"""What a run with updates among its ops reports about them: what was proved before it, and what was counted in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.runtime import Pipeline
from penstock.schedule import Schedule, count_versions
from penstock.train.asynchronous import bound, one_every, proved_mismatch
from penstock.train.settings import Settings


@dataclass(frozen=True)
class UpdateReport:
    """Updates of a run whose schedule has them as ops.

    Attributes:
        rule: which weights ops read. window: microbatches whose gradients an update adds up. drain_every:
            steps of a pass.
        zero: whether only one copy of each stage has its optimizer's state.
        num_updates: over the whole run.
        proved, measured: most updates between a microbatch's forward and its backward, by the order, and as counted.
        met: share of (stage, microbatch) pairs with any.
        versions: most versions of its weights that a copy of a stage holds.
    """

    rule: str
    window: int
    drain_every: int
    zero: bool
    num_updates: int
    proved: int
    measured: int
    met: float
    versions: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Lines for people."""
        weights = "the newest weights" if self.rule == "none" else f"weights by the rule {self.rule}"
        held = "" if self.versions == 1 else f", {self.versions} versions held at most"
        if self.proved == self.measured:
            counted = f"{bound(self.proved)}: proved before the run, and counted in it"
        else:
            counted = f"{bound(self.proved)} proved before the run; {self.measured} counted in it"
        return [
            ("updates", f"{self.num_updates}, {one_every(self.window)}; drained every {self.drain_every} steps"),
            ("mismatch", f"{counted} ({self.met:.0%} of them all meet one)" if self.met else counted),
            ("ops read", weights + held),
        ]


def update_report(settings: Settings, pipe: Pipeline, num_updates: int, is_tied: bool) -> UpdateReport | None:
    """The report on the updates of what the pipeline ran last; None if updates are not ops. All ranks must call it.

    Args:
        is_tied: the first stage and the last one share a parameter.
    """
    schedule = pipe.schedule
    if schedule.updates is None or not settings.is_asynchronous:
        return None
    counted = pipe.mismatch()
    return UpdateReport(
        rule=schedule.updates.rule,
        window=settings.passes.window,
        drain_every=settings.passes.steps,
        zero=settings.sharding != "none",
        num_updates=num_updates,
        proved=proved_mismatch(schedule),
        measured=max(counted.values(), default=0),
        met=sum(1 for count in counted.values() if count) / max(1, len(counted)),
        versions=most_versions(settings, schedule, is_tied),
    )


def most_versions(settings: Settings, schedule: Schedule, is_tied: bool = False) -> int:
    """The most versions of its weights that a copy of a stage holds in such a run."""
    tied = [[0, schedule.num_stages - 1]] if is_tied and schedule.num_stages > 1 else []
    counted = count_versions(schedule, sharding=settings.sharding, num_replicas=settings.dp, tied_stages=tied)
    return max(counted.values(), default=1)


def notices_of(settings: Settings) -> list[str]:
    """What the user should know about how such a run differs."""
    if settings.is_asynchronous and settings.clip:
        return [
            f"--clip {settings.clip:g}, over the root of the number of stages, was for each stage's gradient by "
            "itself: a norm over the model would make every stage wait for all"
        ]
    return []


def state_rows(state: Sequence[Mapping[str, int]]) -> list[tuple[str, str]]:
    """What each rank held for its weights, in MiB."""
    if not state:
        return []
    parts = [
        f"{name} {', '.join(f'{rank[name] / 2**20:.3g}' for rank in state)}"
        for name in state[0]
        if any(rank[name] for rank in state)
    ]
    return [("weights" if place == 0 else "", f"{part} MiB, by rank") for place, part in enumerate(parts)]
