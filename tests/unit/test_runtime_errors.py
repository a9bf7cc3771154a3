"""What is refused, in words; and what a failure leaves behind."""

from __future__ import annotations

import copy
import json
from collections import UserDict, namedtuple
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from packed import packed
from penstock.runtime import PartitionError, RuntimeFailure
from penstock.runtime.tensors import pytree
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.wire_format import WireSpec
from plain_loop import differences, gradients, plain_step
from runtime_cases import CASES, Do, batches, lin

pytestmark = pytest.mark.unit

MSE = nn.MSELoss()


def pipeline(stages: Any, name: str = "1f1b", ranks: int = 2, num: int = 4, **options: Any) -> ps.Pipeline:
    return ps.Pipeline(stages, ps.build(name, ranks, num), **packed(**{"loss_fn": MSE, **options}))


@pytest.mark.parametrize(
    ("stages", "ranks", "error", "said"),
    [
        (lambda: nn.Sequential(lin(), lin(), lin()), 5, PartitionError, "5.*stages.*3 layers"),
        (lambda: [lin(), lin(), lin()], 2, PartitionError, "3 stage modules for a schedule of 2 stages"),
        (
            lambda: ps.split(nn.Sequential(lin(), lin(), lin()), at=["1"]),
            3,
            PartitionError,
            r"split into 2 stages, and the schedule has 3; .* ps.split\(model, 3\)",
        ),
        (lambda: [lin(), lambda: 3], 2, RuntimeFailure, "stage 1: its function returned int, not a module"),
    ],
)
def test_stages_that_do_not_fit(stages: Any, ranks: int, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        pipeline(stages(), ranks=ranks)


def test_a_schedule_that_is_not_valid() -> None:
    schedule = ps.parse(str(ps.build("1f1b", 2, 2)).replace("B1", "F1", 1))
    with pytest.raises(ps.ScheduleError):
        ps.Pipeline([lin(), lin()], schedule, loss_fn=MSE)


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (
            lambda out, target: out - target,
            "must return one number as a tensor, it returned a tensor of shape",
        ),
        (lambda out, target: 3.0, "it returned float"),
        (None, r"has no loss_fn.*loss_fn=lambda output, targets: output\[.loss.\]"),
    ],
)
def test_a_loss_that_is_no_number(loss_fn: Any, said: str) -> None:
    pipe = pipeline([lin(), lin()], loss_fn=loss_fn)
    with pytest.raises(RuntimeFailure, match=said):
        pipe.step(*batches(4, 8)[0])


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_of_one_number_in_a_row_is_that_number(shape: tuple[int, ...]) -> None:
    """On a GPU, where losses are read together, the step failed; the plain loop returned a loss of another shape."""
    stages, plain = [lin(), lin()], [lin(), lin()]
    for one, other in zip(plain, stages, strict=True):
        one.load_state_dict(other.state_dict())
    x, y = batches(4, 8)[0]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output, target).reshape(shape)

    with pipeline(stages, loss_fn=loss_fn) as pipe:
        result = pipe.step(x, y, update=False)
        num = pipe.schedule.num_microbatches
        assert [loss.shape for loss in pipe._local.devices.last[0].losses.values()] == [()] * num
        assert pipe.verify(x, y).holds
    assert result.losses.shape == (num,)
    assert torch.equal(result.loss, ps.plain_step(plain, x, y, loss_fn=loss_fn, num_microbatches=num))


def test_a_forward_that_fails_names_the_shapes_that_it_was_given() -> None:
    """A mask for all samples, with as many rows as there are samples, was cut, and torch's error named no input."""
    pipe = pipeline([Do(lambda ls, x, mask: ls[0](x) * mask, lin()), lin()])
    x, y = batches(4, 8)[0]
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        pipe.step({"x": x, "mask": torch.ones(9, 3)}, y)
    assert any("x: float32 [3, 8], mask: float32 [3, 3]" in each for each in caught.value.__notes__)
    assert any("ps.BatchRules" in each for each in caught.value.__notes__)


