"""Parameters that several stages share, in one process: as in the plain loop, whatever the schedule."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
import tie_runs
from penstock.runtime.split_backward import prepared
from plain_loop import differences, plain_step
from tie_runs import ADAM, MSE


@pytest.mark.parametrize("given", tie_runs.GIVEN)
@pytest.mark.parametrize(("name", "options"), tie_runs.SCHEDULES)
def test_tied_weights_with_several_pipelines(name: str, options: dict[str, Any], given: str) -> None:
    assert not tie_runs.wrong_copies(name, options, given, zero=True)


def test_tied_weights_with_several_pipelines_and_an_optimizer_each() -> None:
    assert not tie_runs.wrong_copies("chimera", {}, "sequential", zero=False)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
@pytest.mark.parametrize("start", [False, True])
def test_a_tied_weight_frozen_and_unfrozen_between_steps(name: str, start: bool) -> None:
    schedule = ps.build(name, 2, 4)
    model = tie_runs.tied_model(schedule.num_stages)
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each[0][0].weight.requires_grad_(start)
    pipe = ps.Pipeline(model, schedule, loss_fn=MSE)
    for number, (x, y) in enumerate(tie_runs.steps(9, 4), start=1):
        wanted = start == (number % 2 == 1)
        for each in (model, plain):
            each[0][0].weight.requires_grad_(wanted)
        if schedule.placement.num_pipelines > 1:
            _, want = tie_runs.grouped_step(plain, x, y, schedule, number)
        else:
            plain_step(plain, x, y, schedule.num_microbatches, MSE, step=number)
            want = {n: p.grad for n, p in plain.named_parameters()}
        pipe.step(x, y, update=False)
        assert not differences(want, {n: p.grad for n, p in pipe.named_parameters()})
        assert (want["0.0.weight"] is not None) == wanted
        pipe.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_hooks_on_a_tied_weight_see_whole_gradients_once_a_microbatch(name: str) -> None:
    schedule = ps.build(name, 2, 4)
    model = tie_runs.tied_model(schedule.num_stages)
    plain = copy.deepcopy(model)
    seen: dict[str, list[torch.Tensor]] = {"pipe": [], "plain": []}

    def hooked(key: str, weight: nn.Parameter) -> None:
        def doubled(gradient: torch.Tensor) -> torch.Tensor:
            seen[key].append(gradient.clone())
            return gradient * 2

        weight.register_hook(doubled)
        weight.register_post_accumulate_grad_hook(lambda p: seen[key].append(p.grad.clone()))

    hooked("pipe", model[0][0].weight)
    hooked("plain", plain[0][0].weight)
    pipe = ps.Pipeline(model, schedule, loss_fn=MSE)
    x, y = tie_runs.steps(9, 1)[0]
    plain_step(plain, x, y, 4, MSE)
    pipe.step(x, y, update=False)
    want = {n: p.grad for n, p in plain.named_parameters()}
    assert not differences(want, {n: p.grad for n, p in pipe.named_parameters()})
    assert len(seen["pipe"]) == len(seen["plain"]) == 8
    assert all(torch.equal(a, b) for a, b in zip(seen["pipe"], seen["plain"], strict=True))


def test_sparse_gradients_with_several_pipelines() -> None:
    for name in ("1f1b", "zb-v", "chimera"):
        for tied in (False, True):
            assert not tie_runs.wrong_sparse(name, 2, tied)


def test_a_norm_of_sparse_gradients_is_refused() -> None:
    said = tie_runs.refused(tie_runs.sparse_model(2), ps.build("1f1b", 2, 4), clip_norm=1.0)
    assert "sparse gradients (`nn.Embedding(sparse=True)`)" in said
    assert "(0.table.weight; 1.table.weight) exclude one another" in said


# Names.


def test_any_name_of_a_parameter_ties_it_and_groups_that_overlap_are_one() -> None:
    def stage() -> nn.Module:
        made = nn.Sequential(nn.Linear(tie_runs.WIDTH, tie_runs.WIDTH), nn.Tanh(), nn.Linear(6, 6))
        made[2].weight = made[0].weight
        return made

    torch.manual_seed(0)
    modules = [stage() for _ in range(3)]
    plain = nn.Sequential(*copy.deepcopy(modules))
    plain[1][0].weight = plain[1][2].weight = plain[2][0].weight = plain[2][2].weight = plain[0][0].weight
    tied = [["0.2.weight", "1.0.weight"], ["2.2.weight", "1.2.weight"]]
    pipe = ps.Pipeline(modules, ps.build("1f1b", 3, 4), loss_fn=MSE, parallel=ps.ParallelOptions(tied=tied))
    x, y = tie_runs.steps(9, 1)[0]
    plain_step(plain, x, y, 4, MSE)
    pipe.step(x, y, update=False)
    want = {n: p.grad for n, p in plain.named_parameters()}
    assert not differences(want, {n: p.grad for n, p in pipe.named_parameters()})


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_a_tied_weight_of_stages_from_functions_was_two_parameters(name: str) -> None:
    schedule = ps.build(name, 2, 4)
    model = tie_runs.tied_model(schedule.num_stages)
    stages, tied = tie_runs.as_given(model, "functions")
    pipe = ps.Pipeline(stages, schedule, loss_fn=MSE, parallel=ps.ParallelOptions(tied=tied))
    assert len(pipe.parameters()) == len(dict(pipe.named_parameters())) == len(list(model.parameters()))
    with torch.no_grad():
        for each in (model.get_parameter("0.0.weight"), dict(pipe.named_parameters())["0.0.weight"]):
            each.mul_(0.5)
    x, y = tie_runs.steps(8, 1)[0]
    loss = MSE(model(x), y)
    loss.backward()
    near = partial(torch.testing.assert_close, rtol=tie_runs.TOLERANCE, atol=tie_runs.TOLERANCE)
    near(pipe.step(x, y).loss, loss.detach())
    near(*(nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (pipe, model)))


def test_an_optimizer_over_two_modules_that_are_tied_steps_their_weight_once() -> None:
    modules = [nn.Linear(6, 6, bias=False) for _ in range(2)]
    plain = nn.Sequential(*copy.deepcopy(modules))
    plain[1].weight = plain[0].weight
    optimizer, own = ADAM([{"params": m.parameters()} for m in modules]), ADAM(plain.parameters())
    tied = ps.ParallelOptions(tied=[("0.weight", "1.weight")])
    pipe = ps.Pipeline(modules, ps.build("1f1b", 2, 4), loss_fn=MSE, optimizer=optimizer, parallel=tied)
    for x, y in tie_runs.steps(8, 2):
        plain_step(plain, x, y, 4, MSE)
        own.step()
        own.zero_grad()
        pipe.step(x, y)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
    assert not differences(dict(plain.named_parameters()), dict(pipe.named_parameters()))


def test_two_parameters_of_one_stage_in_one_group_are_refused() -> None:
    model = [nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 6)]
    said = tie_runs.refused(model, ps.build("1f1b", 2, 4), tied=[["0.0.weight", "0.1.weight", "1.weight"]])
    assert said.startswith("tied= makes 0.0.weight and 0.1.weight one parameter, and both lie in stage 0; let")


class Around(nn.Module):
    """Uses another layer's weight without having it."""

    def __init__(self, other: nn.Linear, own: bool) -> None:
        super().__init__()
        self.hidden = [other]
        self.bias = other.bias if own else nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.hidden[0].weight, self.hidden[0].bias)


