"""One call of the tuner, from the request to the result: measured or given costs, the search, verification."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.train.kinds import CLIP, CONTRAST
from penstock.train.settings import Settings
from penstock.tune.device import num_devices
from penstock.tune.errors import TuneError
from penstock.tune.given_costs import given_costs
from penstock.tune.meter import Measurements, Meter, NeededProfile, prepare_together
from penstock.tune.search import RankedCandidate, SearchFound, TuneCandidate, search
from penstock.tune.settings import TuneSettings
from penstock.tune.space import NEVER_DRAINS, SHARED_ENDS, Shape, TuneSpace
from penstock.tune.towers import TowerSpace, search_towers
from penstock.tune.tuned_model import TunedModel, parts_of, tuned_model, why_no_shared_ends
from penstock.tune.verify import MeasuredCandidate, verify

Say = Callable[[str], None] | None
ShowProgress = Callable[[SearchFound], None] | None


@dataclass
class TuneOutcome:
    """The result.

    Attributes:
        settings: of the run. trained: the model; None if costs were given, which can't be trained.
        num_measured, num_reused: measurements made now, and before.
        measured: of the candidates that were run.
        tp: devices that share each layer; more than one only if a preset of costs was given.
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
    tp: int = 1

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


def tune(asked: TuneSettings, say: Say = None, progress: ShowProgress = None) -> TuneOutcome:
    """Finds the best ways to train.

    An interrupt of the search ends with the best so far, if there is any. If measuring is interrupted, what was
    measured is kept.

    Raises:
        TuneError, SettingsError, CostError: an invalid request, or nothing that fits.
        RanksFailed: measuring or verifying failed.
    """
    settings = asked.run_settings()
    if asked.verify and NEVER_DRAINS in (asked.schedules or ()):
        raise TuneError(f"--verify times steps that drain, and those of {NEVER_DRAINS} do not; leave one of them out")
    if asked.costs is not None:
        return _tune_given(asked, settings, asked.costs, progress)
    outcome = (_tune_towers if settings.model == CLIP else _tune_chain)(asked, settings, say, progress)
    if asked.verify and not outcome.interrupted:
        _verify(asked, outcome, say)
    return outcome


def measure(asked: TuneSettings, say: Say = None) -> Meter:
    """Measures layers with `asked.ranks` side by side, by default one, and what one rank and two cost besides.

    Raises:
        TuneError, SettingsError, RanksFailed.
    """
    settings, num_ranks = asked.run_settings(), asked.ranks or 1
    if settings.model == CLIP:
        raise TuneError(
            f"--model {CLIP} has a chain of layers for each tower, which are not measured as one; penstock tune "
            f"--model {CLIP} measures its towers and lays them out"
        )
    model = tuned_model(settings)
    sizes = asked.microbatch_sizes or (1,)
    if min(sizes) < 1:
        raise TuneError(f"microbatches of {min(sizes)} samples hold nothing; give at least 1")
    if num_ranks > model.num_layers:
        raise TuneError(f"{model.name} has {model.num_layers} layers, too few for {num_ranks} ranks")
    meter = _meter(model, asked, settings, say)
    needs = [NeededProfile(size, num_ranks, bool(asked.recompute)) for size in sizes]
    prepare_together([(meter, needs)], [1, 2])
    return meter


def _meter(model: TunedModel, asked: TuneSettings, settings: Settings, say: Say) -> Meter:
    return Meter(model, settings, Measurements(), asked.seconds, say)


def _space(
    asked: TuneSettings, batch: int, num_ranks: int, can_recompute: bool, sizes: Sequence[int] | None = None
) -> TuneSpace:
    """What is searched. Recomputing costs time and saves memory, so it is tried if memory is limited, or as asked."""
    recompute = (False, True) if can_recompute and asked.memory_limit is not None else (False,)
    return TuneSpace(
        num_ranks, batch, asked.pp, asked.dp, sizes or asked.microbatch_sizes, asked.schedules,
        recompute if asked.recompute is None else (asked.recompute,),
        (False, True) if asked.shared_ends is None else (asked.shared_ends,),
    )  # fmt: skip


