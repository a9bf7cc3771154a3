"""When something goes wrong on one rank, every rank ends soon, and says who and what."""

from __future__ import annotations

import os
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from packed import packed
from penstock.runtime import RuntimeFailure
from processes import Outcome, appears, run_ranks, run_ranks_to_end
from tied_updates_loop import with_rule
from tiers import others_nightly
from waiting import PATIENCE, shorten

pytestmark = pytest.mark.multiproc


def pipeline(name: str = "1f1b", dispatch: str = "frozen", timeout: float = PATIENCE, **options: Any) -> ps.Pipeline:
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    return ps.Pipeline(
        model, ps.build(name, 4, 4), loss_fn=nn.MSELoss(), dispatch=dispatch, timeout=timeout, **packed(**options)
    )


def made(loss_fn: Any = nn.functional.mse_loss, optimizer: Any = None) -> ps.Pipeline:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return ps.Pipeline(layers, ps.build("1f1b", 4, 4), loss_fn=loss_fn, optimizer=optimizer, timeout=PATIENCE)


def named_apart(x: torch.Tensor) -> Any:
    """What can't be pickled: of a class that no module has."""
    kind: Any = namedtuple("Scores", "low high")
    kind.__qualname__ = "named_apart.<locals>.Scores"
    return kind(x, 2 * x)


class GivesNamed(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return named_apart(super().forward(x))


def shares_what_cannot_be_pickled(rank: int) -> tuple[Any, str]:
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4), GivesNamed(4, 4)]
    pipe = ps.Pipeline(stages, ps.build("1f1b", 2, 4), timeout=PATIENCE)
    x = torch.ones(8, 4)
    low, high = pipe.predict(x)[3]
    expected = stages[1](stages[0](x[6:])).low
    with pytest.raises(RuntimeFailure) as refused:
        pipe.gather((lambda: rank) if rank else rank)
    assert pipe.gather(rank) == [0, 1]
    return torch.equal(low, expected) and torch.equal(high, 2 * expected), str(refused.value)


def test_what_cannot_be_pickled_ended_one_process_and_left_the_others_waiting() -> None:
    first, second = run_ranks_to_end(2, shares_what_cannot_be_pickled)
    assert first.value == second.value
    assert first.value[0]
    assert first.value[1].startswith("rank 1 shares a value that can't be sent (AttributeError: Can't pickle")


class GivesUnknown(nn.Linear):
    """Its output can't be taken apart, but in training."""

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        return found if self.training else {1: found}


class TiedLoss(nn.Module):
    """A loss that a parameter of another module is part of."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output @ self.weight, target)


def refused_on_all(rank: int) -> list[str]:
    """What processes say where one can't give its outputs, and where its loss has a parameter of the other's."""
    torch.manual_seed(0)
    stages, x, said = [nn.Linear(4, 4), GivesUnknown(4, 4)], torch.ones(8, 4), []
    schedule = ps.build("1f1b", 2, 4)
    pipe = ps.Pipeline(stages, schedule, loss_fn=nn.MSELoss(), timeout=PATIENCE)
    loss = TiedLoss(stages[0].weight)
    for call in (lambda: pipe.predict(x), lambda: ps.Pipeline(stages, schedule, loss_fn=loss, timeout=PATIENCE)):
        try:
            call()
            said.append("nothing")
        except RuntimeFailure as error:
            said.append(str(error))
    assert not any(runner.results for runner in pipe._local.devices.ends), "outputs are let go of"
    pipe.step(x, x, update=False)
    loss.requires_grad_(False)
    ps.Pipeline(stages, schedule, loss_fn=loss, timeout=PATIENCE).close()
    return said


def test_others_waited_for_outputs_that_can_t_be_given_and_a_loss_of_another_stage_was_wrong() -> None:
    first, second = run_ranks_to_end(2, refused_on_all)
    assert first.value[0].startswith("rank 1 could not give its outputs: a value of type dict")
    assert second.value[0].startswith("a value of type dict")
    assert first.value[1].startswith("rank 1 could not use its loss_fn: ")
    assert second.value[1].startswith(
        "loss_fn (TiedLoss) has 1 parameters that are not in stage 1, where the loss is"
    )


def other_types(rank: int, changed: int) -> str:
    """One rank's model gets another type between two steps."""
    torch.manual_seed(0)
    model = [nn.Embedding(8, 4), nn.Linear(4, 4)]
    pipe = ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss(), timeout=PATIENCE)
    x, y = torch.arange(8), torch.randn(8, 4)
    pipe.step(x, y)
    if rank == changed:
        model[rank].double()
    try:
        pipe.step(x, y)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{getattr(error, '__notes__', '')}"
    return "a step with other types"


