"""What a pipeline's calls must do besides gradients; each check runs in one process and with one process a rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from packed import packed
from penstock.runtime import RuntimeFailure
from plain_loop import differences, gradients, named_as, plain_evaluate, plain_step
from runtime_cases import Do, Tokens, batches, language_model, lin, mlp, token_steps
from waiting import PATIENCE

CHECKS: dict[str, Callable[[int], None]] = {}
MSE = nn.MSELoss()


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS[function.__name__] = function
    return function


def run(name: str, ranks: int) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(5)
    CHECKS[name](ranks)


def build(model: Any, schedule: ps.Schedule, **options: Any) -> ps.Pipeline:
    return ps.Pipeline(copy.deepcopy(model), schedule, **packed(**{"loss_fn": MSE, "timeout": PATIENCE, **options}))


def own_gradients(pipe: ps.Pipeline) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in pipe.named_parameters()}


def assert_equal_gradients(pipe: ps.Pipeline, plain: nn.Module) -> None:
    got, want = own_gradients(pipe), gradients(plain)
    assert not differences({n: want[n] for n in got}, got)


def assert_equal_values(pipe: ps.Pipeline, plain: nn.Module) -> None:
    want = {n: p.detach() for n, p in plain.named_parameters()}
    got = {n: p.detach() for n, p in pipe.named_parameters()}
    assert not differences({n: want[n] for n in got}, got)


def sequential(ranks: int, extra: int = 1, **options: Any) -> nn.Sequential:
    return nn.Sequential(*(mlp(**options) for _ in range(2 * ranks + extra)))


@check
def clipping_is_that_of_torch(ranks: int) -> None:
    model = sequential(ranks)
    for max_norm in (0.01, 100.0):
        plain = copy.deepcopy(model)
        sgd = partial(torch.optim.SGD, lr=0.1)
        optimizer = sgd(plain.parameters())
        pipe = build(model, ps.build("zb-v", ranks, 4), clip_norm=max_norm, optimizer=sgd)
        for number, (x, y) in enumerate(batches(4, 8), start=1):
            plain_step(plain, x, y, 4, MSE, step=number)
            want = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            got = pipe.step(x, y).grad_norm
            assert torch.equal(want, got), (want, got)
            assert_equal_values(pipe, plain)
            assert all(p.grad is None for p in pipe.parameters())


@check
def clipping_of_mixed_types_and_ranks_without_parameters(ranks: int) -> None:
    stages = [lin().double(), *(nn.Tanh() for _ in range(ranks - 1))] if ranks > 1 else [lin().double()]
    plain = copy.deepcopy(stages)
    x, y = (t.double() for t in batches(4, 8)[0])
    plain_step(plain, x, y, 4, MSE)
    want = torch.nn.utils.clip_grad_norm_(nn.ModuleList(plain).parameters(), 0.1)
    pipe = build(stages, ps.build("1f1b", ranks, 4), clip_norm=0.1)
    assert torch.equal(want, pipe.step(x, y).grad_norm)


@check
def a_learning_rate_schedule_works_on_ranks_without_parameters(ranks: int) -> None:
    stages = [lin(), *(nn.Tanh() for _ in range(ranks - 1))]
    plain = copy.deepcopy(stages)
    adam = partial(torch.optim.AdamW, lr=0.1)
    optimizer = adam(nn.ModuleList(plain).parameters())
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    pipe = build(stages, ps.build("1f1b", ranks, 4), optimizer=adam)
    own_rate = torch.optim.lr_scheduler.StepLR(pipe.optimizer, 1, 0.5)
    for number, (x, y) in enumerate(batches(4, 8, count=3), start=1):
        plain_step(plain, x, y, 4, MSE, step=number)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        pipe.step(x, y)
        own_rate.step()
    assert own_rate.get_last_lr() == rate.get_last_lr() == [0.0125]
    assert_equal_values(pipe, named_as(plain))


@check
def an_optimizer_may_be_a_class_a_partial_or_an_instance(ranks: int) -> None:
    model = sequential(ranks)
    x, y = batches(4, 8)[0]
    plain = copy.deepcopy(model)
    plain_step(plain, x, y, 4, MSE)
    torch.optim.Adagrad(plain.parameters()).step()
    instance = copy.deepcopy(model)
    by_part = [{"params": list(instance[:2].parameters())}, {"params": list(instance[2:].parameters())}]
    for one, optimizer in (
        (model, torch.optim.Adagrad),
        (model, partial(torch.optim.Adagrad, lr=0.01)),
        (instance, torch.optim.Adagrad(by_part)),
    ):
        given = one if one is instance else copy.deepcopy(one)
        pipe = ps.Pipeline(given, ps.build("1f1b", ranks, 4), loss_fn=MSE, optimizer=optimizer)
        pipe.step(x, y)
        assert_equal_values(pipe, plain)


@check
def evaluation_changes_nothing(ranks: int) -> None:
    model = nn.Sequential(*(nn.Sequential(mlp(), nn.BatchNorm1d(8)) for _ in range(2 * ranks)))
    model[1].eval()
    pipe = build(model, ps.build("interleaved-1f1b", ranks, 4 * ranks) if ranks > 1 else ps.build("1f1b", 1, 4))
    x, y = batches(4 * ranks, 8)[0]
    pipe.step(x, y, update=False)
    stages = nn.ModuleList(pipe._local.model.stages.values())
    state, modes = copy.deepcopy(stages.state_dict()), [m.training for m in stages.modules()]
    grads, rng = copy.deepcopy(own_gradients(pipe)), torch.get_rng_state()
    plain = copy.deepcopy(model)
    plain_step(plain, x, y, 4 * ranks, MSE)  # moves the batch statistics as the step above did
    for samples in (len(x), 4 * ranks, 3, 1):
        num = min(samples, 4 * ranks)
        want = plain_evaluate(plain, x[:samples], y[:samples], num, MSE)
        got = pipe.evaluate(x[:samples], y[:samples])
        assert torch.equal(want, got.loss), (samples, want, got.loss)
        assert not got.loss.requires_grad
        assert len(pipe.predict(x[:samples])) == num
    assert torch.equal(torch.cat(pipe.predict(x[:3])), torch.cat([plain.eval()(x[m : m + 1]) for m in range(3)]))
    assert [m.training for m in stages.modules()] == modes
    assert not differences(state, stages.state_dict())
    assert not differences(grads, own_gradients(pipe))
    assert torch.equal(rng, torch.get_rng_state())


@check
def evaluation_of_named_inputs_fewer_than_microbatches(ranks: int) -> None:
    """The number of microbatches was taken from a lone tensor only."""
    stages = [Do(lambda ls, a: ls[0](a), lin()) if s == 0 else lin() for s in range(ranks)]
    pipe = build(stages, ps.build("1f1b", ranks, 4))
    x, y = batches(4, 8)[0]
    want = plain_evaluate(stages, {"a": x[:2]}, y[:2], 2, MSE)
    assert torch.equal(want, pipe.evaluate({"a": x[:2]}, y[:2]).loss)


@check
def evaluation_without_targets_gives_the_loss(ranks: int) -> None:
    """It gave 0: without targets the loss was not computed."""
    stages = [lin() for _ in range(ranks)]
    pipe = build(stages, ps.build("1f1b", ranks, 4), loss_fn=lambda out, _: out.square().mean())
    x, _ = batches(4, 8)[0]
    want = plain_evaluate(stages, x, None, 4, lambda out, _: out.square().mean())
    assert torch.equal(want, pipe.evaluate(x).loss)
    assert torch.equal(pipe.step(x).loss, want)


@check
def loss_is_the_same_everywhere_and_its_parts_add_up(ranks: int) -> None:
    pipe = build(sequential(ranks), ps.build("zb-h1", ranks, 4))
    x, y = batches(4, 8)[0]
    result = pipe.step(x, y)
    assert not result.loss.requires_grad
    assert torch.equal(sum(result.losses), result.loss)
    assert all(loss == float(result.loss) for loss in pipe.gather(float(result.loss)))
    assert result.grad_norm is None


@check
def accumulating_twice_doubles(ranks: int) -> None:
    model = nn.Sequential(*(lin() for _ in range(ranks)))
    pipe = build(model, ps.build("1f1b", ranks, 4))
    x, y = batches(4, 8)[0]
    pipe.step(x, y, update=False)
    once = {n: 2 * g for n, g in own_gradients(pipe).items()}
    pipe.step(x, y, update=False)
    got = own_gradients(pipe)
    assert all(torch.allclose(once[n], got[n], rtol=1e-5, atol=1e-7) for n in once)


@check
def a_batch_refused_on_every_rank_does_no_harm(ranks: int) -> None:
    model = sequential(ranks, dropout=0.0)
    pipe = build(model, ps.build("1f1b", ranks, 4))
    x, y = batches(4, 8)[0]
    refused = [
        (x[:3], "samples and the inputs 3"),
        ([x, x], "2 inputs given as a list"),
        ((), "hold no tensor"),
    ]
    for inputs, said in refused:
        with pytest.raises(RuntimeFailure, match=said):
            pipe.step(inputs, y)
    plain_step(model, x, y, 4, MSE)
    pipe.step(x, y, update=False)
    assert_equal_gradients(pipe, model)


@check
def stages_built_by_functions_with_named_ties(ranks: int) -> None:
    """Copies of a tied parameter that start from different values are made the owner's."""
    stages = language_model(ranks)
    tied = copy.deepcopy(stages)
    tied[-1].layers[-1].weight = tied[0].layers[1].weight
    built: list[int] = []

    def make(s: int) -> nn.Module:
        built.append(s)
        return copy.deepcopy(stages[s])

    schedule = ps.build("zb-h1", ranks, 4)
    names = [("0.layers.1.weight", f"{ranks - 1}.layers.2.weight")]
    for dispatch in ("frozen", "dynamic"):
        built.clear()
        pipe = ps.Pipeline(
            [partial(make, s) for s in range(ranks)],
            schedule,
            loss_fn=Tokens(),
            dispatch=dispatch,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            parallel=ps.ParallelOptions(tied=names if ranks > 1 else ()),
        )
        assert built == sorted(pipe._local.model.stages)
        plain = copy.deepcopy(tied if ranks > 1 else stages)
        optimizer = torch.optim.SGD(nn.ModuleList(plain).parameters(), lr=0.1)
        for number, (x, y) in enumerate(token_steps(4, [3, 4]), start=1):
            plain_step(plain, x, y, 4, Tokens(), step=number)
            optimizer.step()
            optimizer.zero_grad()
            pipe.step(x, y)
            assert_equal_values(pipe, named_as(plain))
        last = pipe._local.model.stages.get(ranks - 1)
        if ranks > 1 and last is not None:
            table = dict(last.named_parameters())[f"{ranks - 1}.layers.2.weight"]
            assert torch.equal(table, plain[0].layers[1].weight)


