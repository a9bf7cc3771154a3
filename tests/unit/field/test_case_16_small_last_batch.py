"""A last batch with fewer samples than the schedule has microbatches: a step runs fewer, as an evaluation does."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from plain_loop import differences, gradients, plain_evaluate, plain_step
from tiers import others_nightly

pytestmark = pytest.mark.unit

MSE = nn.MSELoss()
NAMES = [
    *("gpipe", "1f1b", "zb-h1", "zb", "zb-v", "v-half", "interleaved-1f1b", "looped-bfs", "dualpipe-v", "mllm"),
    *("chimera", "dualpipe"),
]


def model(num_stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(2 * num_stages)))


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
@pytest.mark.parametrize("name", others_nightly(NAMES, ["1f1b", "zb-v", "chimera"]))
def test_gradients_are_those_of_the_plain_loop_over_fewer_microbatches(name: str, dispatch: str) -> None:
    schedule = ps.build(name, 2, 4)
    whole = model(schedule.num_stages)
    pipelines = schedule.placement.num_pipelines
    with ps.Pipeline(copy.deepcopy(whole), schedule, loss_fn=MSE, dispatch=dispatch) as pipe:
        for size in (9, 3, 2, 1, 4):
            x, y = torch.randn(size, 8), torch.randn(size, 8)
            plain, num = copy.deepcopy(whole), min(4, size)
            loss = plain_step(plain, x, y, num, MSE, step=pipe.num_steps + 1)
            result = pipe.step(x, y, update=False)
            got = {key: p.grad for key, p in pipe.named_parameters()}
            assert torch.equal(result.loss, loss)
            assert len(result.losses) == num
            if pipelines == 1 or num < 3:  # else the sum of gradients is grouped by pipeline
                assert differences(gradients(plain), got) == []
            else:
                for key, gradient in gradients(plain).items():
                    torch.testing.assert_close(got[key], gradient)
            assert pipe.timeline().makespan > 0
            assert torch.equal(pipe.evaluate(x, y).loss, plain_evaluate(whole, x, y, num, MSE))
            pipe.zero_grad()


def test_an_epoch_with_a_small_last_batch_trains_as_the_plain_loop() -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(19, 8), torch.randn(19, 8)), 8)
    whole = model(2)
    plain = copy.deepcopy(whole)
    optimizer = torch.optim.AdamW(plain.parameters())
    with ps.Pipeline(whole, ps.build("zb-h1", 2, 4), loss_fn=MSE, optimizer=torch.optim.AdamW) as pipe:
        for step, (x, y) in enumerate([*data, *data], start=1):
            pipe.step(x, y)
            plain_step(plain, x, y, min(4, len(x)), MSE, step=step)
            optimizer.step()
            optimizer.zero_grad()
        assert pipe.num_updates == 6
    assert all(map(torch.equal, whole.parameters(), plain.parameters()))


def test_lists_of_fewer_microbatches_on_both_sides() -> None:
    whole = model(2)
    x = [torch.randn(n, 8) for n in (3, 1)]
    with ps.Pipeline(copy.deepcopy(whole), ps.build("1f1b", 2, 4), loss_fn=MSE) as pipe:
        loss = pipe.step(x, x, update=False).loss
        assert torch.equal(loss, plain_step(whole, x, x, 2, MSE))
        with pytest.raises(ps.RuntimeFailure, match="2 inputs given as a list, the schedule runs 4 microbatches"):
            pipe.step(x, torch.cat(x))


def test_a_run_that_adapts_leaves_such_a_step_out_of_what_it_measures() -> None:
    with ps.Pipeline(
        model(2), ps.build("1f1b", 2, 4), loss_fn=MSE, optimizer=torch.optim.SGD, adapt=ps.AdaptOptions()
    ) as pipe:
        for size in (8, 8, 2, 8, 3, 8):
            x = torch.randn(size, 8)
            assert len(pipe.step(x, x).losses) == min(4, size)


@pytest.mark.parametrize(
    "schedule",
    [partial(ps.build, "pipedream", 2, 4, window=1), lambda: ps.passes.add_reductions(ps.build("1f1b", 2, 4))],
)
def test_schedules_that_always_run_all_their_microbatches_say_why(schedule: Any) -> None:
    made = schedule()
    ops: Any = {"REDUCE": lambda call: None} if made.graph.registered else None
    with ps.Pipeline(model(2), made, loss_fn=MSE, optimizer=torch.optim.SGD, ops=ops) as pipe:
        x = torch.randn(3, 8)
        why = f"{made.name} has .* updates or other ops that were placed for all its microbatches"
        with pytest.raises(
            ps.RuntimeFailure, match=rf"3 samples can't be cut into 4 microbatches, nor into fewer: {why}.*drop_last"
        ):
            pipe.step(x, x)
        pipe.step(*[torch.randn(4, 8)] * 2)
