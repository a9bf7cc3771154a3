"""Models, batches and losses that are easy to get wrong in a pipeline, and how one is compared to the plain loop.

Every case runs in one process and, from the same table, in several (where each rank compares its own part).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
import penstock.runtime.split_backward.prepared as slot_module
from packed import packed
from plain_loop import Model, differences, gradients, named_as, plain_step
from waiting import PATIENCE

W = 8


@dataclass
class Case:
    """A model for some number of stages, a batch a step, a loss."""

    model: Model
    steps: list[tuple[Any, Any]]
    loss_fn: Callable[..., Tensor] = field(default_factory=nn.MSELoss)
    options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Callable[[int, int], Case]] = {}
"""Name -> function of (number of stages, number of microbatches)."""


def case(make: Callable[[int, int], Case]) -> Callable[[int, int], Case]:
    CASES[make.__name__] = make
    return make


@dataclass(frozen=True)
class Plain:
    """What the plain loop makes of a case: after each step, after the update that follows, and at the end."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


_PLAIN: dict[tuple[str, int, int], Plain] = {}
"""By name, stages and microbatches: whatever the schedule, the plain loop is the same, and is run once a process."""

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def compare(name: str, schedule: ps.Schedule, dispatch: str, defer: bool) -> list[str]:
    """Two accumulating steps and an update, by the pipeline and by the plain loop; where they differ, in words."""
    before, slot_module.MERGE_WORK = slot_module.MERGE_WORK, 0 if defer else slot_module.MERGE_WORK
    try:
        key = name, schedule.num_stages, schedule.num_microbatches
        torch.manual_seed(7)
        made = CASES[name](*key[1:])
        if key not in _PLAIN:
            _PLAIN[key] = plain_case(made, schedule.num_microbatches)
        return compare_case(made, schedule, dispatch, _PLAIN[key])
    finally:
        slot_module.MERGE_WORK = before


def plain_case(made: Case, num_microbatches: int) -> Plain:
    """The case by the plain loop, on a copy of its model."""
    plain = copy.deepcopy(made.model)
    module = named_as(plain)
    names = dict(module.named_parameters())
    losses, sums = [], []
    for number, (inputs, targets) in enumerate(made.steps, start=1):
        given, autocast = copy.deepcopy(inputs), made.options.get("autocast")
        losses.append(
            plain_step(plain, given, targets, num_microbatches, made.loss_fn, step=number, autocast=autocast)
        )
        sums.append(gradients(plain))
    if names:
        SGD(list(names.values())).step()
    return Plain(losses, sums, {n: p.detach() for n, p in names.items()}, dict(module.named_buffers()))


def compare_case(made: Case, schedule: ps.Schedule, dispatch: str, plain: Plain | None = None) -> list[str]:
    """The same for a case at hand; `plain` where it is known already."""
    plain = plain or plain_case(made, schedule.num_microbatches)
    pipe = ps.Pipeline(
        made.model,
        schedule,
        loss_fn=made.loss_fn,
        dispatch=dispatch,
        optimizer=SGD,
        timeout=PATIENCE,
        **packed(**made.options),
    )
    found: list[str] = []
    rng = torch.get_rng_state()
    for number, (inputs, targets) in enumerate(made.steps, start=1):
        loss, sums = plain.losses[number - 1], plain.gradients[number - 1]
        got = pipe.step(copy.deepcopy(inputs), targets, update=False)
        if not torch.equal(loss.double(), got.loss.double()):
            found.append(f"step {number}: loss {got.loss.item()!r}, want {loss.item()!r}")
        mine = {n: p.grad for n, p in pipe.named_parameters()}
        found += [f"step {number}: {d}" for d in differences({n: sums[n] for n in mine}, mine)]
    if not torch.equal(rng, torch.get_rng_state()):
        found.append("the global random state changed")
    pipe.update()
    mine = {n: p.detach() for n, p in pipe.named_parameters()}
    found += [f"after the update: {d}" for d in differences({n: plain.parameters[n] for n in mine}, mine)]
    own = {n: b for stage in pipe._local.model.stages.values() for n, b in stage.named_buffers()}
    found += [f"buffer: {d}" for d in differences({n: plain.buffers[n] for n in own}, own)]
    pipe.close()
    return found


