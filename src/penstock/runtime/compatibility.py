"""What does not go with what: schedules and options that are refused before anything starts, each with its reason.

schedule --require_runnable--> stages --names_of_layers--> FeatureCombination --require_compatible--> a pipeline
   |
   +--allowed_adaptation--> what may change of it while it runs

`REFUSALS` is the table of a pipeline's features that exclude one another. The site's page of them is made from it
by `docs/site/pages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import nn

from penstock.dispatch import Dispatch
from penstock.passes.reduce import REDUCE
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.parameters.copies import require_one_copy_a_rank
from penstock.runtime.stage.branches import has_many_ends, is_plain, require_matching
from penstock.runtime.transport.wiring import tied_sums
from penstock.schedule import Schedule, StageGraph
from penstock.schedule.async_ops import without_offload
from penstock.schedule.liveness import run_on


@dataclass(frozen=True)
class FeatureCombination:
    """What of a pipeline's features may exclude another.

    Attributes:
        num_replicas: of the mesh (dp).
        device: kind of device that stages lie on.
        one_process: whether all ranks of a pipeline are in this process.
        tied: by name the stages that share a parameter, ascending. dispatch: how ranks pick ops.
        scales_loss: whether losses are scaled (see `PrecisionOptions.scaler`).
        skips_updates: whether updates with gradients that are not finite are left out without a scaler.
        clips: whether the norm of gradients is limited.
        sparse: names of parameters with sparse gradients. summing: layers whose forward sums over processes.
    """

    schedule: Schedule
    num_replicas: int = 1
    device: str = "cpu"
    one_process: bool = False
    tied: Mapping[str, Sequence[int]] = field(default_factory=dict)
    dispatch: Dispatch = Dispatch.FROZEN
    scales_loss: bool = False
    skips_updates: bool = False
    clips: bool = False
    sparse: Sequence[str] = ()
    summing: Sequence[str] = ()

    @property
    def has_updates(self) -> bool:
        return self.schedule.updates is not None


def _fed_by(graph: StageGraph, stage: int) -> set[int]:
    """A stage, and all that what it makes comes to."""
    reached, new = {stage}, [stage]
    while new:
        new = [target for target in graph.targets[new.pop()] if target not in reached] + new
        reached.update(new)
    return reached


def _carries(schedule: Schedule, stages: Sequence[int]) -> bool:
    """Whether each microbatch comes to all of these stages by way of the lowest."""
    graph = schedule.graph
    return _fed_by(graph, stages[0]) >= set(stages) and not set(graph.num_microbatches) - {schedule.num_microbatches}


def _sums_wait(schedule: Schedule, tied: Collection[Sequence[int]]) -> bool:
    """Whether the order never comes to its end where the backward of each stage that uses a tied parameter waits for
    that of the next one down, as the sum of the parameter's gradient makes it."""
    pairs = {pair for stages in tied for pair in pairwise(stages)}
    if all(lower in _fed_by(schedule.graph, upper) for upper, lower in pairs):
        return False  # it waits for that anyway
    number = {op: place for place, op in enumerate(op for row in schedule.order for op in row)}
    sums = tied_sums(schedule, number, [*tied])
    return bool(run_on(schedule, (), [(edge.producer, edge.consumer) for edge in sums]).blocked)


def _sends_sparse(c: FeatureCombination) -> bool:
    """Whether something takes the gradients of a parameter that are sparse, and needs dense ones."""
    tied = {name for names in c.tied for name in names.split(", ")}
    sent = not tied.isdisjoint(c.sparse) or c.schedule.placement.num_pipelines > 1
    return bool(c.sparse) and (c.num_replicas > 1 or c.clips or (sent and not c.one_process))


def _ties_of(c: FeatureCombination) -> Sequence[str]:
    return [f"{names} of stages {', '.join(map(str, stages))}" for names, stages in c.tied.items()]


def _work_apart(c: FeatureCombination) -> bool:
    """Whether stages that share a parameter work on different numbers of microbatches."""
    of, most = c.schedule.graph.microbatches_of, c.schedule.num_microbatches
    return any(len({of(stage, most) for stage in stages}) > 1 for stages in c.tied.values())


@dataclass(frozen=True)
class Refusal:
    """Two features that exclude one another.

    Attributes:
        one, other: the features. why: what stands in the way. instead: what to do.
        holds: whether a combination has both. names: the layers or parameters of the model that the error names.
    """

    one: str
    other: str
    why: str
    instead: str
    holds: Callable[[FeatureCombination], bool]
    names: Callable[[FeatureCombination], Sequence[str]] = lambda c: ()