@pytest.mark.parametrize("own", [True, False])
def test_verify_finds_a_parameter_that_is_used_around_its_module(own: bool) -> None:
    first = nn.Linear(6, 6)
    pipe = ps.Pipeline(nn.Sequential(first, Around(first, own)), ps.build("1f1b", 2, 4), loss_fn=MSE)
    with pytest.raises(ps.VerifyError, match=r"sentence 5 of the contract"):
        pipe.verify(*tie_runs.steps(9, 1)[0])


# Modules with buffers in several stages.


class Shifted(nn.Module):
    """Adds a table that never changes, or one that does."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.counts = counts
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.linspace(0, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts and self.training:
            self.table += 1
        return (self.linear(x) + self.table).tanh()


def both_ends(module: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 6), module), nn.Linear(6, 6), nn.Sequential(module, nn.Linear(6, 6))
    )


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_verify_finds_statistics_that_two_stages_gather_together(name: str) -> None:
    pipe = ps.Pipeline(both_ends(nn.BatchNorm1d(6)), ps.build(name, 3, 4), loss_fn=MSE)
    with pytest.raises(ps.VerifyError, match=r"differs: the buffer .*running_mean"):
        pipe.verify(*tie_runs.steps(9, 1)[0])


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_verify_finds_statistics_of_a_module_that_two_functions_return(name: str) -> None:
    norm = nn.BatchNorm1d(6)
    sources = [lambda: norm, *([lambda: nn.Linear(6, 6)] * 2), lambda: norm]
    pipe = ps.Pipeline(sources, ps.build(name, 4, 4), loss_fn=MSE)
    with pytest.raises(ps.VerifyError, match=r"differs: the buffer .*running_mean"):
        pipe.verify(*tie_runs.steps(9, 1)[0])


def test_verify_finds_a_buffer_of_two_stages_that_changes() -> None:
    pipe = ps.Pipeline(both_ends(Shifted(counts=True)), ps.build("1f1b", 3, 4), loss_fn=MSE)
    with pytest.raises(ps.VerifyError, match="sentence 2 of the contract"):
        pipe.verify(*tie_runs.steps(9, 1)[0])


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(6).eval(), Shifted])
def test_buffers_of_two_stages_that_stay_as_they_are(name: str, make: Any) -> None:
    schedule = ps.build(name, 2 if name == "chimera" else 3, 4)
    module = make()
    model = both_ends(module) if schedule.num_stages == 3 else nn.Sequential(module, module)
    plain = copy.deepcopy(model)
    pipe = ps.Pipeline(model, schedule, loss_fn=MSE)
    for number, (x, y) in enumerate(tie_runs.steps(9, 2), start=1):
        loss, want = tie_runs.grouped_step(plain, x, y, schedule, number)
        assert torch.equal(pipe.step(x, y, update=False).loss, loss)
        assert not differences(want, {n: p.grad for n, p in pipe.named_parameters()})
        pipe.zero_grad()
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in plain.state_dict().items())


# Autocast. m: a matmul, whose weight is cast. l: a lookup, whose weight is not. c: a cast of the user's own.

CASTS = [
    "mm",
    "m_",
    "lm",
    "ml",
    "_m",
    "cc",
    "cm",
    "mc",
    "mmmm",
    "mlml",
    "lllm",
    "m__m",
    "_mm_",
    "lm_m",
    "_lmm",
    "llm",
    "llmm",
    "_lm",
    "llllm",
]
SEVERAL = [
    ("mm", "mm"),
    ("ml", "lm"),
    ("lm", "ml"),
    ("lmlm", "mlml"),
    ("mlm", "l", "m", "ll"),
    ("l", "ll", "lml", "llm"),
    ("l", "lm"),
    ("l", "ml"),
    ("l", "c", "ml", "l", "lm", "cm"),
]


@pytest.mark.parametrize("uses", [*CASTS, *SEVERAL])
def test_tied_weights_under_autocast(uses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MERGE_WORK", 0)  # everything that may wait for W does
    each = [use.replace("_", "") for use in uses]
    for name in ("zb-h1", *(["chimera"] if len(each) == 4 else [])):
        assert not tie_runs.wrong_casts(tie_runs.using(each), ps.build(name, len(each), 4)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_one_module_in_two_stages_under_autocast(name: str, dtype: torch.dtype) -> None:
    schedule = ps.build(name, 2, 4)
    assert not tie_runs.wrong_casts(tie_runs.tied_model(schedule.num_stages), schedule, dtype)


def test_tied_convolutions_under_autocast() -> None:
    torch.manual_seed(0)
    conv = nn.Conv1d(1, 1, 3, padding=1)
    wide = [nn.Sequential(nn.Unflatten(1, (1, -1)), conv, nn.Flatten(), nn.Linear(6, 6)) for _ in range(3)]
    assert not tie_runs.wrong_casts(nn.Sequential(*wide), ps.build("1f1b", 3, 4))


# Upper case: in some microbatches alone.

CHANGING = [
    "mL",
    ("m", "mL"),
    ("mL", "mL"),
    ("m", "L", "m"),
    ("lM", "M"),
    ("l", "M", "mL"),
    ("l", "LmL"),
    ("LmL", "LlM"),
]


@pytest.mark.parametrize("uses", CHANGING)
def test_a_tied_weight_used_once_more_in_some_microbatches_under_autocast(uses: Any) -> None:
    for name in ("1f1b", "zb-h1"):
        model = tie_runs.using(uses)
        assert not tie_runs.wrong_casts(model, ps.build(name, len(uses), 4)), name


class Rows(tie_runs.Uses):
    """Gives rows of the weight beside its output: tensors that one node of the graph has made."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(x), *self.weight.unbind(0)


