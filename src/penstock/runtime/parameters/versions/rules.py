"""The rules by name."""

from __future__ import annotations

from penstock.runtime.parameters.versions.double_buffer import DoubleBuffer
from penstock.runtime.parameters.versions.none import Newest
from penstock.runtime.parameters.versions.pipedream import Stashing
from penstock.runtime.parameters.versions.rule import VersionRule
from penstock.runtime.parameters.versions.slowed import SlowedPrediction, SlowedStashing
from penstock.runtime.parameters.versions.spectrain import MomentumPrediction
from penstock.runtime.parameters.versions.vnag import StashingNesterov
from penstock.runtime.parameters.versions.xpipe import AdamPrediction
from penstock.schedule import ScheduleError

_KINDS: tuple[type[VersionRule], ...] = (
    Newest,
    Stashing,
    DoubleBuffer,
    MomentumPrediction,
    AdamPrediction,
    StashingNesterov,
    SlowedStashing,
    SlowedPrediction,
)
_RULES: dict[str, VersionRule] = {kind.name: kind() for kind in _KINDS}


def rule_of(name: str) -> VersionRule:
    """The rule that `Updates.rule` names.

    Raises:
        ScheduleError: there is none of that name.
    """
    if name not in _RULES:
        raise ScheduleError(
            f"no rule named {name!r} says which weights ops read; there are {', '.join(_RULES)}", rule="updates"
        )
    return _RULES[name]
