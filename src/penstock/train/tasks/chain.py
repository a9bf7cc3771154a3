"""What models that are a chain of layers have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.schedule import Schedule
from penstock.train.checks import SettingsError
from penstock.train.settings import Settings
from penstock.train.tasks.task import BYTES


def chain_bytes(settings: Settings, num_stages: int, numbers: int) -> list[float]:
    """Bytes of a message of each stage: the last one sends nothing.

    Args:
        numbers: of a sample, between any two layers.
    """
    size = float(BYTES * numbers * math.ceil(settings.batch / (settings.dp * settings.microbatches)))
    return [size] * (num_stages - 1) + [0.0]


def require_untied(tied: Sequence[Sequence[str]], schedule: Schedule) -> None:
    """Raises SettingsError for a weight of two stages that are updated at different times."""
    if tied and schedule.updates is not None and schedule.num_stages > 1:
        raise SettingsError(
            f"embedding and head share one weight, and {schedule.name} updates their stages at different times; give "
            "--no-tied, or a schedule that updates all stages together"
        )
