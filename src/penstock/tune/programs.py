"""Schedules made for the model: the best program of each placement over its measured costs.

The planner's search over placements, rules and traversals (`planning/programs.py`, FlexPipe's section 6) finds
them. It also tries a first and a last stage that all ranks share, whose backwards stay whole, as in FlexPipe. Since
this takes longer than building from the library, it is done only for the shapes of the best library candidates.
"""

from __future__ import annotations

from penstock.cost import Costs
from penstock.formats.profile import MessageCosts, Profile
from penstock.planning.programs import placements_of, search_space
from penstock.schedule import ScheduleError
from penstock.train.tasks.layers import cut_layers
from penstock.tune.predict import uniform_links
from penstock.tune.space import Shape, TunePlan

STAGES_A_RANK = (1, 2, 4)


def programs_for(
    shape: Shape, profile: Profile, transfer: MessageCosts, memory_limit: float | None
) -> list[TunePlan]:
    """The best program of each placement for which the model has enough layers.

    If memory is limited, programs whose activations keep within the limit are tried, besides the fastest.
    """
    if shape.pp < 2:
        return []
    found: list[TunePlan] = []
    shared = profile.num_sharing > 1
    for each in STAGES_A_RANK:
        num_stages = each * shape.pp + 2 * shared
        if num_stages > profile.num_layers:
            break
        names = [
            name
            for name, placement in placements_of(shape.pp, each * shape.pp, shared).items()
            if placement.num_stages == num_stages and not (shared and placement.num_pipelines > 1)
        ]  # the runtime has a shared stage in one pipeline
        costs, links = _costs(profile, transfer, num_stages), uniform_links(profile, transfer)
        for limit in (None, *([] if memory_limit is None else [_left(profile, memory_limit, shape.pp)])):
            if not names or (limit is not None and limit <= 0):
                continue
            try:
                outcome = search_space(
                    costs,
                    shape.pp,
                    shape.num_microbatches,
                    links=links,
                    memory_limit=limit,
                    shapes=names,
                    shared_ends=shared,
                    split=(lambda stage, last=num_stages - 1: 0 < stage < last) if shared else True,
                )
            except ScheduleError:  # no program runs under the limit
                continue
            ends, within = "shared ends, " if shared else "", "" if limit is None else ", within the limit"
            known = {plan.schedule for plan in found}
            found += [
                TunePlan(ends + each.name + within, each.schedule, program=True)
                for each in outcome.found
                if each.schedule not in known
            ]
    return found


def _costs(profile: Profile, transfer: MessageCosts, num_stages: int) -> Costs:
    """Costs of stages that all send and receive. What a placement changes in this is predicted afterwards."""
    cut = cut_layers(profile.layer_costs(is_split=True), num_stages, profile.num_sharing > 1)
    size = max(profile.output)
    around = transfer.gap + transfer.at("send", size) + transfer.at("receive", size)
    activation = [profile.total("activation", layers) for layers in cut]
    held = sum(profile.held)
    share = 1 - min(1.0, held / sum(activation)) if sum(activation) else 0.5
    return Costs(
        f=[profile.time("f_split", layers) + around for layers in cut],
        i=[profile.time("i", layers) + around for layers in cut],
        w=[profile.time("w", layers) + transfer.gap for layers in cut],
        activation=activation,
        freed_by_input=share,
    )


def _left(profile: Profile, memory_limit: float, num_ranks: int) -> float:
    """Bytes that a rank has for activations, if weights are spread evenly and it has its part of shared ends."""
    state = [2 * weight + kept for weight, kept in zip(profile.weight, profile.state, strict=True)]
    ends = state[0] + state[-1] if profile.num_sharing > 1 else 0.0
    return memory_limit - ends - (sum(state) - ends) / num_ranks
