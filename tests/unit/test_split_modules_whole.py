"""Any module is cut into stages as it is: what comes out is the plain loop's to the bit, or the line in the way."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from own_loop import plain_evaluate, plain_step, state
from own_models import GPT, MODELS, EncoderDecoder, Own, ResNet, UNet
from penstock.runtime import PartitionError
from penstock.runtime.partitioning.program import MOST_PROGRAMS
from plain_loop import cut, differences
from runtime_cases import Do
from tiers import others_nightly

STAGES = 4
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CAN_BE_CUT = [name for name, own in MODELS.items() if not own.refused]


def split(own: Own, model: nn.Module, inputs: Any) -> ps.runtime.Split:
    return ps.split(model, STAGES, example=cut(inputs, 4)[0] if own.example else None)


def compared(model: nn.Module, own: Own, schedule: str = "zb-h1", num_ranks: int = 4, num_steps: int = 3) -> None:
    """Trains the stages and the plain model side by side."""
    reference = copy.deepcopy(model)
    inputs, targets = own.inputs(), own.targets()
    stages = split(own, model, inputs)
    assert len(stages) == STAGES
    assert all(stages.layers)
    layers = [path for paths in stages.layers for path in paths]
    pipe = ps.Pipeline(stages, ps.build(schedule, num_ranks, 4), loss_fn=own.loss, optimizer=SGD)
    optimizer = SGD(reference.parameters())
    for step in range(1, num_steps + 1):
        want = plain_step(reference, layers, inputs, targets, 4, own.loss, step)
        assert torch.equal(pipe.step(inputs, targets, update=False).loss, want)
        assert differences(state(reference), state(model)) == []
        optimizer.step()
        optimizer.zero_grad()
        pipe.update()
        assert differences(state(reference), state(model)) == []
        want = plain_evaluate(reference, inputs, targets, 4, own.loss)
        assert torch.equal(pipe.evaluate(inputs, targets).loss, want)
    assert {name for name, _ in pipe.named_parameters()} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("name", others_nightly(CAN_BE_CUT, list(CAN_BE_CUT)[::2]))
def test_own_models_train_as_the_plain_loop_to_the_bit(name: str) -> None:
    torch.manual_seed(1)
    compared(MODELS[name].make(), MODELS[name])


def test_seventeen_of_twenty_can_be_cut() -> None:
    assert len(MODELS) == 20
    assert len(CAN_BE_CUT) >= 17


@pytest.mark.parametrize("name", [name for name, own in MODELS.items() if own.refused])
def test_the_others_are_refused_with_their_line(name: str) -> None:
    own = MODELS[name]
    for example in (None, own.inputs()):
        with pytest.raises(PartitionError, match=r"own_models\.py:\d+") as error:
            ps.split(own.make(), STAGES, example=example)
        assert own.refused in str(error.value)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 4), ("zb-v", 2), ("interleaved-1f1b", 2)])
def test_other_schedules(schedule: str, num_ranks: int) -> None:
    torch.manual_seed(2)
    compared(MODELS["gpt"].make(), MODELS["gpt"], schedule, num_ranks)
    compared(MODELS["unet"].make(), MODELS["unet"], schedule, num_ranks)


def test_copies_of_stages_in_two_pipelines() -> None:
    """Their gradients are added up pipeline by pipeline; the loss is the plain loop's."""
    torch.manual_seed(2)
    model, own = GPT(), MODELS["gpt"]
    reference, inputs, targets = copy.deepcopy(model), own.inputs(), own.targets()
    stages = ps.split(model, 4)
    pipe = ps.Pipeline(stages, ps.build("chimera", 4, 4), loss_fn=own.loss)
    layers = [path for paths in stages.layers for path in paths]
    want = plain_step(reference, layers, inputs, targets, 4, own.loss)
    assert torch.equal(pipe.step(inputs, targets, update=False).loss, want)
    for a, b in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)