def batches(num: int, *shape: int, count: int = 2, extra: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Steps of random inputs and targets alike, with `extra` samples more than two a microbatch."""
    return [(torch.randn(2 * num + extra, *shape), torch.randn(2 * num + extra, *shape)) for _ in range(count)]


def mlp(width: int = W, dropout: float = 0.3) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width))


def each(num_stages: int, make: Callable[[int], nn.Module]) -> list[nn.Module]:
    return [make(s) for s in range(num_stages)]


def sequential(num_stages: int, make: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*each(num_stages, make))


class Do(nn.Module):
    """Layers and a function that says what to do with them."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.layers, *args, **kwargs)


def ends(num_stages: int, index: int, first: Any, middle: Any, last: Any) -> Any:
    return first if index == 0 else last if index == num_stages - 1 else middle


def lin(a: int = W, b: int = W) -> nn.Linear:
    return nn.Linear(a, b)


# What stages look like.


@case
def dropout_and_a_ragged_last_microbatch(stages: int, num: int) -> Case:
    return Case(sequential(2 * stages + 1, lambda s: mlp()), batches(num, 5, W))


@case
def attention(stages: int, num: int) -> Case:
    return Case(
        each(stages, lambda s: nn.TransformerEncoderLayer(W, 2, 16, batch_first=True)), batches(num, 3, W, extra=0)
    )


@case
def stages_that_end_in_a_view(stages: int, num: int) -> Case:
    def flat(layers: Any, x: Tensor) -> Tensor:
        return layers[0](x).view(-1, 3, W).view(-1, 3 * W).view(-1, 3, W)

    return Case(each(stages, lambda s: Do(flat, lin())), batches(num, 3, W))


@case
def stages_that_end_transposed(stages: int, num: int) -> Case:
    layers = each(stages, lambda s: Do(lambda ls, x: ls[0](x).transpose(0, 1).tanh(), lin()))
    return Case(layers, batches(num, 4, W), lambda out, target: out.square().mean())


@case
def stages_that_end_in_a_slice(stages: int, num: int) -> Case:
    def sliced(layers: Any, x: Tensor) -> Tensor:
        return layers[0](x).chunk(3, -1)[1]

    return Case(each(stages, lambda s: Do(sliced, lin(W, 3 * W))), batches(num, 4, W))


@case
def stages_that_end_expanded(stages: int, num: int) -> Case:
    def spread(layers: Any, x: Tensor) -> Tensor:
        return layers[0](x).mean(1, keepdim=True).expand(-1, 4, -1)

    return Case(each(stages, lambda s: Do(spread, lin())), batches(num, 4, W))


@case
def gradients_that_arrive_expanded_or_transposed(stages: int, num: int) -> Case:
    def reduce(layers: Any, x: Tensor) -> Tensor:
        return layers[0](x.sum(1)).unsqueeze(1) + layers[1](x.transpose(1, 2)).sum(2)[:, None, :]

    layers = each(stages, lambda s: Do(reduce, lin(), lin(1 if s else 4, W)))
    return Case(layers, [(inputs, targets[:, :1]) for inputs, targets in batches(num, 4, W)])


@case
def tuples(stages: int, num: int) -> Case:
    def middle(ls: Any, x: Tensor, y: Tensor) -> Any:
        return ls[0](x) + y, x * y.sigmoid()

    def last(ls: Any, x: Tensor, y: Tensor) -> Tensor:
        return ls[0](x) * y

    first = lambda ls, x: (ls[0](x), x)  # noqa: E731
    if stages == 1:
        return Case([lin()], batches(num, W))
    return Case(each(stages, lambda s: Do(ends(stages, s, first, middle, last), lin())), batches(num, W))


@case
def dicts_with_constants_integers_and_nesting(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        ids = torch.arange(x.shape[0])
        return {"x": ls[0](x), "rest": {"ids": ids, "keep": (ids % 2 == 0, [2, "two", None, 0.5, True]), "scale": 3}}

    def middle(ls: Any, x: Tensor, rest: Any) -> Any:
        assert rest["keep"][1] == [2, "two", None, 0.5, True]
        assert rest["keep"][0].dtype is torch.bool
        return {"rest": rest, "x": ls[0](x) * rest["scale"] + rest["ids"][:, None]}

    def last(ls: Any, x: Tensor, rest: Any) -> Tensor:
        return ls[0](x) * rest["keep"][0][:, None]

    if stages == 1:
        return Case([lin()], batches(num, W))
    return Case(each(stages, lambda s: Do(ends(stages, s, first, middle, last), lin())), batches(num, W))


@case
def a_sequential_that_passes_tuples(stages: int, num: int) -> Case:
    def layer(ls: Any, pair: Any) -> Any:
        x, y = pair
        return ls[0](x), x + y

    layers = [Do(lambda ls, x: (ls[0](x), x), lin()), *each(2 * stages, lambda s: Do(layer, lin()))]
    return Case(nn.Sequential(*layers, Do(lambda ls, pair: pair[0] + pair[1])), batches(num, W))


@case
def an_input_passed_on_unchanged(stages: int, num: int) -> Case:
    def middle(ls: Any, x: Tensor, skip: Tensor) -> Any:
        return ls[0](x) + ls[1](skip), skip

    def last(ls: Any, x: Tensor, skip: Tensor) -> Tensor:
        return ls[0](x) + skip * 2

    def first(ls: Any, x: Tensor) -> Any:
        x = ls[0](x)
        return x.relu(), x

    if stages == 1:
        return Case([lin()], batches(num, W))
    return Case(each(stages, lambda s: Do(ends(stages, s, first, middle, last), lin(), lin())), batches(num, W))


@case
def one_tensor_twice_in_the_output(stages: int, num: int) -> Case:
    def middle(ls: Any, x: Tensor, y: Tensor) -> Any:
        z = (ls[0](x) + ls[1](y) + y * x).tanh()
        return z, z

    first = lambda ls, x: (x, x)  # noqa: E731
    last = lambda ls, x, y: ls[0](x) + ls[1](y) * x  # noqa: E731
    if stages == 1:
        return Case([lin()], batches(num, W))
    return Case(each(stages, lambda s: Do(ends(stages, s, first, middle, last), lin(), lin())), batches(num, W))


@case
def outputs_that_need_no_gradient_or_get_none(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        y = ls[0](x)
        return y, y.detach(), ls[1](x), torch.ones(3)

    def middle(ls: Any, x: Tensor, fixed: Tensor, unused: Tensor, ones: Tensor) -> Any:
        return ls[0](x) + fixed, fixed * 2, ls[1](x), ones

    def last(ls: Any, x: Tensor, fixed: Tensor, unused: Tensor, ones: Tensor) -> Tensor:
        return ls[0](x) * ones[0] + fixed

    if stages == 1:
        return Case([lin()], batches(num, W))
    return Case(each(stages, lambda s: Do(ends(stages, s, first, middle, last), lin(), lin())), batches(num, W))


@case
def gradients_that_stop_half_way(stages: int, num: int) -> Case:
    stop = stages // 2
    return Case(
        each(stages, lambda s: Do(lambda ls, x, s=s: ls[0](x.detach() if s == stop else x), lin())), batches(num, W)
    )


@case
def a_gradient_that_sometimes_stops(stages: int, num: int) -> Case:
    def stage(ls: Any, x: Tensor) -> Tensor:
        return ls[0](x.detach() if x.sum() > 0 else x)

    return Case(each(stages, lambda s: Do(stage, lin())), batches(num, W))


@case
def parameters_that_get_no_gradient(stages: int, num: int) -> Case:
    return Case(each(stages, lambda s: Do(lambda ls, x: ls[0](x), lin(), lin())), batches(num, W))


def _frozen(stages: int, num: int, which: Callable[[int], bool], whole: bool = True) -> Case:
    layers = each(stages, lambda s: mlp())
    for s, layer in enumerate(layers):
        if which(s):
            for n, p in layer.named_parameters():
                p.requires_grad_(not whole and "weight" in n)
    return Case(layers, batches(num, W))


@case
def frozen_biases(stages: int, num: int) -> Case:
    return _frozen(stages, num, lambda s: True, whole=False)


@case
def a_frozen_first_stage(stages: int, num: int) -> Case:
    return _frozen(stages, num, lambda s: s == 0)


@case
def a_frozen_middle(stages: int, num: int) -> Case:
    return _frozen(stages, num, lambda s: 0 < s < stages - 1)


@case
def a_frozen_last_stage(stages: int, num: int) -> Case:
    return _frozen(stages, num, lambda s: s == stages - 1)


@case
def all_frozen(stages: int, num: int) -> Case:
    return _frozen(stages, num, lambda s: True)


@case
def stages_without_parameters(stages: int, num: int) -> Case:
    return Case(each(stages, lambda s: nn.Tanh() if s % 2 else lin()), batches(num, W))


@case
def activation_checkpointing_with_dropout(stages: int, num: int) -> Case:
    def stage(ls: Any, x: Tensor) -> Tensor:
        return checkpoint(ls[0], x, use_reentrant=False) + ls[1](x)

    return Case(each(stages, lambda s: Do(stage, mlp(), lin())), batches(num, 3, W))


@case
def reentrant_checkpointing(stages: int, num: int) -> Case:
    def stage(ls: Any, x: Tensor) -> Tensor:
        return ls[1](checkpoint(ls[0], ls[2](x), use_reentrant=True))

    return Case(each(stages, lambda s: Do(stage, mlp(), lin(), lin())), batches(num, 3, W))


@case
def changes_in_place_at_the_start(stages: int, num: int) -> Case:
    def adds(ls: Any, x: Tensor) -> Tensor:
        x += 1
        x.mul_(1.5)
        return ls[0](x)

    return Case(
        each(stages, lambda s: nn.Sequential(nn.ReLU(inplace=True), lin()) if s % 2 else Do(adds, lin())),
        batches(num, W),
    )


@case
def changes_in_place_after_a_side_effect(stages: int, num: int) -> Case:
    """A stage that was run twice because the first try failed would count its batch statistics twice."""

    def stage(ls: Any, x: Tensor) -> Tensor:
        y = ls[0](x.detach().clone())
        x *= 2
        return ls[1](x) + y

    return Case(each(stages, lambda s: Do(stage, nn.BatchNorm1d(W), lin())), batches(num, W))


@case
def changes_in_place_at_the_end(stages: int, num: int) -> Case:
    def adds(ls: Any, x: Tensor) -> Tensor:
        return ls[0](x).add_(1)

    make = [lambda: Do(adds, lin()), lambda: nn.Sequential(lin(), nn.ReLU(inplace=True))]
    return Case(each(stages, lambda s: make[s % 2]()), batches(num, 3, W))


@case
def batch_norm(stages: int, num: int) -> Case:
    return Case(sequential(2 * stages, lambda s: nn.Sequential(lin(), nn.BatchNorm1d(W))), batches(num, W))


@case
def convolutions(stages: int, num: int) -> Case:
    layers = each(stages, lambda s: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()))
    return Case([layer.to(memory_format=torch.channels_last) for layer in layers], batches(num, 3, 6, 6))


@case
def one_layer_several_times_in_a_sequential(stages: int, num: int) -> Case:
    relu, shared = nn.ReLU(), lin()
    layers = [layer for _ in range(stages) for layer in (lin(), relu)]
    return Case(nn.Sequential(*layers, shared, relu, shared), batches(num, W))


@case
def compiled_stages(stages: int, num: int) -> Case:
    return Case(each(stages, lambda s: torch.compile(lin(), backend="eager") if s % 2 else lin()), batches(num, W))


# Batches and losses.


class Tokens:
    """A mean over the targets that are not negative."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=-1, reduction="sum")
        return loss / max(1, self.weight(target))

    def weight(self, target: Tensor) -> int:
        return int((target >= 0).sum())


def language_model(stages: int, tied: Sequence[int] = (), vocabulary: int = 11) -> list[nn.Module]:
    """An embedding in the first stage, a head in the last, and tables in `tied` that are all one parameter."""
    table = nn.Embedding(vocabulary, W)

    def first(ls: Any, ids: Tensor) -> Any:
        return ls[0](ls[1](ids)), ids

    def middle(ls: Any, x: Tensor, ids: Tensor) -> Any:
        return ls[0](x) + ls[1](ids), ids

    def last(ls: Any, x: Tensor, ids: Tensor) -> Tensor:
        return ls[2](ls[0](x)) + nn.functional.linear(ls[1](ids), ls[2].weight)

    def stage(s: int) -> nn.Module:
        body = mlp()
        own = table if s in tied else nn.Embedding(vocabulary, W)
        head = nn.Linear(W, vocabulary, bias=False)
        if stages - 1 in tied:
            head.weight = table.weight
        if stages == 1:
            return Do(lambda ls, ids: ls[2](ls[0](ls[1](ids))), body, own, head)
        return Do(ends(stages, s, first, middle, last), body, own, *([head] if s == stages - 1 else []))

    return each(stages, stage)


def token_steps(num: int, lengths: Sequence[int], vocabulary: int = 11) -> list[tuple[list[Tensor], list[Tensor]]]:
    """A step for each of two orders of lengths, a list with one entry a microbatch."""
    steps = []
    for shift in range(2):
        sizes = [lengths[(m + shift) % len(lengths)] for m in range(num)]
        ids = [torch.randint(vocabulary, (2, t)) for t in sizes]
        steps.append((ids, [torch.where(torch.rand(i.shape) < 0.3, -1, i) for i in ids]))
    return steps


@case
def lengths_that_change_with_the_microbatch(stages: int, num: int) -> Case:
    return Case(language_model(stages), token_steps(num, [3, 5, 4]), Tokens())


@case
def lengths_that_change_with_the_step(stages: int, num: int) -> Case:
    ids = [torch.randint(11, (2 * num, t)) for t in (4, 7, 4, 2)]
    return Case(language_model(stages), [(i, i.where(i != 3, -1)) for i in ids], Tokens())


@case
def a_microbatch_without_any_target(stages: int, num: int) -> Case:
    steps = token_steps(num, [4])
    steps[0][1][0] = torch.full_like(steps[0][1][0], -1)
    return Case(language_model(stages), steps, Tokens())


@case
def tied_first_and_last(stages: int, num: int) -> Case:
    return Case(language_model(stages, [0, stages - 1]), token_steps(num, [4, 3]), Tokens())


@case
def tied_in_every_stage(stages: int, num: int) -> Case:
    return Case(language_model(stages, range(stages)), token_steps(num, [4]), Tokens())


@case
def tied_in_three_stages(stages: int, num: int) -> Case:
    return Case(language_model(stages, [0, stages // 2, stages - 1]), token_steps(num, [4]), Tokens())


@case
def tied_neighbours(stages: int, num: int) -> Case:
    return Case(language_model(stages, [0, 1]), token_steps(num, [4]), Tokens())


@case
def tied_and_frozen(stages: int, num: int) -> Case:
    model = language_model(stages, [0, stages - 1])
    model[0].layers[1].weight.requires_grad_(False)
    return Case(model, token_steps(num, [4]), Tokens())


@case
def two_ties(stages: int, num: int) -> Case:
    layers = sequential(2 * stages, lambda s: nn.Sequential(lin(), nn.Tanh()))
    layers[-1][0].weight = layers[0][0].weight
    layers[-1][0].bias = layers[stages][0].bias
    return Case(layers, batches(num, W))


@case
def autocast_to_bfloat16(stages: int, num: int) -> Case:
    return Case(each(stages, lambda s: mlp()), batches(num, 3, W), options={"autocast": torch.bfloat16})


@case
def double_precision(stages: int, num: int) -> Case:
    steps = [(a.double(), b.double()) for a, b in batches(num, W)]
    return Case(each(stages, lambda s: lin().double()), steps)


@case
def several_inputs_and_targets(stages: int, num: int) -> Case:
    def first(ls: Any, a: Tensor, b: Tensor) -> Tensor:
        return ls[0](a) * b

    steps = [({"a": a, "b": torch.randn_like(a)}, (b, b > 0)) for a, b in batches(num, W)]
    loss = lambda out, t: ((out - t[0]) * t[1]).square().mean()  # noqa: E731
    return Case(each(stages, lambda s: Do(first if s == 0 else lambda ls, x: ls[0](x), lin())), steps, loss)


# What the wire must carry.


@case
def shapes_that_depend_on_the_data(stages: int, num: int) -> Case:
    def picks(ls: Any, x: Tensor) -> Any:
        return ls[0](x)[: 1 + int(x.abs().sum() * 10) % 3]

    layers = each(stages, lambda s: Do(picks if s == 0 and stages > 1 else lambda ls, x: ls[0](x), lin()))
    return Case(layers, batches(num, W, extra=num), lambda out, target: out.square().mean())


@case
def headers_longer_than_one_part(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        return {f"a_rather_long_name_for_a_tensor_{i}": ls[0](x) * i for i in range(60)}

    def middle(ls: Any, **xs: Tensor) -> Any:
        return {name: ls[0](x) for name, x in xs.items()}

    def last(ls: Any, **xs: Tensor) -> Tensor:
        return sum(ls[0](x) for x in xs.values())

    if stages == 1:
        return Case([lin()], batches(num, W))
    return Case(each(stages, lambda s: Do(ends(stages, s, first, middle, last), lin())), batches(num, W))


@case
def constants_that_change(stages: int, num: int) -> Case:
    def first(ls: Any, x: Tensor) -> Any:
        return ls[0](x), float(x.sum())

    def middle(ls: Any, x: Tensor, total: float) -> Any:
        return ls[0](x) * total, total

    def last(ls: Any, x: Tensor, total: float) -> Tensor:
        return ls[0](x) / (1 + abs(total))

    if stages == 1:
        return Case([lin()], batches(num, W))
    return Case(each(stages, lambda s: Do(ends(stages, s, first, middle, last), lin())), batches(num, W))


@case
def tensors_of_every_type(stages: int, num: int) -> Case:
    kinds = [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool, torch.int64]

    def first(ls: Any, x: Tensor) -> Any:
        y = ls[0](x)
        odd = [torch.ones(3, dtype=kind) for kind in kinds]
        return y, torch.complex(y, y * 2), y.double(), y.bfloat16(), y[:0], torch.zeros(0, 3), torch.tensor(2.5), odd

    def middle(ls: Any, y: Tensor, c: Tensor, d: Tensor, h: Tensor, *rest: Any) -> Any:
        assert [t.dtype for t in rest[3]] == kinds
        assert rest[0].shape == (0, W)
        assert rest[1].shape == (0, 3)
        return ls[0](y) + c.imag, c * 1j, d + 1, h * 2, *rest

    def last(ls: Any, y: Tensor, c: Tensor, d: Tensor, h: Tensor, *rest: Any) -> Tensor:
        return ls[0](y) * rest[2] + c.real + d.float() + h.float() + rest[0].sum()

    if stages == 1:
        return Case([lin()], batches(num, W))
    return Case(each(stages, lambda s: Do(ends(stages, s, first, middle, last), lin())), batches(num, W))
