"""Arguments of another type than they should be: one clear error each, before anything is made."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import branches_runs
import penstock as ps
from packed import packed
from penstock.runtime import RuntimeFailure
from penstock.runtime.transport.choose import TransportChoice, TransportOptions
from runtime_cases import Do, batches, lin

pytestmark = pytest.mark.unit

MSE = nn.MSELoss()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "1f1b"}, r"schedule is '1f1b'; give a schedule: ps.build\(name, num_ranks="),
        ({"schedule": None}, "schedule is None; give a schedule"),
        ({"model": None}, "model is None; give an instance of a module, or a list of stages"),
        ({"loss_fn": nn.MSELoss}, r"loss_fn is the class MSELoss; give an instance: MSELoss\(\)"),
        ({"optimizer": lambda parameters: None}, "optimizer= made NoneType, not a torch optimizer"),
        ({"optimizer": torch.optim.SGD(lin().parameters(), lr=0.1)}, "has 2 parameters that are not in the model"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0; give a number, at least 0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"clip_norm": "1"}, "clip_norm is '1'"),
        ({"clip_norm": True}, "clip_norm is True"),
        ({"timeout": 0}, "timeout is 0; give seconds, above 0"),
        ({"timeout": None}, "timeout is None"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"autocast": "bfloat16"}, "autocast is 'bfloat16'; give a type like torch.bfloat16"),
        ({"autocast": True}, "autocast is True"),
        ({"tied": ("0.weight", "1.weight")}, "tied is .*; give groups of names"),
        ({"tied": "0.weight"}, "tied is '0.weight'"),
        ({"ops": {"LOOK": 3}}, "ops= has a function for kind LOOK, of which 1f1b has no ops"),
        ({"sharding": "zero2"}, "sharding is 'zero2'; give one of none, copies, zero1, fsdp"),
        ({"transport": 3}, "transport 3: give 'host'"),
        ({"dispatch": 3}, "dispatch"),
        ({"dispatch": "dynamics"}, "dispatch"),
    ],
)
def test_an_argument_that_makes_no_sense(options: dict[str, Any], said: str) -> None:
    given = {"model": nn.Sequential(lin(), lin()), "schedule": ps.build("1f1b", 2, 4), "loss_fn": MSE, **options}
    with pytest.raises((RuntimeFailure, ps.ScheduleError), match=said):
        ps.Pipeline(given.pop("model"), given.pop("schedule"), **packed(**given))


@pytest.mark.parametrize("clip_norm", [0, 0.0, 1, float("inf")])
def test_norms_that_make_sense(clip_norm: float) -> None:
    pipe = ps.Pipeline(
        [lin(), lin()], ps.build("1f1b", 2, 4), loss_fn=MSE, precision=ps.PrecisionOptions(clip_norm=clip_norm)
    )
    assert pipe.step(*batches(4, 8)[0]).grad_norm > 0


def test_an_optimizer_over_some_of_the_parameters() -> None:
    """The stages before are frozen, and a rank has none of its parameters."""
    model = nn.Sequential(lin(), lin())
    model[0].requires_grad_(False)
    before = model[1].weight.detach().clone()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=MSE, optimizer=optimizer).step(*batches(4, 8)[0])
    assert not torch.equal(before, model[1].weight)


@pytest.mark.parametrize("seed", range(3))
def test_a_stage_that_joins_says_what_it_is_called_with(seed: int) -> None:
    """Its arguments come by the stages' numbers, however the edges were given."""
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    random.Random(seed).shuffle(edges)
    program = ps.Program(ps.placements.one_to_one(4), 8, stages=ps.schedule.StageGraph(4, tuple(edges)))
    one, two = (Do(lambda ls, x, k=k: ls[0](x)[:, :k], lin(6, 6)) for k in (2, 3))
    seen = []

    def joins(ls: Any, a: Any, b: Any) -> Any:
        seen.append((a.shape[1], b.shape[1]))
        return ls[0](a.sum(1, keepdim=True) + b.sum(1, keepdim=True))

    inputs, targets = branches_runs.batch_of("a fork that joins", 1)
    stages = [nn.Linear(6, 6), one, two, Do(joins, lin(1, 6))]
    ps.Pipeline(stages, program.build(), loss_fn=MSE).step(inputs, targets, update=False)
    assert set(seen) == {(2, 3)}
    stages[3] = Do(lambda ls, a: a, lin(6, 6))
    with pytest.raises(TypeError) as caught:
        ps.Pipeline(stages, program.build(), loss_fn=MSE).step(inputs, targets)
    said = "stage 3 joins others: it is called with the outputs of stages 1 and 2"
    assert any(said in note for note in caught.value.__notes__)