@pytest.mark.parametrize("changed", [0, 1])
def test_a_rank_whose_model_has_another_type_was_told_by_torch_alone(changed: int) -> None:
    """And the others waited for it until their deadline, or until its process ended."""
    first, second = run_ranks_to_end(2, other_types, changed)
    assert second.value.startswith("RuntimeError")
    assert f"stage 1 was given {'float64' if changed == 0 else 'float32'} [2, 4] as microbatch 0" in second.value
    assert first.value.startswith("PeerFailed: rank 1 could not do its part of the step: ")


class FailsOnLast(torch.optim.SGD):
    """Its second step fails on the last rank, as one that finds no memory for its state does."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls == 2 and torch.distributed.get_rank() == 1:
            raise ValueError("no memory for this")
        super().step(closure)


def goes_on_after_a_failed_update(rank: int, apart: bool) -> list[str]:
    """What each of three steps says."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    schedule = ps.build("1f1b", 2, 4)
    pipe = ps.Pipeline(layers, schedule, loss_fn=nn.MSELoss(), optimizer=FailsOnLast, timeout=PATIENCE)
    x, said = torch.randn(8, 4), []
    for _ in range(3):
        try:
            pipe.step(x, x, update=not apart)
            if apart:
                pipe.update()
            said.append("stepped")
        except (ValueError, RuntimeFailure) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("apart", [False, True])
def test_an_update_that_failed_on_one_rank_was_made_on_the_others_and_training_went_on(apart: bool) -> None:
    first, second = run_ranks_to_end(2, goes_on_after_a_failed_update, apart)
    assert first.value[:2] == ["stepped", "stepped"]
    assert "rank 0" in first.value[2]  # which waited for the other one
    stepped, failed, then = second.value
    assert (stepped, failed) == ("stepped", "no memory for this")
    doing = "an update" if apart else "the update of step 2"
    assert f"{doing} ended on rank 1 with ValueError: no memory for this. What" in then


class Raises(nn.Module):
    """Works until its third call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("the third call is too much")
        return x


def raises_in_rank_2(rank: int, dispatch: str) -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), Raises(), nn.Linear(4, 4)]
    pipe = pipeline(model=layers, dispatch=dispatch)
    x = torch.randn(8, 4)
    pipe.step(x, x)


def goes_on_after_an_exception(rank: int) -> list[str]:
    """Rank 2's layer raises where that ends the step at once, and every rank catches what it gets and calls on."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), Raises(), nn.Linear(4, 4)]
    pipe = pipeline(model=layers, adapt=ps.AdaptOptions())
    x, told = torch.randn(8, 4), []
    for call in (pipe.step, pipe.step, pipe.evaluate):
        try:
            call(x, x)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    pipe.close()
    return told


def test_calls_after_an_exception_say_that_the_pipeline_is_broken() -> None:
    """They waited for messages of the step that had failed, and told of a mix-up."""
    outcomes = run_ranks_to_end(4, goes_on_after_an_exception)
    for outcome in outcomes:
        first, *later = outcome.value
        for text in later:
            assert text.startswith("RuntimeFailure: this pipeline is broken: step 1 ended on rank"), text
            assert "load a checkpoint" in text
            assert first.split(":")[0] in text, (first, text)
    assert "ended on rank 2 with ValueError: the third call is too much" in outcomes[2].value[1]


