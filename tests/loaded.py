"""What the tests' ranks need, loaded once: processes forked from the one that has imported this start with all of it.

Nothing here may start a thread, as no thread is there any more after a fork.
"""

from __future__ import annotations

import pytest  # noqa: F401
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import penstock.models
import penstock.runtime
import penstock.train.run_job  # noqa: F401

torch.set_num_threads(1)
# The first optimizer of a process takes a second: torch loads its compiler then.
torch.optim.SGD([torch.zeros(1)])