def test_an_unknown_keyword_was_a_plain_type_error() -> None:
    schedule = ps.build("1f1b", 2, 4)
    with pytest.raises(RuntimeFailure, match="Pipeline has no argument 'optimiser'; did you mean optimizer="):
        ps.Pipeline([lin(), lin()], schedule, optimiser=None)  # type: ignore[call-arg]
    with pytest.raises(RuntimeFailure, match="no argument 'loss'; did you mean loss_fn="):
        ps.Pipeline([lin(), lin()], schedule, loss=MSE)  # type: ignore[call-arg]
    with pytest.raises(RuntimeFailure, match="no argument 'nonsense'; it takes model, schedule, loss_fn, opt"):
        ps.Pipeline([lin(), lin()], schedule, nonsense=1)  # type: ignore[call-arg]
    with pytest.raises(RuntimeFailure, match=r"3 arguments by place and takes 2 so \(model, schedule\); .*loss_fn="):
        ps.Pipeline([lin(), lin()], schedule, MSE)  # type: ignore[misc]
    with pytest.raises(ps.ScheduleError, match="simulate has no argument 'link'; did you mean links="):
        ps.simulate(schedule, link=ps.Links())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: ps.PrecisionOptions(clip=1), RuntimeFailure, "has no argument 'clip'; did you mean clip_norm="),
        (lambda: ps.ParallelOptions(links=None), RuntimeFailure, r"'links'; give TransportOptions\(links=...\)"),
        (lambda: ps.AdaptOptions(nonsense=1), RuntimeFailure, "'nonsense'; it takes folder, store, costs"),
        (lambda: ps.Pipeline([lin()], None, least_gain=1), RuntimeFailure, r"give AdaptOptions\(least_gain=...\)"),
        (lambda: ps.PrecisionOptions(None, 1.0, None, False, 2), RuntimeFailure, "given 5 arguments .* leave the"),
        (lambda: ps.split(num_stages=2), ps.runtime.PartitionError, "split needs model="),
        (
            lambda: ps.NewOp("X", 0, num_op=3),
            ps.ScheduleError,
            "NewOp has no argument 'num_op'; did you mean num_ops=",
        ),
        (lambda: ps.NewOp("X", 0, ms=3), ps.ScheduleError, "NewOp has no argument 'ms'; it takes kind, stage, after"),
        (
            lambda: ps.Branch(None, 4, rank=(0,)),
            ps.ScheduleError,
            "Branch has no argument 'rank'; did you mean ranks=",
        ),
        (lambda: ps.plan(None, ranks=2), ps.ScheduleError, "plan has no argument 'ranks'; did you mean num_ranks="),
        (
            lambda: ps.build("1f1b", num_rank=2, num_microbatches=4),
            ps.ScheduleError,
            "needs num_ranks=; it was given",
        ),
        (lambda: ps.Costs.uniform(2, act=1.0), ps.CostError, "it takes num_stages, f, i, w"),
        (lambda: ps.emulate(None, None, optimizer=1), RuntimeFailure, r"Pipeline\(optimizer=...\) would take it"),
    ],
)
def test_unknown_keywords_of_options_were_plain_type_errors(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


class Weighted(nn.Module):
    """A loss with a weight to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_of_all = nn.Parameter(torch.tensor(1.0))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.weight_of_all * MSE(output, target)


def test_parameters_of_the_loss_were_never_updated() -> None:
    schedule, sgd, loss = ps.build("1f1b", 2, 4), torch.optim.SGD, Weighted()
    said = r"loss_fn \(Weighted\) has 1 parameters that are not in the model, the first is weight_of_all"
    for given in (loss, loss.forward, partial(loss)):
        with pytest.raises(RuntimeFailure, match=said):
            ps.Pipeline([lin(), lin()], schedule, loss_fn=given, optimizer=sgd)
    ps.Pipeline([lin(), lin()], schedule, loss_fn=loss).close()  # who gives no optimizer updates all of it
    last = nn.Sequential(lin())
    last.loss = loss
    ps.Pipeline([lin(), last], schedule, loss_fn=loss, optimizer=sgd).close()
    loss.requires_grad_(False)
    ps.Pipeline([lin(), lin()], schedule, loss_fn=loss, optimizer=sgd).close()


def test_an_optimizer_of_other_parameters_stepped_nothing() -> None:
    """Functions make other stages in each call, and asynchronous schedules step masters."""
    said = "the optimizer has none of the .* parameters that are stepped"
    others = torch.optim.SGD([*lin().parameters(), *lin().parameters()], lr=0.1)
    with pytest.raises(RuntimeFailure, match=said):
        ps.Pipeline([lin, lin], ps.build("1f1b", 2, 4), loss_fn=MSE, optimizer=others)
    model = nn.Sequential(lin(), lin())
    with pytest.raises(RuntimeFailure, match=said):
        ps.Pipeline(
            model,
            ps.build("pipedream", 2, 4, window=2),
            loss_fn=MSE,
            optimizer=lambda params: torch.optim.SGD(model.parameters(), lr=0.1),
        )


def test_without_an_optimizer_gradients_stay_for_one_of_the_users_own() -> None:
    """They were dropped, so that the user's own optimizer stepped nothing."""
    layers, plain = [lin(), lin()], [lin(), lin()]
    for one, other in zip(layers, plain, strict=True):
        other.load_state_dict(one.state_dict())
    steps = batches(4, 8)[:2] * 2
    own, theirs = (torch.optim.SGD(nn.ModuleList(each).parameters(), lr=0.1) for each in (layers, plain))
    clipped = ps.PrecisionOptions(clip_norm=0.1)
    pipe = ps.Pipeline(layers, ps.build("zb-h1", 2, 4), loss_fn=MSE, precision=clipped)
    pipeline = ps.Pipeline(plain, ps.build("zb-h1", 2, 4), loss_fn=MSE, precision=clipped, optimizer=lambda _: theirs)
    for x, y in steps:
        one, other = pipe.step(x, y), pipeline.step(x, y)
        assert torch.equal(one.loss, other.loss)
        assert torch.equal(one.grad_norm, other.grad_norm)  # type: ignore[arg-type]
        own.step()
        pipe.zero_grad()
    assert all(map(torch.equal, pipe.parameters(), pipeline.parameters()))
    assert (pipe.num_updates, pipeline.num_updates) == (0, len(steps))
    with pytest.raises(RuntimeFailure, match=r"update\(\) has no optimizer to run"):
        pipe.update()
    scaled = ps.PrecisionOptions(scaler=torch.amp.GradScaler("cpu"))
    with (
        ps.Pipeline([lin(), lin()], ps.build("1f1b", 2, 4), loss_fn=MSE, precision=scaled) as pipe,
        pytest.raises(RuntimeFailure, match="scaler= is a part of updates, and this pipeline has no optimizer"),
    ):
        pipe.step(*steps[0])


@pytest.mark.parametrize("why", ["detached", "frozen", "no_grad"])
def test_a_step_without_any_gradient_trained_nothing_and_said_nothing(why: str) -> None:
    layers = [lin(), lin()]
    for layer in layers:
        layer.requires_grad_(why != "frozen")
    loss_fn = (lambda output, target: MSE(output, target).detach()) if why == "detached" else MSE
    pipe = ps.Pipeline(layers, ps.build("zb-h1", 2, 4), loss_fn=loss_fn)
    x, y = batches(4, 8)[0]
    assert pipe.evaluate(x, y).loss > 0
    with (
        torch.set_grad_enabled(why != "no_grad"),
        pytest.raises(RuntimeFailure, match="no microbatch has a grad"),
    ):
        pipe.step(x, y)


def test_a_loss_that_is_a_sum_was_averaged_over_microbatches() -> None:
    layers = nn.Sequential(lin(), lin())
    plain, (x, y) = copy.deepcopy(layers), batches(4, 8)[0]
    total = nn.MSELoss(reduction="sum")
    pipe = ps.Pipeline(layers, ps.build("zb-h1", 2, 4), loss_fn=total)
    found = pipe.step(x, y, update=False)
    for x_m, y_m in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        total(plain(x_m), y_m).backward()
    assert all(map(torch.equal, (p.grad for p in layers.parameters()), (p.grad for p in plain.parameters())))
    assert torch.allclose(found.loss, total(plain(x), y))
    assert torch.allclose(pipe.evaluate(x, y).loss, found.loss)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_was_an_assertion_of_torch() -> None:
    with pytest.raises(RuntimeFailure, match="device is 'cuda' and torch finds 0 GPUs; give one that is there"):
        ps.Pipeline([lin(), lin()], ps.build("1f1b", 2, 4), loss_fn=MSE, parallel=ps.ParallelOptions(device="cuda"))


def test_a_pipeline_takes_few_arguments_and_values_for_the_rest() -> None:
    names = inspect.signature(ps.Pipeline).parameters
    assert len(names) <= 14
    assert {"links", "depth", "zero", "sharding"}.isdisjoint(names)
    for kind in (ps.PrecisionOptions, ps.ParallelOptions, ps.TransportOptions, ps.AdaptOptions, ps.BatchRules):
        assert kind() == kind()
        assert kind.__doc__
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kind(), dataclasses.fields(kind)[0].name, None)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (ps.PrecisionOptions, {"autocast": ["bfloat16", torch.int64, 16], "clip_norm": ["1", -1.0, True]}),
        (
            ps.ParallelOptions,
            {
                "sharding": ["zero2", None],
                "tied": ["a", ["a", "b"]],
                "batches": ["all"],
            },
        ),
        (
            ps.AdaptOptions,
            {
                "memory_limit": ["x", "12", -1.0, float("nan"), [1.0, "x"]],
                "host_memory": ["1GB", -1.0, (1.0, -1.0)],
                "dispatches": ["dynamic", ("any",), (3,)],
                "least_gain": [4, -0.1, "2%", True],
                "least_delay": ["1ms", -1.0],
                "patience": [0, -1, "30", None, float("inf")],
            },
        ),
        (
            ps.TransportOptions,
            {"name": ["pigeon", None], "delegates": [2, True], "depth": [0, 1.5, True, "2"], "links": [{}, "0:1=20"]},
        ),
        (
            ps.runtime.DelegateOptions,
            {
                "num": [0, 1.5, True],
                "most": [0, "4"],
                "interfaces": ["eth0", 3, (1,)],
                "host_memory": ["8GB", 0, -1],
            },
        ),
    ],
)
def test_a_least_gain_of_4_and_a_memory_limit_of_x_were_taken(kind: Any, wrong: dict[str, list[Any]]) -> None:
    """Each option says what is wrong with it, by its name, when it is made."""
    for name, values in wrong.items():
        for value in values:
            with pytest.raises((RuntimeFailure, ps.ScheduleError)) as caught:
                kind(**{name: value})
            word = {"name": "transport", "dispatches": "dispatch"}.get(name, name)
            assert word in str(caught.value), (name, value)