def lacks_what_is_predicted(rank: int) -> list[str]:
    """Optimizers over part of a model, and a step of the one that lacks nothing of which ops read predictions."""
    told = []
    x = torch.randn(8, 4)
    for name, rule, left_out in (
        ("spectrain", "spectrain", "0."),
        ("pipedream", "xpipe", "0.bias"),
        ("amdp", "xpipe", "0.w"),
        ("pipedream", "xpipe", "1."),
    ):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        kept = [p for each, p in model.named_parameters() if not each.startswith(left_out)]
        kind = torch.optim.Adam if rule == "xpipe" else partial(torch.optim.SGD, momentum=0.9)
        optimizer = kind(kept, lr=0.01)
        schedule = with_rule(ps.build(name, 2, 8, window=1 if name != "amdp" else 2), rule)
        try:
            with ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), optimizer=optimizer, timeout=PATIENCE) as pipe:
                pipe.step(x, x)
            told.append("")
        except RuntimeFailure as error:
            told.append(str(error))
    return told


@pytest.mark.slow
def test_others_waited_for_a_rank_whose_optimizer_lacks_what_is_predicted() -> None:
    """It found out in its first step, which others began, too."""
    outcomes = run_ranks_to_end(2, lacks_what_is_predicted)
    for outcome in outcomes:
        *lacking, of_last = outcome.value
        assert all("predicts weights of stage 0 that the optimizer does not have" in said for said in lacking)
        assert not of_last, "the last stage of this order reads its newest weights"


def dies_in_rank_1(rank: int, dispatch: str) -> None:
    pipe = pipeline(dispatch=dispatch)
    x = torch.randn(8, 4)
    pipe.step(x, x)
    if rank == 1:
        os._exit(9)
    pipe.step(x, x)


def stands_still_in_rank_1(rank: int, dispatch: str, folder: Path) -> None:
    """Until rank 0, which needs something from it, has given up."""
    pipe = pipeline(dispatch=dispatch)
    x = torch.randn(8, 4)
    pipe.step(x, x)
    if rank == 0:
        shorten(pipe, 2.0)
    if rank == 1:
        appears(folder / "gave up")
    try:
        pipe.step(x, x)
    finally:
        if rank == 0:
            (folder / "gave up").touch()


def ended(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.code not in (0, None), f"rank {outcome.rank} ended with {outcome.code}: {outcome.text}"


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_an_exception_in_one_rank(dispatch: str) -> None:
    outcomes = run_ranks(4, raises_in_rank_2, dispatch)
    ended(outcomes)
    assert "ValueError: the third call is too much" in outcomes[2].text
    assert outcomes[2].last_line == "in F2 of stage 2 on rank 2"
    said = (
        "rank 2 could not do its part of the step: ValueError: the third call is too much; stage 2 was given float32 "
        "[2, 4] as microbatch 2; in F2 of stage 2 on rank 2"
    )
    for rank in (0, 1, 3):
        assert outcomes[rank].last_line.endswith(f"PeerFailed: {said}"), outcomes[rank].text


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_a_rank_that_dies(dispatch: str) -> None:
    outcomes = run_ranks(4, dies_in_rank_1, dispatch)
    ended(outcomes)
    assert "PeerLost" in outcomes[0].last_line, outcomes[0].text
    assert "rank 1" in outcomes[0].last_line


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", others_nightly(["frozen", "dynamic"], ["dynamic"]))
def test_a_deadline_names_who_waited_for_what_from_whom(dispatch: str, tmp_path: Path) -> None:
    outcomes = run_ranks(4, stands_still_in_rank_1, dispatch, tmp_path)
    ended(outcomes)
    waited = [o.last_line for o in outcomes if "DeadlineExceeded" in o.last_line]
    assert waited, "\n".join(o.text for o in outcomes)
    assert any("for 2 s" in line and "of stage 1" in line and "rank 1" in line for line in waited), waited


def given_different_things(rank: int) -> dict[str, str]:
    """What is told where ranks were not asked the same; all in one launch, as nothing hangs."""
    x, other = torch.randn(8, 4), torch.randn(8, 4)
    told: dict[str, str] = {}

    def tell(what: str, function: Any) -> None:
        try:
            function()
            told[what] = "nothing"
        except RuntimeFailure as error:
            told[what] = str(error)

    tell("schedule", lambda: pipeline("zb-h1" if rank == 2 else "1f1b"))
    tell("dispatch", lambda: pipeline(dispatch="dynamic" if rank == 1 else "frozen"))
    tell("seed", lambda: pipeline(seed=rank))
    deep, deeper = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(n))) for n in (8, 9))
    tell("model", lambda: pipeline(model=deeper if rank == 1 else deep))
    tell("loss_fn", lambda: made(None if rank == 0 else nn.MSELoss()))
    tell("name of loss_fn", lambda: made(nn.L1Loss() if rank == 3 else nn.MSELoss()))
    tell("autocast", lambda: pipeline(autocast=torch.bfloat16 if rank == 1 else None))
    sgd, adam = torch.optim.SGD, torch.optim.AdamW
    tell("optimizer", lambda: made(optimizer=adam if rank == 2 else sgd))
    tell("lr", lambda: made(optimizer=partial(sgd, lr=0.1 * (rank + 1))))
    pipe = pipeline()
    tell("inputs", lambda: pipe.step(other if rank == 3 else x, x))
    assert all(p.grad is None for p in pipe.parameters())
    tell("targets", lambda: pipe.evaluate(x, x + (rank == 3)))
    tell("same again", lambda: pipe.step(x, x))
    inside = x.clone()
    inside[4, 1] += 1e-3
    tell("one element", lambda: pipe.step(inside if rank in (1, 3) else x, x))
    order = x[[0, 2, 1, 3, 4, 5, 6, 7]]
    tell("order", lambda: pipe.step(order if rank == 2 else x, x))
    tell("type", lambda: pipe.evaluate(x, x.double() if rank == 1 else x))
    tell("update", lambda: pipe.step(x, x, update=rank != 1))
    tell("same at the end", lambda: pipe.step(x, x))
    clips = pipeline(clip_norm=0.1)
    tell("update, with clipping", lambda: clips.step(x, x, update=rank == 1))
    tell("same with clipping", lambda: clips.step(x, x, update=False))
    return told