@check
def master_weights_stay_float32_under_autocast(ranks: int) -> None:
    model = sequential(ranks)
    plain = copy.deepcopy(model)
    sgd = partial(torch.optim.SGD, lr=0.1)
    optimizer = sgd(plain.parameters())
    pipe = build(model, ps.build("zb-v", ranks, 4), autocast=torch.bfloat16, optimizer=sgd)
    for number, (x, y) in enumerate(batches(4, 8), start=1):
        want = plain_step(plain, x, y, 4, MSE, step=number, autocast=torch.bfloat16)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(want, pipe.step(x, y).loss)
    assert_equal_values(pipe, plain)
    assert all(p.dtype is torch.float32 for p in pipe.parameters())


@check
def compiled_stages_split_without_a_notice(ranks: int) -> None:
    stages = [torch.compile(lin(), backend="eager") for _ in range(ranks)]
    pipe = ps.Pipeline(stages, ps.build("zb-h1", ranks, 4), loss_fn=MSE)
    pipe.step(*batches(4, 8)[0])
    assert not any("torch.compile" in notice for notice in pipe.notices)
    assert all(runner.deferred_share() is not None for runner in pipe._local.devices.runners.values())


@check
def a_timeline_holds_every_op(ranks: int) -> None:
    schedule = ps.build("zb-v", ranks, 4)
    pipe = build(sequential(ranks), schedule)
    pipe.step(*batches(4, 8)[0])
    timeline = pipe.timeline()
    assert len(timeline.ops) == schedule.num_ops
    assert timeline.makespan > 0
    busy, spans, nums = zip(*pipe.gather(pipe.op_times()), strict=True)
    share = 1 - sum(busy) / (sum(nums) * max(spans))
    assert sum(nums) == ranks
    # Of each process alone the longest time from its first op to its last is at most the makespan.
    assert share <= timeline.bubble_ratio + 1e-3
    if len(nums) == 1:
        assert share == pytest.approx(timeline.bubble_ratio)


