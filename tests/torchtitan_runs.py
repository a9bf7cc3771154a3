"""TorchTitan's own trainer on a CPU: two ranks train a tiny Llama, and return losses and gradients.

`examples/torchtitan/titan_on_cpu.py` answers what TorchTitan asks of a GPU.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import penstock as ps

sys.path.append(str(Path(__file__).parents[1] / "examples" / "torchtitan"))
import titan_on_cpu

IS_MISSING = find_spec("torchtitan") is None and not (titan_on_cpu.SITE / "torchtitan").is_dir()

MICROBATCHES = 4


def prepare(folder: str) -> None:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    titan_on_cpu.prepare(folder)


def make_config(
    folder: str, schedule: str, *, is_chunked: bool = False, dtype: str = "float32", **parallelism: Any
) -> Any:
    """The config of Llama's debug model, made tiny, with a named schedule of TorchTitan's."""
    from torchtitan.config import ParallelismConfig
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = titan_on_cpu.make_small(llama3_debugmodel(), folder)
    if schedule == "ZBVZeroBubble":
        config.activation_checkpoint = None  # a SelectiveAC allows one backward of a region, and not I and W
    if not is_chunked:
        config.loss = config.loss.loss_fn
    config.training = replace(
        config.training,
        local_batch_size=MICROBATCHES,
        seq_len=32,
        steps=2,
        max_norm=1e9,
        mixed_precision_param=dtype,
    )
    config.parallelism = ParallelismConfig(
        **({"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule} | parallelism)
    )
    return config


def train(config: Any) -> dict[str, Tensor]:
    """Losses of both steps, where the last stage is, and the last step's gradients and the weights by their names."""
    from torchtitan.trainer import Trainer

    trainer = Trainer(config)
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            draws = torch.Generator().manual_seed(zlib.crc32(_plain(name).encode()))
            with torch.no_grad():
                local = _local(parameter)
                local.copy_(0.1 * torch.randn(local.shape, generator=draws) + (local.ndim == 1))
    losses, step = [], trainer.pp_forward_backward_step

    def keep(**given: Any) -> Tensor:
        losses.append(step(**given).detach().clone())
        return losses[-1]

    trainer.pp_forward_backward_step = keep  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    found = {"losses": torch.stack(losses)} if trainer.pp_has_last_stage else {}
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            found[_plain(name)] = _local(parameter).detach().clone()
            if parameter.grad is not None:
                found[f"gradient of {_plain(name)}"] = _local(parameter.grad).clone()
    return found


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def own_placement() -> ps.Schedule:
    """Stage 1 on rank 0, and the three others on rank 1."""
    placement, costs = ps.Placement(((1, 0, 1, 1),)), ps.Costs.uniform(4, f=1, i=1, w=1)
    return ps.plan(costs, 2, MICROBATCHES, placement=placement, time_limit=1.0).schedule


def split_inside() -> ps.Schedule:
    """Interleaved 1F1B whose last stage has its backwards whole, and stages 1 and 2 split."""
    rows = [
        ",".join(
            f"{op.stage}I{op.microbatch},{op.stage}W{op.microbatch}"
            if op.kind == "B" and op.stage in (1, 2)
            else str(op)
            for op in row
        )
        for row in ps.build("interleaved-1f1b", 2, MICROBATCHES).order
    ]
    return ps.formats.from_torch_csv("\n".join(rows))


PLANS: dict[str, tuple[Callable[[], ps.Schedule], dict[str, Any]]] = {
    "1f1b, chunked loss": (lambda: ps.build("1f1b", 2, MICROBATCHES), {}),
    "1f1b, replan": (lambda: ps.build("1f1b", 2, MICROBATCHES), {"replan": True}),
    "zb": (lambda: ps.build("zb", 2, MICROBATCHES), {}),
    "interleaved-1f1b": (lambda: ps.build("interleaved-1f1b", 2, MICROBATCHES), {"channels": "nccl"}),
    "zb-v": (lambda: ps.build("zb-v", 2, MICROBATCHES), {}),
    "zb-v, bfloat16": (lambda: ps.build("zb-v", 2, MICROBATCHES), {}),
    "placement": (own_placement, {}),
    "split inside, chunked loss": (split_inside, {}),
}

Runs = dict[str, dict[str, Tensor]]


def by_name(rank: int, folder: str) -> Runs:
    """Runs of TorchTitan's own schedules."""
    prepare(folder)
    return {
        "1F1B, chunked loss": train(make_config(folder, "1F1B", is_chunked=True)),
        "1F1B": train(make_config(folder, "1F1B")),
        "Interleaved1F1B": train(make_config(folder, "Interleaved1F1B")),
        "ZBVZeroBubble, bfloat16": train(make_config(folder, "ZBVZeroBubble", dtype="bfloat16")),
        "ZBVZeroBubble, chunked loss": train(make_config(folder, "ZBVZeroBubble", is_chunked=True)),
    }


def by_plans(rank: int, folder: str) -> Runs:
    """Runs of plans, each read from a file."""
    prepare(folder)
    return {name: train(planned_config(rank, folder, name)) for name in PLANS}


def with_shards(rank: int, folder: str) -> Runs:
    """Two pipelines over which parameters are sharded."""
    prepare(folder)
    more = {"data_parallel_shard_degree": 2, "spmd_backend": "partial_dtensor"}  # the default needs a newer torch
    return {
        "1F1B": train(make_config(folder, "1F1B", **more)),
        "zb": train(planned_config(rank, folder, "zb", **more)),
        "zb-v": train(planned_config(rank, folder, "zb-v", **more)),
        "1f1b, replan": train(planned_config(rank, folder, "1f1b, replan", **more)),
    }


def planned_config(rank: int, folder: str, name: str, **parallelism: Any) -> Any:
    from penstock.integrations.torchtitan import planned

    make_plan, options = PLANS[name]
    path = Path(folder, f"{name}.json")
    if rank == 0:
        ps.save(make_plan(), path)
    dist.barrier()
    plan = ps.load(path)
    home = plan.rank_of(plan.num_stages - 1, 0)
    dtype = "bfloat16" if "bfloat16" in name else "float32"
    config = make_config(
        folder, "1F1B" if home else "ZBVZeroBubble", is_chunked="chunked" in name, dtype=dtype, **parallelism
    )
    if plan.splits_backward():
        config.activation_checkpoint = None
    config.model_spec.pipelining_fn = planned(path, **options)
    return config