def test_a_pipeline_takes_the_module_itself() -> None:
    torch.manual_seed(3)
    model = ResNet()
    before = [parameter.clone() for parameter in model.parameters()]
    pipe = ps.Pipeline(model, ps.build("1f1b", 4, 4), loss_fn=F.cross_entropy, optimizer=SGD)
    pipe.step(torch.randn(8, 3, 8, 8), torch.randint(5, (8,)))
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model.load_state_dict(model.state_dict())


class Scaled(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_sequential_with_a_forward_of_its_own_is_cut() -> None:
    torch.manual_seed(4)
    layers = [nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 1)]
    vectors = MODELS["layerdrop"]
    compared(Scaled(*layers), Own(nn.Identity, vectors.inputs, vectors.loss, vectors.targets))


def test_the_number_of_stages_changes_no_draw() -> None:
    """Dropout is seeded layer by layer, and the layers follow from the model alone."""
    found = []
    for num_stages in (2, 3, 5):
        torch.manual_seed(5)
        model, own = GPT(), MODELS["gpt"]
        inputs, targets = own.inputs(), own.targets()
        pipe = ps.Pipeline(model, ps.build("1f1b", num_stages, 4), loss_fn=own.loss)
        found.append((pipe.step(inputs, targets, update=False).loss, state(model)))
    assert all(torch.equal(loss, found[0][0]) for loss, _ in found)
    assert all(differences(found[0][1], other) == [] for _, other in found)


def test_stages_begin_where_at_says() -> None:
    stages = ps.split(EncoderDecoder(), at=["encoder.layers.2", "decoder.layers.0"])
    assert [paths[0] for paths in stages.layers] == ["shared", "encoder.layers.2", "decoder.layers.0"]
    inside = ps.split(ResNet(), at=["layer2.0.conv2"])
    assert inside.layers[1][0] == "layer2.0.conv2"
    assert "layer1.0" in inside.layers[0]
    with pytest.raises(PartitionError, match=r"'encoder\.layer', which the model does not have"):
        ps.split(EncoderDecoder(), at=["encoder.layer"])
    with pytest.raises(PartitionError, match="in the order"):
        ps.split(EncoderDecoder(), at=["decoder.layers.0", "encoder.layers.0"])
    with pytest.raises(PartitionError, match="2 stages, not 4"):
        ps.split(EncoderDecoder(), 4, at=["decoder.layers.0"])


def test_a_cut_inside_blocks_trains_as_the_plain_loop() -> None:
    torch.manual_seed(6)
    model, own = ResNet(), MODELS["resnet"]
    reference, inputs, targets = copy.deepcopy(model), own.inputs(), own.targets()
    stages = ps.split(model, at=["layer1.1.bn1", "layer2.1.relu", "layer3.0.conv2"])  # the identity goes along
    layers = [path for paths in stages.layers for path in paths]
    pipe = ps.Pipeline(stages, ps.build("1f1b", 4, 4), loss_fn=own.loss)
    want = plain_step(reference, layers, inputs, targets, 4, own.loss)
    assert torch.equal(pipe.step(inputs, targets, update=False).loss, want)
    assert differences(state(reference), state(model)) == []


def test_the_table_says_what_each_stage_holds() -> None:
    torch.manual_seed(7)
    table = str(ps.split(UNet(), 4, example=torch.randn(2, 3, 8, 8))).splitlines()
    assert table[0].split() == ["stage", "layers", "parameters", "cost", "passes", "on"]
    assert table[1].startswith("0      inc .. down.2 (4)")
    assert table[1].endswith("3.8 kB")
    assert len(table) == 5
    assert sum(p.numel() for p in UNet().parameters()) == 6336 + 6720 + 1696 + 442
    assert len(ps.split(UNet(), example=torch.randn(2, 3, 8, 8))) == 11  # a stage for each layer