def test_ranks_given_different_things() -> None:
    outcomes = run_ranks_to_end(4, given_different_things)
    for outcome in outcomes:
        told = outcome.value
        assert "rank 2 was given another schedule than rank 0" in told["schedule"]
        assert "rank 1 was given another dispatch than rank 0" in told["dispatch"]
        assert "ranks 1, 2 and 3 were given another seed than rank 0" in told["seed"]
        assert "rank 1 was given another model than rank 0" in told["model"], told
        assert "ranks 1, 2 and 3 were given another loss_fn than rank 0" in told["loss_fn"], told
        assert "another loss_fn than rank 0 (rank 3 has 'L1Loss', rank 0 has 'MSELoss')" in told["name of loss_fn"]
        assert (
            "rank 1 was given another precision than rank 0 (rank 1 has 'PrecisionOptions(autocast="
            in told["autocast"]
        )
        assert "rank 2 was given another optimizer than rank 0" in told["optimizer"], told
        assert "ranks 1, 2 and 3 were given another lr of the optimizer than rank 0" in told["lr"], told
        assert "rank 3 was given another batch than rank 0" in told["inputs"], told
        assert "rank 3 was given another batch than rank 0" in told["targets"], told
        assert told["same again"] == told["same at the end"] == told["same with clipping"] == "nothing", told
        assert told["update"].startswith("3 of 4 ranks called step(update=True), and the others step(update=False)")
        assert told["update, with clipping"].startswith("1 of 4 ranks called step(update=True)"), told
        assert "ranks 1 and 3 were given another batch than rank 0" in told["one element"], told
        assert "rank 2 was given another batch than rank 0" in told["order"], told
        assert "rank 1 was given another batch than rank 0" in told["type"], told


def raises() -> nn.Module:
    raise ValueError("no weights there")


