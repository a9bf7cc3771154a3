"""The search: every candidate within the memory limit, ranked by predicted throughput.

If the busiest rank of a candidate alone works longer than the best few candidates take, the candidate cannot be among
them and is not simulated. So the best few are the same as if every candidate were simulated.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.dispatch import Dispatch
from penstock.formats.profile import ROWS, MessageCosts, Profile
from penstock.runtime import RuntimeFailure
from penstock.runtime.compatibility import require_runnable
from penstock.simulation.memory_footprint import in_bytes
from penstock.train.kinds import CLIP
from penstock.train.own_file import is_own
from penstock.train.settings import Settings, SettingsError
from penstock.train.tasks.layers import cut_layers
from penstock.train.tasks.own import OwnTask
from penstock.tune.errors import TuneError
from penstock.tune.memory import memory_of
from penstock.tune.predict import Prediction, predict, stage_costs
from penstock.tune.programs import programs_for
from penstock.tune.space import NEVER_DRAINS, Shape, TunePlan, TuneSpace, schedules_for, why_none

SETTINGS = {"num_stages": "stages", "rule": "rule", "window": "window"}
"""Options of a plan that are settings of their own in `penstock train`."""

NUM_SHAPES = 4
"""How many shapes programs are searched for."""

ProfileOf = Callable[[Shape, bool], Profile | None]
"""The profile for a shape, with or without recompute. If it is None, the shape is left out."""

EndsOf = Callable[[Shape], Profile | None]
"""The profile of only the first and the last layer, if the ranks of a shape's pipeline share both. None if they
can't, or if it is not known.
"""


@dataclass(frozen=True)
class TuneCandidate:
    """One way to train: a plan for a shape, with the layers of each stage."""

    shape: Shape
    plan: TunePlan
    cut: tuple[range, ...]
    recompute: bool

    @property
    def num_ranks(self) -> int:
        return self.shape.pp * self.shape.dp

    @property
    def name(self) -> str:
        """The name of the schedule, with its options."""
        options = (f"{name}={_short(value)}" for name, value in self.plan.options)
        towers = (
            f"{name}: {len(each.ranks)} ranks, {each.stages} stages, {each.microbatches} microbatches, {each.style}"
            for name, each in self.plan.towers
        )
        return "; ".join((" ".join((self.plan.name, *options)), *towers))

    @property
    def has_shared_ends(self) -> bool:
        """Whether all ranks of the pipeline hold a part of its first and its last stage."""
        return bool(self.plan.schedule.placement.shared)

    @property
    def is_asynchronous(self) -> bool:
        """Whether it trains with a mismatch: updates may fall between a microbatch's forward and its backward."""
        return self.plan.schedule.updates is not None

    def __str__(self) -> str:
        shape = self.shape
        recompute = ", recompute" if self.recompute else ""
        return f"{self.name}, pp {shape.pp}, dp {shape.dp}, {shape.microbatches}{recompute}"


@dataclass(frozen=True)
class RankedCandidate:
    """A candidate with its prediction."""

    candidate: TuneCandidate
    prediction: Prediction
    samples_per_second: float