def test_inputs_of_another_form_are_traced_when_they_come() -> None:
    """An optional mask, given by keyword, to a model that was cut without an example."""
    torch.manual_seed(8)
    model, own = EncoderDecoder(), MODELS["encoder-decoder"]
    reference = copy.deepcopy(model)
    stages = ps.split(model, 4)
    layers = [path for paths in stages.layers for path in paths]
    pipe = ps.Pipeline(stages, ps.build("1f1b", 4, 4), loss_fn=own.loss)
    for step, masked in enumerate((True, False, True), start=1):
        inputs, targets = own.inputs(), own.targets()
        if not masked:
            inputs.pop("src_mask")
        want = plain_step(reference, layers, inputs, targets, 4, own.loss, step)
        assert torch.equal(pipe.step(inputs, targets, update=False).loss, want)
        assert differences(state(reference), state(model)) == []


def test_a_checkpoint_has_the_names_of_the_model(tmp_path: Any) -> None:
    torch.manual_seed(9)
    own, losses = MODELS["gpt"], []
    inputs, targets = own.inputs(), own.targets()
    for num_stages in (4, 2):
        torch.manual_seed(10 + num_stages)
        model = GPT()
        pipe = ps.Pipeline(model, ps.build("1f1b", num_stages, 4), loss_fn=own.loss, optimizer=SGD)
        if num_stages == 4:
            pipe.step(inputs, targets)
            pipe.save(tmp_path)
        else:
            pipe.load(tmp_path)
        losses.append(pipe.evaluate(inputs, targets).loss)
    assert torch.equal(*losses)


# What stands in the way.


class Chain(nn.Module):
    """Four layers; what `between` does after each stands in the way, or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.scale, self.count, self.seen = 1.0, 0, []
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(torch.tanh(layer(x)))
        return x.sum(-1, keepdim=True)

    def between(self, x: Tensor) -> Tensor:
        return x


class Counts(Chain):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


class CountsInABuffer(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_seen = self.num_seen + 1
        return super().forward(x)


class Notes(Chain):
    def between(self, x: Tensor) -> Tensor:
        self.seen.append(x)  # for somebody to look at
        return x


class Branches(Chain):
    def between(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class OnShape(Chain):
    def between(self, x: Tensor) -> Tensor:
        return x if x.shape[0] > 1 else -x


class Seeds(Chain):
    def between(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(x)


class Drawn(Chain):
    def between(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) > 0.5 else -x


class Asks(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LSTM(12, 12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x, more = norm(x)
            if more is not None:
                x = x + 1
        return super().forward(x)


class AsksKind(Chain):
    """Asks what kind of thing a layer returned, which the layer alone knows."""

    def between(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        return x * 2 if isinstance(y, Tensor) else x


class Kinds(Chain):
    """Asks what kinds of things are that are known without an example."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2 if isinstance(x, Tensor) and torch.is_tensor(x) else -x
        parts = x * 3 if isinstance(x, tuple | list | Mapping) else x + 1
        return super().forward(parts)


class Optional(nn.Module):
    """A layer that returns a dict with None in it, or with something else."""

    def __init__(self, gives: str = "None") -> None:
        super().__init__()
        self.linear, self.gives = nn.Linear(12, 12), gives

    def forward(self, x: Tensor) -> Any:
        return {"x": self.linear(x), "more": None if self.gives == "None" else x}