class OwnMean(nn.MSELoss):
    """A mean that does not say over what."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target)


class WeighedMean(OwnMean):
    def weight(self, target: Tensor) -> int:
        return len(target)


def weighs_by(sizes: list[int], others: list[int], loss_fn: nn.Module) -> float:
    """The loss of microbatches of so many samples, the first tensor of which has other sizes."""
    torch.manual_seed(0)
    pipe = pipeline([Do(lambda ls, other, x: ls[0](x) + other.mean(), lin()), lin()], loss_fn=loss_fn)
    inputs = [(torch.ones(other, 8), torch.randn(size, 8)) for other, size in zip(others, sizes, strict=True)]
    targets = [torch.zeros(size, 8) for size in sizes]
    return pipe.step(inputs, targets, update=False).loss.item()


def test_microbatches_weighed_by_the_first_tensor_whatever_the_others_have() -> None:
    with pytest.raises(RuntimeFailure, match=r"microbatches 0 and 1 together.*weighed 0.5 to 0.5.*weight\(targets\)"):
        weighs_by([1, 2, 2, 3], [3, 3, 3, 3], OwnMean())
    want = weighs_by([1, 2, 2, 3], [3, 3, 3, 3], WeighedMean())
    assert weighs_by([1, 2, 2, 3], [3, 3, 3, 3], nn.MSELoss()) == want
    assert weighs_by([1, 2, 2, 3], [2, 4, 4, 6], OwnMean()) == want
    weighs_by([2, 2, 2, 2], [3, 3, 3, 3], OwnMean())


class Mode(StrEnum):
    TRAIN = "train"


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1, 2}, "can't be cut or pass between stages"),
        (object(), "can't be cut or pass between stages"),
        ({3: torch.zeros(1)}, "can't be cut or pass between stages"),
        # In one process `mode is Mode.TRAIN` was true in the next stage, and between processes it was not.
        (Mode.TRAIN, "type Mode can't be cut or pass"),
        (Text("train"), "type Text can't be cut or pass"),
        (np.float64(2.0), "type float64 can't be cut or pass"),
    ],
)
def test_an_output_that_can_not_travel_or_is_of_another_class_in_another_process(value: Any, said: str) -> None:
    pipe = pipeline([Do(lambda ls, x: (ls[0](x), value), lin()), Do(lambda ls, x, v: x)])
    with pytest.raises(RuntimeFailure, match=said) as caught:
        pipe.step(*batches(4, 8)[0])
    assert caught.value.__notes__ == ["in F0 of stage 0 on rank 0"]


class Marked(Tensor):
    pass


def test_a_tensor_of_a_class_of_its_own_became_a_plain_one_on_the_wire() -> None:
    with pytest.raises(RuntimeFailure, match=r"a Marked, a class of tensors, can't pass between ranks.*as_subclass"):
        WireSpec.of(Payload([torch.ones(2).as_subclass(Marked)], 0, [False]))
    WireSpec.of(Payload([nn.Parameter(torch.ones(2)), None], 0, [False, False]))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (torch.zeros(0, 8), r"inputs has shape \(0, 8\), 0 in dimension 0"),
        ([torch.zeros(1, 8)] * 3, "3 inputs given as a list, the schedule runs 4 microbatches"),
        ((torch.zeros(4, 8), torch.zeros(5, 8)), r"inputs\[1\] has shape \(5, 8\), 5 in dimension 0"),
        (torch.tensor(1.0), "samples in dimension 0"),
    ],
)
def test_a_batch_that_can_not_be_cut(inputs: Any, said: str) -> None:
    with pytest.raises(RuntimeFailure, match=said):
        pipeline([lin(), lin()]).step(inputs, torch.zeros(4, 8))


def test_a_microbatch_without_samples_made_every_gradient_nan() -> None:
    model, schedule = [nn.Linear(4, 4), nn.Linear(4, 4)], ps.build("1f1b", 2, 4)
    xs = [torch.randn(size, 4) for size in (2, 0, 3, 2)]
    for loss_fn in (nn.MSELoss(), OwnMean(), nn.MSELoss(reduction="sum")):
        with ps.Pipeline(model, schedule, loss_fn=loss_fn) as pipe:
            found = pipe.step(xs, xs, update=False)
            whole = torch.cat(xs)
            want = loss_fn(model[1](model[0](whole)), whole)
            assert found.losses[1] == 0
            assert torch.allclose(found.loss, want)
            assert torch.allclose(pipe.evaluate(xs, xs).loss, want)
            for p, gradient in zip(
                pipe.parameters(), torch.autograd.grad(want, list(pipe.parameters())), strict=True
            ):
                assert p.grad is not None
                assert torch.allclose(p.grad, gradient, atol=1e-6)
            pipe.zero_grad()


@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [
        (torch.zeros(8, 8), torch.zeros(4, 8), "the targets have 4 samples and the inputs 8"),
        (torch.zeros(8, 8), torch.zeros(9, 8), "the targets have 9 samples and the inputs 8"),
        (torch.zeros(8, 8), (torch.zeros(8), torch.zeros(4)), r"targets\[1\] has shape \(4,\), 4 in dimension 0"),
        ([torch.zeros(2, 8)] * 4, torch.zeros(4, 8), "the targets have 4 samples and the inputs 8"),
        ([torch.zeros(n, 8) for n in (1, 3, 2, 2)], torch.zeros(8, 8), "microbatch 0 has 1 samples and 2 targets"),
        (torch.zeros(8, 8), [torch.zeros(1, 8)] * 4, "microbatch 0 has 2 samples and 1 targets"),
    ],
)
def test_targets_of_another_length_than_inputs(inputs: Any, targets: Any, said: str) -> None:
    """They were cut by themselves, and broadcast in the loss."""
    pipe = pipeline([lin(), lin()])
    for run in (pipe.step, pipe.evaluate):
        with pytest.raises(RuntimeFailure, match=said):
            run(inputs, targets)


class Fails(nn.Module):
    """Fails in the forward or the backward of its third microbatch, once."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.layer, self.backward, self.calls = lin(), backward, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x)
        if self.calls == 3:
            if not self.backward:
                raise ValueError("no")
            y.register_hook(self._raise)
        return y

    def _raise(self, _: Tensor) -> None:
        raise ValueError("no")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_step_after_one_that_failed(name: str, backward: bool) -> None:
    """The failed step's gradients stayed, and the next step added to them."""
    stages = [nn.Sequential(lin(), nn.Tanh()), Fails(backward), lin()]
    stages[2].weight = stages[0][0].weight
    plain = copy.deepcopy(stages)
    plain[1].calls = 100
    pipe = pipeline(stages, name, 3, optimizer=torch.optim.SGD)
    x, y = batches(4, 8)[0]
    pipe._local.devices.runners[0, 1].stage.train()
    with pytest.raises(ValueError, match="no"):
        pipe.step(x, y)
    assert all(p.grad is None for p in pipe.parameters())
    plain_step(plain, x, y, 4, MSE, step=2)
    pipe.step(x, y, update=False)
    got = {n: p.grad for n, p in pipe.named_parameters()}
    want = gradients(plain)
    assert not differences({n: want[n] for n in got}, got)


