"""`pipe.verify`: each of forty mistakes is found and named, nothing lasts, and what is right passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loss_forms
import penstock as ps
from contract_mistakes import MISTAKES, B, D, Does, M, batch, piped, row
from fuzz_blocks import MainGrad
from penstock.runtime import RuntimeFailure
from plain_loop import differences, gradients


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_named(name: str) -> None:
    torch.manual_seed(0)
    sentence, made = MISTAKES[name]
    pipe, inputs, targets = made(2)
    with pytest.raises(ps.VerifyError) as raised:
        pipe.verify(inputs, targets)
    found = [each.sentence for each in raised.value.verification.comparisons if each.outcome == "differs"]
    assert found[0] == sentence, str(raised.value)
    assert f"sentence {sentence} of the contract" in str(raised.value)
    pipe.close()


def test_each_sentence_that_a_step_can_break_has_at_least_three_mistakes() -> None:
    sentences = [sentence for sentence, _ in MISTAKES.values()]
    assert len(sentences) == 40
    assert all(sentences.count(sentence) >= 3 for sentence in range(1, 8))


class Statistics(nn.Module):
    """Batch norm, dropout, a counter in a buffer and a number in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(D), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.seen += len(x)
        return self.dropout(self.norm(x))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "chimera"])
def test_nothing_lasts(schedule: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), Statistics()) for _ in range(4)))
    other, (x, y) = copy.deepcopy(model), batch()
    built = ps.build(schedule, 2, M)
    adam = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)  # noqa: E731
    pipe = ps.Pipeline(model, built, loss_fn=nn.MSELoss(), optimizer=adam)
    twin = ps.Pipeline(other, built, loss_fn=nn.MSELoss(), optimizer=adam)
    for step in range(2):
        for each in (pipe, twin):
            each.step(x, y, update=False)
        before, state, modes = (
            gradients(model),
            copy.deepcopy(model.state_dict()),
            [m.training for m in model.modules()],
        )
        draws, seen = torch.get_rng_state(), [m.seen for m in model.modules() if isinstance(m, Statistics)]
        timeline = pipe.timeline().ops
        assert pipe.verify(x, y).holds
        assert not differences(before, gradients(model))
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert torch.equal(draws, torch.get_rng_state()), "generators are put back"
        assert [m.training for m in model.modules()] == modes
        assert [m.seen for m in model.modules() if isinstance(m, Statistics)] == seen
        assert pipe.timeline().ops == timeline
        assert pipe.num_steps == step + 1
        pipe.update()
        twin.update()
    assert torch.equal(pipe.step(x, y).loss, twin.step(x, y).loss)


def outcomes(found: Any) -> list[str]:
    return [each.outcome for each in found.comparisons]


def test_nothing_lasts_of_what_a_loss_keeps() -> None:
    """Its running mean was that of all calls by which `verify` compares."""
    torch.manual_seed(1)
    loss, model = loss_forms.Centered(), loss_forms.model_of(loss_forms.RIGHT["a running mean"])
    with ps.Pipeline(model, ps.build("1f1b", 2, 4), loss_fn=loss) as pipe, suppress(ps.VerifyError):
        pipe.verify(torch.randn(8, loss_forms.WIDTH), torch.randn(8, loss_forms.WIDTH))
    assert loss.calls == 0
    assert not loss.center.any()