class Adds(tie_runs.Uses):
    def forward(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, *rows = given
        return super().forward(x + sum(row.reshape(-1, 6).sum(0) for row in rows))


def test_rows_of_a_tied_weight_that_a_stage_gives_on_under_autocast() -> None:
    weight = tie_runs.using("m")[0].weight
    model = nn.Sequential(tie_runs.Uses("l", weight), Rows("m", weight), Adds("m", weight))
    assert not tie_runs.wrong_casts(model, ps.build("1f1b", 3, 4))


def test_an_embedding_that_is_the_head_too_under_autocast() -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, nn.Linear(6, 6), nn.Sequential(nn.Tanh(), head))
    plain, loss = copy.deepcopy(model), nn.CrossEntropyLoss()
    tokens, targets = torch.randint(11, (64,)), torch.randint(11, (64,))
    ps.plain_step(plain, tokens, targets, loss_fn=loss, num_microbatches=4, autocast=torch.bfloat16)
    precision = ps.PrecisionOptions(autocast=torch.bfloat16)
    pipe = ps.Pipeline(model, ps.build("zb-h1", 3, 4), loss_fn=loss, precision=precision)
    pipe.step(tokens, targets, update=False)
    want = {n: p.grad for n, p in plain.named_parameters()}
    assert not differences(want, {n: p.grad for n, p in pipe.named_parameters()})


