"""What a plan leaves open, and what its proof covers: forms of ops, and how microbatches are dealt to pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cost import CostError, Costs
from penstock.program import placements
from penstock.schedule import Placement, ScheduleError, StageGraph
from penstock.schedule.channels import BUFFERED
from penstock.schedule.offload import OFFLOAD, RELOAD
from penstock.schedule.short_repr import short_repr


@dataclass(frozen=True)
class Certificate:
    """Which family of schedules a plan's lower bound covers: none of them has a smaller value, others may.

    Each stage runs its ops of a kind in the order of microbatches, as `check` demands, or in one that the schedule
    declares where `order` is "any".

    Attributes:
        placement: which rank hosts which stage; shared stages run on all their ranks at once.
        backward: "split" where every backward is I and W, "whole" where it is B, "any" where each is one of the two.
        microbatches: how they are dealt to the pipelines; "in turn" is round robin, "any" every other way too.
        recompute: "any" where forwards may run again or not, each by itself; "none" where none does.
        offload: "any" where each activation may wait in host memory or not; "none" where none does.
        stages: how they depend on one another, None for a chain.
        pairs: "any" where a forward and a backward of another microbatch may run as one or not; "none" where none do.
        order: of the microbatches on a stage: "as numbered", or "any", as where they differ (`Costs.uneven`).
        channel: what carries the messages, see `schedule.channels`.

    Examples:
        >>> import penstock as ps
        >>> plan = ps.plan(ps.Costs.uniform(2, f=10, i=10, w=10), num_ranks=2, num_microbatches=4)
        >>> plan.certificate.backward, plan.certificate.recompute
        ('any', 'any')
    """

    placement: Placement
    backward: str
    microbatches: str = "in turn"
    recompute: str = "none"
    offload: str = "none"
    stages: StageGraph | None = None
    pairs: str = "none"
    order: str = "as numbered"
    channel: str = BUFFERED

    __repr__ = short_repr

    def __str__(self) -> str:
        """`placement one-to-one, backward split (I and W), no recompute, no offload`"""
        words = [f"placement {_placement_name(self.placement)}"]
        if self.stages is not None:
            words.append(f"stages that branch ({len(self.stages.edges)} edges)")
        backward = {
            "split": "backward split (I and W)",
            "whole": "backward whole (B)",
            "any": "each backward split or whole",
        }
        words.append(backward[self.backward])
        words.append("no recompute" if self.recompute == "none" else "each forward run again or not")
        words.append("no offload" if self.offload == "none" else "each activation in host memory or not")
        if self.pairs != "none":
            words.append("a forward and a backward as a pair or not")
        if self.placement.num_pipelines > 1:
            how = "in any way" if self.microbatches == "any" else self.microbatches
            words.append(f"microbatches dealt to pipelines {how}")
        if self.order == "any":
            words.append("microbatches in any order")
        if self.channel != BUFFERED:
            words.append(f"messages over {self.channel}")
        return ", ".join(words)


def _placement_name(placement: Placement) -> str:
    num_ranks, num_stages = len({rank for hosts in placement.pipelines for rank in hosts}), placement.num_stages
    for name in placements.NAMES:
        try:
            there = placements.named(name, num_ranks, num_stages)
        except ScheduleError:  # it has another number of stages
            continue
        if placement == there:
            return f"{name} with {num_stages} stages" if name.startswith(("circular", "wave")) else name
    pipelines = "" if placement.num_pipelines == 1 else f" in {placement.num_pipelines} pipelines"
    shared = f", {len(placement.shared)} of them shared" if placement.shared else ""
    return f"as given ({num_stages} stages{pipelines}{shared})"


@dataclass(frozen=True)
class OpForms:
    """The forms that ops may take.

    Attributes:
        again: whether forwards may run again.
        whole, split: whether backwards may be B, and I and W.
        away: whether activations may go to host memory.
    """

    again: bool
    whole: bool
    split: bool
    away: bool = False


@dataclass(frozen=True)
class Family:
    """What a call leaves open.

    Attributes:
        forms: that ops may have.
        joint: whether forms are decided with the order; else every backward is split, or every one whole.
        backward, recompute, offload: as in the certificate.
    """

    forms: OpForms
    joint: bool
    backward: str
    recompute: str
    offload: str = "none"


def family_of(
    costs: Costs,
    split: bool | None,
    recompute: bool | None,
    capped: bool,
    simple: bool,
    offload: bool = False,
    counted: bool = False,
) -> Family:
    """What is open of what was asked, and of that what can help.

    A B that takes no less than I and W is no better than the two side by side. Forwards run again only to hold less
    memory: without a limit, or where limits count forwards, leaving them out is no worse.

    Args:
        capped: whether memory is limited, in the unit of the costs' activations.
        simple: whether the makespan of a frozen order is planned.
        offload: whether activations may go to host memory. counted: whether memory is limited by counts.
    """
    said = recompute is True or costs.kept_by_recompute is not None
    again = simple and recompute is not False and (said or not capped)
    either = simple and split is None
    gains = any(costs.b[s] < costs.i[s] + costs.w[s] for s in range(costs.num_stages))
    forms = OpForms(
        again=again and capped and costs.kept < 1, whole=split is False or either, split=split is not False,
        away=offload and (capped or counted),
    )  # fmt: skip
    backward = "any" if either else "whole" if split is False else "split"
    joint = forms.again or forms.away or (either and gains)
    return Family(forms, joint, backward, "any" if again else "none", "any" if offload else "none")


def check_options(split: object, recompute: object) -> None:
    """Raises ScheduleError unless both are yes, no or open."""
    for name, value in (("split", split), ("recompute", recompute)):
        if value is not None and not isinstance(value, bool):
            raise ScheduleError(f"{name} is {value!r}: give True, False or None", rule="options")


def read_offload(offload: object, costs: Costs) -> bool:
    """Whether activations may go to host memory; how much of them is read with the other limits.

    Raises:
        CostError: they may, and the costs do not say how long the way takes.
    """
    if offload is None or offload is False:
        return False
    said = {(kind, stage) for kind, stage, _, _ in costs.other_entries}
    for kind in (OFFLOAD, RELOAD):
        for stage in range(costs.num_stages):
            if not said & {(kind, stage), (kind, None)}:
                raise CostError(
                    f"offload is {offload!r}, and the costs do not say how long {kind} of stage {stage} takes; say "
                    'so, like ps.Costs(..., other={"OFFLOAD": 2.5, "RELOAD": 2.5}), milliseconds of one activation'
                )
    return True


def in_turn(num_microbatches: int, num_pipelines: int) -> tuple[int, ...]:
    """How many microbatches each pipeline has where they are dealt in turn."""
    return tuple(len(range(p, num_microbatches, num_pipelines)) for p in range(num_pipelines))


def dealt(counts: Sequence[int]) -> tuple[int, ...]:
    """The pipeline of each microbatch: in turn, but for pipelines that have all theirs."""
    left, found = list(counts), []
    while any(left):
        for p in range(len(left)):
            if left[p] > 0:
                found.append(p)
                left[p] -= 1
    return tuple(found)


def read_deal(deal: str | Sequence[int], num_microbatches: int, num_pipelines: int) -> tuple[int, ...] | None:
    """The counts that are given, or None where all deals are to be thought of.

    Raises:
        ScheduleError: not "any", "in turn" or one count for each pipeline that add up to the microbatches.
    """
    if deal == "in turn" or (num_pipelines == 1 and deal == "any"):
        return in_turn(num_microbatches, num_pipelines)
    if deal == "any":
        return None
    counts = () if isinstance(deal, str) else tuple(deal)
    if (
        len(counts) != num_pipelines
        or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts)
        or sum(counts) != num_microbatches
    ):
        raise ScheduleError(
            f"deal is {deal!r}: give 'any', 'in turn', or how many microbatches each of the {num_pipelines} "
            f"pipelines has, {num_microbatches} together",
            rule="options",
        )
    return counts
