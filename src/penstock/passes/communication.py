"""Messages as ops of their own: where ranks send and receive, written into the schedule.

Penstock's runtime places messages itself and needs none of this. Runtimes that run a list of actions do,
torch's pipelining among them.

    before   rank 0 | F0 F1 .  .  B0 .  B1
             rank 1 | .  F0 B0 .  F1 B1

    after    rank 0 | RECV_B0 RECV_B1 F0 SEND_F0 F1 SEND_F1 B0 B1                   on "gloo"
             rank 1 | RECV_F0 RECV_F1 F0 B0 SEND_B0 F1 B1 SEND_B1

    after    rank 0 | F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1                   on "nccl"
             rank 1 | RECV_F0 F0 RECV_F1 B0 SEND_B0 F1 B1 SEND_B1

A receive that is posted late delays its message on gloo; one that is posted early blocks the stream of NCCL. So
the place of a message depends on the channel, see `schedule.messages`. `simulation.channels` chooses it.
"""

from __future__ import annotations

from penstock.cost import Costs, Links
from penstock.cost.links import LinkQueues
from penstock.schedule import Schedule, ScheduleError, check
from penstock.schedule.messages import NCCL, remove_communication, require_channel
from penstock.simulation.channels import place_messages
from penstock.simulation.runner import Runner

__all__ = ["add_communication", "remove_communication"]


def add_communication(
    schedule: Schedule,
    costs: Costs | None = None,
    links: Links | None = None,
    *,
    channels: str = NCCL,
    most_posted: int = 8,
) -> Schedule:
    """The schedule with SEND_F, RECV_F, SEND_B and RECV_B for every message between two ranks.

    The compute ops keep their order. Messages that were there already are placed anew; stages side by side
    on one rank need none.

    Args:
        schedule: what gets the messages.
        costs: when each op ends decides where messages stand; by default F, I and W take 1 ms for each rank's share
            of the model, as in `ps.simulate`.
        links: how late messages arrive. "nccl" and "nccl-pair" need the links to place messages well, the other
            channels do not.
        channels: what will carry the messages: "nccl" (one communicator, torch's default on GPUs), "nccl-pair",
            "nccl-edge", "gloo" or "buffered". Rows for "nccl" hang on none of them; rows for "gloo" are faster there.
        most_posted: most receives that a rank has posted and not used yet, except where an op needs more. Only for
            channels without shared streams. 8 cost nothing in any case tried; fewer take less memory for what
            arrives.

    Raises:
        ScheduleError: the schedule is not valid, or has shared stages, branches or registered kinds, whose
            messages these four kinds cannot tell apart.

    Examples:
        >>> import penstock as ps
        >>> s = ps.passes.add_communication(ps.build("1f1b", 2, 2))
        >>> [str(op) for op in s.order[1][:4]]
        ['1RECV_F0', '1F0', '1RECV_F1', '1B0']
        >>> s = ps.passes.add_communication(ps.build("1f1b", 2, 2), channels="gloo")
        >>> [str(op) for op in s.order[1][:4]]
        ['1RECV_F0', '1RECV_F1', '1F0', '1B0']
    """
    schedule = remove_communication(schedule)
    _refuse_graphs(schedule)
    check(schedule)
    if most_posted < 1:
        raise ScheduleError(f"most_posted is {most_posted}: give at least 1", rule="options")
    costs = Costs.assumed(schedule.num_ranks, schedule.placement) if costs is None else costs
    found = Links.of(links)
    found.check_ranks(schedule.num_ranks)
    order = Runner(costs).lowered(schedule)
    return place_messages(schedule, order, costs, lambda: LinkQueues(found), require_channel(channels), most_posted)


def _refuse_graphs(schedule: Schedule) -> None:
    if schedule.has_shared_ops:
        raise ScheduleError(
            "communication ops are between one rank and another, but this schedule has stages or ops that several "
            "ranks run together; give each stage one rank",
            rule="communication",
        )
    if schedule.updates is not None and schedule.placement.num_pipelines > 1:
        raise ScheduleError(
            "communication ops carry activations and gradients between stages, not what updates send between the "
            "copies of one; give the schedule without its updates (U)",
            rule="communication",
        )
    if not schedule.graph.is_chain:
        raise ScheduleError(
            "communication ops say which stage sends, not to which, so they fit a plain chain of stages; this "
            "schedule has a stage graph (branches, counts of its own or registered kinds)",
            rule="communication",
        )
