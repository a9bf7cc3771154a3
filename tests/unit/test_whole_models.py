"""A sequential that does more than run its layers, and models that something else has wrapped: whole, or refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize

import penstock as ps
from penstock.runtime import PartitionError, RuntimeFailure
from plain_loop import differences, gradients
from runtime_cases import batches, lin

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:Full backward hook is firing")]

MSE = nn.MSELoss()


class OwnForward(nn.Sequential):
    """A residual around its layers, scaled by a parameter of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for name, layer in self._modules.items():
            y = layer(y) if name.isdigit() else y
        return x + self.scale * y + self.shift


class Backwards(nn.Sequential):
    """Runs its layers from the last to the first."""

    def __iter__(self) -> Any:
        return reversed(list(self._modules.values()))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    return [layer for _ in range(3) for layer in (lin(), nn.Tanh())]


def own_forward() -> nn.Sequential:
    return OwnForward(*layers())


def other_order() -> nn.Sequential:
    return Backwards(*layers())


def patched_forward() -> nn.Sequential:
    model = nn.Sequential(*layers())
    plain = model.forward
    model.forward = lambda x: 3 * plain(x)  # type: ignore[method-assign]
    return model


def forward_hook() -> nn.Sequential:
    model = nn.Sequential(*layers())
    model.register_forward_hook(lambda module, given, out: out * 2)
    return model


def forward_pre_hook() -> nn.Sequential:
    model = nn.Sequential(*layers())
    model.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    return model


def backward_hook() -> nn.Sequential:
    model = nn.Sequential(*layers())
    model.register_full_backward_hook(lambda module, into, out: None)
    return model


def backward_pre_hook() -> nn.Sequential:
    model = nn.Sequential(*layers())
    model.register_full_backward_pre_hook(lambda module, out: tuple(g * 2 for g in out))
    return model


def own_parameter() -> nn.Sequential:
    model = nn.Sequential(*layers())
    scale = nn.Parameter(torch.tensor(1.5))
    model.register_parameter("scale", scale)
    model.register_forward_hook(lambda module, given, out: out * module.scale)
    return model


def parametrized() -> nn.Sequential:
    model = own_forward()
    parametrize.register_parametrization(model, "scale", Twice())
    return model


TRACED = (own_forward, other_order, patched_forward)
"""Whose forward is cut as it is."""
WHOLE: dict[Callable[[], nn.Sequential], str] = {
    forward_hook: "forward hooks",
    forward_pre_hook: "forward pre hooks",
    backward_hook: "backward hooks",
    backward_pre_hook: "backward pre hooks",
    own_parameter: "forward hooks",
    parametrized: "parametrizations",
}
"""What stands in the way of a cut."""


def plain_gradients(model: nn.Sequential, x: Tensor, y: Tensor, num: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    total = torch.zeros(())
    for x_m, y_m in zip(x.tensor_split(num), y.tensor_split(num), strict=True):
        loss = MSE(model(x_m), y_m) * (len(x_m) / len(x))
        loss.backward()
        total = total + loss.detach()
    return total, gradients(model)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("make", "num_ranks"),
    [*((make, 1) for make in (*TRACED, *WHOLE)), *((make, 2) for make in TRACED)],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_a_sequential_that_does_more_than_run_its_layers(
    make: Callable[[], nn.Sequential], num_ranks: int, name: str
) -> None:
    """It is one stage, or cut as it is."""
    torch.manual_seed(3)
    x, y = batches(4, 8)[0]
    loss, want = plain_gradients(make(), x, y, 4)
    model = make()
    pipe = ps.Pipeline(model, ps.build(name, num_ranks, 4), loss_fn=MSE)
    result = pipe.step(x, y, update=False)
    assert torch.equal(result.loss, loss)
    assert not differences(want, gradients(model))
    assert {id(p) for p in pipe.parameters()} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("make", WHOLE, ids=lambda make: make.__name__)
def test_a_sequential_that_is_called_as_a_whole_is_not_cut(make: Callable[[], nn.Sequential]) -> None:
    with pytest.raises(PartitionError, match=WHOLE[make]) as caught:
        ps.Pipeline(make(), ps.build("1f1b", 2, 4), loss_fn=MSE)
    assert "list with one module for each stage" in str(caught.value)


def test_evaluation_of_a_whole_sequential_is_in_evaluation_mode() -> None:
    class Noisy(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1e6 if self.training else 2)

    model = Noisy(*layers())
    x, y = batches(4, 8, extra=0)[0]
    with torch.no_grad():
        want = sum(
            MSE(2 * nn.Sequential(*model)(x_m), y_m) / 4 for x_m, y_m in zip(x.chunk(4), y.chunk(4), strict=True)
        )
    pipe = ps.Pipeline(model, ps.build("1f1b", 1, 4), loss_fn=MSE)
    assert torch.equal(pipe.evaluate(x, y).loss, want)
    assert model.training


def test_hooks_and_forwards_of_inner_modules_run() -> None:
    torch.manual_seed(3)
    inner = forward_hook()
    model = nn.Sequential(inner, lin(), own_forward(), copy.deepcopy(inner))
    x, y = batches(4, 8)[0]
    loss, want = plain_gradients(copy.deepcopy(model), x, y, 4)
    result = ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=MSE).step(x, y, update=False)
    assert torch.equal(result.loss, loss)
    assert not differences(want, gradients(model))