class Nones(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Optional("None" if k % 2 else "x") for k in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            found = layer(x)
            x = found["x"] if found["more"] is None and found.get("more") is None else found["x"].tanh()
            x = x + 1 if isinstance(found, dict) and hasattr(found, "items") and not hasattr(x, "own") else -x
        return x.sum(-1, keepdim=True)


class Swallows(Chain):
    def between(self, x: Tensor) -> Tensor:
        try:
            if x.sum() > 1:
                return x
        except Exception:
            pass
        return -x


CALLS = 0


class Differentiates(Chain):
    def between(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
        return x + slope


class Enables(Chain):
    def between(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 2


class Recomputes(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.sum(-1, keepdim=True)


class Casts(Chain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Branches, "x if x.sum.. > 0 else -x"),
        (OnShape, "example=.*x if x.shape.0. > 1 else -x"),
        (Seeds, "seeds torch's random numbers.*torch.manual_seed.0."),
        (Drawn, "x if torch.rand"),
        (AsksKind, "isinstance.y, Tensor."),
        (Swallows, "if x.sum.. > 1"),
        (Differentiates, "computes gradients itself.*torch.autograd.grad"),
        (Enables, "with torch.enable_grad"),
        (Recomputes, "checkpoint.layer, x"),
        (Casts, "with torch.autocast"),
    ],
)
def test_what_tracing_would_freeze_is_refused_with_its_line(kind: type[nn.Module], line: str) -> None:
    model = kind()
    with pytest.raises(PartitionError, match=rf"test_split_modules_whole\.py:\d+.*{line}|{line}") as error:
        ps.Pipeline(model, ps.build("1f1b", 4, 4), loss_fn=F.mse_loss)
    assert "test_split_modules_whole.py:" in str(error.value)


@pytest.mark.parametrize(("kind", "name"), [(Counts, "count"), (CountsInABuffer, "num_seen"), (Notes, "seen")])
def test_a_forward_that_sets_an_attribute_is_refused(kind: type[Any], name: str) -> None:
    model = kind()
    with pytest.raises(PartitionError, match=f"the forward changes '{name}' of a {kind.__name__}"):
        ps.Pipeline(model, ps.build("1f1b", 4, 4), loss_fn=F.mse_loss)
    assert model.count == 0
    assert model.seen == []


@pytest.mark.parametrize("kind", [OnShape, Asks, AsksKind, Nones])
def test_an_example_answers_what_follows_from_shapes_and_kinds(kind: type[nn.Module]) -> None:
    torch.manual_seed(11)
    vectors = MODELS["layerdrop"]
    compared(kind(), Own(nn.Identity, vectors.inputs, vectors.loss, vectors.targets, example=True))


def test_a_microbatch_that_would_take_another_branch_is_refused() -> None:
    pipe = ps.Pipeline(ps.split(OnShape(), 4, example=torch.randn(2, 12)), ps.build("1f1b", 4, 4), loss_fn=F.mse_loss)
    pipe.step(torch.randn(8, 12), torch.randn(8, 1))
    with pytest.raises(PartitionError, match=r"gives False where the example gave True.*x.shape\[0\] > 1"):
        pipe.step(torch.randn(4, 12), torch.randn(4, 1))


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_torch_computes_in_one_piece_have_their_operations(training: bool) -> None:
    """An LSTM cost nothing, and an attention in evaluation mode neither, so the other layers made all of the cut."""
    before = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    for kind in (nn.LSTM, nn.GRU):
        layers = [Recurrent(kind(16, 16, batch_first=True)) for _ in range(4)]
        model = nn.Sequential(*layers, nn.Linear(16, 16)).train(training)
        shares = ps.split(model, 5, example=torch.randn(4, 6, 16)).shares
        gates = 4 if kind is nn.LSTM else 3  # each has one matrix for the input and one for the state
        assert shares == pytest.approx([2 * gates / (8 * gates + 1)] * 4 + [1 / (8 * gates + 1)])
    encoder = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)))
    cut = ps.split(nn.Sequential(encoder, nn.Linear(16, 16)).train(training), 4, example=torch.randn(4, 6, 16))
    assert cut.shares[0] == cut.shares[2] > 5 * cut.shares[3]
    assert before == (torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled())


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Routed(nn.Module):
    """Each row goes to one of four experts, and an expert without enough rows is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = (chosen == index).nonzero(as_tuple=True)
            if len(rows) > 1:
                out = out.index_add(0, rows, expert(x[rows]))
        return x + out.reshape(out.shape[0], -1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(3))
        self.head = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_a_block_that_asks_how_many_rows_an_expert_gets_is_kept_whole_with_an_example() -> None:
    """It was opened, and then refused every microbatch that was routed in another way than the example."""
    torch.manual_seed(3)
    model = Mixture()
    plain = copy.deepcopy(model)
    x, y = torch.randn(32, 12), torch.randn(32, 1)
    counts = {len(each[model.blocks[0].router(each).argmax(-1) == 0]) for each in x.chunk(8)}
    assert len(counts) > 2
    split = ps.split(model, 4, example=x[:4])
    assert split.layers == [["blocks.0"], ["blocks.1"], ["blocks.2"], ["head"]]
    (line,) = split.kept_whole  # equal blocks share one
    assert line.startswith("kept whole: blocks.0, blocks.1, blocks.2: the forward asks for the length of the values")
    assert str(split).endswith(f"\n{line}")
    ps.Pipeline(split, ps.build("zb-h1", 4, 8), loss_fn=F.mse_loss).step(x, y, update=False)
    for x_m, y_m in zip(x.chunk(8), y.chunk(8), strict=True):
        (F.mse_loss(plain(x_m), y_m) / 8).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


class Merges(Chain):
    """Writes some rows, chosen by their values, and then asks for shapes and for how many rows there are."""

    def between(self, x: Tensor) -> Tensor:
        chosen = (x > 0)[:, :1].expand_as(x)
        x = x.masked_scatter(chosen, x[chosen] * 2)
        rows = x[:, 0].nonzero()
        return x if x.shape[1] > 1 and len(rows) >= 0 else -x


def test_a_shape_may_be_asked_for_after_rows_were_written_that_values_choose() -> None:
    torch.manual_seed(5)
    vectors = MODELS["layerdrop"]
    compared(Merges(), Own(nn.Identity, vectors.inputs, vectors.loss, vectors.targets, example=True))


TABLES: dict[str, Tensor] = {}


@functools.lru_cache
def table(num: int) -> Tensor:
    return torch.arange(num) / num


class CachesInAGlobal(Chain):
    def between(self, x: Tensor) -> Tensor:
        if "table" not in TABLES:
            TABLES["table"] = torch.arange(12.0).to(x) / 12
        return x + TABLES["table"]


class CachesByLru(Chain):
    def between(self, x: Tensor) -> Tensor:
        return torch.add(x, table(12))


@pytest.mark.parametrize("kind", [CachesInAGlobal, CachesByLru])
def test_a_cache_that_a_traced_forward_fills_is_refused_in_words(kind: type[nn.Module]) -> None:
    """It ended in a KeyError: the cache kept a value that stood for a tensor while the forward was traced."""
    TABLES.clear()
    table.cache_clear()
    model, x = kind(), torch.randn(3, 12)
    with pytest.raises(PartitionError, match=r"kept while it was traced.*sentence 1 .*Or empty the cache.*example="):
        ps.split(model, 2)
    with pytest.raises(PartitionError, match="kept while it was traced"):
        model(x)
    TABLES.clear()
    table.cache_clear()
    stages = ps.split(model, 2, example=x)
    other = torch.randn(5, 12)
    assert torch.equal(stages[1](stages[0](other)), model(other))
    assert len(ps.split(model, 2)) == 2, "the cache holds tensors now"


def test_what_a_layer_does_inside_is_its_own() -> None:
    """Branches on data, kinds and globals in a layer that is not opened."""
    torch.manual_seed(14)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(12, 12), 0

        def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
            global CALLS
            CALLS += 1
            self.calls += 1
            y = self.linear(x)
            return y if more is None and isinstance(x, Tensor) and y.sum() > 0 else torch.tanh(y)

    class Layers(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(9))

    vectors = MODELS["layerdrop"]
    for example in (False, True):
        compared(Layers(), Own(nn.Identity, vectors.inputs, vectors.loss, vectors.targets, example=example))


class Running(Chain):
    """Its own forward gathers a mean in place, in one stage."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        x = x - self.mean
        with torch.no_grad():
            shift = self.layers[0](x)
        return super().forward(x + shift)