class FailsOnce(torch.optim.SGD):
    """Its first step fails: before it has stepped, or once it has."""

    def __init__(self, parameters: Any, error: type[BaseException], after: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.error, self.after, self.calls = error, after, 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls > 1 or self.after:
            super().step(closure)
        if self.calls == 1:
            raise self.error("no")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [False, True])
def test_gradients_of_a_step_whose_update_failed_were_added_to_those_of_the_next(
    error: type[BaseException], after: bool
) -> None:
    model = [nn.Sequential(lin(), nn.Tanh()), lin()]
    pipe = pipeline(model, optimizer=partial(FailsOnce, error=error, after=after))
    (x, y), *_ = batches(4, 8)
    with pytest.raises(error, match="no"):
        pipe.step(x, y)
    assert all(p.grad is None for p in pipe.parameters())
    plain = copy.deepcopy(model)
    plain_step(plain, x, y, 4, MSE, step=2)
    want = gradients(plain)
    pipe.step(x, y, update=False)
    assert not differences(want, gradients(model))


def test_a_failed_step_leaves_the_tied_parameters_to_their_owner() -> None:
    """A hook went on catching the gradients of tied parameters after a step that failed."""
    stages = [lin(), Fails(False), lin()]
    stages[2].weight = stages[0].weight
    pipe = pipeline(stages, "1f1b", 3)
    with pytest.raises(ValueError, match="no"):
        pipe.step(*batches(4, 8)[0])
    stages[0](torch.ones(1, 8)).sum().backward()
    assert stages[0].weight.grad is not None


