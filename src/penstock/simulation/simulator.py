"""Times a schedule: drives the decision core over costs and links."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from numbers import Integral

from penstock.cost import Costs, Links
from penstock.cost.costs import require_costs
from penstock.cost.links import LinkQueues
from penstock.dispatch import Dispatch, Policy
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.messages import BUFFERED, has_communication, remove_communication, require_channel
from penstock.schedule.op import UPDATE
from penstock.simulation.auto import choose
from penstock.simulation.channels import place_messages, run_channels
from penstock.simulation.lowered import Order, frozen_caps
from penstock.simulation.runner import Runner
from penstock.simulation.timeline import Timeline, timeline_of
from penstock.simulation.transport import SimulatedTransport, as_transport
from penstock.unknown_names import refuse_unknown

AUTO = "auto"


@refuse_unknown(ScheduleError)
def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    links: Links | LinkQueues | None = None,
    *,
    dispatch: Dispatch | Policy | str = Dispatch.FROZEN,
    transport: SimulatedTransport | str = "decoupled",
    channels: str = BUFFERED,
    memory_limit: float | Sequence[float] | None = None,
    warmup: Sequence[int] | None = None,
    links_at: float = 0.0,
) -> Timeline:
    """Computes when every op of a schedule runs, over given costs and links. The same input gives the same result.

    A frozen run of a schedule that has its messages as ops posts each where it stands, and the data leaves as the
    channel says. All other runs send a message when its op ends, and take it when it arrives.

    Args:
        schedule: the schedule to run. It need not be proved first.
        costs: costs of each stage. Default: F = I = W = 1 ms for each rank's share of the model (`Costs.assumed`).
            Updates and ops of registered kinds take no time unless the costs name them; a program's `all_costs` do.
        links: delays in ms (pure latency), or conditions that may change over time: latency, occupancy, bandwidth
            and loss. Default: messages arrive at once. A bandwidth counts the `message_bytes` of the costs, which are
            0 unless given. `LinkQueues` also contain the messages that an earlier run left in them. Queues, losses
            and random delays are not compiled; with them a million ops take some ten seconds.
        dispatch: how a rank picks its next op. "frozen": the next one in its order. "hinted": of the ready ops that
            fit into memory, the earliest in its order. "dynamic": of these a B or I first, then an F, then a W.
            "hinted:0.5" may wait for an op that is nearly due, see `Policy`; its planned times come from the frozen
            run over the same costs and links. "auto" tries several (`auto.POLICIES`) and takes the fastest, which
            the timeline names.
        transport: "decoupled", "blocking:4" or `Blocking(4)`; "gloo" and "nccl-edge" are lines of Penstock's runtime.
        channels: what carries the messages in the framework that runs the schedule: "buffered" (Penstock's own),
            "gloo", "nccl", "nccl-pair" or "nccl-edge", see `schedule.messages`. Such frameworks follow their rows, so
            the dispatch must be "frozen". Messages that are no ops of the schedule are placed as
            `passes.add_communication` does, with any number of receives posted.
        memory_limit: most activations that a rank may hold, in the unit of the costs: one number, or one per rank. By
            default a rank may hold as much as it holds in the frozen run without delays. A lower limit is refused,
            because a rank must be able to finish in its frozen order. A frozen run only checks the limit.
        warmup: forwards that each rank runs before anything else. Not for frozen dispatch.
        links_at: when the run starts, in ms of the link conditions' own time.

    Raises:
        ScheduleError: the order deadlocks, or a cap is below what the frozen order needs, or warm-up counts exceed
            what a cap allows, or are given for a frozen run.
        CostError: costs for another number of stages, or a link between ranks that do not exist.

    Examples:
        >>> import penstock as ps
        >>> s = ps.build("zb-h1", 4, 8)
        >>> costs = ps.Costs.uniform(4, f=10, i=10, w=10)
        >>> ps.simulate(s, costs).makespan
        270.0
        >>> late = ps.Links({(2, 3): 30.0})
        >>> [ps.simulate(s, costs, links=late, dispatch=each).makespan for each in ("frozen", "hinted")]
        [500.0, 430.0]

    References:
        PipeMorph (NSDI 2026), section 3.1: how bubbles of a late link cascade.
    """
    placed, schedule = schedule, remove_communication(schedule)
    costs = Costs.assumed(schedule.num_ranks, schedule.placement) if costs is None else costs
    through_lines = links if isinstance(links, LinkQueues) else Links.of(links)
    require_costs(costs)
    costs.require_stages(schedule.num_stages)
    (through_lines.links if isinstance(through_lines, LinkQueues) else through_lines).check_ranks(schedule.num_ranks)
    policy = None if dispatch == AUTO else Policy.of(dispatch)
    runner = Runner(costs)
    order = runner.lowered(schedule)
    follows = policy is not None and not policy.dispatch.is_dynamic
    if warmup is not None:
        _check_warmup(warmup, order.num_ranks, policy)
    caps = None
    # What a frozen run holds is known: under the cap, or not.
    if not follows or memory_limit is not None:
        caps = frozen_caps(order.graph, order.change.tolist(), memory_limit)
    if (follows and placed is not schedule) or require_channel(channels) != BUFFERED:
        if not follows or transport != "decoupled":
            raise ScheduleError(
                f"channels {channels!r} are those of frameworks that follow their rows; give dispatch='frozen' and "
                "leave transport out",
                rule="options",
            )
        return _through_channels(placed, order, costs, through_lines, channels, links_at)
    return _decoupled(runner, order, through_lines, policy, transport, caps, warmup, links_at)


def _decoupled(
    runner: Runner,
    order: Order,
    links: Links | LinkQueues,
    policy: Policy | None,
    transport: SimulatedTransport | str,
    caps: list[float] | None,
    warmup: Sequence[int] | None,
    links_at: float,
) -> Timeline:
    """The timeline of a run that sends a message when its op ends; a policy of None stands for the fastest."""
    through = as_transport(transport)
    considered: tuple[tuple[str, float], ...] = ()
    if policy is None:
        choice = choose(runner, order, links, through, caps or (), links_at=links_at)
        policy, considered = choice.policy, tuple(choice.means.items())
    ran = runner.run(order, links, dispatch=policy, transport=through, caps=caps, warmup=warmup, links_at=links_at)
    return timeline_of(ran, str(policy), considered)


def _through_channels(
    placed: Schedule, order: Order, costs: Costs, links: Links | LinkQueues, channels: str, at: float
) -> Timeline:
    """The timeline of a schedule whose messages are ops, or are made ones here."""

    def lines() -> LinkQueues:
        return deepcopy(links) if isinstance(links, LinkQueues) else LinkQueues(links)

    if not has_communication(placed):
        if not placed.graph.is_chain or placed.has_shared_ops or placed.updates is not None:
            raise ScheduleError(
                f"channels {channels!r} carry activations and gradients along a plain chain of stages, each on one "
                "rank; simulate this schedule without channels",
                rule="communication",
            )
        placed = place_messages(placed, order, costs, lines, channels, placed.num_ops, at)
    return run_channels(placed, order, costs, links if isinstance(links, LinkQueues) else lines(), channels, at)


def _check_warmup(warmup: Sequence[int], num_ranks: int, policy: Policy | None) -> None:
    """Raises ScheduleError for counts that are none, not one per rank, or for a run that has its order already."""
    if len(warmup) != num_ranks:
        raise ScheduleError(f"warmup has {len(warmup)} counts; give one per rank, {num_ranks} in all", rule="options")
    for rank, count in enumerate(warmup):
        if not isinstance(count, Integral) or count < 0:
            raise ScheduleError(
                f"warmup of rank {rank} is {count!r}: give a whole number of at least 0", rule="options"
            )
    if policy is None or not policy.dispatch.is_dynamic:
        raise ScheduleError(
            f"warmup {list(warmup)} steers a dynamic run, and a frozen one follows its order, warm-up and all, which "
            "'auto' may choose; give dispatch='dynamic', or build the schedule with these counts (zb takes warmup)",
            rule="options",
        )


def as_dispatch(value: Dispatch | str) -> Dispatch:
    """Reads "frozen", "hinted" or "dynamic", for what takes no policy that waits; else raises ScheduleError."""
    try:
        return Dispatch(value)
    except ValueError:
        raise ScheduleError(
            f"dispatch {value!r}: give 'frozen', 'hinted' or 'dynamic'; policies that wait are for ps.simulate, "
            "which knows when each op is due",
            rule="dispatch",
        ) from None


def untimed_kinds(schedule: Schedule, costs: Costs) -> list[str]:
    """Kinds of op that take no time because the costs do not name them: registered ones, and updates."""
    ops = {(registered.kind, registered.stage) for registered in schedule.graph.registered}
    if schedule.updates is not None:
        ops |= {(UPDATE, stage) for stage in range(schedule.num_stages)}
    known = {kind for kind, *_ in costs.other_entries} | {kind for kind, stage in ops if costs.duration(kind, stage)}
    return sorted({kind for kind, _ in ops} - known)
