"""What a pipeline leaves behind: nothing, whether it was closed, or could not be made."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from packed import packed
from penstock.control import Configuration
from penstock.runtime import RuntimeFailure
from penstock.runtime.lifetime import Lifetime
from runtime_cases import batches, language_model, lin

pytestmark = pytest.mark.unit

MSE = nn.MSELoss()


def traces(modules: Any) -> list[Any]:
    """What of modules a pipeline may change."""
    return [
        (sorted(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks), m.training)
        for module in modules
        for m in module.modules()
    ] + [
        (id(p), p.grad is None, len(p._post_accumulate_grad_hooks or ()), len(p._backward_hooks or ()))
        for module in modules
        for p in module.parameters()
    ]


def fails(parameters: Any) -> torch.optim.Optimizer:
    raise ValueError("no optimizer today")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": fails}, "no optimizer today"),
        ({"tied": [("0.nothing", "1.nothing")]}, "is in no stage"),
        ({"steering": ps.AdaptOptions(store="redis://127.0.0.1:1/0")}, "."),
        ({"dispatch": "dynamics"}, "dispatch"),
    ],
    ids=["optimizer", "tied", "steering", "dispatch"],
)
def test_a_pipeline_that_can_not_be_made_leaves_nothing_behind(options: dict[str, Any], said: str) -> None:
    model = language_model(4, tied=(0, 3))
    given = torch.optim.SGD(nn.ModuleList(model).parameters(), lr=0.1)
    groups = [[id(p) for p in group["params"]] for group in given.param_groups]
    before = traces(model)
    with pytest.raises(Exception, match=said):
        ps.Pipeline(model, ps.build("zb-h1", 4, 4), loss_fn=MSE, **packed(**{"optimizer": given, **options}))
    assert traces(model) == before
    assert [[id(p) for p in group["params"]] for group in given.param_groups] == groups


def test_a_pipeline_is_a_context_manager() -> None:
    model = [lin(), lin()]
    before = traces(model)
    x, y = batches(4, 8)[0]
    with ps.Pipeline(model, ps.build("zb-h1", 2, 4), loss_fn=MSE, optimizer=torch.optim.SGD) as pipe:
        pipe.step(x, y)
    assert traces(model) == before
    with pytest.raises(ValueError, match="mine"), ps.Pipeline(model, ps.build("zb-h1", 2, 4), loss_fn=MSE):
        raise ValueError("mine")
    assert traces(model) == before


def test_a_closed_pipeline_says_so(tmp_path: Any) -> None:
    pipe = ps.Pipeline([lin(), lin()], ps.build("1f1b", 2, 4), loss_fn=MSE, optimizer=torch.optim.SGD)
    other = ps.Pipeline([lin(), lin()], ps.build("1f1b", 2, 4), loss_fn=MSE, optimizer=torch.optim.SGD)
    x, y = batches(4, 8)[0]
    pipe.step(x, y)
    pipe.close()
    pipe.close()
    for call in (
        partial(pipe.step, x, y),
        partial(pipe.evaluate, x, y),
        partial(pipe.predict, x),
        pipe.update,
        partial(pipe.save, tmp_path),
        partial(pipe.load, tmp_path),
        partial(pipe.hand_over, other),
        partial(pipe.reconfigure, Configuration(ps.build("zb-h1", 2, 4), "frozen", caps=(9.0, 9.0))),
    ):
        with pytest.raises(RuntimeFailure, match=r"this pipeline was closed; make a new one"):
            call()
    assert pipe.timeline().source == "measured"
    again = ps.Pipeline(copy.deepcopy(list(pipe._local.model.stages.values())), ps.build("1f1b", 2, 4), loss_fn=MSE)
    again.step(x, y, update=False)


def test_a_step_that_broke_off_among_updates_asks_for_a_checkpoint_until_one_is_loaded(tmp_path: Any) -> None:
    x, y = batches(4, 8)[0]
    fails = False

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if fails:
            raise KeyError("no loss today")
        return MSE(output, target)

    schedule = ps.build("pipedream", 2, 4, window=2)
    with ps.Pipeline([lin(), lin()], schedule, loss_fn=loss, optimizer=torch.optim.SGD) as pipe:
        pipe.step(x, y)
        pipe.save(tmp_path)
        fails = True
        with pytest.raises(Exception, match="no loss today"):
            pipe.step(x, y)
        fails = False
        for call in (partial(pipe.step, x, y), partial(pipe.evaluate, x, y), partial(pipe.save, tmp_path)):
            with pytest.raises(RuntimeFailure, match=r"an earlier step broke off \(.*no loss today.*\) when some"):
                call()
        pipe.zero_grad()
        pipe.load(tmp_path)
        pipe.step(x, y)


def test_a_broken_pipeline_stays_broken_when_it_is_closed() -> None:
    life = Lifetime()
    with pytest.raises(ValueError, match="no"), life.sharing("step 3", 2):
        raise ValueError("no\nand more")
    for _ in range(2):
        with pytest.raises(
            RuntimeFailure, match=r"this pipeline is broken: step 3 ended on rank 2 with ValueError: no\."
        ):
            life.require_open()
        life.close()


def test_an_optimizer_had_the_parameters_of_a_pipeline_that_could_not_be_made() -> None:
    model = [lin(), lin()]
    given = torch.optim.AdamW(nn.ModuleList(model).parameters())
    groups = [[id(p) for p in group["params"]] for group in given.param_groups]
    with pytest.raises(RuntimeFailure, match="no formula for AdamW"):
        ps.Pipeline(model, ps.build("spectrain", 2, 4, window=1), loss_fn=MSE, optimizer=given)
    assert [[id(p) for p in group["params"]] for group in given.param_groups] == groups
    x, y = batches(4, 8)[0]
    with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=MSE, optimizer=given) as pipe:
        assert pipe.step(x, y).loss > pipe.step(x, y).loss