def _tune_chain(asked: TuneSettings, settings: Settings, say: Say, progress: ShowProgress) -> TuneOutcome:
    devices = num_devices(settings)
    model = tuned_model(settings)
    space = _space(asked, settings.batch, asked.ranks or devices, True)
    shapes = [shape for shape in space.shapes() if shape.pp <= model.num_layers]
    if not shapes:
        raise TuneError(f"{model.name} has {model.num_layers} layers, so pp is at most {model.num_layers}")
    sharing = _sharing(asked, settings, model, shapes, devices)

    def need(shape: Shape, recompute: bool) -> NeededProfile:
        return NeededProfile(shape.microbatch_size, min(shape.pp * shape.dp, devices, model.num_layers), recompute)

    def need_ends(shape: Shape) -> NeededProfile:
        return NeededProfile(shape.microbatch_size, shape.pp * shape.dp, False, shape.pp)

    meter = _meter(model, asked, settings, say)
    needs = [need(shape, again) for shape in shapes for again in space.recompute]
    needs += [need_ends(shape) for shape in shapes if shape in sharing]
    prepare_together([(meter, needs)], sorted({shape.num_measured_together for shape in shapes}))
    found = search(
        space,
        lambda shape, again: meter.profiles.get(need(shape, again)),
        lambda shape: meter.transfers.get(shape.num_measured_together),
        _wanted(asked, settings, devices, progress),
        asked.programs and not asked.schedules,
        settings,
        lambda shape: meter.profiles.get(need_ends(shape)) if shape in sharing else None,
    )
    return _outcome(settings, model, space, found, [meter])


def _tune_towers(asked: TuneSettings, settings: Settings, say: Say, progress: ShowProgress) -> TuneOutcome:
    devices, model = num_devices(settings), tuned_model(settings)
    if asked.shared_ends:
        raise TuneError(f"--shared-ends: {why_no_shared_ends(settings, 2)}; leave it out")
    towers = TowerSpace.of(settings, _space(asked, settings.batch, asked.ranks or devices, True), asked.schedules)
    shapes = towers.shapes()

    def need(size: int, processes: int, recompute: bool) -> NeededProfile:
        return NeededProfile(size, min(processes, devices), recompute)

    def needs(part: str) -> list[NeededProfile]:
        return [
            need(size, shape.pp * shape.dp, again)
            for shape in shapes
            for again in towers.space.recompute
            for size in ([shape.microbatch_size] if part == CONTRAST else towers.sizes(shape))
        ]

    meters = {part: _meter(each, asked, settings, say) for part, each in parts_of(settings).items()}
    first = next(iter(meters.values()))
    wanted = [(meter, needs(part)) for part, meter in meters.items()]
    prepare_together(wanted, sorted({shape.num_measured_together for shape in shapes}))
    found = search_towers(
        towers,
        settings,
        lambda part, size, processes, again: meters[part].profiles.get(need(size, processes, again)),
        lambda shape: first.transfers.get(shape.num_measured_together),
        _wanted(asked, settings, devices, progress),
    )
    return _outcome(settings, model, towers.space, found, [*meters.values()])


def _tune_given(asked: TuneSettings, settings: Settings, source: str, progress: ShowProgress) -> TuneOutcome:
    for name in ("model", "data", "preset", "device", "seconds"):
        if getattr(asked, name) != getattr(TuneSettings, name):
            raise TuneError(f"--costs says what layers cost, so --{name} changes nothing; leave one of them out")
    if asked.verify:
        raise TuneError(
            "--verify runs the model on this machine and so needs costs that were measured here; leave it out, or "
            "leave out --costs"
        )
    if asked.ranks is None:
        raise TuneError("how many ranks there are is not known for another machine; give --ranks")
    costs = given_costs(source)
    sizes = asked.microbatch_sizes or costs.sizes
    if missing := sorted(set(sizes or ()) - set(costs.sizes or sizes or ())):
        raise TuneError(f"{source} has no profile of microbatches of {missing[0]}; it has {costs.sizes}")
    if asked.recompute and not costs.has_recompute:
        raise TuneError(f"{source} does not say what is kept with recompute; leave out --recompute")
    if asked.shared_ends:
        raise TuneError(
            f"{source} says what layers cost one rank, and nothing of ranks that share embedding and head; leave "
            "out --shared-ends, or --costs to measure that here"
        )
    if asked.memory_limit is not None and not costs.has_weights:
        raise TuneError(
            f"--memory-limit counts all that a rank holds, and {source} does not say what weights take; add "
            "weight_bytes, or leave --memory-limit out"
        )
    space = _space(asked, settings.batch, asked.ranks, costs.has_recompute, sizes)

    found = search(
        space,
        lambda shape, again: costs.profile(shape.microbatch_size, shape.pp * shape.dp, again),
        lambda shape: costs.transfer(shape.pp * shape.dp),
        _wanted(asked, settings, None, progress),
        asked.programs and not asked.schedules,
        settings,
    )
    return TuneOutcome(costs.name, settings, None, space, found, interrupted=found.interrupted, tp=costs.tp)


