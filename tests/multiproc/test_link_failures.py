"""gloo's connections cut in the middle of steps: messages go on by delegates, sums by another interface, each once,
and losses and parameters are bitwise those of a run whose connections stood."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from link_runs import INTERFACES, TIMEOUT, LinkCase, lines_over_gloo, trainings
from processes import Outcome, appears, run_ranks
from tiers import NIGHTLY
from waiting import wait_until

pytestmark = pytest.mark.multiproc


def run_and_check(num_ranks: int, cases: Sequence[LinkCase]) -> None:
    """All cases at night; else those with no cut, and of those with cuts every third one and the last."""
    if not NIGHTLY:
        cut = [case for case in cases if case != case.uncut]
        by_day = [*cut[::3], *cut[-1:]]
        uncut = [case.uncut for case in by_day]
        cases = [case for case in cases if case in uncut or case in by_day]
    check(cases, run_ranks(num_ranks, trainings, cases))


def check(cases: Sequence[LinkCase], outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.value is not None, "\n".join(each.text for each in outcomes)
        for case, told in zip(cases, outcome.value, strict=True):
            usual = outcome.value[cases.index(case.uncut)]
            assert torch.equal(told["losses"], usual["losses"]), case
            assert all(map(torch.equal, told["state"], usual["state"])), case
            changes = case != case.uncut
            assert (told["number"] >= 1) == changes, case
            assert any("nothing was lost" in one for one in told["notices"]) == changes, case


@pytest.mark.slow
def test_a_pipeline_goes_on_where_a_connection_is_cut() -> None:
    dynamic = LinkCase(clip_norm=0.5, evaluates=True)
    frozen = replace(dynamic, dispatch="frozen")
    tied = LinkCase(tied=True)
    delegate = LinkCase(transport="delegate", clip_norm=0.5)
    cases = [
        dynamic,
        replace(dynamic, cuts=((0, "sending", 9, False),)),
        replace(dynamic, cuts=((1, "receiving", 14, True),)),
        replace(dynamic, cuts=((0, "step ends", 2, True),)),
        replace(dynamic, cuts=((1, "summed", 8, True),)),
        replace(dynamic, cuts=((0, "sending", 9, False), (1, "summed", 9, True), (1, "summed", 12, False))),
        frozen,
        replace(frozen, cuts=((1, "sending", 12, True),)),
        replace(frozen, cuts=((0, "step begins", 3, False),)),
        replace(frozen, cuts=((0, "summing", 9, True),)),
        tied,
        replace(tied, cuts=((0, "sharing", 2, False),)),
        replace(tied, cuts=((1, "sharing", 3, True),)),
        delegate,
        replace(delegate, cuts=((1, "summed", 4, False),)),
    ]
    run_and_check(2, cases)


@pytest.mark.slow
def test_replicas_go_on_where_a_connection_is_cut() -> None:
    plain = LinkCase(dp=2, clip_norm=0.5)
    zero1, fsdp = replace(plain, sharding="zero1"), replace(plain, sharding="fsdp")
    cases = [
        plain,
        replace(plain, cuts=((0, "sending", 12, False),)),
        replace(plain, cuts=((3, "summing", 15, True),)),
        replace(plain, cuts=((2, "summed", 13, True), (1, "summed", 20, False))),
        zero1,
        replace(zero1, cuts=((1, "summing", 14, False),)),
        replace(zero1, cuts=((2, "summed", 16, True),)),
        fsdp,
        replace(fsdp, cuts=((0, "summing", 17, True),)),
        replace(fsdp, cuts=((3, "summed", 14, True),)),
        # One of two has begun a sum of which each gets a part; the other, before it begins, has all leave.
        replace(fsdp, cuts=((3, "summing", 8, False),)),
    ]
    run_and_check(4, cases)


@pytest.mark.slow
def test_bounded_channels_and_late_messages_go_on_where_a_connection_is_cut() -> None:
    direct = LinkCase(transport="direct", depth=1, links="0:1=latency:10ms", clip_norm=0.5, evaluates=True)
    frozen = replace(direct, dispatch="frozen")
    late = LinkCase(links="0:1=latency:10ms")
    cases = [
        direct,
        replace(direct, cuts=((0, "sending", 9, False),)),
        replace(direct, cuts=((1, "receiving", 14, True),)),
        replace(direct, cuts=((0, "step ends", 2, False),)),
        frozen,
        replace(frozen, cuts=((0, "step begins", 3, False),)),
        late,
        replace(late, cuts=((0, "sending", 9, False),)),
        replace(late, cuts=((1, "receiving", 14, True),)),
        replace(late, cuts=((0, "step ends", 2, True),)),
        replace(direct, cuts=((1, "sending", 12, True),)),
    ]
    run_and_check(2, cases)


@pytest.mark.slow
def test_lines_between_devices_are_given_up_where_a_connection_is_cut() -> None:
    """What an aborted line was carrying counts as completed, with nonsense in it, and is not taken."""
    usual = LinkCase(transport="nccl", clip_norm=0.5, evaluates=True)
    frozen, tied = replace(usual, dispatch="frozen"), LinkCase(transport="nccl", tied=True)
    bounded = replace(usual, depth=1, links="0:1=latency:5ms")
    cases = [
        usual,
        replace(usual, cuts=((0, "sending by a line", 7, True),)),
        replace(usual, cuts=((1, "receiving by a line", 9, True),)),
        replace(usual, fails_at=6),
        replace(usual, cuts=((0, "receiving by a line", 5, False),)),
        replace(usual, cuts=((0, "sending", 9, False),)),
        replace(usual, cuts=((0, "step ends", 2, True),)),
        replace(usual, cuts=((1, "summed", 8, True),)),
        replace(usual, fails_at=11, cuts=((0, "summed", 9, True),)),
        frozen,
        replace(frozen, cuts=((1, "sending by a line", 6, True),)),
        replace(frozen, fails_at=7),
        replace(frozen, cuts=((0, "step begins", 3, False),)),
        tied,
        replace(tied, cuts=((0, "receiving by a line", 4, True),)),
        bounded,
        replace(bounded, cuts=((0, "receiving by a line", 8, True),)),
        replace(bounded, fails_at=9),
    ]
    run_and_check(2, cases)


@pytest.mark.slow
def test_replicas_whose_messages_go_by_lines_go_on_where_a_connection_is_cut() -> None:
    usual = LinkCase(transport="nccl", dp=2, sharding="zero1", clip_norm=0.5)
    cases = [
        usual,
        replace(usual, cuts=((0, "receiving by a line", 6, True),)),
        replace(usual, cuts=((3, "summing", 15, True),)),
        replace(usual, cuts=((2, "summed", 13, True), (1, "summed", 20, False))),
    ]
    run_and_check(4, cases)


@pytest.mark.slow
def test_replicas_with_bounded_channels_go_on_where_a_connection_is_cut() -> None:
    direct = LinkCase(transport="direct", depth=1, dp=2, sharding="zero1", links="0:2=latency:5ms")
    cases = [
        direct,
        replace(direct, cuts=((0, "sending", 12, False),)),
        replace(direct, cuts=((2, "summed", 13, True), (1, "summed", 20, False))),
    ]
    run_and_check(4, cases)


def spare_interface_dies(rank: int, transport: str) -> tuple[list[float], int, list[str]]:
    """gloo goes by the last interface; by the first one delegates and, perhaps, lines between devices."""
    os.environ["PENSTOCK_INTERFACES"] = INTERFACES
    torch.manual_seed(1)
    stages: list[torch.nn.Module] = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    with (
        lines_over_gloo(rank, LinkCase(transport=transport)),
        ps.Pipeline(
            stages,
            ps.build("1f1b", 2, 2),
            loss_fn=torch.nn.MSELoss(),
            optimizer=torch.optim.SGD,
            transport=transport,
            timeout=TIMEOUT,
        ) as pipe,
    ):
        x, failover = torch.ones(4, 4), pipe._local.failover
        assert failover is not None
        losses = [float(pipe.step(x, x[:, :1]).loss)]
        if rank == 0:
            with failover._beats._lock:
                failover._beats._down.add((1, 0))
            failover._look()
        if transport == "nccl":
            # An interface died by which lines may go.
            wait_until(lambda: failover.number, lambda: f"nothing changed: {pipe.notices}")
        losses += [float(pipe.step(x, x[:, :1]).loss) for _ in range(2)]
        return losses, failover.number, pipe.notices


def test_an_interface_by_which_lines_between_devices_may_go_dies() -> None:
    """It carries no sums: where messages go by gloo, nothing changes."""
    usual = run_ranks(2, spare_interface_dies, "gloo")
    outcomes = run_ranks(2, spare_interface_dies, "nccl")
    texts = "\n".join(o.text for o in (*usual, *outcomes))
    assert [o.code for o in (*usual, *outcomes)] == [0] * 4, texts
    for before, after in zip(usual, outcomes, strict=True):
        assert before.value[0] == after.value[0]
        assert before.value[1:] == (0, [])
        assert after.value[1] >= 1
        assert any("messages by delegates: nothing was lost" in notice for notice in after.value[2])
    said = next(notice for notice in outcomes[0].value[2] if "nothing was lost" in notice)
    assert "interface 127.0.0.3, by which NCCL may go, reaches not everyone any more" in said


def moves_by_itself(rank: int) -> tuple[list[float], str]:
    """Nodes of a pipeline that change places by what `adapt` decided."""
    os.environ["PENSTOCK_INTERFACES"] = INTERFACES
    torch.manual_seed(1)
    pipe = ps.Pipeline(
        [torch.nn.Linear(4, 1)],
        ps.build("1f1b", 1, 2),
        loss_fn=torch.nn.MSELoss(),
        optimizer=torch.optim.SGD,
        mesh=ps.runtime.device_mesh(ps.Mesh(pp=1, dp=2)),
    )
    x, failover = torch.ones(4, 4), pipe._local.failover
    assert failover is not None
    losses = [float(pipe.step(x, x[:, :1]).loss)]
    if rank == 1:
        failover.lost(0, ps.runtime.PeerLost("the test says so"))
    with pytest.raises(ps.runtime.RuntimeFailure) as caught:
        pipe._move(replace(pipe.configuration, nodes=(1, 0)))
    losses.append(float(pipe.step(x, x[:, :1]).loss))
    pipe.close()
    return losses, str(caught.value)


def test_nodes_of_one_pipeline_stay_where_they_are_after_an_interface_was_lost() -> None:
    outcomes = run_ranks(2, moves_by_itself)
    assert [o.code for o in outcomes] == [0, 0], outcomes[0].text + outcomes[1].text
    (losses, refused), other = (o.value for o in outcomes)
    assert (losses, refused) == other
    assert losses[0] > losses[1]
    assert "nodes can't change places any more" in refused


def killed(rank: int, folder: str) -> str:
    os.environ["PENSTOCK_INTERFACES"] = INTERFACES
    stages: list[torch.nn.Module] = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    pipe: Any = ps.Pipeline(
        stages, ps.build("1f1b", 2, 2), loss_fn=torch.nn.MSELoss(), optimizer=torch.optim.SGD, transport="gloo"
    )
    x = torch.ones(4, 4)
    pipe.step(x, x[:, :1])
    if rank == 1:
        Path(folder, "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    appears(Path(folder, "killed"))
    try:
        pipe.step(x, x[:, :1])
    except ps.runtime.PeerLost as error:
        return str(error)
    return "no error"


def test_a_rank_that_has_ended_is_no_link_that_failed(tmp_path: Path) -> None:
    outcomes = run_ranks(2, killed, str(tmp_path))
    said = outcomes[0].value
    assert said is not None, outcomes[0].text
    assert "rank 1, whose process has ended" in said