def test_a_hook_on_the_state_dict_takes_no_part_in_the_forward() -> None:
    model = nn.Sequential(*layers())
    model.register_state_dict_post_hook(lambda *args: None)
    ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=MSE).step(*batches(4, 8)[0])


def test_a_compiled_model_is_one_stage_and_says_how_to_be_cut() -> None:
    model = nn.Sequential(*layers())
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    x, y = batches(4, 8)[0]
    loss, want = plain_gradients(model, x, y, 4)
    result = ps.Pipeline(compiled, ps.build("1f1b", 1, 4), loss_fn=MSE).step(x, y, update=False)
    assert torch.equal(result.loss, loss)
    assert not differences(want, gradients(compiled._orig_mod))
    with pytest.raises(PartitionError, match=r"compiled by torch.compile.*compile its layers"):
        ps.Pipeline(compiled, ps.build("1f1b", 2, 4), loss_fn=MSE)
    in_place = nn.Sequential(*layers())
    in_place.compile(backend="eager")
    with pytest.raises(PartitionError, match=r"compiled by torch.compile.*compile its layers"):
        ps.Pipeline(in_place, ps.build("1f1b", 2, 4), loss_fn=MSE)


class Shifting(nn.Module):
    """Its forward and that of its block use buffers and parameters of their own."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = lin(), lin()
            self.register_buffer("mask", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.layer(x) * self.mask)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = lin(), self.Block()
        self.register_buffer("shift", torch.full((8,), 0.3))
        self.scale = nn.Parameter(torch.full((8,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x) + self.shift) * self.scale


def give_buffers(model: Shifting) -> None:
    model.shift = torch.full((8,), 0.7)
    model.block.mask = torch.arange(8.0)


def load_buffers(model: Shifting) -> None:
    model.load_state_dict({"shift": torch.full((8,), 0.7)}, strict=False, assign=True)


@pytest.mark.parametrize("change", [give_buffers, load_buffers, Shifting.double, Shifting.bfloat16])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "chimera"])
def test_buffers_that_a_traced_model_was_given_after_the_cut_were_left_out_in_silence(
    change: Callable[[Shifting], object], name: str
) -> None:
    torch.manual_seed(5)
    model = Shifting()
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    schedule = ps.build(name, 2, 4)
    pipe = ps.Pipeline(model, schedule, loss_fn=MSE)
    pipe.step(x, y, update=False)
    pipe.zero_grad()
    change(model)
    x, y = x.to(model.scale.dtype), y.to(model.scale.dtype)
    plain = copy.deepcopy(model)
    totals: dict[str, Tensor] = {}
    for pipeline in sorted({*schedule.microbatch_pipeline}):
        for m in (m for m in range(4) if schedule.microbatch_pipeline[m] == pipeline):
            (MSE(plain(x.chunk(4)[m]), y.chunk(4)[m]) / 4).backward()
        for at, p in plain.named_parameters():
            totals[at] = p.grad if at not in totals else totals[at] + p.grad
            p.grad = None
    pipe.step(x, y, update=False)
    got = {at: p.grad for at, p in model.named_parameters()}
    assert not differences(totals, got)


def test_buffers_given_after_the_cut_are_saved_and_loaded(tmp_path: Path) -> None:
    model = Shifting()
    pipe = ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=MSE)
    give_buffers(model)
    pipe.save(tmp_path)
    model.shift = torch.zeros(8)
    pipe.load(tmp_path)
    assert torch.equal(model.shift, torch.full((8,), 0.7))
    x = torch.randn(8, 8)
    with torch.no_grad():
        want = [model(each) for each in x.chunk(4)]
    assert all(map(torch.equal, pipe.predict(x), want))


class WarmsUp(nn.Module):
    """Grows with the number of its calls, which it keeps in attributes, and has a buffer that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.seen, self.total = nn.Linear(8, 8), 0, [torch.zeros(())], torch.zeros(8)
        self.register_buffer("scale", torch.full((1,), 0.5).expand(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.detach().mean())
        self.total += 1
        y: Tensor = self.linear(x) * self.scale * min(1.0, self.calls / 10)
        return y


class WarmingUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = WarmsUp(), WarmsUp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y


def test_a_cut_by_an_example_left_what_its_runs_had_counted() -> None:
    """Buffers alone were set back. Where a count changes the output, the stages gave another one than the model."""
    torch.manual_seed(0)
    model, x = WarmingUp(), torch.randn(8, 8)
    plain = copy.deepcopy(model)
    stages = ps.split(model, 2, example=x[:2])
    for block in (model.first, model.last):
        assert (block.calls, len(block.seen), block.total.sum()) == (0, 1, 0)
    want = [MSE(plain(part), part).item() for part in x.chunk(4)]
    with ps.Pipeline(stages, ps.build("1f1b", 2, 4), loss_fn=MSE) as pipe:
        assert (4 * pipe.step(x, x, update=False).losses).tolist() == want


class Distributed(DistributedDataParallel):
    """One that was made without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize("wrap", [DataParallel, Distributed])
@pytest.mark.parametrize("where", ["whole", "stage", "layer", "function"])
def test_replicas_made_by_something_else_are_refused(wrap: Callable[..., nn.Module], where: str) -> None:
    model: Any = {
        "whole": lambda: wrap(nn.Sequential(lin(), lin())),
        "stage": lambda: [lin(), wrap(lin())],
        "layer": lambda: nn.Sequential(lin(), nn.Sequential(nn.Tanh(), wrap(lin()))),
        "function": lambda: [lin, lambda: wrap(lin())],
    }[where]()
    name = "DataParallel" if wrap is DataParallel else "Distributed"
    with pytest.raises(RuntimeFailure, match=rf"{name}.*give the module inside"):
        ps.Pipeline(model, ps.build("1f1b", 1 if where == "whole" else 2, 4), loss_fn=MSE)


@pytest.mark.parametrize("where", ["whole", "layer", "stage", "function"])
def test_parameters_without_values_are_refused(where: str) -> None:
    """A lazy layer ended in a ValueError of torch's while its elements were counted."""
    for make, said in (
        (lambda: nn.LazyLinear(8), "weight of .*LazyLinear.*has no shape yet; run the model once on a sample"),
        (lambda: nn.Linear(8, 8, device="meta"), "weight of .*Linear.*is on the meta device"),
        (lambda: nn.LazyBatchNorm1d(), "LazyBatchNorm1d.*has no shape yet"),
    ):
        model: Any = {
            "whole": make,
            "layer": lambda make=make: nn.Sequential(lin(), nn.Sequential(make(), lin())),
            "stage": lambda make=make: [lin(), make()],
            "function": lambda make=make: [lin, make],
        }[where]()
        with pytest.raises(RuntimeFailure, match=said):
            ps.Pipeline(model, ps.build("1f1b", 1 if where == "whole" else 2, 4), loss_fn=MSE)


def test_a_class_in_place_of_a_model_is_refused_in_words() -> None:
    """It ended in a TypeError of Python's: a type is not iterable."""
    pipeline = partial(ps.Pipeline, schedule=ps.build("1f1b", 2, 4), loss_fn=MSE)
    for refuse in (pipeline, ps.split):
        with pytest.raises(RuntimeFailure, match=r"model is <class .*; give an instance of a module"):
            refuse(nn.Linear)


class Overheard(nn.Module):
    """While its forward runs, another thread does what a transport's threads do: it makes a tensor.

    Args:
        made: takes what that thread got.
    """

    def __init__(self, made: list[object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self._beside = lambda: made.append(torch.zeros(1, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=self._beside)
        thread.start()
        thread.join()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_what_other_threads_do_while_a_model_is_traced_is_no_part_of_it() -> None:
    """Random run 80218 between three processes: a model was traced anew in a step, and the tensor of an
    acknowledgement, which a thread of the transport made just then, was taken for one of the model's."""
    made: list[object] = []
    parts = ps.split(Overheard(made), 2)
    assert made
    assert {type(each) for each in made} == {Tensor}
    assert [len(paths) for paths in parts.layers] == [2, 2]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, z: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self.a(x) + scale * self.b(z))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("x", "zz"), "unexpected keyword argument 'zz'"),
        (("x", "z", "q"), "unexpected keyword argument 'q'"),
        (1, "missing 1 required positional argument: 'z'"),
        (4, "but 5 were given"),
    ],
)
def test_inputs_that_the_forward_does_not_take_named_a_line_of_ours(names: Any, said: str) -> None:
    x = torch.randn(8, 4)
    inputs = dict.fromkeys(names, x) if isinstance(names, tuple) else x if names == 1 else (x,) * names
    pipe = ps.Pipeline(Two(), ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss())
    with pytest.raises(PartitionError, match=said):
        pipe.step(inputs, torch.randn(8, 1))
    with pytest.raises(PartitionError, match=said):
        ps.split(Two(), 2, example=inputs)
    assert pipe.step((x, x), torch.randn(8, 1), update=False).loss > 0


class Pair(NamedTuple):
    x: Tensor
    z: Tensor


def test_a_named_tuple_of_inputs_counted_as_one_argument() -> None:
    model, inputs = Two(), Pair(torch.randn(8, 4), torch.randn(8, 4))
    first, last = ps.split(model, 2, example=inputs)
    assert torch.equal(last(first(inputs)), model(*inputs))


def test_a_transformers_model_given_as_it_is_named_lines_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    with pytest.raises(PartitionError, match=r"cut by penstock.models.huggingface.Decoder\(model\), whose .stages"):
        ps.Pipeline(transformers.GPT2LMHeadModel(config), ps.build("1f1b", 2, 4))
