"""What a benchmark's numbers were measured on; nothing that names the machine or its owner."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from penstock.tune.device import processor


def machine() -> dict[str, Any]:
    """Processor, how many, torch's threads, and versions."""
    return {
        "processor": processor(),
        "num_processors": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }
