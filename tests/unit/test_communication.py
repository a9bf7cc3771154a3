"""Messages as ops: where the pass puts them, and that every wrong one is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.passes import add_communication, remove_communication
from penstock.schedule import Op, StageGraph

pytestmark = pytest.mark.unit

WITH = """
schedule x: 2 ranks, 2 stages, 2 microbatches
pipeline 0: stages on ranks 0 1
rank 0 | F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1
rank 1 | RECV_F0 F0 RECV_F1 B0 SEND_B0 F1 B1 SEND_B1
"""


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_where_messages_are_put(name: str, golden: Callable[[str, str], None]) -> None:
    schedule = ps.build(name, 2, 3)
    by_channel = [
        f"{channel}\n{add_communication(schedule, channels=channel, most_posted=2)}\n" for channel in ("gloo", "nccl")
    ]
    golden(f"communication/{name}.txt", "\n".join([f"{schedule}\n", *by_channel]))


def test_the_drawing_of_the_docs() -> None:
    assert add_communication(remove_communication(ps.parse(WITH))) == ps.parse(WITH)


def test_messages_that_are_there_are_placed_anew() -> None:
    late = ps.parse(WITH.replace("RECV_F1 B0 SEND_B0 F1", "B0 SEND_B0 RECV_F1 F1"))
    ps.check(late)
    assert add_communication(late) == ps.parse(WITH)


def test_stages_side_by_side_on_a_rank_need_none() -> None:
    schedule = add_communication(ps.build("zb-v", 1, 2))
    assert schedule == ps.build("zb-v", 1, 2)
    v = add_communication(ps.build("zb-v", 2, 4))
    sends = {(op.kind, op.stage) for row in v.order for op in row if op.kind.startswith("SEND")}
    assert sends == {("SEND_F", 0), ("SEND_F", 2), ("SEND_B", 1), ("SEND_B", 3)}


def test_costs_decide_where_a_receive_stands() -> None:
    """A first stage five times as slow: its second message leaves after the other rank's first backward."""
    slow = add_communication(remove_communication(ps.parse(WITH)), ps.Costs(f=[5, 1], i=[1, 1], w=[1, 1]))
    assert [str(op) for op in slow.order[1]][:5] == ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1"]
    ps.check(slow)
    ps.check(slow, channels="nccl")


def test_ops_that_take_no_time_are_placed_too() -> None:
    schedule = ps.build("interleaved-1f1b", 2, 4)
    placed = add_communication(schedule, ps.Costs.uniform(4, f=0, i=0, w=0))
    ps.check(placed)
    ps.check(placed, channels="nccl")


def test_what_cannot_have_messages() -> None:
    chain = ps.build("gpipe", 2, 2)
    with pytest.raises(ps.ScheduleError, match="fit a plain chain of stages"):
        add_communication(replace(chain, stage_graph=StageGraph(2, ())))
    with pytest.raises(ps.ScheduleError, match="several ranks run together"):
        add_communication(replace(chain, placement=ps.Placement(((0, 1),), shared=((0, (0, 1)),))))
    with pytest.raises(ps.ScheduleError, match="rule: deadlock"):
        add_communication(
            ps.parse("""
                schedule x: 2 ranks, 2 stages, 2 microbatches
                pipeline 0: stages on ranks 0 1
                rank 0 | F0 B0 F1 B1
                rank 1 | F0 F1 B0 B1
            """)
        )


def test_two_pipelines_have_messages_too() -> None:
    schedule = ps.parse("""
        schedule x: 2 ranks, 2 stages, 2 microbatches
        pipeline 0: stages on ranks 0 1, microbatches 0
        pipeline 1: stages on ranks 1 0, microbatches 1
        rank 0 | 0F0 1F1 1B1 0B0
        rank 1 | 0F1 1F0 1B0 0B1
    """)
    placed = add_communication(schedule)
    ps.check(placed)
    assert [str(op) for op in placed.order[0][:4]] == ["0F0", "0SEND_F0", "1RECV_F1", "1F1"]