UPDATES = "updates as ops of the schedule"
TIED = "a tied parameter that they share"
REFUSALS = (
    Refusal(
        "stages that work on different numbers of microbatches",
        TIED,
        "its gradient is added up microbatch by microbatch, and the microbatches of these stages have other samples",
        "give the stages that share it the same number of microbatches, or untie them",
        _work_apart,
        _ties_of,
    ),
    Refusal(
        "stages of which none feeds the other, in a frozen order that runs backwards of the lower one first",
        TIED,
        "its gradient is added up from the last stage that uses it to the first. This order runs the lower stage's "
        "backward first, so it would wait for a backward scheduled after it",
        "let the backwards of the higher stage come first, give dispatch='dynamic', or untie them",
        lambda c: c.dispatch is Dispatch.FROZEN and _sums_wait(c.schedule, c.tied.values()),
        _ties_of,
    ),
    Refusal(
        UPDATES,
        "replicas whose ranks share a process, on a GPU",
        "each update sums gradients over the replicas, which must then take the same turns. On a GPU, whose ops end "
        "later than the calls that start them, this has not been tried",
        "give each rank a process",
        lambda c: c.has_updates and c.num_replicas > 1 and c.one_process and c.device != "cpu",
    ),
    Refusal(
        UPDATES,
        "a tied parameter whose lowest stage does not feed all other stages that use it, or a tied parameter of a "
        "model whose stages work on different numbers of microbatches",
        "new values of a tied parameter travel from its lowest stage with the forwards. Without such a forward, a "
        "stage and the lowest one's updates could wait for each other",
        "untie them, or use a schedule without updates as ops",
        lambda c: c.has_updates and not all(_carries(c.schedule, stages) for stages in c.tied.values()),
        _ties_of,
    ),
    Refusal(
        UPDATES,
        "loss scaling (`PrecisionOptions(scaler=)`), or updates that are left out (`skip_not_finite=`)",
        "whether all gradients are finite decides about an update, and each stage makes its own before all are there",
        "give autocast=torch.bfloat16, which needs no scaler, or use a schedule without updates as ops",
        lambda c: c.has_updates and (c.scales_loss or c.skips_updates),
    ),
    Refusal(
        "several stages that feed no other, whose outputs ops of the user's compare",
        "loss scaling (`PrecisionOptions(scaler=)`)",
        "the loss is part of these ops, which give gradients themselves, and nothing is there to be multiplied",
        "give autocast=torch.bfloat16, which needs no scaler",
        lambda c: has_many_ends(c.schedule.graph) and c.scales_loss,
    ),
    Refusal(
        "sparse gradients (`nn.Embedding(sparse=True)`)",
        "replicas, `clip_norm`, or processes that tie such a parameter or run several pipelines",
        "all of these add gradients up or measure them, and take dense ones",
        "give the embedding sparse=False",
        _sends_sparse,
        lambda c: c.sparse,
    ),
    Refusal(
        "`nn.SyncBatchNorm`",
        "a pipeline over processes",
        "its forward waits for all processes, and those of a pipeline run other stages and microbatches then",
        "take BatchNorm, which normalizes each microbatch, or GroupNorm",
        lambda c: bool(c.summing),
        lambda c: c.summing,
    ),
)
"""All are looked at once layers and tied parameters are known. The first that holds is raised."""


def refusal_of(combination: FeatureCombination) -> Refusal | None:
    """The first row of the table that refuses it; None where it runs."""
    return next((row for row in REFUSALS if row.holds(combination)), None)


def require_compatible(combination: FeatureCombination) -> None:
    """Raises RuntimeFailure, the same on every rank, with the reason of the first row that refuses a combination."""
    if (row := refusal_of(combination)) is None:
        return
    names = "; ".join(row.names(combination))
    raise RuntimeFailure(
        f"{combination.schedule.name}: {row.one} and {row.other}{f' ({names})' * bool(names)} exclude one another: "
        f"{row.why}; {row.instead}"
    )


def require_runnable(schedule: Schedule) -> None:
    """Raises RuntimeFailure, naming the feature, for schedules that are proved and simulated but not yet run."""
    require_one_copy_a_rank(schedule.placement)
    require_matching(schedule.graph, schedule.num_microbatches)


def names_of_layers(stages: Mapping[int, nn.Module], everyone: Peers) -> tuple[list[str], list[str]]:
    """The `sparse` and `summing` of a `FeatureCombination`, from all processes. Every one must call it."""
    sparse, summing = [], []
    for index, stage in stages.items():
        for path, module in stage.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                sparse.append(f"{path}.weight".removeprefix("."))
            if isinstance(module, nn.SyncBatchNorm) and isinstance(everyone, GroupPeers):
                summing.append(f"{path} of stage {index}")
    gathered = everyone.gather((sparse, summing))
    of_all = [sorted({name for part in kinds for name in part}) for kinds in zip(*gathered, strict=True)]
    return of_all[0], of_all[1]


def allowed_adaptation(schedule: Schedule, adapt: AdaptOptions | None) -> AdaptOptions | None:
    """What adapting may do to a schedule. Every one is measured, its dispatch may be changed and its links delegated;
    its order is changed where that can be planned.
    """
    if adapt is None:
        return None
    return replace(adapt, may_replan=adapt.may_replan and why_order_stays(schedule) is None)


def why_order_stays(schedule: Schedule) -> str | None:
    """Why adapting never changes the order of a schedule, in words; None if it may."""
    beside = schedule.has_shared_ops or schedule.asynchronous or schedule.pairs
    if schedule.updates is None and schedule.placement.num_pipelines == 1 and is_plain(schedule) and not beside:
        return None
    return (
        f"adapting may change the dispatch of {schedule.name} and what carries its messages, and never its order: "
        "orders are planned for a single chain of stages, without updates or ops that run beside others"
    )


def why_never_fewer(schedule: Schedule, num_replicas: int = 1) -> str | None:
    """Why a step always runs all microbatches of a schedule, in words; None where a smaller batch runs fewer."""
    graph, own = without_offload(schedule).graph, {REDUCE} if num_replicas > 1 else set()
    kinds = {registered.kind for registered in graph.registered} | {need.after[0] for need in graph.needs}
    if schedule.updates is None and is_plain(schedule) and not graph.num_microbatches and kinds <= own:
        return None
    return (
        f"{schedule.name} has stages that branch, or updates or other ops that were placed for all its microbatches"
    )
