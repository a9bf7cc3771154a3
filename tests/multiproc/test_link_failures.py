"""gloo's connections cut in the middle of steps, which are then repeated over another interface.

Losses and parameters are bitwise those of a run whose connections stood.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from link_runs import INTERFACES, TIMEOUT, LinkCase, cutting, lines_over_gloo, trainings
from penstock.runtime.mesh.probe import LEAST_EVERY
from penstock.runtime.node_moves import probes_of
from processes import Outcome, appears, run_ranks, run_ranks_to_end
from tiers import NIGHTLY
from waiting import wait_until

pytestmark = pytest.mark.multiproc


CALLS = {
    "sending": 16, "receiving": 16, "step begins": 4, "step ends": 4, "telling": 19, "summing": 5, "summed": 5,
    "sharing": 10, "sending by a line": 8, "receiving by a line": 8,
}  # fmt: skip
"""How often each is called in a training at the least, where it is called at all."""


def run_and_check(num_ranks: int, usual: Sequence[LinkCase], *points: str) -> None:
    """Each case without a cut, then with cuts at random calls of some points and ranks: 40 at night, else 3."""
    chance = random.Random(f"{points} {usual}")
    cases = list(usual)
    for number in range(40 if NIGHTLY else 3):
        several = range(2 if number % 3 == 2 else 1)
        cuts = [(chance.randrange(num_ranks), point, chance.randrange(CALLS[point]) + 1, chance.random() < 0.5)
                for point in (chance.choice(points) for _ in several)]  # fmt: skip
        cases.append(replace(usual[number % len(usual)], cuts=tuple(cuts)))
    check(cases, run_ranks(num_ranks, trainings, cases))


def check(cases: Sequence[LinkCase], outcomes: Sequence[Outcome]) -> None:
    """Of the cuts, those in the last step may have come to nothing."""
    for outcome in outcomes:
        assert outcome.value is not None, "\n".join(each.text for each in outcomes)
        num_changed = 0
        for case, told in zip(cases, outcome.value, strict=True):
            usual = outcome.value[cases.index(case.uncut)]
            assert torch.equal(told["losses"], usual["losses"]), case
            assert all(map(torch.equal, told["state"], usual["state"])), case
            if case.fails_at is None:
                assert told["repeats"] <= len(case.cuts), case
            num_changed += told["number"] >= 1
            assert case != case.uncut or told["number"] == 0, case
            assert told["number"] >= 1 or not any("nothing was lost" in one for one in told["notices"]), case
        if cases[0].transport == "delegate" and cases[0].dp == 1:  # nothing waits for the groups that are left
            assert not any(told["repeats"] for told in outcome.value)
        else:
            assert num_changed >= sum(case != case.uncut for case in cases) / 2


@pytest.mark.slow
def test_a_pipeline_goes_on_where_a_connection_is_cut() -> None:
    dynamic = LinkCase(clip_norm=0.5, evaluates=True)
    usual = [dynamic, replace(dynamic, dispatch="frozen"), replace(dynamic, batch_norm=True, accumulates=True)]
    run_and_check(2, usual, "sending", "receiving", "step begins", "step ends", "telling")


@pytest.mark.slow
def test_stages_that_share_a_parameter_go_on_where_a_connection_is_cut() -> None:
    run_and_check(2, [LinkCase(tied=True)], "sharing", "sending", "telling")


@pytest.mark.slow
def test_delegates_go_on_where_a_connection_is_cut() -> None:
    """Messages and what is small go by other ways: nothing is repeated."""
    run_and_check(2, [LinkCase(transport="delegate", clip_norm=0.5)], "telling")


@pytest.mark.slow
def test_replicas_go_on_where_a_connection_is_cut() -> None:
    plain = LinkCase(dp=2, clip_norm=0.5)
    usual = [plain, replace(plain, sharding="zero1"), replace(plain, sharding="fsdp")]
    # In another order the last step is cut. A rank that then wants new groups waits 25 s for gloo in vain.
    run_and_check(4, usual, "summing", "telling", "sending", "summed")


@pytest.mark.slow
def test_replicas_by_delegates_repeat_a_step_in_which_a_sum_is_cut() -> None:
    """Messages of the attempt that was given up are not taken for those of the next."""
    run_and_check(4, [LinkCase(dp=2, transport="delegate")], "summing", "summed")


@pytest.mark.slow
def test_bounded_channels_and_late_messages_go_on_where_a_connection_is_cut() -> None:
    direct = LinkCase(transport="direct", depth=1, links="0:1=latency:10ms", clip_norm=0.5, evaluates=True)
    usual = [direct, replace(direct, dispatch="frozen"), LinkCase(links="0:1=latency:10ms")]
    run_and_check(2, usual, "sending", "receiving", "step ends")


@pytest.mark.slow
def test_lines_between_devices_are_given_up_where_a_connection_is_cut() -> None:
    """What an aborted line was carrying counts as completed, with nonsense in it, and is not taken."""
    usual = LinkCase(transport="nccl", clip_norm=0.5, evaluates=True)
    points = "sending by a line", "receiving by a line", "sending", "step begins", "step ends"
    run_and_check(2, [usual, replace(usual, dispatch="frozen"), LinkCase(transport="nccl", tied=True)], *points)
    bounded = replace(usual, depth=1, links="0:1=latency:5ms")
    fails = [replace(usual, fails_at=6), replace(usual, dispatch="frozen", fails_at=7), replace(bounded, fails_at=9)]
    cases = [each for one in fails for each in (one.uncut, one)]
    check(cases, run_ranks(2, trainings, cases))


@pytest.mark.slow
def test_replicas_whose_messages_go_by_lines_go_on_where_a_connection_is_cut() -> None:
    usual = LinkCase(transport="nccl", dp=2, sharding="zero1", clip_norm=0.5)
    run_and_check(4, [usual], "receiving by a line", "summing", "summed")


@pytest.mark.slow
def test_replicas_with_bounded_channels_go_on_where_a_connection_is_cut() -> None:
    direct = LinkCase(transport="direct", depth=1, dp=2, sharding="zero1", links="0:2=latency:5ms")
    run_and_check(4, [direct], "sending", "summed")


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
        x, failover = torch.ones(4, 4), pipe._local.attempts.failover
        losses = [float(pipe.step(x, x[:, :1]).loss)]
        if rank == 0:
            with failover.beats._lock:
                failover.beats._down.add((1, 0))
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
        assert any("nothing was lost" in notice for notice in after.value[2])
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
    x, failover = torch.ones(4, 4), pipe._local.attempts.failover
    losses = [float(pipe.step(x, x[:, :1]).loss)]
    if rank == 1:
        failover.want(1, "the test says so")
        failover.await_newest()
    with pytest.raises(ps.runtime.RuntimeFailure) as caught:
        pipe._move(replace(pipe.configuration, nodes=(1, 0)))
    losses.append(float(pipe.step(x, x[:, :1]).loss))
    pipe.close()
    return losses, str(caught.value)


def test_nodes_of_one_pipeline_stay_where_they_are_after_an_interface_was_lost() -> None:
    outcomes = run_ranks_to_end(2, moves_by_itself)
    (losses, refused), other = (o.value for o in outcomes)
    assert (losses, refused) == other
    assert losses[0] > losses[1]
    assert "nodes can't change places any more" in refused


def probes(rank: int, cuts: list[tuple[int, str, int, bool]]) -> tuple[set[int], int, list[tuple[int, int]]]:
    """Links between nodes that are probed after the fifth step, while connections break."""
    os.environ["PENSTOCK_INTERFACES"] = INTERFACES
    torch.manual_seed(1)
    with ps.Pipeline(
        [torch.nn.Linear(4, 1)],
        ps.build("1f1b", 1, 2),
        loss_fn=torch.nn.MSELoss(),
        optimizer=torch.optim.SGD,
        mesh=ps.runtime.device_mesh(ps.Mesh(pp=1, dp=2)),
        timeout=TIMEOUT,
    ) as pipe:
        x, after_step, found = torch.ones(4, 4), probes_of(lambda: pipe._local, pipe._given), []
        for step in range(1, LEAST_EVERY + 1):
            pipe.step(x, x[:, :1])
            with cutting(rank, pipe, cuts if step == LEAST_EVERY else []):
                found.append(after_step(False))
        pipe.step(x, x[:, :1])
        due = {step for step, each in enumerate(found, 1) if each is not None}
        return due, pipe._local.attempts.failover.number, sorted(found[-1] or {})


@pytest.mark.parametrize("cut", [(0, "sharing", 2, False), (1, "sharing", 3, True), (1, "summing", 1, False)])
def test_links_between_nodes_are_probed_again_where_a_connection_breaks_meanwhile(
    cut: tuple[int, str, int, bool],
) -> None:
    """Once the probes went by torch's own group, which does not outlive the loss of its interface."""
    for outcome in run_ranks(2, probes, [cut]):
        assert outcome.value == ({LEAST_EVERY}, 1, [(0, 1)]), outcome.text