WRONG: dict[str, tuple[str, str, int, int, Op, str]] = {
    "no receive": ("RECV_F1 ", "", 0, 3, Op("SEND_F", 0, 1), "its other end, 1RECV_F1, is nowhere"),
    "no send": ("SEND_F1 ", "", 0, 2, Op("F", 0, 1), "its result goes to rank 1, but there is no 0SEND_F1"),
    "no stage to send to": ("1 | RECV_F0 F0", "1 | RECV_F0 F0 SEND_F0", 1, 2, Op("SEND_F", 1, 0), "2RECV_F0, is now"),
    "neither": ("", "", 0, 2, Op("F", 0, 1), "its result goes to rank 1, but there is no 0SEND_F1"),
    "a wrong stage": (
        "0 | F0",
        "0 | F0 1RECV_F0",
        0,
        1,
        Op("RECV_F", 1, 0),
        "stage 1 is placed on rank 1, so the op",
    ),
    "sent too early": ("F0 SEND_F0 F1", "SEND_F0 F0 F1", 0, 0, Op("SEND_F", 0, 0), "it needs F0 of stage 0, which"),
    "received late": ("RECV_F0 F0", "F0 RECV_F0", 1, 0, Op("F", 1, 0), "it needs RECV_F0 of stage 1, which comes"),
    "twice": ("SEND_F1 ", "SEND_F1 SEND_F1 ", 0, 4, Op("SEND_F", 0, 1), "the op occurs twice"),
    "swapped": (
        "RECV_F0 F0 RECV_F1",
        "RECV_F1 RECV_F0 F0",
        1,
        0,
        Op("RECV_F", 1, 1),
        "it is number 0 from rank 0 to rank 1, but number 0 to be sent is 0SEND_F0, at step 1 there",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_is_found(name: str) -> None:
    old, new, rank, step, op, message = WRONG[name]
    text = WITH.replace(old, new) if old else WITH.replace("RECV_F1 ", "").replace("SEND_F1 ", "")
    with pytest.raises(ps.ScheduleError) as caught:
        ps.check(ps.parse(text))
    error = caught.value
    assert (error.rank, error.step, error.op) == (rank, step, op)
    assert message in str(error)


def test_a_message_from_a_rank_to_itself() -> None:
    head = "schedule x: 1 rank, 2 stages, 1 microbatch\npipeline 0: stages on ranks 0 0\n"
    with pytest.raises(ps.ScheduleError, match="its other end, 1RECV_F0, is on this rank too; leave both out"):
        ps.check(ps.parse(head + "rank 0 | 0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0"))


def test_both_directions_of_a_v_share_a_line() -> None:
    """Two messages of one kind and size from rank 1 to rank 0, an activation and a gradient: swapped, each would
    be taken for the other."""
    schedule = add_communication(ps.build("zb-v", 2, 4))
    row = list(schedule.order[0])
    first = next(i for i, op in enumerate(row) if op.kind == "RECV_B")
    second = next(i for i, op in enumerate(row) if i > first and op.kind == "RECV_F")
    row.insert(first, row.pop(second))
    with pytest.raises(ps.ScheduleError) as caught:
        ps.check(replace(schedule, order=(tuple(row), schedule.order[1])))
    assert caught.value.rule == "message"


def test_a_graph_of_stages_has_no_messages_as_ops() -> None:
    with pytest.raises(ps.ScheduleError, match="messages as ops are for plain chains") as caught:
        ps.check(replace(ps.parse(WITH), stage_graph=StageGraph(2, ())))
    assert caught.value.rule == "message"


def test_a_late_receive_delays_its_message_on_gloo_alone() -> None:
    """The notice of a receive takes the way back: 7 ms after it is posted, data leaves; 7 ms later it is there."""
    late = ps.parse(WITH.replace("RECV_F0 F0 RECV_F1 B0", "RECV_F0 F0 B0 RECV_F1"))
    costs, links = ps.Costs.uniform(2, f=1, i=1, w=1), ps.Links({(0, 1): 7.0})
    arrivals = {}
    for channel in ("buffered", "gloo"):
        run = ps.simulate(late, costs, links=links, channels=channel)
        arrivals[channel] = {str(m.source): (m.posted, m.left, m.arrived) for m in run.messages}
    assert arrivals["buffered"]["0F0"] == (0, 1, 8)
    assert arrivals["gloo"]["0F0"] == (0, 7, 14)
    posted, left, arrived = arrivals["gloo"]["0F1"]
    assert (left, arrived) == (posted + 7, posted + 14)


def test_channels_are_for_rows_that_are_followed() -> None:
    schedule = ps.build("1f1b", 2, 2)
    with pytest.raises(ps.ScheduleError, match="channels 'mpi': give one of buffered, gloo"):
        ps.simulate(schedule, channels="mpi")
    with pytest.raises(ps.ScheduleError, match="give dispatch='frozen'"):
        ps.simulate(schedule, channels="gloo", dispatch="dynamic")
    with pytest.raises(ps.ScheduleError, match="no messages as ops, so nothing is proved of channels 'nccl'"):
        ps.check(schedule, channels="nccl")
    with pytest.raises(ps.ScheduleError, match="most_posted is 0"):
        add_communication(schedule, channels="gloo", most_posted=0)


@pytest.mark.parametrize("placed", [False, True])
def test_a_limit_and_warm_up_counts_are_read_over_channels_too(placed: bool) -> None:
    """Both were ignored as soon as channels carried the messages, or the schedule had its messages as ops."""
    schedule = ps.build("gpipe", 4, 8)
    if placed:
        schedule, channels = add_communication(schedule, channels="gloo"), {}
    else:
        channels = {"channels": "gloo"}
    with pytest.raises(
        ps.ScheduleError, match="rank 0: the cap is 2 activations, but the schedule's own order needs 8"
    ):
        ps.simulate(schedule, **channels, memory_limit=2)
    with pytest.raises(ps.ScheduleError, match=r"warmup \[4, 3, 2, 1\] steers a dynamic run"):
        ps.simulate(schedule, **channels, warmup=[4, 3, 2, 1])
    enough = ps.simulate(schedule, **channels, memory_limit=8)
    assert enough.makespan == ps.simulate(schedule, **channels).makespan


def test_three_ranks_wait_in_a_circle_of_messages_alone() -> None:
    """Each rank's stream begins with another message, and each of these is the second one at its other end."""
    schedule = add_communication(ps.build("interleaved-1f1b", 3, 6), channels="gloo", most_posted=1)
    with pytest.raises(ps.ScheduleError, match="messages wait for one another on nccl") as caught:
        ps.check(schedule, channels="nccl")
    assert caught.value.rule == "deadlock"
    assert "waits behind" in str(caught.value)


def test_messages_take_no_time_in_a_simulation() -> None:
    schedule, costs = ps.build("1f1b", 4, 8), ps.Costs.uniform(4, f=10, i=10, w=10)
    links = ps.Links({(0, 1): 7.0})
    placed = ps.simulate(add_communication(schedule), costs, links=links)
    assert placed.makespan == ps.simulate(schedule, costs, links=links).makespan


def test_our_runtime_places_messages_itself() -> None:
    def gradients(schedule: ps.Schedule) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        x = torch.randn(6, 4)
        ps.Pipeline(model, schedule, loss_fn=nn.MSELoss()).step(x, x.sum(1, keepdim=True), update=False)
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, placed = gradients(ps.build("1f1b", 2, 3)), gradients(add_communication(ps.build("1f1b", 2, 3)))
    assert len(plain) == 4
    assert all(torch.equal(a, b) for a, b in zip(plain, placed, strict=True))
