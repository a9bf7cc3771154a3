"""State from one pipeline to another: who sends what, and that nothing is lost on the way."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.runtime import RuntimeFailure
from penstock.runtime.checkpoint.state_transfer import sendings

pytestmark = pytest.mark.unit

NAMES = [f"model/{number}" for number in range(5)]
KIND = ((2, 3), torch.float32)
names = st.lists(st.sampled_from(NAMES), unique=True)


@given(st.lists(st.tuples(names, names), min_size=1, max_size=6))
def test_everyone_gets_what_it_lacks_once_from_one_who_has_it(processes: list[tuple[list[str], list[str]]]) -> None:
    kinds, wants = [dict.fromkeys(held, KIND) for held, _ in processes], [wanted for _, wanted in processes]
    anywhere = {name for held in kinds for name in held}
    if lost := {name for wanted in wants for name in wanted} - anywhere:
        with pytest.raises(RuntimeFailure, match="which no process holds") as failure:
            sendings(kinds, wants)
        assert any(name in str(failure.value) for name in lost)
        return
    plan = sendings(kinds, wants)
    assert all(name in kinds[source] for name, source, _ in plan)
    for process, (held, wanted) in enumerate(processes):
        assert sorted(name for name, _, target in plan if target == process) == sorted(set(wanted) - set(held))


def test_those_who_hold_the_same_share_the_sending() -> None:
    holds = dict.fromkeys(NAMES[:4], KIND)
    plan = sendings([holds, {}, holds], [[], NAMES[:4], []])
    assert [source for _, source, _ in plan] == [0, 2, 0, 2]


def test_a_pipeline_goes_on_where_another_was_under_another_schedule() -> None:
    torch.manual_seed(1)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)])
    x, y = torch.randn(8, 8), torch.randn(8, 8)

    def made(name: str, num_ranks: int, seed: int = 0) -> ps.Pipeline:
        schedule = ps.build(name, num_ranks, 4)
        model = copy.deepcopy(layers)
        return ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW, seed=seed)

    stays, goes = made("1f1b", 4), made("1f1b", 4)
    for pipe in (stays, goes):
        pipe.step(x, y)
        pipe.step(x, y, update=False)
    then = made("zb-h1", 2, seed=5)
    assert goes.hand_over(then) == 0, "nothing leaves the process"
    goes.close()
    for _ in range(2):
        assert torch.equal(stays.step(x, y).loss, then.step(x, y).loss)
    expected = dict(stays.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in then.named_parameters())
    assert (then.num_steps, then.num_updates) == (4, 3)


class AlwaysDrops(nn.Linear):
    """Drops out in evaluation mode too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, training=True)


def test_evaluations_drew_other_numbers_after_a_hand_over_and_a_closed_pipeline_took_all() -> None:
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    goes, then = (ps.Pipeline([AlwaysDrops(8, 8)], ps.build("1f1b", 1, 4), loss_fn=nn.MSELoss()) for _ in range(2))
    goes.evaluate(x, y)
    for _ in range(2):
        then.evaluate(x, y)
    goes.hand_over(then)
    assert torch.equal(goes.evaluate(x, y).loss, then.evaluate(x, y).loss)
    then.close()
    with pytest.raises(RuntimeFailure, match="this pipeline was closed"):
        goes.hand_over(then)


def test_a_pipeline_of_another_model_takes_nothing() -> None:
    def made(width: int) -> ps.Pipeline:
        return ps.Pipeline([nn.Linear(8, width)], ps.build("1f1b", 1, 2), optimizer=torch.optim.SGD)

    with pytest.raises(RuntimeFailure, match="the pipeline before is of another model"):
        made(8).hand_over(made(4))
