"""Plans in TorchTitan: one line in a config, and its own trainer runs a plan of Penstock's.

    from penstock.integrations.torchtitan import planned

    def llama3_debugmodel_zb() -> Trainer.Config:
        config = llama3_debugmodel()
        config.model_spec.pipelining_fn = planned("zb.csv")
        return config

TorchTitan's `pipeline_llm` cuts the model, shards it and makes the stages, as ever. TorchTitan has no public way to
say the following, so while `pipeline_llm` runs, three functions that it calls are replaced:

    _get_pipeline_metadata                    into how many stages the model is cut: as many as the plan has
    _get_pp_rank_to_stage_indices_mapping     which rank gets which stages: by the plan's placement
    _build_pipeline_schedule                  the schedule: a `PlannedSchedule`

This was tried with TorchTitan 0.3.0. A plan that does not fit the config is refused before the model is cut.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock.cost import Costs, Links
from penstock.formats import to_torch_csv
from penstock.integrations.torch import PlannedSchedule, Replanner, as_schedule
from penstock.planning import Plan
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.op import INPUT

__all__ = ["planned"]


def planned(
    plan: Schedule | Plan | str | Path,
    *,
    base: Callable[..., Any] | None = None,
    channels: str | None = None,
    costs: Costs | None = None,
    links: Links | None = None,
    replan: bool | Replanner = False,
) -> Callable[..., Any]:
    """A `pipelining_fn` for a model spec of TorchTitan's that runs a plan.

    Args:
        plan: a schedule, a `ps.plan` result, or the path of a file. Its ranks are those of
            `pipeline_parallel_degree`, and its stages may lie on them in any way.
        base: the function that cuts the model and makes the stages. Default: TorchTitan's `pipeline_llm`.
        channels, costs, links, replan: as of `PlannedSchedule`. With `replan` all processes of the job change their
            plans together, unless a `Replanner` has another group. A plan of its own `planner` is not taken if it
            splits backwards that must be whole.

    Raises:
        ScheduleError: torch lacks what the plan needs. The function that is returned raises it too, if the plan does
            not fit the config; with rule "torch".
    """
    schedule = as_schedule(plan)
    to_torch_csv(schedule, "compute_only")  # refuses here, while the config is read, what torch lacks

    def pipelining_fn(model: Any, **config: Any) -> Any:
        _require_fit(schedule, config)
        titan: Any = import_module("torchtitan.distributed.pipeline_parallel")
        replanner = replan if isinstance(replan, Replanner) else Replanner()
        if replanner.group is None:
            replanner = replace(replanner, group=dist.group.WORLD)
        if (own := replanner.planner) is not None:
            replanner = replace(replanner, planner=lambda *given: _require_fitting_backwards(own(*given), config))

        def build(*, parallelism: Any, local_batch_size: int, stages: Any, loss_fn: Any, **options: Any) -> Any:
            return PlannedSchedule(
                stages,
                schedule,
                loss_fn=lambda *args, **kwargs: loss_fn(*args, **kwargs)[0],  # the loss; the rest are metrics
                channels=channels,
                costs=costs,
                links=links,
                replan=replan and replanner,
                scale_grads=False,  # TorchTitan divides by the number of tokens
                **options,
            )

        theirs = getattr(titan, "_get_pipeline_metadata", None)
        replaced = {
            "_get_pipeline_metadata": lambda *args: (schedule.num_stages, *theirs(*args)[1:]),  # type: ignore[misc]
            "_get_pp_rank_to_stage_indices_mapping": lambda rank, *_: tuple(sorted(schedule.stages_of(rank))),
            "_build_pipeline_schedule": build,
        }
        with _replace(titan, replaced):
            made = (base or titan.pipeline_llm)(model, **config)
        if not isinstance(made[0], PlannedSchedule):
            raise _misfit(
                f"{base} made a {type(made[0]).__name__} and did not call TorchTitan's _build_pipeline_schedule, "
                "through which planned() gives it the plan; give another base, or none"
            )
        return made

    return pipelining_fn


@contextmanager
def _replace(module: Any, replaced: Mapping[str, Any]) -> Iterator[None]:
    """Puts other functions into a module for a while."""
    if missing := [name for name in replaced if not hasattr(module, name)]:
        raise _misfit(
            f"{module.__name__} has no {', '.join(missing)}; planned() was tried with TorchTitan 0.3.0, install that"
        )
    before = {name: getattr(module, name) for name in replaced}
    try:
        vars(module).update(replaced)
        yield
    finally:
        vars(module).update(before)


def _require_fit(schedule: Schedule, config: Mapping[str, Any]) -> None:
    """Raises ScheduleError if the plan does not fit TorchTitan's config."""
    dims, parallelism = config["parallel_dims"], config["parallelism"]
    if schedule.num_ranks != dims.pp:
        raise _misfit(
            f"the plan has {schedule.num_ranks} ranks, parallelism.pipeline_parallel_degree is {dims.pp}; plan for "
            f"{dims.pp} ranks, or set it to {schedule.num_ranks}"
        )
    batch, size = config["training"].local_batch_size, parallelism.pipeline_parallel_microbatch_size
    if schedule.num_microbatches * size != batch:
        raise _misfit(
            f"the plan has {schedule.num_microbatches} microbatches, training.local_batch_size {batch} and "
            f"parallelism.pipeline_parallel_microbatch_size {size} make {batch / size:g}; plan for as many, or set "
            f"training.local_batch_size to {schedule.num_microbatches * size}"
        )
    for name in ("pipeline_parallel_schedule_csv", "pipeline_parallel_layers_per_stage"):
        if value := getattr(parallelism, name, None):
            raise _misfit(
                f"parallelism.{name} is {value!r}, but the plan says in which order which stages run; leave "
                "it out. To choose the layers of each stage, set parallelism.module_fqns_per_model_part"
            )
    parts = parallelism.module_fqns_per_model_part
    if parts is not None and len(parts) != schedule.num_stages:
        raise _misfit(
            f"the plan has {schedule.num_stages} stages, parallelism.module_fqns_per_model_part has {len(parts)} "
            f"parts; name {schedule.num_stages} parts, or leave it out"
        )
    _require_fitting_backwards(schedule, config)
    home = schedule.rank_of(schedule.num_stages - 1, 0)
    logs = 0 if parallelism.pipeline_parallel_schedule == "ZBVZeroBubble" else dims.pp - 1
    if home != logs:
        other = "ZBVZeroBubble" if home == 0 else "1F1B"
        warnings.warn(
            f"the plan's last stage, which has the loss, is on rank {home}. TorchTitan reports metrics of rank {logs}"
            + (
                f"; set parallelism.pipeline_parallel_schedule to {other!r}, from whose name it takes the rank"
                if home in (0, dims.pp - 1)
                else "; set metrics.save_for_all_ranks"
            ),
            stacklevel=3,
        )