class Twice(nn.Module):
    """Uses a parameter of its own before and after its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12) * 0.3)
        self.unused = nn.Parameter(torch.randn(3))
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        x[:, 0] = 1.0
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        return F.linear(x, self.weight.t()).mean(-1, keepdim=True)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x  # not the derivative, so that it shows which was used


class Squares(Chain):
    def between(self, x: Tensor) -> Tensor:
        return Square.apply(x)


@pytest.mark.parametrize("kind", [Running, Twice, Squares, Kinds, Asks])
def test_what_the_forward_does_itself_is_done_alike(kind: type[nn.Module]) -> None:
    torch.manual_seed(13)
    vectors = MODELS["layerdrop"]
    compared(kind(), Own(nn.Identity, vectors.inputs, vectors.loss, vectors.targets))


class Doubled(torch.autograd.Function):
    """Its forward is given no context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


@pytest.mark.parametrize("apply", [Square.apply, Doubled.apply])
def test_an_apply_that_was_looked_up_before_the_trace_lost_its_backward(apply: Callable[[Tensor], Tensor]) -> None:
    """The layers before the function got no gradient. A trace inlined the function's forward, under no_grad."""

    class Bound(Chain):
        def between(self, x: Tensor) -> Tensor:
            return apply(x)

    for example in (None, torch.randn(4, 12)):
        with pytest.raises(PartitionError, match=r"write MyFunction\.apply\(.*return apply\(x\)"):
            ps.split(Bound(), 2, example=example)
    assert "__init__" not in vars(torch.autograd.function.BackwardCFunction)
    within = nn.Sequential(nn.Linear(12, 12), Do(lambda _, x: apply(x)), nn.Linear(12, 1))
    x, y = torch.randn(8, 12), torch.randn(8, 1)
    (want,) = torch.autograd.grad(F.mse_loss(within(x), y), within[0].weight)
    ps.Pipeline(ps.split(within, 2, example=x), ps.build("1f1b", 2, 1), loss_fn=F.mse_loss).step(x, y, update=False)
    assert torch.equal(within[0].weight.grad, want)