class Checkpointed(tie_runs.Uses):
    """Uses the weight, and (r) in a checkpoint whose backward is one inside the stage's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for use in self.uses:
            x = checkpoint(self.used, x, use_reentrant=True) if use == "r" else self.used(x)
        y: torch.Tensor = self.linear(x)
        return y

    def used(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).tanh()


def wrong_checkpoints(uses: Any, name: str, dtype: torch.dtype | None = None) -> list[str]:
    weight = tie_runs.using("m")[0].weight
    model = nn.Sequential(nn.Linear(6, 6), *(Checkpointed(use, weight) for use in uses))
    model = nn.Sequential(model[:2], *model[2:])
    return tie_runs.wrong_casts(model, ps.build(name, len(uses), 4), dtype)


@pytest.mark.parametrize("uses", ["rm", ["mr", "m"], ["rm", "", "mm"], ["r", "m", "m", "m"]])
def test_a_tied_weight_in_a_checkpoint_with_a_backward_of_its_own_in_the_owner_s_stage(uses: Any) -> None:
    for name in ("1f1b", "zb-h1", *(["chimera"] if len(uses) in (2, 4) else [])):
        assert not wrong_checkpoints(uses, name), name


@pytest.mark.parametrize("name", ["1f1b", "chimera", "pipedream-2bw"])
def test_a_layer_that_two_stages_know_by_one_name_trains_and_is_saved(name: str, tmp_path: Path) -> None:
    """No stage counted as its owner: synchronous schedules ended in a KeyError, and others trained it wrongly."""
    options = {"window": 2} if name == "pipedream-2bw" else {}
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)

    def made(first: str, last: str) -> ps.Pipeline:
        torch.manual_seed(0)
        shared, inner, head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        stages = [
            ps.runtime.Stage({first: shared, "inner": inner}, indices=[0, 1]),
            ps.runtime.Stage({last: shared, "head": head}, indices=[2, 3]),
        ]
        sgd = partial(torch.optim.SGD, lr=0.1)
        return ps.Pipeline(stages, ps.build(name, 2, 4, **options), loss_fn=nn.MSELoss(), optimizer=sgd)

    pipe, other = made("shared", "shared"), made("shared", "again")
    for _ in range(3):
        assert torch.equal(pipe.step(x, y).loss, other.step(x, y).loss)
    pipe.save(tmp_path / "saved")
    resumed = made("shared", "shared")
    resumed.load(tmp_path / "saved")
    assert torch.equal(pipe.step(x, y).loss, resumed.step(x, y).loss)
