"""What is usual for each asynchronous schedule: the window of its updates, and an optimizer that its rule has a
formula for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.train.checks import SettingsError, is_schedule_file
from penstock.train.passes import usual_steps

if TYPE_CHECKING:
    from penstock.train.run_settings import RunSettings


@dataclass(frozen=True)
class Usual:
    """Attributes:
    window: microbatches an update gathers; None for those of a step.
    learning: settings of optimizer and learning rate in place of those of synchronous runs.
    """

    window: int | None = None
    learning: Mapping[str, Any] = field(default_factory=dict)


ASYNCHRONOUS: Mapping[str, Usual] = {
    "amdp": Usual(),
    "pipedream": Usual(window=1),
    "pipedream-2bw": Usual(),
    "xpipe": Usual(),
    "spectrain": Usual(1, {"optimizer": "SGD", "optimizer_options": {"momentum": 0.9}, "lr": 0.03}),
    "vnag": Usual(
        1,
        {
            "optimizer": "NAdam",
            "optimizer_options": {"betas": [0.99, 0.999], "momentum_decay": 0.004, "decoupled_weight_decay": True},
        },
    ),
}
"""Schedules that are trained with their updates among the other ops."""

OPTIONS = ("window", "max_mismatch", "drain_every")


def completed(given: Mapping[str, Any], learning: bool = True) -> dict[str, Any]:
    """Settings of a run with what is usual for its schedule, where the given ones do not say.

    Args:
        given: all that is known: schedule, ranks, microbatches, steps and so on; None stands for not given.
        learning: whether the run learns, and so has an optimizer.
    """
    found = {name: value for name, value in given.items() if value is not None}
    usual = ASYNCHRONOUS.get(str(found.get("schedule")))
    if usual is None:
        return dict(given)
    if learning and not {"optimizer", "optimizer_options"} & set(found):
        found = {**usual.learning, **found}  # the learning rate goes with the optimizer
    microbatches, ranks = found["microbatches"], found["ranks"]
    of_blocks = found["schedule"] == "amdp" and ranks > 0 and ranks % 2 == 0
    if of_blocks and "window" not in found and microbatches % ranks:
        near = sorted({max(1, microbatches // ranks), microbatches // ranks + 1})
        raise SettingsError(
            f"amdp updates once a step where --window does not say otherwise, and gathers a multiple of the {ranks} "
            f"microbatches of a block; {microbatches} are none: give --microbatches "
            f"{' or '.join(str(count * ranks) for count in near)}, or --window"
        )
    found.setdefault("window", usual.window or microbatches)
    found.setdefault("dispatch", "frozen")
    if all(isinstance(found[name], int) and found[name] > 0 for name in ("window", "microbatches", "steps")):
        # What learns is a number of passes; an emulated step is one.
        steps = found["steps"] if learning else 0
        found.setdefault("drain_every", usual_steps(steps, microbatches, found["window"]))
    return {**given, **found}


def check_updates(settings: RunSettings) -> None:
    """Raises SettingsError for options about updates that do not go together, or with the schedule."""
    named = settings.schedule in ASYNCHRONOUS or is_schedule_file(settings.schedule)
    if not (named and settings.is_asynchronous):
        _check_none(settings)
        return
    passes = settings.passes
    if not passes.fits:
        whole = passes.num_microbatches
        near = [n for n in range(1, whole + 1) if whole % n == 0]
        near += range(2 * whole, passes.window + whole + 1, whole)
        best = sorted(sorted(near, key=lambda n: abs(n - passes.window))[:2])
        raise SettingsError(
            f"a window of {passes.window} microbatches fits no whole number of times into a pass of "
            f"{passes.steps} steps with {passes.microbatches} each, {whole}, nor that into it; give --window "
            f"{' or '.join(map(str, best))}, or another --drain-every"
        )


def _check_none(settings: RunSettings) -> None:
    given = [name for name in OPTIONS if getattr(settings, name) is not None]
    if given:
        option = given[0].replace("_", "-")
        raise SettingsError(
            f"--{option} {getattr(settings, given[0])} is for schedules that have their updates among the other ops "
            f"({', '.join(ASYNCHRONOUS)}), not for {settings.schedule}; leave it out"
        )
