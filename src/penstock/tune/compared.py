"""Costs for comparing schedules: the measured layers of a model, cut into stages, with updates and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.cost import Costs
from penstock.schedule import Schedule
from penstock.tune.profile import Profile


def costs_of(schedule: Schedule, cut: Sequence[range], profile: Profile) -> Costs:
    """Milliseconds and bytes of every stage. Messages take no time; their sizes are what the layers send.

    On a copy that does not own its stage, taking over an update takes no time.
    """
    halved = {op.stage for row in schedule.order for op in row if op.kind == "I"}

    def of_all(what: Callable[[range], float]) -> list[float]:
        return [what(layers) for layers in cut]

    kept, held = sum(profile.activation), sum(profile.held)
    weights = of_all(lambda layers: profile.total("weight", layers))
    return Costs(
        f=[profile.time("f_split" if stage in halved else "f", layers) for stage, layers in enumerate(cut)],
        i=of_all(lambda layers: profile.time("i", layers)),
        w=of_all(lambda layers: profile.time("w", layers)),
        b=of_all(lambda layers: profile.time("b", layers)),
        activation=of_all(lambda layers: profile.total("activation", layers)),
        freed_by_input=max(0.0, 1 - held / kept) if kept else 0.0,
        other={("U", stage): profile.total("update", layers) for stage, layers in enumerate(cut)},
        message_bytes=[profile.output[layers[-1]] for layers in cut[:-1]] + [0.0],
        update_bytes=weights,
        weight_bytes=weights,
        optimizer_bytes=of_all(lambda layers: profile.total("state", layers)),
    )