class Scaled(nn.Sequential):
    """A forward that is traced, so that stages hold the layers within the model and not the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 1.5)


def test_nothing_lasts_of_gradients_that_a_traced_module_keeps_in_an_attribute() -> None:
    """The stages of a traced model hold its linear layer, and not the module around it, which keeps the sum."""
    keeps = MainGrad(4)
    pipe = ps.Pipeline(Scaled(nn.Linear(4, 4), keeps, nn.Linear(4, 4)), ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss())
    pipe.verify(torch.randn(8, 4), torch.randn(8, 4))
    assert torch.equal(keeps.recorded, torch.zeros(4, 4))


def test_batch_norms_are_told_as_what_they_are() -> None:
    pipe = piped(row(nn.BatchNorm1d(D), ranks=2), 2)
    whole = pipe.verify(*batch()).comparisons[3]
    assert whole.outcome == "same"
    assert whole.found == "compared in evaluation mode"


def test_batch_norms_without_running_statistics_are_left_out() -> None:
    """They normalise by the batch in evaluation mode too, so this was told as a mistake."""
    pipe = piped(row(nn.BatchNorm1d(D, track_running_stats=False), ranks=2), 2)
    whole = pipe.verify(*batch()).comparisons[3]
    assert whole.outcome == "not compared"
    assert "batch norms (1) without running statistics" in whole.found


@pytest.mark.parametrize("ranks", [1, 2])
def test_inputs_that_a_layer_changes_in_place_and_targets_stay_as_they_were(ranks: int) -> None:
    class Shifts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(0.5).mul_(2))

    x, y = batch()
    before, labels, model = x.clone(), y.clone(), row(ranks=ranks)
    model.insert(0, Shifts(D, D))
    pipe = ps.Pipeline(
        model, ps.build("1f1b", ranks, M), loss_fn=lambda o, t: nn.functional.mse_loss(o, t.clamp_(-0.1, 0.1))
    )
    assert pipe.verify(x, y).holds
    assert torch.equal(x, before)
    assert torch.equal(y, labels)


def test_draws_and_batch_norms_are_left_out_of_the_comparison_with_the_whole_batch() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.4, self.training)

    for layer in (nn.Dropout(0.4), Drops(), nn.Sequential(nn.BatchNorm1d(D), nn.Dropout(0.4))):
        whole = piped(row(layer, ranks=2), 2).verify(*batch()).comparisons[3]
        assert whole.outcome == "same"
        assert whole.found == "compared in evaluation mode"


def test_what_can_not_be_compared_is_said() -> None:
    x, y = batch()
    stages = [nn.Linear(D, D), nn.Linear(D, D)]
    listed = piped(stages, 2).verify(list(x.chunk(M)), list(y.chunk(M)))
    assert outcomes(listed) == ["same", "same", "same", "not compared", "same"]
    assert "given as microbatches" in str(listed)


class OfNoForm(nn.Module):
    """Returns an object, as a last stage may, and uses a parameter that no module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.foreign = nn.Linear(D, D), [nn.Parameter(torch.ones(D))]

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(value=self.linear(x) * self.foreign[0])


def test_bug_a_step_that_failed_was_told_as_the_same() -> None:
    found = piped([nn.Linear(D, D), OfNoForm()], 2, lambda output, y: nn.functional.mse_loss(output.value, y))
    told = found.verify(*batch()).comparisons[2]
    assert told.outcome == "not compared"
    assert "a value of type SimpleNamespace" in told.found


class TwiceInPlace(nn.Module):
    """Returns its output twice, as a hidden state and a residual, or changes the first of two in place."""

    def __init__(self, begins: bool) -> None:
        super().__init__()
        self.linear, self._begins = nn.Linear(D, D), begins

    def forward(self, *values: Tensor) -> Any:
        if self._begins:
            hidden = self.linear(values[0])
            return hidden, hidden.view(hidden.shape)
        hidden, residual = values
        return hidden.mul_(0.5) + self.linear(residual)


def test_a_residual_that_the_next_stage_changes_in_place_is_found() -> None:
    with pytest.raises(ps.VerifyError, match="sentence 6 of the contract") as told:
        piped([TwiceInPlace(True), TwiceInPlace(False)], 2).verify(*batch())
    assert outcomes(told.value.verification)[-1] == "differs"


def test_a_loss_for_each_microbatch_by_itself_says_so() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output @ target.T, torch.arange(len(output)))

    loss.by_microbatch = True  # type: ignore[attr-defined]
    found = piped(row(ranks=2), 2, loss).verify(*batch())
    assert found.holds
    assert "by_microbatch" in found.comparisons[3].found


def test_a_batch_smaller_than_the_number_of_microbatches_is_verified() -> None:
    x, y = batch()
    assert piped(row(ranks=2), 2).verify(x[:3], y[:3]).holds


def test_the_only_stage_of_a_model_is_verified() -> None:
    assert piped(row(ranks=1), 1).verify(*batch()).holds