class Annealed(nn.Module):
    """Divides by a number among its inputs, where a shape says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 1)

    def forward(self, x: Tensor, temperature: float) -> Tensor:
        x = self.first(x)
        return self.last(x / temperature if x.shape[0] > 1 else x)


def test_a_number_among_the_inputs_that_changed_took_the_example_away() -> None:
    """The forward was refused for want of an example, and the programs of all numbers were kept."""
    model, x, y = Annealed(), torch.randn(8, 12), torch.randn(8, 1)
    cut = ps.split(model, 2, example=(x[:2], 1.0))
    pipe = ps.Pipeline(cut, ps.build("1f1b", 2, 4), loss_fn=F.mse_loss)
    for temperature in (1.0, 0.5, 2, *(1 + step / 8 for step in range(MOST_PROGRAMS)), 1.0):
        plain = copy.deepcopy(model)
        for part, target in zip(x.chunk(4), y.chunk(4)):
            (F.mse_loss(plain(part, temperature), target) / 4).backward()
        pipe.step((x, temperature), y, update=False)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))
        pipe.zero_grad()
    assert len(cut.tracing._programs) == MOST_PROGRAMS


def test_verify_finds_a_norm_that_two_stages_use() -> None:
    class Shares(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(12)

        def between(self, x: Tensor) -> Tensor:
            return self.norm(x)

    pipe = ps.Pipeline(Shares(), ps.build("1f1b", 4, 4), loss_fn=F.mse_loss)
    with pytest.raises(ps.VerifyError, match=r"differs: the buffer norm\.running_mean"):
        pipe.verify(torch.randn(16, 12), torch.randn(16, 1))


def test_too_many_stages_say_what_there_is() -> None:
    with pytest.raises(PartitionError, match=r"20 stages asked of a Chain with 4 layers.*layers\.0, layers\.1"):
        ps.split(Chain(), 20)
    with pytest.raises(PartitionError, match="3 costs given for 4 layers"):
        ps.split(Chain(), 2, costs=[1, 2, 3])
    assert [len(paths) for paths in ps.split(Chain(), 2, costs=[9, 1, 1, 1]).layers] == [1, 3]
