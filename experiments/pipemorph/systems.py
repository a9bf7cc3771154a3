"""The systems that are compared, each as what it runs on a model whose links are late by known delays.

    system           schedule                 order     late links         memory
    1f1b             1F1B                     frozen    direct             its own
    zb               warm-ups 2(S-i)-1        frozen    direct             its own
    pipemorph-cpu    as zb                    frozen    delegated          its own
    pipemorph        corrected Algorithm 2    frozen    delegated          as much as it wants
    dynamic, direct  as zb                    dynamic   direct             as zb
    dynamic          as zb                    dynamic   delegated          as zb
    ours             what the controller      either    as it decides      as zb
                     comes to
    ours, host       as it decides            either    as it decides      as zb; while links are delegated,
                                                                           OFFLOAD and RELOAD ops move
                                                                           activations to host memory and back

`ours` starts as `dynamic, direct` does, the others run as they are. Where nothing is late nothing is delegated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import penstock as ps
from experiments.pipemorph.setups import BASE, DIRECT, Link, Model
from penstock.control import Configuration, Controller, Job, rehearse, run_once
from penstock.control.configuration import peaks
from penstock.cost import LinkCondition, Links
from penstock.cost.conditions import Trace
from penstock.planning import slow_link_schedule

SYSTEMS = ("1f1b", "zb", "pipemorph-cpu", "pipemorph", "dynamic, direct", "dynamic", "ours")
HOSTED = "ours, host"
HOST_MEMORY = 8.0
"""Activations a rank that `ours, host` may keep in host memory."""

HEALTHY, SLOW = 4, 20
"""Iterations that the controller is rehearsed for before and after the links turn late."""


@dataclass(frozen=True)
class Setting:
    """What a system runs, in the same values that the controller decides and the runtime switches to.

    Attributes:
        job: costs, start, depth of direct links. configuration: what runs.
        decisions: what the controller decided on its way there, in its words.
    """

    job: Job
    configuration: Configuration
    decisions: tuple[str, ...] = ()


def job_of(model: Model, start: Configuration | None = None, host_memory: float = 0.0) -> Job:
    """A job under the memory of frozen `zb`, with room for so many activations in host memory."""
    return Job(
        model.costs_with_copies,
        start or Configuration(model.zb, "dynamic", (), model.caps),
        host_memory=host_memory * model.activation,
        transport=DIRECT,
    )


def setting(system: str, model: Model, delays: Mapping[Link, float]) -> Setting:
    """What `system` runs on links that are late by `delays` ms and stay so."""
    slow = tuple(link for link, ms in delays.items() if ms > 0)
    if system in ("ours", HOSTED):
        return settled(job_of(model, host_memory=HOST_MEMORY if system == HOSTED else 0.0), dict(delays))
    if system in ("dynamic", "dynamic, direct"):
        job = job_of(model)
        return Setting(job, replace(job.start, delegated=slow if system == "dynamic" else ()))
    if system == "1f1b":
        schedule, links = ps.build("1f1b", model.num_ranks, model.num_microbatches), ()
    elif system == "zb":
        schedule, links = model.zb, ()
    elif system == "pipemorph-cpu":
        schedule, links = model.zb, slow
    elif system == "pipemorph":
        schedule = slow_link_schedule(model.costs, model.num_microbatches, ps.Links(dict(delays)))
        links = slow
    else:
        raise SystemExit(f"system {system!r}: give one of {', '.join((*SYSTEMS, HOSTED))}")
    configuration = Configuration(schedule, "frozen", links, peaks(schedule, model.costs))
    return Setting(job_of(model, configuration), configuration)


def settled(job: Job, delays: dict[Link, float]) -> Setting:
    """What the controller comes to when it is rehearsed on links that turn late and stay so."""
    ideal = run_once(job, job.start, ps.Links()).makespan
    begins = HEALTHY * ideal
    conditions = Links(
        {link: LinkCondition(Trace((0.0, begins), (0.0, ms))) for link, ms in delays.items()}, base=BASE
    )
    controller = Controller(job)
    run = rehearse(controller, conditions, until=begins + SLOW * ideal)
    told = tuple(f"iteration {each.iteration}: {each.action.value}" for each in run.decisions)
    return Setting(job, controller.now, told)