def test_updates_within_the_order_are_refused_with_the_way_out() -> None:
    built = ps.build("amdp", 2, M, window=2)
    pipe = ps.Pipeline(row(ranks=2), built, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD)
    with pytest.raises(RuntimeFailure, match="give the schedule without them"):
        pipe.verify(*batch())


def test_a_step_that_fails_anyway_raises_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        piped(row(ranks=2), 2).verify(torch.randn(B, D + 1), batch()[1])


class AsksType(nn.Module):
    """Asks for the class of a value, which no tracing can answer; `asks` says of what and how."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.layers, self.asks = nn.ModuleList(nn.Linear(D, D) for _ in range(4)), asks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.asks == "type":
                is_tensor = type(x) is Tensor
            elif self.asks == "class":
                is_tensor = x.__class__ is Tensor
            else:
                is_tensor = not hasattr(x, "logits")
            x = x.tanh() if is_tensor else -x
        return x


@pytest.mark.parametrize("asks", ["type", "class", "attribute"])
def test_a_traced_forward_that_asks_for_the_type_of_a_value_is_found(asks: str) -> None:
    """A value has no type while it is traced, so such a forward goes another way in the stages."""
    torch.manual_seed(0)
    x, y = batch()
    pipe = piped(AsksType(asks), 2)
    with pytest.raises(ps.VerifyError, match=r"sentence 3 of the contract.*isinstance") as raised:
        pipe.verify(x, y)
    outcomes = {each.ways: each.outcome for each in raised.value.verification.comparisons}
    assert outcomes["the stages, and the model's own forward"] == "differs"


class OnNone(nn.Module):
    """Asks whether a layer returned None, which it does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, more = layer(x)
            if more is None:
                x = x.tanh()
        return x


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.linear(x), None


def test_a_traced_forward_that_asks_for_none_without_an_example_is_found() -> None:
    torch.manual_seed(0)
    x, y = batch()
    with pytest.raises(ps.VerifyError, match="sentence 3 of the contract"):
        piped(OnNone(), 2).verify(x, y)
    assert piped(ps.split(OnNone(), 2, example=x), 2).verify(x, y).holds


class Between(nn.Module):
    """Four layers, and what a function does with each of them and its input."""

    def __init__(self, call: Any, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.call = nn.ModuleList(layers or [nn.Linear(D, D) for _ in range(4)]), call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


class Fills(nn.Module):
    """A layer that changes the list that it is given, or returns None for every second microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num = nn.Linear(D, D), 0

    def forward(self, x: Tensor, sizes: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        x, self.num = self.linear(x), self.num + 1
        sizes[0] = sizes[0] + x.mean()
        return x, x if self.num % 2 else None


def in_evaluation(layer: nn.Module, x: Tensor) -> Tensor:
    layer[1].eval()  # type: ignore[index]
    y: Tensor = layer(x)
    layer[1].train()  # type: ignore[index]
    return y


def reads_its_list(layer: nn.Module, x: Tensor) -> Tensor:
    sizes = [x.mean()]
    y: Tensor = layer(x, sizes)[0]
    return y * sizes[0]


def asks_for_none(layer: nn.Module, x: Tensor) -> Tensor:
    y, more = layer(x, [x.mean()])
    return y if more is None else y.tanh()


def normalised() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)) for _ in range(4)]


@pytest.mark.parametrize(
    "made",
    [
        lambda: Between(in_evaluation, *normalised()),
        lambda: Between(reads_its_list, *(Fills() for _ in range(4))),
        lambda: ps.split(Between(asks_for_none, *(Fills() for _ in range(4))), 2, example=batch()[0]),
    ],
    ids=["the mode of a layer", "a list that a layer changes", "None in some microbatches"],
)
def test_what_a_traced_forward_does_that_stages_do_not_is_found(made: Any) -> None:
    torch.manual_seed(0)
    with pytest.raises(ps.VerifyError, match=r"sentence [13] of the contract") as raised:
        piped(made(), 2).verify(*batch())
    outcomes = {each.ways: each.outcome for each in raised.value.verification.comparisons}
    assert "differs" in outcomes.values()


def test_a_hook_that_came_after_the_cut_is_found() -> None:
    torch.manual_seed(0)
    model = Between(lambda layer, x: layer(x))
    pipe = piped(model, 2)
    assert pipe.verify(*batch()).holds
    model.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ps.VerifyError, match="sentence 3 of the contract"):
        pipe.verify(*batch())


@pytest.mark.parametrize("is_large", [True, False])
def test_statistics_of_another_stage_that_are_read_are_found(is_large: bool) -> None:
    """In a layer, or in the traced forward itself: a layer that is a large part of the model is opened."""
    torch.manual_seed(0)
    norm, width = nn.BatchNorm1d(D), D if is_large else 20 * D
    reads = Does(lambda layer, x: x * layer.weight - norm.running_mean)
    model = Between(lambda layer, x: layer(x), norm, nn.Linear(D, width), nn.Linear(width, D), reads)
    with pytest.raises(ps.VerifyError, match="sentence 2 of the contract"):
        piped(model, 2).verify(*batch())


def square(*, scale: bool = False) -> nn.Module:
    """Layers of width D, cut by a trace of the forward where there is a scale of its own."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2)))
    if not scale:
        return layers
    model = Does(lambda own, x: own.layers(x) * own.scale)
    model.layers, model.scale = layers, nn.Parameter(torch.ones(D))
    return model


def given(path: str, make: Callable[[], Any]) -> Callable[[nn.Module], object]:
    """Gives a model something else at a path."""
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), name, make())