def _wanted(asked: TuneSettings, settings: Settings, devices: int | None, progress: ShowProgress) -> SearchFound:
    """What a search is to keep, with nothing found yet."""
    num_best = max(asked.top, asked.verify)
    return SearchFound(settings.batch, asked.memory_limit, num_best, settings.dispatch, devices, progress)


def _outcome(
    settings: Settings, model: TunedModel, space: TuneSpace, found: SearchFound, meters: Sequence[Meter]
) -> TuneOutcome:
    return TuneOutcome(
        model.name, settings, model, space, found, sum(meter.num_measured for meter in meters),
        sum(meter.num_reused for meter in meters), notices=[notice for meter in meters for notice in meter.notices],
        interrupted=found.interrupted,
    )  # fmt: skip


def _sharing(
    asked: TuneSettings, settings: Settings, model: TunedModel, shapes: Sequence[Shape], devices: int
) -> frozenset[Shape]:
    """The shapes whose ranks are to share the first and the last layer: where that or a schedule with it is asked
    for, or memory is limited, all that can; else those in which one of the two costs more than a rank's even part.

    Ranks that run an op together, while others of them wait for a core, tell nothing of its time. So shapes with more
    ranks than `devices` can't.

    Raises:
        TuneError: it is asked for, and can't be.
    """
    named = set(asked.schedules or ()) & set(SHARED_ENDS)
    if asked.shared_ends is False or (asked.schedules and not named):
        return frozenset()
    if settings.device != "cpu":
        if asked.shared_ends:
            raise TuneError(
                f"--shared-ends with --device {settings.device}: how long ops take that several GPUs run "
                "together is not measured yet; leave it out"
            )
        return frozenset()
    asked_for, limited = asked.shared_ends or bool(named), asked.memory_limit is not None
    heaviest = max(model.costs[0], model.costs[-1])
    found: list[Shape] = []
    why: dict[int, str] = {}
    for shape in shapes:
        needed = asked_for or limited or heaviest > sum(model.costs) / shape.pp
        if shape.pp < 2 or not needed or shape.pp * shape.dp > devices:
            continue
        if shape.pp not in why:
            why[shape.pp] = why_no_shared_ends(settings, shape.pp)
        if not why[shape.pp]:
            found.append(shape)
    if asked.shared_ends and not found:
        of_ranks = (
            "embedding and head are shared by the ranks of a pipeline, at least 2, and at most the "
            f"{devices} that can work at the same time here"
        )
        raise TuneError(f"--shared-ends: {next(iter(why.values()), of_ranks)}; leave it out, or give another --pp")
    return frozenset(found)


def _verify(asked: TuneSettings, outcome: TuneOutcome, say: Say) -> None:
    chosen = outcome.found.best[: asked.verify]
    if len(chosen) < asked.verify:
        outcome.notices.append(f"{asked.verify} candidates were to be verified; {len(chosen)} were found")
    with contextlib.suppress(KeyboardInterrupt):  # seen below: some are missing
        outcome.measured = verify(chosen, outcome.settings, say=say)
    outcome.interrupted = len(outcome.measured) < len(chosen)
    disturbed = [each for each in outcome.measured.values() if not each.quiet]
    if disturbed:
        busiest = max(each.others or 0.0 for each in disturbed)
        outcome.notices.append(
            f"other programs kept up to {busiest:.1f} cores busy during verification, which makes steps longer"
        )