@pytest.mark.parametrize("name", ["host", "gloo", "direct", "delegate", "nccl"])
def test_any_transport_may_be_bounded(name: str) -> None:
    choice = TransportChoice(ps.TransportOptions(name, depth=3, links=ps.Links()))
    assert choice.simulated == "blocking:3"
    assert choice.shared == f"{name} of depth 3"
    without_links = TransportChoice(ps.TransportOptions(name, depth=3))
    expected = {"nccl": "nccl-edge"}.get(name, "decoupled")  # nothing here opens gloo between processes
    assert (without_links.simulated, without_links.shared) == (expected, name)
    with pytest.raises(RuntimeFailure, match="depth is 0; give a whole number of messages"):
        ps.TransportOptions(name, depth=0)


def test_a_name_alone_stands_for_a_transport() -> None:
    assert TransportOptions.of("direct") == ps.TransportOptions("direct")
    assert TransportOptions.of(None) == ps.TransportOptions() == TransportOptions.of(ps.TransportOptions())
    with pytest.raises(RuntimeFailure, match="delegates is 3"):
        ps.TransportOptions(delegates=3)
    with pytest.raises(RuntimeFailure, match="links is"):
        ps.TransportOptions(links={(0, 1): 3})
    with pytest.raises(RuntimeFailure, match="given as links="):
        ps.emulate(ps.build("1f1b", 2, 4), ps.Costs.uniform(2), transport=ps.TransportOptions(links=ps.Links()))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda s, c: ps.emulate(s, c, num_steps="3"), ps.CostError, "num_steps is '3': give a whole number"),
        (lambda s, c: ps.emulate(s, c, mesh=3), RuntimeFailure, "mesh is 3; give a process group that"),
        (lambda s, c: ps.Pipeline([lin(), lin()], s, mesh=ps.Mesh(2, 2)), RuntimeFailure, "mesh is .*device_mesh"),
        (lambda s, c: ps.plan(c, 2, 4, progress=3), ps.ScheduleError, "progress is 3: give a function"),
        (lambda s, c: ps.split(nn.Sequential(lin(), lin()), at="1"), ps.runtime.PartitionError, "at is the text '1'"),
    ],
)
def test_values_of_other_types_were_errors_of_python(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(ps.build("1f1b", 2, 4), ps.Costs.uniform(2))


def square() -> tuple[nn.Sequential, ps.Pipeline]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return model, ps.Pipeline(model, ps.build("1f1b", 2, 2), loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD)


def test_generators_of_arguments_were_read_once_and_then_empty() -> None:
    """`at` made one stage without a word, and the others ended in errors of Python's."""
    model = square()[0]
    assert len(ps.split(model, at=(str(number) for number in (1, 3)))) == 3
    assert ps.split(model, sizes=(number for number in (1, 3))).layers == [["0"], ["1", "2", "3"]]
    assert len(ps.split(model, 2, costs=(1.0 for _ in range(4)))) == 2
    schedule = ps.build("pipedream", 2, 4, window=2)
    with ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD) as pipe:
        pipe.step(torch.ones(4, 4), torch.ones(4, 4), rates=(rate for rate in (0.1, torch.tensor(0.1))))
        pipe.sum_each_step(lambda: (float(number) for number in range(3)))
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))
        assert pipe.step_sums == (0.0, 1.0, 2.0)


def test_a_norm_below_zero_to_clip_to_ended_in_a_type_error() -> None:
    with (
        square()[1] as pipe,
        pytest.raises(RuntimeFailure, match=r"max_norm is -1\.0; give a number, at least 0"),
    ):
        pipe.clip(-1.0)
