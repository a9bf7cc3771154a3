"""What the tests' ranks need, loaded once: processes forked from the one that has imported this start with all of it.

Besides torch that is what takes a rank up to a second of processor time to load: the tests' own modules, which load
Hypothesis, the front of torch's compiler, and Hugging Face's models. Nothing here may start a thread, as no thread is
there any more after a fork.
"""

# ruff: noqa: F401

from __future__ import annotations

import gc

import pytest
import torch
import torch._inductor.compile_fx
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.profiler
import transformers.models.llama.modeling_llama

import compatibility_cells
import fuzz_runs
import gang_runs
import mesh_runs
import own_models
import penstock.models
import penstock.runtime
import penstock.train.run_job
import runtime_checks
import tied_updates_loop

torch.set_num_threads(1)
# The first optimizer of a process takes a second: torch loads its compiler then.
torch.optim.SGD([torch.zeros(1)])
gc.freeze()  # what all of them share is looked through, and so copied, by no rank's collector of garbage