def updates_in_its_order(rank: int) -> tuple[str, str]:
    """A step whose updates are ops, in which a link is lost; and what the next step says."""
    os.environ["PENSTOCK_INTERFACES"] = INTERFACES
    stages: list[torch.nn.Module] = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    schedule = ps.build("pipedream", 2, 4, window=1)
    assert schedule.updates is not None
    x, said = torch.ones(8, 4), []
    with ps.Pipeline(
        stages, schedule, loss_fn=torch.nn.MSELoss(), optimizer=torch.optim.SGD, transport="gloo", timeout=TIMEOUT
    ) as pipe:
        pipe.step(x, x[:, :1])
        with cutting(rank, pipe, [(1, "receiving", 2, False)]):
            for _ in range(2):
                with pytest.raises(ps.RuntimeFailure) as caught:
                    pipe.step(x, x[:, :1])
                said.append(str(caught.value))
    return said[0], said[1]


def test_a_step_whose_updates_are_ops_goes_on_from_a_checkpoint() -> None:
    outcomes = run_ranks_to_end(2, updates_in_its_order)
    for first, second in (o.value for o in outcomes):
        assert "lost a link in the step, and it can't be repeated; go on from the newest checkpoint" in first
        assert "go on from a checkpoint with load(...)" in second


def killed(rank: int, folder: str) -> str:
    os.environ["PENSTOCK_INTERFACES"] = INTERFACES
    stages: list[torch.nn.Module] = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    pipe: Any = ps.Pipeline(
        stages, ps.build("1f1b", 2, 2), loss_fn=torch.nn.MSELoss(), optimizer=torch.optim.SGD, transport="gloo"
    )
    x = torch.ones(4, 4)
    pipe.step(x, x[:, :1])
    if rank == 1:
        appears(Path(folder, "stepped"))  # else what this rank told last of the step may still be on its way
        Path(folder, "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    Path(folder, "stepped").touch()
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