@pytest.mark.parametrize("name", ["zb-v", "zb-h1"])
def test_a_closed_pipeline_leaves_the_model_as_it_was(name: str) -> None:
    torch.manual_seed(0)
    made = CASES["tied_first_and_last"](4, 4)
    before = [
        (type(m), dict(m.__dict__).keys(), len(m._forward_hooks), m.training) for s in made.model for m in s.modules()
    ]
    x, y = made.steps[0]
    plain = copy.deepcopy(made.model)
    pipe = ps.Pipeline(made.model, ps.build(name, 2 if name == "zb-v" else 4, 4), loss_fn=made.loss_fn)
    pipe.step(x, y)
    pipe.zero_grad()
    pipe.close()
    after = [
        (type(m), dict(m.__dict__).keys(), len(m._forward_hooks), m.training) for s in made.model for m in s.modules()
    ]
    assert before == after
    plain_step(plain, x, y, 4, made.loss_fn)
    plain_step(made.model, x, y, 4, made.loss_fn)
    assert not differences(gradients(plain), gradients(made.model))


def test_a_step_without_targets_says_that_they_are_missing() -> None:
    pipe = ps.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ps.build("1f1b", 2, 2), loss_fn=nn.MSELoss())
    with pytest.raises(RuntimeFailure, match=r"targets that were not given .*; call step\(inputs, targets\)"):
        pipe.step(torch.ones(4, 4))


def test_a_loss_that_needs_no_targets_goes_without() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = ps.Pipeline(layers, ps.build("1f1b", 2, 2), loss_fn=lambda output, _: output.square().mean())
    assert pipe.step(torch.ones(4, 4)).loss > 0


def test_a_model_made_in_inference_mode_ended_in_an_error_about_a_version_counter() -> None:
    with torch.inference_mode():
        frozen = nn.Linear(4, 4)
    model = nn.Sequential(frozen.requires_grad_(False), nn.Linear(4, 4))
    x = torch.ones(8, 4)
    pipe = ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss())
    assert pipe.evaluate(x, x).loss.isfinite()
    with pytest.raises(RuntimeFailure, match=r"^0\.weight was made under torch\.inference_mode\(\), of which"):
        pipe.step(x, x)
    trained = ps.Pipeline(nn.Sequential(nn.Linear(4, 4)), ps.build("1f1b", 1, 4), loss_fn=nn.MSELoss())
    with torch.inference_mode(), pytest.raises(RuntimeFailure, match=r"under torch\.inference_mode"):
        trained.step(x, x)


def test_regression_a_named_tuple_of_a_module_with_a_space_in_its_name_had_other_fields_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = namedtuple("kind", ["left", "right"], module="my model")
    leaves, skeleton = pytree.flatten(kind(torch.ones(1), torch.zeros(1)))
    monkeypatch.setattr(pytree, "_CLASSES", {})  # as the other process begins
    found = pytree.unflatten(leaves, json.loads(json.dumps(skeleton)))
    assert found._asdict() == {"left": leaves[0], "right": leaves[1]}


def test_regression_a_buffer_made_in_inference_mode_ended_in_an_error_about_a_version_counter() -> None:
    norm = nn.BatchNorm1d(4)
    with torch.inference_mode():
        norm.register_buffer("running_mean", torch.zeros(4))
    pipe = ps.Pipeline(nn.Sequential(norm), ps.build("1f1b", 1, 4), loss_fn=nn.MSELoss())
    x = torch.ones(8, 4)
    with pytest.raises(RuntimeFailure, match=r"^0\.running_mean was made under torch\.inference_mode\(\), of which"):
        pipe.step(x, x)


