"""What models that are a chain of layers have in common."""

from __future__ import annotations

import math

from penstock.train.settings import Settings
from penstock.train.tasks.task import BYTES


def chain_bytes(settings: Settings, num_stages: int, numbers: int) -> list[float]:
    """Bytes of a message of each stage: the last one sends nothing.

    Args:
        numbers: of a sample, between any two layers.
    """
    size = float(BYTES * numbers * math.ceil(settings.batch / (settings.dp * settings.microbatches)))
    return [size] * (num_stages - 1) + [0.0]