@dataclass
class SearchFound:
    """What a search is to keep, and what it has found, also if it was interrupted.

    Attributes:
        batch: samples of a step. memory_limit: bytes that a rank may need; None for no limit.
        num_best: candidates to keep. dispatch: of the runs.
        num_devices: ranks that can work at the same time on the machine; None for all.
        progress: is called after each candidate.
        best: the fastest first; `penstock train` runs all of them.
        num_tried: candidates looked at. num_too_large: how many of them are above the memory limit.
        refused: how many of them `penstock train` would refuse, by its error message.
        smallest: the least memory that any candidate needs, and which candidate that is.
        asynchronous: the fastest asynchronous candidate, if none was asked for and it is faster than all of `best`.
    """

    batch: int
    memory_limit: float | None = None
    num_best: int = 10
    dispatch: Dispatch | str = Dispatch.FROZEN
    num_devices: int | None = None
    progress: Callable[[SearchFound], None] | None = None
    best: list[RankedCandidate] = field(default_factory=list)
    num_tried: int = 0
    num_too_large: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    smallest: tuple[float, TuneCandidate] | None = None
    interrupted: bool = False
    asynchronous: RankedCandidate | None = None

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """In it, an interrupt (Ctrl-C) ends the search with what was found so far, if anything was."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.best:
                raise
            self.interrupted = True

    def refuse(self, reason: str) -> None:
        """Counts a candidate that `penstock train` would refuse."""
        self.num_tried += 1
        self.refused[reason] += 1

    def add(self, candidate: TuneCandidate, profile: Profile, transfer: MessageCosts) -> None:
        """Predicts a candidate and keeps it, if it is among the best."""
        self.num_tried += 1
        need = max(memory.total for memory in memory_of(candidate.plan.schedule, candidate.cut, profile))
        if self.smallest is None or need < self.smallest[0]:
            self.smallest = need, candidate
        if self.memory_limit is not None and need > self.memory_limit:
            self.num_too_large += 1
        elif len(self.best) < self.num_best or self.slowest >= _busiest(candidate, profile, transfer):
            self._rank(candidate, profile, transfer)
        if self.progress is not None:
            self.progress(self)

    def _rank(self, candidate: TuneCandidate, profile: Profile, transfer: MessageCosts) -> None:
        prediction = predict(
            candidate.plan.schedule, candidate.cut, profile, transfer, candidate.shape.dp, self.num_devices,
            self.dispatch,
        )  # fmt: skip
        speed = self.batch / prediction.step * 1e3 if prediction.step else float("inf")
        ranked = RankedCandidate(candidate, prediction, speed)
        bisect.insort(self.best, ranked, key=lambda each: (each.prediction.step, each.prediction.peak_bytes))
        del self.best[self.num_best :]

    @property
    def slowest(self) -> float:
        """Milliseconds of a step that a candidate must not exceed to be among the best."""
        return self.best[-1].prediction.step if len(self.best) >= self.num_best else float("inf")

    def has(self, candidate: TuneCandidate) -> bool:
        """Whether the order of a candidate is among the best already."""
        schedule = candidate.plan.schedule
        return any(
            (other.shape, other.recompute) == (candidate.shape, candidate.recompute)
            and other.plan.schedule.placement == schedule.placement
            and other.plan.schedule.order == schedule.order
            for other in (ranked.candidate for ranked in self.best)
        )

    @property
    def best_shapes(self) -> list[tuple[Shape, bool]]:
        """The shapes for which programs are searched: those of the best candidates."""
        shapes = dict.fromkeys(
            (each.candidate.shape, each.candidate.recompute) for each in self.best if each.candidate.shape.pp > 1
        )
        return list(shapes)[:NUM_SHAPES]


def search(
    space: TuneSpace,
    profile_of: ProfileOf,
    transfer_of: Callable[[Shape], MessageCosts | None],
    found: SearchFound,
    programs: bool = False,
    settings: Settings | None = None,
    ends_of: EndsOf = lambda shape: None,
) -> SearchFound:
    """Searches the whole space.

    Args:
        found: is filled and returned; it says what to keep.
        programs: whether to search programs too, for the shapes of the best candidates.
        settings: of the run that is tuned, for everything that candidates do not determine; by default those of
            `penstock train`.
        ends_of: the profile of shared ends, if the space has them.

    Raises:
        TuneError: nothing fits the space or the memory limit; the message says the least memory that is needed.
    """
    shapes = space.shapes()
    run = settings or Settings(batch=space.batch, microbatches=1, ranks=1)

    def consider(candidate: TuneCandidate, profile: Profile, transfer: MessageCosts) -> None:
        if (reason := refusal(candidate, run)) is not None:
            found.refuse(reason)
        else:
            found.add(candidate, profile, transfer)

    def costs_of(shape: Shape, recompute: bool) -> Iterator[tuple[Profile, MessageCosts]]:
        """With ends that ranks share, and with ends on one rank each, if these are asked for and known."""
        profile, transfer = profile_of(shape, recompute), transfer_of(shape)
        if profile is None or transfer is None:
            return
        for shared in space.shared_ends:
            if not shared:
                yield profile, transfer
            elif (ends := ends_of(shape)) is not None:
                yield with_shared_ends(profile, ends), transfer

    with found.until_interrupted():
        for shape in shapes:
            for recompute in space.recompute:
                for profile, transfer in costs_of(shape, recompute):
                    for candidate in candidates(shape, profile, recompute, space.schedules):
                        consider(candidate, profile, transfer)
        for shape, recompute in found.best_shapes if programs else ():
            for profile, transfer in costs_of(shape, recompute):
                for plan in programs_for(shape, profile, transfer, found.memory_limit):
                    shared = bool(plan.schedule.placement.shared)
                    cut = tuple(cut_layers(profile.layer_costs(is_split=True), plan.schedule.num_stages, shared))
                    candidate = TuneCandidate(shape, plan, cut, recompute)
                    if not found.has(candidate):
                        consider(candidate, profile, transfer)
        if not space.schedules:
            beside = SearchFound(found.batch, found.memory_limit, 1, found.dispatch, found.num_devices)
            for shape, recompute in found.best_shapes:
                for profile, transfer in costs_of(shape, recompute):
                    for candidate in candidates(shape, profile, recompute, (NEVER_DRAINS,)):
                        if refusal(candidate, run) is None:
                            beside.add(candidate, profile, transfer)
            faster = (each for each in beside.best if each.prediction.step < found.best[0].prediction.step)
            found.asynchronous = next(faster, None)
    _require_some(found, space, shapes[0])
    return found


def _require_some(found: SearchFound, space: TuneSpace, first: Shape) -> None:
    """Raises TuneError if nothing was found, with the reason."""
    if not found.num_tried:
        names = f"of {', '.join(space.schedules)} " if space.schedules else ""
        raise TuneError(
            f"no schedule {names}accepts any of the numbers of ranks and microbatches tried, like "
            f"{first.pp} and {first.num_microbatches}, with the model's layers; try others{why_none(space, first)}"
        )
    if found.refused.total() == found.num_tried:
        (reason, count), *_ = found.refused.most_common(1)
        raise TuneError(f"penstock train refuses all {found.num_tried} candidates, {count} of them because {reason}")
    if not found.best and found.smallest is not None and found.memory_limit is not None:
        least, candidate = found.smallest
        raise TuneError(
            f"nothing fits in {in_bytes(found.memory_limit)} per rank; the least is {in_bytes(least)}, for "
            f"{candidate}; raise --memory-limit, or allow more ranks, smaller microbatches or recompute"
        )


def with_shared_ends(profile: Profile, ends: Profile) -> Profile:
    """The profile of a model whose first and last layer are shared by several ranks.

    Args:
        ends: the profile of these two layers alone, for the part that one of these ranks has.
    """
    known = [name for name in ROWS if getattr(profile, name)]
    rows = {name: (getattr(ends, name)[0], *getattr(profile, name)[1:-1], getattr(ends, name)[-1]) for name in known}
    return msgspec.structs.replace(profile, tied=ends.tied, num_sharing=ends.num_sharing, **rows)


def candidates(
    shape: Shape, profile: Profile, recompute: bool, names: Sequence[str] | None = None
) -> Iterable[TuneCandidate]:
    """Every plan for a shape, with its layers cut so that the costliest stage costs least.

    If ranks share the first and the last layer, as the profile says, each of these is a stage of its own.
    """
    if shape.pp > profile.num_layers:
        return
    shared = profile.num_sharing > 1
    cuts: dict[tuple[int, bool], tuple[range, ...]] = {}
    for plan in schedules_for(shape.pp, shape.num_microbatches, profile.num_layers, names, shared):
        key = plan.schedule.num_stages, plan.schedule.splits_backward()
        if key not in cuts:
            cuts[key] = tuple(cut_layers(profile.layer_costs(key[1]), key[0], shared))
        yield TuneCandidate(shape, plan, cuts[key], recompute)


def settings_of(candidate: TuneCandidate, settings: Settings) -> Settings:
    """The settings of `penstock train` for a candidate; a program's schedule is a file's, which stands in it yet.

    Raises:
        SettingsError: settings that do not go together.
    """
    shape, plan = candidate.shape, candidate.plan
    options: dict[str, Any] = {SETTINGS[name]: value for name, value in plan.options if name in SETTINGS}
    others = {name: value for name, value in plan.options if name not in SETTINGS}
    return replace(
        settings,
        schedule=settings.schedule if plan.program else plan.name,
        ranks=shape.pp,
        dp=shape.dp,
        microbatches=shape.num_microbatches,
        cut=None if settings.model == CLIP else tuple(len(layers) for layers in candidate.cut),
        recompute=candidate.recompute,
        **{"stages": None, **options, "schedule_options": others},
    )


def refusal(candidate: TuneCandidate, settings: Settings) -> str | None:
    """Why `penstock train` would refuse a candidate; None if it runs it. The checks are those of the run itself."""
    try:
        require_runnable(candidate.plan.schedule)
        if is_own(settings.model):
            OwnTask(settings_of(candidate, settings), candidate.plan.schedule)
        elif candidate.is_asynchronous:
            settings_of(candidate, settings)
    except (SettingsError, RuntimeFailure) as error:
        return str(error)
    return None


def _busiest(candidate: TuneCandidate, profile: Profile, transfer: MessageCosts) -> float:
    """A lower bound in milliseconds for any order of the ops: the work of the busiest rank, without its updates."""
    schedule = candidate.plan.schedule
    costs = stage_costs(schedule, candidate.cut, profile, transfer)
    cost: Mapping[tuple[str, int], float] = {
        (kind, stage): costs.duration(kind, stage) for kind in "FBIW" for stage in range(costs.num_stages)
    }
    num_steps = 1 if schedule.windows is None else schedule.windows.num_updates
    return max(sum(cost.get((op.kind, op.stage), 0.0) for op in row) for row in schedule.order) / num_steps


def _short(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