def given_other_stages(rank: int) -> dict[str, str]:
    """What each rank is told where rank 1 gives another list of stages."""
    others: dict[str, Any] = {
        "one more": [nn.Linear(4, 4) for _ in range(3)],
        "wider": [nn.Linear(4, 5), nn.Linear(5, 4)],
        "wider where it runs": [nn.Linear(4, 4), nn.Linear(5, 4)],
        "longer numbers": [nn.Linear(4, 4), nn.Linear(4, 4).double()],
        "other names": [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))],
        "another name": [nn.Linear(4, 4, bias=False), nn.Linear(4, 4)],
        "a function that raises": [nn.Linear(4, 4), raises],
        "a function for its own": [nn.Linear(4, 4), lambda: nn.Linear(4, 4)],
        "nothing for the other": [nn.Identity(), nn.Linear(4, 4)],
    }
    told = {}
    for what, other in others.items():
        stages = other if rank == 1 else [nn.Linear(4, 4), nn.Linear(4, 4)]
        try:
            with ps.Pipeline(stages, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss(), timeout=PATIENCE) as pipe:
                pipe.step(torch.ones(8, 4), torch.ones(8, 4))
            told[what] = "nothing"
        except (RuntimeFailure, ValueError) as error:
            told[what] = str(error)
    return told


def test_lists_of_stages_were_not_compared_between_ranks() -> None:
    """Each rank trained the stages of its own list, whatever the others had, or waited for them to its deadline."""
    outcomes = run_ranks_to_end(2, given_other_stages)
    told = outcomes[0].value
    assert "number of stages in its list than rank 0 (rank 1 has 3, rank 0 has 2)" in told["one more"]
    first = "rank 1 was given another stage 0 than rank 0; rank 0 has parameter 0"
    assert told["wider"].startswith(f"{first}.weight of shape [4, 4], torch.float32, and rank 1 has parameter 0.w")
    assert told["another name"].startswith(f"{first}.bias of shape [4], torch.float32, and rank 1 has no more")
    for what in ("wider where it runs", "longer numbers", "other names"):
        assert told[what].startswith("rank 1 was given another stage 1 than rank 0; rank 0 has parameter 1.w"), told
    assert told["a function for its own"] == told["nothing for the other"] == "nothing", told
    assert told.pop("a function that raises") == "rank 1 could not build its stages: ValueError: no weights there"
    assert outcomes[1].value.pop("a function that raises") == "no weights there"
    assert told == outcomes[1].value


def without_gradients(rank: int) -> list[str]:
    """What is told where the losses of all microbatches, or of all but one, have no gradient."""
    told: list[str] = []
    for with_gradient in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        calls: list[int] = []

        def loss(output: torch.Tensor, target: torch.Tensor, least: int = with_gradient) -> torch.Tensor:
            calls.append(1)  # noqa: B023
            found = nn.functional.mse_loss(output, target)
            return found if len(calls) <= least else found.detach()  # noqa: B023

        pipe = ps.Pipeline(model, ps.build("1f1b", 4, 4), loss_fn=loss, optimizer=torch.optim.SGD, timeout=PATIENCE)
        x = torch.randn(8, 4)
        before = [p.clone() for p in pipe.parameters()]
        try:
            pipe.step(x, x)
            told.append("nothing")
        except RuntimeFailure as error:
            told.append(str(error))
        told.append(str(all(map(torch.equal, before, pipe.parameters()))))
    return told


def test_a_loss_without_a_gradient_trained_nothing_and_said_nothing() -> None:
    outcomes = run_ranks_to_end(4, without_gradients)
    for outcome in outcomes:
        said, unchanged, one, then = outcome.value
        assert said.startswith("the loss of no microbatch has a gradient, so this step would train nothing"), said
        assert (unchanged, one, then) == ("True", "nothing", "False")


def given_other_shapes(rank: int) -> None:
    pipe = pipeline()
    x = torch.randn(8, 3 + (rank == 2), 4)
    pipe.step(x, x)


def test_ranks_given_other_shapes_end_without_an_abort() -> None:
    outcomes = run_ranks(4, given_other_shapes)
    ended(outcomes)
    assert all(o.code == 1 for o in outcomes), [o.code for o in outcomes]
    assert any("targets of the same shapes" in o.last_line for o in outcomes), "\n".join(o.text for o in outcomes)


def too_many_or_too_few(rank: int) -> str:
    try:
        ps.Pipeline(nn.Sequential(nn.Linear(4, 4)), ps.build("1f1b", 3, 4))
    except RuntimeFailure as error:
        return str(error)
    return ""


def test_a_schedule_for_another_number_of_ranks() -> None:
    outcomes = run_ranks_to_end(2, too_many_or_too_few)
    assert all("the schedule is for 3 ranks and the process group has 2" in o.value for o in outcomes)