def _require_fitting_backwards(schedule: Schedule, config: Mapping[str, Any]) -> Schedule:
    """The plan, unless it splits backwards that TorchTitan's loss or checkpointing needs whole.

    Raises:
        ScheduleError: it does.
    """
    loss = config["loss_fn"]
    split = {op.stage for row in schedule.order for op in row if op.kind == INPUT}
    last = schedule.num_stages - 1
    if last in split and any("Chunked" in each.__name__ for each in type(loss).__mro__):
        raise _misfit(
            f"the plan splits the backward of its last stage ({last}) into I and W, and the loss is a "
            f"{type(loss).__name__}: the weight of the final norm would get no gradient, and no error would say so. "
            "Set config.loss to a CrossEntropyLoss.Config, or take a plan whose last stage has whole backwards (B), "
            "such as 1f1b"
        )
    checkpointing = type(config.get("ac_config")).__qualname__
    if split - {0} and "SelectiveAC" in checkpointing:  # in torch the first stage's backward is always whole
        raise _misfit(
            f"the plan splits backwards into I and W, and config.activation_checkpoint is a {checkpointing}, through "
            "which torch can go backward only once. Set it to a FullAC.Config or to None, or take a plan with whole "
            "backwards (B), such as 1f1b"
        )
    return schedule


def _misfit(message: str) -> ScheduleError:
    return ScheduleError(message, rule="torch")