def test_a_batch_that_torch_cannot_cut_ended_in_an_error_about_strides() -> None:
    pipe = pipeline([Do(lambda ls, x: ls[0](x.to_dense()), lin()), lin()])
    (x, y), *_ = batches(4, 8)
    nested = torch.nested.nested_tensor([torch.ones(n, 8) for n in (1, 2, 3, 4)], layout=torch.jagged)
    strided = torch.nested.nested_tensor([torch.ones(n, 8) for n in (1, 2, 3, 4)])
    for given, kind in ((x.to_sparse(), "sparse_coo"), (x.to_sparse_csr(), "sparse_csr"), (nested, "nested")):
        for run in (pipe.step, pipe.evaluate):
            with pytest.raises(RuntimeFailure, match=rf"inputs is a tensor of layout {kind}.*give a list with one"):
                run(given, y)
    with pytest.raises(RuntimeFailure, match=r"layout=torch\.jagged"):
        pipe.step(strided, y)
    pipe.step([x_m.to_sparse() for x_m in x.tensor_split(4)], list(y.tensor_split(4)), update=False)


def test_numpy_arrays_and_other_mappings_are_refused() -> None:
    pipe = pipeline([lin(), lin()])
    (x, y), *_ = batches(4, 8)
    with pytest.raises(RuntimeFailure, match=r"ndarray can't be cut .* torch.as_tensor makes a tensor of it"):
        pipe.step(x.numpy(), y)
    with pytest.raises(RuntimeFailure, match="UserDict can't be cut"):
        pipe.step(UserDict(x=x), y)


def test_a_default_device_without_values_is_none_of_the_runtime() -> None:
    """Its own tensors were made there: a step ended in an error about a tensor without data."""
    stages = [lin(), lin()]
    (x, y), *_ = batches(4, 8)
    plain = copy.deepcopy(stages)
    want = plain_step(plain, x, y, 4, MSE)
    with torch.device("meta"):
        pipe = pipeline(stages, "zb-h1", optimizer=torch.optim.SGD, clip_norm=1.0)
        loss = pipe.step(x, y, update=False).loss
        pipe.update()
        pipe.evaluate(x, y)
        pipe.predict(x)
    assert torch.equal(loss, want)


def test_a_frozen_stage_was_told_that_the_rest_of_nothing_runs_in_i() -> None:
    stages = [lin(), lin()]
    stages[0].requires_grad_(False)
    pipe = pipeline(stages, "zb-h1")
    pipe.step(*batches(4, 8)[0], update=False)
    assert not [notice for notice in pipe.notices if notice.startswith("stage 0")]


class Supervised(nn.Module):
    """Has a loss of its own, and runs its backward at once."""

    def __init__(self, cut_off: bool) -> None:
        super().__init__()
        self.layer, self.cut_off = lin(), cut_off

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x.detach() if self.cut_off else x).square().mean().backward()
        return self.layer(x)


def scored_twice(output: Tensor, target: Tensor) -> Tensor:
    loss = MSE(output, target)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("where", ["a layer", "the loss"])
def test_a_backward_within_a_forward_lost_its_gradients_of_earlier_stages(where: str, name: str) -> None:
    stages = [lin(), lin() if where == "the loss" else Supervised(False)]
    pipe = pipeline(stages, name, loss_fn=scored_twice if where == "the loss" else MSE)
    with pytest.raises(RuntimeFailure, match=r"calls backward\(\) itself, and the gradient goes back into the stage"):
        pipe.step(*batches(4, 8)[0])


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_backward_within_a_forward_that_ends_in_its_stage_is_added_in_another_order(name: str) -> None:
    stages = [Supervised(False), Supervised(True)]
    plain = copy.deepcopy(stages)
    x, y = batches(4, 8)[0]
    pipe = pipeline(stages, name)
    want = plain_step(plain, x, y, 4, MSE)
    assert torch.equal(pipe.step(x, y, update=False).loss, want)
    for (at, wanted), (_, got) in zip(gradients(plain).items(), gradients(stages).items(), strict=True):
        torch.testing.assert_close(got, wanted, msg=at)