@check
def a_step_of_1f1b_begins_and_ends_on_rank_0(ranks: int) -> None:
    """The bubbles that `penstock train` shows were shares of each rank's own time: half of the bubble ratio."""
    pipe = build(sequential(ranks), ps.build("1f1b", ranks, 4))
    pipe.step(*batches(4, 8)[0])
    told = pipe.gather(pipe.op_times())
    assert max(span for _, span, _ in told) == pytest.approx(pipe.timeline().makespan, rel=0.01)


@check
def another_sequence_length_each_step_leaves_no_buffers(ranks: int) -> None:
    pipe = build(nn.Sequential(*(lin() for _ in range(ranks))), ps.build("1f1b", ranks, 4), transport="gloo")
    for length in (3, 5, 3, 9, 2):
        x = torch.randn(4, length, 8)
        pipe.step(x, x, update=False)
    transport = pipe._local.transport
    ends = [*transport._incoming.values(), *transport._outgoing.values()] if transport else []
    for end in ends:
        assert sum(bool(pool.spare) for pool in end.pools.values()) <= 1


@check
def two_pipelines_may_take_turns(ranks: int) -> None:
    models = [sequential(ranks, dropout=0.0) for _ in range(2)]
    pipes = [build(model, ps.build(name, ranks, 4)) for model, name in zip(models, ("1f1b", "zb-v"), strict=True)]
    for number, (x, y) in enumerate(batches(4, 8), start=1):
        for pipe, model in zip(pipes, models, strict=True):
            plain_step(model, x, y, 4, MSE, step=number)
            pipe.step(x, y, update=False)
            assert_equal_gradients(pipe, model)
