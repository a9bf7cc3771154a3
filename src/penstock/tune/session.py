"""One call of the tuner, from the request to the result: measure, search, verify."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.train.kinds import CLIP, CONTRAST
from penstock.train.settings import Settings
from penstock.tune.costs_file import CostsFile, load_costs_file
from penstock.tune.device import num_devices
from penstock.tune.errors import TuneError
from penstock.tune.estimate import estimate, estimate_ends
from penstock.tune.meter import Measurements, Meter, NeededProfile, prepare_together
from penstock.tune.profile import MessageCosts, Profile
from penstock.tune.search import RankedCandidate, SearchFound, TuneCandidate, search
from penstock.tune.space import SHARED_ENDS, Shape, TuneSpace
from penstock.tune.towers import TowerSpace, search_towers
from penstock.tune.tuned_model import TunedModel, parts_of, tuned_model, why_no_shared_ends
from penstock.tune.verify import MeasuredCandidate, verify


@dataclass(frozen=True)
class MeasuredSource:
    """Costs measured on this machine now or before; measurements are kept in `folder`."""

    folder: Path
    seconds: float = 1.0
    fresh: bool = False


@dataclass(frozen=True)
class EstimatedSource:
    """Costs from the model's sizes and a device's speed; links in ms and bytes per ms."""

    tflops: float
    latency: float = 0.0
    bandwidth: float = float("inf")


@dataclass(frozen=True)
class FileSource:
    """Costs from a file."""

    path: str


Source = MeasuredSource | EstimatedSource | FileSource


@dataclass(frozen=True)
class TuneRequest:
    """What is to be tuned.

    Attributes:
        settings: model, optimizer, batch, precision and so on, as in `penstock train`.
        num_ranks: most ranks; None for as many as can work at the same time here.
        pp, dp, microbatch_sizes, schedules: what to try; None for all. recompute: None to try it if
            memory is limited.
        shared_ends: whether the ranks of a pipeline share embedding and head; None to try both if that may
            gain something.
        programs: whether to search schedules without a name too, if no library schedules are given.
        options: of library schedules, for those that take them.
        memory_limit: bytes per rank. num_best: candidates to keep. num_verified: how many of them to run.
    """

    settings: Settings
    source: Source
    num_ranks: int | None = None
    pp: Sequence[int] | None = None
    dp: Sequence[int] | None = None
    microbatch_sizes: Sequence[int] | None = None
    schedules: Sequence[str] | None = None
    recompute: bool | None = None
    programs: bool = True
    memory_limit: float | None = None
    num_best: int = 10
    num_verified: int = 0
    num_steps: int = 10
    shared_ends: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class TuneOutcome:
    """The result.

    Attributes:
        settings: asked for. trained: the model; None for one that is only a file of costs, which can't be trained.
        num_measured, num_reused: measurements made now, and taken from the database.
        measured: of the candidates that were run.
    """

    model: str
    settings: Settings
    trained: TunedModel | None
    space: TuneSpace
    found: SearchFound
    num_measured: int = 0
    num_reused: int = 0
    measured: dict[TuneCandidate, MeasuredCandidate] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def choice(self) -> RankedCandidate | None:
        """What to train with: the fastest of the candidates that were run or, if none was, the fastest by
        prediction.
        """
        best = self.found.best
        ran = [ranked for ranked in best if ranked.candidate in self.measured]
        if ran:
            return min(ran, key=lambda ranked: self.measured[ranked.candidate].step)
        return best[0] if best else None


def tune(
    asked: TuneRequest,
    say: Callable[[str], None] | None = None,
    progress: Callable[[SearchFound], None] | None = None,
) -> TuneOutcome:
    """Finds the best ways to train.

    An interrupt ends with the best so far, if there is any.

    Raises:
        TuneError, SettingsError: an invalid request, or nothing that fits.
        RanksFailed: measuring or verifying failed.
    """
    if asked.memory_limit is not None and not asked.memory_limit > 0:
        raise TuneError(f"a memory limit of {asked.memory_limit:g} bytes holds nothing; give more than 0")
    if isinstance(asked.source, MeasuredSource):
        return _tune_here(asked, asked.source, say, progress)
    if asked.settings.model == CLIP:
        given = "--costs" if isinstance(asked.source, FileSource) else "--tflops"
        raise TuneError(
            f"{given} gives costs of one chain of layers, and --model {CLIP} has a chain for each tower; leave it "
            "out to measure them here"
        )
    if asked.num_verified:
        raise TuneError(
            "--verify runs the model on this machine and so needs costs that were measured here; leave it out, or "
            "leave out --costs and --tflops"
        )
    if asked.num_ranks is None:
        raise TuneError("how many ranks there are is not known for another machine; give --ranks")
    if isinstance(asked.source, FileSource):
        return _tune_file(asked, load_costs_file(asked.source.path), asked.num_ranks, progress)
    return _tune_estimated(asked, asked.source, asked.num_ranks, progress)


def measure(
    settings: Settings,
    source: MeasuredSource,
    num_ranks: int,
    microbatch_sizes: Sequence[int],
    recompute: bool,
    say: Callable[[str], None] | None = None,
) -> Meter:
    """Measures layers with `num_ranks` side by side, and messages.

    Raises:
        TuneError, SettingsError, RanksFailed.
    """
    if settings.model == CLIP:
        raise TuneError(
            f"--model {CLIP} has a chain of layers for each tower, which are not measured as one; penstock tune "
            f"--model {CLIP} measures its towers and lays them out"
        )
    model = tuned_model(settings)
    model.require_again(recompute)
    if wrong := [size for size in microbatch_sizes if size < 1]:
        raise TuneError(f"microbatches of {wrong[0]} samples hold nothing; give at least 1")
    if num_ranks > model.num_layers:
        raise TuneError(f"{model.name} has {model.num_layers} layers, too few for {num_ranks} ranks")
    meter = Meter(model, settings, Measurements(source.folder), source.seconds, source.fresh, say)
    meter.prepare([NeededProfile(size, num_ranks, recompute) for size in microbatch_sizes], [min(2, num_ranks)])
    return meter


def _tune_here(
    asked: TuneRequest,
    source: MeasuredSource,
    say: Callable[[str], None] | None,
    progress: Callable[[SearchFound], None] | None,
) -> TuneOutcome:
    settings = asked.settings
    if settings.model == CLIP:
        return _tune_towers(asked, source, say, progress)
    model = tuned_model(settings)
    model.require_again(asked.recompute)
    devices = num_devices(settings)
    space = _space(asked, asked.num_ranks or devices, asked.microbatch_sizes, _recompute(asked, not model.not_again))
    shapes = [shape for shape in space.shapes() if shape.pp <= model.num_layers]
    if not shapes:
        raise TuneError(f"{model.name} has {model.num_layers} layers, so pp is at most {model.num_layers}")
    sharing = _sharing(asked, model, shapes, devices)

    def need_ends(shape: Shape) -> NeededProfile:
        return NeededProfile(shape.microbatch_size, shape.pp * shape.dp, False, shape.pp)

    def need(shape: Shape, recompute: bool) -> NeededProfile:
        return NeededProfile(shape.microbatch_size, min(shape.pp * shape.dp, devices, model.num_layers), recompute)

    meter = Meter(model, settings, Measurements(source.folder), source.seconds, source.fresh, say)
    needs = list(dict.fromkeys(need(shape, again) for shape in shapes for again in space.recompute))
    needs += list(dict.fromkeys(need_ends(shape) for shape in shapes if shape in sharing))
    several = any(shape.pp * shape.dp > 1 for shape in shapes)
    alone = any(shape.pp * shape.dp == 1 for shape in shapes)
    interrupted = False
    try:
        meter.prepare(needs, [*([1] if alone else []), *([2] if several else [])])
    except KeyboardInterrupt:
        interrupted = True  # what was measured until now may be enough for a part of the space

    def transfer_of(shape: Shape) -> MessageCosts | None:
        return meter.transfers.get(min(2, shape.pp * shape.dp))

    found = _searched(
        asked, space, lambda shape, again: meter.profiles.get(need(shape, again)), transfer_of, devices, progress,
        interrupted, lambda shape: meter.profiles.get(need_ends(shape)) if shape in sharing else None,
    )  # fmt: skip
    outcome = TuneOutcome(
        model.name, settings, model, space, found, meter.num_measured, meter.num_reused, notices=meter.notices,
        interrupted=found.interrupted or interrupted,
    )  # fmt: skip
    if asked.num_verified and not outcome.interrupted:
        _verify(asked, outcome, model, say)
    return outcome


def _tune_towers(
    asked: TuneRequest,
    source: MeasuredSource,
    say: Callable[[str], None] | None,
    progress: Callable[[SearchFound], None] | None,
) -> TuneOutcome:
    settings, model = asked.settings, tuned_model(asked.settings)
    if asked.shared_ends:
        raise TuneError(f"--shared-ends: {why_no_shared_ends(settings, 2)}; leave it out")
    devices = num_devices(settings)
    space = _space(asked, asked.num_ranks or devices, asked.microbatch_sizes, _recompute(asked, True), ())
    if asked.options:
        raise TuneError(
            f"--option {next(iter(asked.options))}: each tower has its own options, by --tower; leave it out"
        )
    towers = TowerSpace.of(settings, space, asked.schedules)
    shapes = towers.shapes()

    def need(size: int, processes: int, recompute: bool) -> NeededProfile:
        return NeededProfile(size, min(processes, devices), recompute)

    def needs(part: str) -> list[NeededProfile]:
        found = (
            need(size, shape.pp * shape.dp, again)
            for shape in shapes
            for again in space.recompute
            for size in ([shape.microbatch_size] if part == CONTRAST else towers.sizes(shape))
        )
        return list(dict.fromkeys(found))

    meters = {
        part: Meter(each, settings, Measurements(source.folder), source.seconds, source.fresh, say)
        for part, each in parts_of(settings).items()
    }
    first = next(iter(meters.values()))
    ranks = [count for count in (1, 2) if any(min(2, shape.pp * shape.dp) == count for shape in shapes)]
    interrupted = False
    try:
        prepare_together([(meter, needs(part)) for part, meter in meters.items()], ranks)
    except KeyboardInterrupt:
        interrupted = True
    found = search_towers(
        towers,
        settings,
        lambda part, size, processes, again: meters[part].profiles.get(need(size, processes, again)),
        lambda shape: first.transfers.get(min(2, shape.pp * shape.dp)),
        asked.memory_limit,
        max(asked.num_best, asked.num_verified),
        settings.dispatch,
        devices,
        progress,
        interrupted,
    )
    outcome = TuneOutcome(
        model.name, settings, model, space, found, sum(meter.num_measured for meter in meters.values()),
        sum(meter.num_reused for meter in meters.values()),
        notices=[notice for meter in meters.values() for notice in meter.notices],
        interrupted=found.interrupted or interrupted,
    )  # fmt: skip
    if asked.num_verified and not outcome.interrupted:
        _verify(asked, outcome, model, say)
    return outcome


def _tune_file(
    asked: TuneRequest, file: CostsFile, num_ranks: int, progress: Callable[[SearchFound], None] | None
) -> TuneOutcome:
    sizes = asked.microbatch_sizes or file.microbatch_sizes
    if missing := sorted(set(sizes or ()) - set(file.microbatch_sizes or sizes or ())):
        raise TuneError(f"{file.path} has no profile of microbatches of {missing[0]}; it has {file.microbatch_sizes}")
    if asked.recompute and not file.has_recompute:
        raise TuneError(f"{file.path} has no profile with recompute; leave out --recompute")
    if asked.shared_ends:
        raise TuneError(
            f"{file.path} says what layers cost one rank, and nothing of ranks that share embedding and head; leave "
            "out --shared-ends, or --costs to measure that here"
        )
    space = _space(asked, num_ranks, sizes, _recompute(asked, file.has_recompute))
    assumed = MessageCosts.assumed()

    def profile_of(shape: Shape, recompute: bool) -> Profile | None:
        return file.profile(shape.microbatch_size, shape.pp * shape.dp, recompute)

    def transfer_of(shape: Shape) -> MessageCosts:
        return file.transfer(shape.pp * shape.dp) or assumed

    found = _searched(asked, space, profile_of, transfer_of, None, progress)
    return TuneOutcome(file.model, asked.settings, None, space, found, interrupted=found.interrupted)


def _tune_estimated(
    asked: TuneRequest, source: EstimatedSource, num_ranks: int, progress: Callable[[SearchFound], None] | None
) -> TuneOutcome:
    settings = asked.settings
    model = tuned_model(settings, runs_here=False)
    if (config := model.config) is None:
        raise TuneError(
            f"--tflops estimates from the sizes of a GPT, and {model.name} is not a GPT; leave it out to measure"
        )
    space = _space(asked, num_ranks, asked.microbatch_sizes, _recompute(asked, True))
    transfer = MessageCosts.assumed(source.latency, source.bandwidth)

    def profile_of(shape: Shape, recompute: bool) -> Profile:
        return estimate(
            config, settings.preset, shape.microbatch_size, source.tflops, settings.optimizer,
            settings.precision == "bfloat16", recompute,
        )  # fmt: skip

    def ends_of(shape: Shape) -> Profile | None:
        if shape not in sharing:
            return None
        return estimate_ends(
            config, settings.preset, shape.microbatch_size, source.tflops, shape.pp, transfer, settings.optimizer,
            settings.precision == "bfloat16",
        )  # fmt: skip

    sharing = _sharing(asked, model, space.shapes())
    found = _searched(asked, space, profile_of, lambda shape: transfer, None, progress, ends_of=ends_of)
    return TuneOutcome(model.name, settings, model, space, found, interrupted=found.interrupted)


def _space(
    asked: TuneRequest,
    num_ranks: int,
    sizes: Sequence[int] | None,
    recompute: Sequence[bool],
    schedules: Sequence[str] | None = None,
) -> TuneSpace:
    """`schedules` replace those asked for, if these are not in the library."""
    names = asked.schedules if schedules is None else schedules
    shared_ends = (False, True) if asked.shared_ends is None else (asked.shared_ends,)
    return TuneSpace(
        num_ranks, asked.settings.batch, asked.pp, asked.dp, sizes, names, recompute, shared_ends, asked.options
    )


def _sharing(
    asked: TuneRequest, model: TunedModel, shapes: Sequence[Shape], devices: int | None = None
) -> frozenset[Shape]:
    """The shapes whose ranks are to share the first and the last layer: where that or a schedule with it is asked
    for, or memory is limited, all that can; else those in which one of the two costs more than a rank's even part.

    Args:
        devices: ranks that can work at the same time, if it is to be measured: ranks that run an op together while
            others of them wait for a core tell nothing of it.

    Raises:
        TuneError: it is asked for, and can't be.
    """
    named = set(asked.schedules or ()) & set(SHARED_ENDS)
    if asked.shared_ends is False or (asked.schedules and not named):
        return frozenset()
    if devices is not None and asked.settings.device != "cpu":
        if asked.shared_ends:
            raise TuneError(
                f"--shared-ends with --device {asked.settings.device}: how long ops take that several GPUs run "
                "together is not measured yet; leave it out, or estimate with --tflops"
            )
        return frozenset()
    asked_for, limited = asked.shared_ends or bool(named), asked.memory_limit is not None
    heaviest = max(model.costs[0], model.costs[-1])
    found: list[Shape] = []
    why: dict[int, str] = {}
    for shape in shapes:
        needed = asked_for or limited or heaviest > sum(model.costs) / shape.pp
        if shape.pp < 2 or not needed or (devices is not None and shape.pp * shape.dp > devices):
            continue
        if shape.pp not in why:
            why[shape.pp] = why_no_shared_ends(asked.settings, shape.pp)
        if not why[shape.pp]:
            found.append(shape)
    if asked.shared_ends and not found:
        at_most = "" if devices is None else f", and at most the {devices} that can work at the same time here"
        of_ranks = f"embedding and head are shared by the ranks of a pipeline, at least 2{at_most}"
        raise TuneError(f"--shared-ends: {next(iter(why.values()), of_ranks)}; leave it out, or give another --pp")
    return frozenset(found)


def _recompute(asked: TuneRequest, possible: bool) -> tuple[bool, ...]:
    """Whether to try recomputing. It costs time and saves memory, so it is tried if memory is limited, or as
    asked.
    """
    if asked.recompute is not None:
        return (asked.recompute,)
    return (False, True) if possible and asked.memory_limit is not None else (False,)


def _searched(
    asked: TuneRequest,
    space: TuneSpace,
    profile_of: Callable[[Shape, bool], Profile | None],
    transfer_of: Callable[[Shape], MessageCosts | None],
    devices: int | None,
    progress: Callable[[SearchFound], None] | None,
    interrupted: bool = False,
    ends_of: Callable[[Shape], Profile | None] = lambda shape: None,
) -> SearchFound:
    return search(
        space, profile_of, transfer_of, asked.memory_limit, max(asked.num_best, asked.num_verified),
        asked.settings.dispatch, devices, progress, interrupted, asked.programs and not asked.schedules,
        asked.settings, ends_of,
    )  # fmt: skip


def _verify(asked: TuneRequest, outcome: TuneOutcome, model: TunedModel, say: Callable[[str], None] | None) -> None:
    chosen = outcome.found.best[: asked.num_verified]
    if len(chosen) < asked.num_verified:
        outcome.notices.append(f"{asked.num_verified} candidates were to be verified; {len(chosen)} were found")
    with contextlib.suppress(KeyboardInterrupt):  # seen below: some are missing
        outcome.measured = verify(chosen, asked.settings, model, asked.num_steps, say=say)
    outcome.interrupted = len(outcome.measured) < len(chosen)
    disturbed = [each for each in outcome.measured.values() if not each.quiet]
    if disturbed:
        busiest = max(each.others or 0.0 for each in disturbed)
        outcome.notices.append(
            f"other programs kept up to {busiest:.1f} cores busy during verification, which makes steps longer"
        )