def linear() -> nn.Module:
    return nn.Linear(D, D)


@pytest.mark.parametrize(
    ("scale", "change", "said"),
    [
        pytest.param(False, given("0", linear), r"layer 0 of the model is another one than", id="a layer"),
        pytest.param(
            True, given("layers.0", linear), r"layer layers\.0 of the model is another", id="of a traced model"
        ),
        pytest.param(
            False,  # as adapters do that wrap layers: no optimizer would train theirs
            given("0.0", lambda: nn.Sequential(linear(), linear())),
            r"layer 0\.0 of stage 0 is another one than when ps\.Pipeline was",
            id="a layer within a layer",
        ),
        pytest.param(
            False, given("1.1", nn.ReLU), r"layer 1\.1 of stage 1 is another one", id="one without parameters"
        ),
        pytest.param(
            False,
            given("1.0.weight", lambda: nn.Parameter(torch.zeros(D, D))),
            r"parameter .* of stage 1 is another one .*make a new pipeline",
            id="a parameter",
        ),
        pytest.param(
            True,
            given("scale", lambda: nn.Parameter(torch.zeros(D))),
            r"parameter scale of the model is another one.*make a new pipeline",
            id="a parameter of a traced model",
        ),
        pytest.param(
            False,
            given("1.0.scale", lambda: nn.Parameter(torch.ones(D))),
            r"parameter 1\..* of stage 1 is another one than when ps\.Pipeline was made, or there was none",
            id="a parameter more",
        ),
        pytest.param(
            False,
            lambda model: nn.utils.parametrizations.weight_norm(model[1][0]),
            r"(parameter|layer) 1\..* of stage 1 is another one than when ps\.Pipeline was made, or there was none",
            id="a parametrization",
        ),
    ],
)
def test_what_is_replaced_after_the_pipeline_was_made_is_found(scale: bool, change: Any, said: str) -> None:
    model, (x, y) = square(scale=scale), batch()
    with ps.Pipeline(model, ps.build("1f1b", 2, M), loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD) as pipe:
        pipe.step(x, y)
        change(model)
        with pytest.raises(ps.VerifyError, match=said):
            pipe.verify(x, y)


def test_a_layer_that_is_put_back_holds_again() -> None:
    model, (x, y) = square(), batch()
    with ps.Pipeline(model, ps.build("1f1b", 2, M), loss_fn=nn.MSELoss()) as pipe:
        first, model[0] = model[0], linear()
        with pytest.raises(ps.VerifyError, match="layer 0 of the model is another one than"):
            pipe.verify(x, y)
        model[0] = first
        assert pipe.verify(x, y).holds
