"""The rules by name."""

from __future__ import annotations

from penstock.runtime.weights.double_buffer import DoubleBuffer
from penstock.runtime.weights.none import Newest
from penstock.runtime.weights.pipedream import Stashing
from penstock.runtime.weights.rule import Rule
from penstock.runtime.weights.spectrain import MomentumPrediction
from penstock.runtime.weights.vnag import StashingNesterov
from penstock.runtime.weights.xpipe import AdamPrediction
from penstock.schedule import ScheduleError

_RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (Newest(), Stashing(), DoubleBuffer(), MomentumPrediction(), AdamPrediction(), StashingNesterov())
}


def rule_of(name: str) -> Rule:
    """The rule that `Updates.rule` names.

    Raises:
        ScheduleError: there is none of that name.
    """
    if name not in _RULES:
        raise ScheduleError(
            f"no rule named {name!r} says which weights ops read; there are {', '.join(_RULES)}", rule="updates"
        )
    return _RULES[name]
