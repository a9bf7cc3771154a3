"""Nodes of a mesh that change places while a pipeline trains: what an agent is told of them, and the move itself.

LocalPipeline at the old place --hand_over--> LocalPipeline at the new place      between two steps, everywhere
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import add
from time import perf_counter_ns

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from penstock.control import Configuration, Link
from penstock.control.events import LinkTime
from penstock.control.orchestrator import link_times
from penstock.runtime.adapt import Agent, RunSetting
from penstock.runtime.adapt.coordinator import STARTING_STEPS
from penstock.runtime.arguments import PipelineArguments
from penstock.runtime.checkpoint.state_transfer import hand_over
from penstock.runtime.checkpoint.training_state import TrainingState
from penstock.runtime.errors import PeerFailed, RuntimeFailure
from penstock.runtime.execute.plan import ActivePlan
from penstock.runtime.lifetime import Lifetime
from penstock.runtime.local_pipeline import LocalPipeline
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.probe import ProbePace, probe
from penstock.runtime.mesh.process_mesh import Nodes, device_mesh_of, end_groups, why_sorted
from penstock.runtime.parameters.optimizer_state import gradient_bytes

Probes = Callable[[bool], dict[Link, LinkTime] | None]
"""The function that a process calls after each step; see `probes_of`."""


def run_setting(local: LocalPipeline, given: PipelineArguments, may_move: bool) -> RunSetting:
    """What an agent must know of the run; with the mesh if the links between its nodes are probed. Every process must
    call it.
    """
    place, nodes, first, stay = local.mesh, local.nodes, local.start, ""
    if nodes is not None:
        predicted = first.schedule.updates is None and first.schedule.placement.num_pipelines == 1
        stay = _why_nodes_stay(local, nodes, given, predicted, may_move)
        if not (predicted and nodes.is_everything and "cpu" in dist.get_backend_config()):
            nodes = None
    weighs: tuple[float, ...] = ()
    if nodes is not None:
        first = replace(first, nodes=nodes.mesh.nodes)
        _note_nodes(local, first.nodes)
        weighs = gradient_bytes(local.model.copies.stages, local.peers, first.schedule.num_stages)
    copies, mesh = place.num_replicas * place.num_shards, None if nodes is None else nodes.mesh
    return RunSetting(first, local.costs, local.choice, 1.0, copies, mesh, stay, weighs, STARTING_STEPS)


def _why_nodes_stay(
    local: LocalPipeline, nodes: Nodes, given: PipelineArguments, predicted: bool, may_move: bool
) -> str:
    """Why nodes cannot change places, which a notice says unless nobody wants it; empty if they may."""
    stages = [given.model] if isinstance(given.model, nn.Module) else given.model
    reasons = {
        "the schedule has several pipelines, or its updates in the order": not predicted,
        "stages are given as modules; give functions that make them": any(isinstance(s, nn.Module) for s in stages),
        "the optimizer is given as it is; give a function that makes one": isinstance(given.optimizer, Optimizer),
        "no optimizer is given, and your own would keep the parameters of the old place": given.optimizer is None,
        "each replica is given its own part of a batch": local.own_batches is not None,
        "torch.distributed has processes outside of the mesh": not nodes.is_everything,
    }
    why = next((words for words, holds in reasons.items() if holds), why_sorted())
    why = next(filter(None, local.mesh.everyone.gather(why)), "")  # each process has a torch of its own
    if why and may_move:
        local.notices.note([f"nodes stay where they lie, also where a link between them is late: {why}"])
    why = why if may_move else "AdaptOptions has may_move=False"
    return f"nodes cannot move: {why}" if why else ""


def _note_nodes(local: LocalPipeline, nodes: tuple[int, ...]) -> None:
    """What runs says from now on where nodes lie."""
    local.running = replace(local.running, configuration=replace(local.running.configuration, nodes=nodes))


def probes_of(present: Callable[[], LocalPipeline], given: PipelineArguments) -> Probes:
    """A function that every process calls after each step. The function probes the links between nodes, and adds the
    conditions that are injected into the links, after the steps that `ProbePace` names. A round in which a connection
    breaks is made again over another interface, if there is one. The function raises DeadlineExceeded or PeerLost
    if a process is late or gone.

    Args:
        present: the pipeline that trains now, which lies elsewhere after nodes moved.
    """
    nodes, conditions = present().nodes, present().conditions
    assert nodes is not None, "only links between nodes are probed"
    processes, links, pace = nodes.processes, given.transport.links, ProbePace()

    def after_step(is_soon: bool) -> dict[Link, LinkTime] | None:
        if not pace.after_step(is_soon):
            return None
        everyone = present().mesh.everyone
        assert isinstance(everyone, GroupPeers), "nodes are processes of a device mesh"
        found = everyone.repeated(lambda: probe(processes, everyone, pace))
        if links is not None and conditions is not None:
            now = (perf_counter_ns() - conditions.origin) / 1e6
            for link, added in link_times(links.conditions, links, now).items():
                found[link] = LinkTime(*map(add, found[link], added))
        return found

    return after_step


def tell_place(agent: Agent, local: LocalPipeline) -> None:
    """Tells the agent where this process lies. Every process must call it."""
    place, agent.ahead = local.mesh, local.choice.ahead
    if place.is_flat:
        return
    agent.pipeline_index = place.replica * place.num_shards + place.shard
    agent.pipeline = local.peers.gather(place.everyone.here[0])
    if len(agent.pipeline) == 1:  # one process runs the whole pipeline
        agent.pipeline = agent.pipeline * local.running.schedule.num_ranks


def move_nodes(
    before: LocalPipeline, then: Configuration, given: PipelineArguments, life: Lifetime, agent: Agent | None
) -> LocalPipeline:
    """Moves to where a configuration places the nodes. Every process calls it, between two steps.

    It builds the pipeline of the new place beside the old one, hands all state over, and closes the old one. If nodes
    can't move, the agent ends, and training goes on in the old place.

    Returns:
        The pipeline that trains from here on.
    """
    moved, groups = None, None
    assert before.nodes is not None, "nodes that move are known"
    try:
        _require_new_groups(before)
        groups = device_mesh_of(before.nodes.at(then.nodes).layout, before.model.device.type)
        moved = LocalPipeline(given, groups, then.dispatch, life)
        _note_nodes(moved, then.nodes)
        _require_movable(before, moved)
        plan = moved.ready(then)
        assert isinstance(plan, ActivePlan), "the nodes lie there by now"
        giver, taker = (TrainingState(each.optimizer_state, each.mesh) for each in (before, moved))
        hand_over(giver, taker, before.optimizer_state.num_updates, before.mesh.everyone)
    except BaseException as error:
        if moved is not None:
            moved.close()
        if groups is not None:
            end_groups(groups)
        if type(error) not in (RuntimeFailure, PeerFailed) or agent is None:
            raise
        agent.end(f"nodes could not move: {error}")  # as on every process
        return before
    if before.conditions is not None and moved.conditions is not None:
        moved.conditions.origin = before.conditions.origin
    moved.optimizer_state.go_on_from(before.optimizer_state)
    moved.switch(plan)
    moved.groups = groups
    before.close()
    if before.groups is not None:
        end_groups(before.groups)
    before.notices.move_to(moved.mesh.everyone, moved.notices.known())
    moved.notices = before.notices
    if agent is not None:
        tell_place(agent, moved)
    return moved


def _require_movable(before: LocalPipeline, then: LocalPipeline) -> None:
    """Raises RuntimeFailure or PeerFailed, in every process, if one pipeline cannot continue as another."""
    known = set(map(id, before.model.parameters))

    def require_fresh() -> None:
        if shared := sum(id(parameter) in known for parameter in then.model.parameters):
            raise RuntimeFailure(
                f"the other pipeline shares {shared} parameters with this one; give functions that make fresh stages"
            )

    before.mesh.everyone.together(require_fresh, "continue as another pipeline")


def _require_new_groups(local: LocalPipeline) -> None:
    """Raises RuntimeFailure, in every process, where connections have broken since the pipeline was built.

    torch makes groups by the store and over the interface that it was set up with, and would wait for these.
    """
    # Every process has a guard, or none has.
    if local.attempts is not None and any(local.mesh.everyone.gather(local.attempts.failover.number)):
        raise RuntimeFailure(
            "nodes can't change places any more: connections have broken, what ranks sum goes by another interface "
            "since, and torch.distributed makes groups only by the store and over the interface that it was set up "
            "with; start again from the newest checkpoint"
        )
