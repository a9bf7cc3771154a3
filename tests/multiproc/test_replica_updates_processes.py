"""Updates over two replicas that are not plain: steps of the optimizer itself, parameters that are frozen or changed,
and optimizers that torch cannot step parts with. What trains is compared with the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, Adafactor, AdamW, Optimizer, Rprop

import penstock as ps
from penstock.runtime import RuntimeFailure
from penstock.runtime.tensors.dtensor import whole
from plain_loop import plain_step
from processes import run_ranks_to_end
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

NUM = 4
ADAMW = partial(AdamW, lr=0.01)
SHARDINGS = ("none", "zero1", "fsdp")
Values = dict[str, Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, 0)


def pipeline(module: nn.Module, sharding: str, optimizer: Any = ADAMW) -> ps.Pipeline:
    return ps.Pipeline(
        module,
        ps.build("1f1b", 1, NUM // 2),
        loss_fn=nn.MSELoss(),
        optimizer=optimizer,
        mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")),
        timeout=PATIENCE,
        parallel=ps.ParallelOptions(sharding=sharding),
    )


def values_of(pipe: ps.Pipeline) -> Values:
    return {name: whole(parameter.detach()).clone() for name, parameter in pipe.named_parameters()}


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeFailure, RuntimeError) as error:
        return str(error)
    return "nothing"


def stepped_by_others(rank: int) -> dict[str, str]:
    """What is said of steps of the optimizer that are not the pipeline's."""
    found = {}
    for sharding in SHARDINGS:
        pipe = pipeline(model(), sharding)
        pipe.step(*batch(0), update=False)
        found[sharding] = said(pipe.optimizer.step)  # type: ignore[union-attr]
        found[f"{sharding}, the pipeline's"] = said(pipe.update)
    scaler = torch.amp.GradScaler("cpu")
    pipe.step(*batch(0), update=False)
    scaler.scale(torch.ones(()))
    found["a scaler"] = said(lambda: scaler.step(pipe.optimizer))  # type: ignore[arg-type]
    optimizer = pipe.optimizer
    pipe.close()
    found["closed"] = said(optimizer.step)  # type: ignore[union-attr]
    return found


def test_a_step_of_the_optimizer_itself_left_each_replica_with_what_it_owns_stepped_alone() -> None:
    """Under zero1 nobody fetched what others had stepped; a scaler leaves out steps in some processes alone."""
    for outcome in run_ranks_to_end(2, stepped_by_others):
        found = outcome.value
        for case in (*SHARDINGS, "a scaler"):
            assert found[case].startswith("AdamW.step() was called, and this pipeline has 2 processes"), found
            assert "call pipe.update() on every rank instead" in found[case]
        assert {found[case] for case in found.keys() - {*SHARDINGS, "a scaler"}} == {"nothing"}


def in_two_pipelines(optimizer: Any) -> ps.Pipeline:
    """Two ranks with copies of each other's stages, which share a parameter."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)]
    stages[1].weight = stages[0][0].weight  # type: ignore[index]
    schedule = ps.build("chimera", 2, NUM)
    return ps.Pipeline(stages, schedule, loss_fn=nn.MSELoss(), optimizer=optimizer, timeout=PATIENCE)


def stepped_by_ones_own(rank: int) -> dict[str, tuple[bool, str]]:
    """By case, whether an optimizer of one's own steps as the pipeline's does, and what is said where it can't."""
    found = {}
    for case in (*SHARDINGS, "copies and ties"):
        theirs, mine = (
            pipeline(model(), case, optimizer) if case in SHARDINGS else in_two_pipelines(optimizer)
            for optimizer in (ADAMW, None)
        )
        own, texts = ADAMW(mine.parameters()), []
        for step in range(3):
            theirs.step(*batch(step))
            texts.append(said(partial(mine.step, *batch(step))))
            own.step()
            own.zero_grad()
        one, other = values_of(theirs), values_of(mine)
        found[case] = all(torch.equal(one[name], other[name]) for name in one), texts[-1]
        theirs.close()
        mine.close()
    return found


def test_an_optimizer_of_ones_own_steps_in_each_process_as_the_pipelines_does() -> None:
    for outcome in run_ranks_to_end(2, stepped_by_ones_own):
        is_alike, text = outcome.value.pop("zero1")
        assert not is_alike
        assert text.startswith("sharding=zero1 is a part of updates, and this pipeline has no optimizer")
        assert set(outcome.value.values()) == {(True, "nothing")}, outcome.value


def frozen_every_other_step(module: nn.Module, step: int) -> None:
    for name, parameter in module.named_parameters():
        if name.startswith("2."):
            parameter.requires_grad_(step % 2 == 0)


def trained(rank: int, folder: str) -> dict[str, tuple[Values, Values]]:
    """By sharding, parameters after two cases: of one frozen while its gradient waits, and of gradients that were
    loaded."""
    found = {}
    for sharding in SHARDINGS:
        module = model()
        pipe = pipeline(module, sharding)
        for step in range(4):
            frozen_every_other_step(module, step)
            pipe.step(*batch(step), update=step % 2 == 1)
        frozen = values_of(pipe)
        pipe.close()
        pipe = pipeline(model(), sharding)
        pipe.step(*batch(0))
        pipe.step(*batch(1), update=False)
        saved = pipe.save(Path(folder) / sharding)
        pipe.close()
        pipe = pipeline(model(), sharding)
        pipe.load(saved)
        pipe.update()
        pipe.step(*batch(2))
        found[sharding] = frozen, values_of(pipe)
        pipe.close()
    return found


def plainly(updates: dict[int, bool], freezes: bool) -> Values:
    module = model()
    optimizer = AdamW(module.parameters(), lr=0.01)
    for step, update in updates.items():
        if freezes:
            frozen_every_other_step(module, step)
        plain_step(module, *batch(step), NUM, nn.MSELoss())
        if update:
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.slow
def test_updates_of_what_no_step_had_trained_since_came_to_its_owner_alone(tmp_path: Path) -> None:
    """Under zero1 the other replica kept the old values of a parameter that was frozen by then, and of all parameters
    where gradients came from a checkpoint."""
    wanted = plainly({0: False, 1: True, 2: False, 3: True}, freezes=True)
    wanted_loaded = plainly({0: True, 1: True, 2: True}, freezes=False)
    for outcome in run_ranks_to_end(2, trained, str(tmp_path)):
        for frozen, loaded in outcome.value.values():
            torch.testing.assert_close(frozen, wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(loaded, wanted_loaded, rtol=1e-4, atol=1e-5)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Rprop": Rprop,
    "Adafactor": Adafactor,
    "SGD with fused=True": partial(SGD, fused=True),
    "SGD": SGD,
}


def with_parts(rank: int) -> dict[str, str]:
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        for sharding in ("zero1", "fsdp"):
            pipe = pipeline(model(), sharding, optimizer)
            found[f"{name}, {sharding}"] = said(partial(pipe.step, *batch(0)))
            pipe.close()
    return found


def test_optimizers_that_cannot_step_parts_ended_in_an_error_of_torch() -> None:
    for outcome in run_ranks_to_end(2, with_parts):
        refused = {case: text for case, text in outcome.value.items() if text != "nothing"}
        wanted = {f"{name}, fsdp" for name in OPTIMIZERS if name != "SGD"}
        assert refused.keys() in (wanted, wanted - {"Rprop, fsdp"})  # which torch 2.15 steps
        for case, text in refused.items():
            kind = case.removesuffix(", fsdp").removesuffix(" with fused=True")
            assert text.startswith(f"{kind} can't step the parts of parameters that processes")
            assert "give ParallelOptions(sharding='zero1') instead of 'fsdp'" in text
        assert "leave out fused=" in refused["SGD with fused=True, fsdp"]


class Average(nn.Module):
    """A layer that keeps an average of another one's weights, the same on every replica."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.weight.lerp_(self.layer.weight, 0.1)
        return self.layer(x)


def step_at_once(parameter: Tensor) -> None:
    """A hook that is called when a gradient is complete."""
    with torch.no_grad():
        parameter.sub_(parameter.grad)  # type: ignore[arg-type]
    parameter.grad = None


def changed_in_a_step(rank: int) -> list[str]:
    found = []
    for sharding in SHARDINGS:
        hooked = model()
        hooked[2].weight.register_post_accumulate_grad_hook(step_at_once)
        pipe = pipeline(hooked, sharding)
        found.append(said(partial(pipe.step, *batch(0))))
    return found


def averaged_in_a_step(rank: int) -> dict[str, Tensor]:
    """By sharding, an average that a forward keeps after two steps."""
    found = {}
    for sharding in SHARDINGS:
        torch.manual_seed(0)
        pipe = pipeline(nn.Sequential(nn.Linear(4, 4), Average()), sharding)
        for step in range(2):
            pipe.step(*batch(step))
        found[sharding] = whole(dict(pipe.named_parameters())["1.average.weight"].detach())
    return found


def test_bug_what_a_forward_changed_alike_on_all_replicas_was_lost_under_fsdp() -> None:
    for outcome in run_ranks_to_end(2, averaged_in_a_step):
        first, *others = outcome.value.values()
        assert all(torch.equal(first, other) for other in others)


def test_what_changes_parameters_in_the_middle_of_a_step_made_replicas_other_models() -> None:
    """Each had seen its own microbatches alone."""
    for outcome in run_ranks_to_end(2, changed_in_a_step):
        for hooked in outcome.value:
            by_itself = "parameter 'weight' of Linear changed in the backward of microbatch" in hooked
            assert by_itself or hooked.startswith("parameter 2.weight differs between process 0 and process 1")


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "nothing": lambda module: None,
    "other parameters": lambda module: module.load_state_dict(model().state_dict(), assign=True),
    "another parameter": lambda module: setattr(module[2], "bias", nn.Parameter(torch.ones(8))),
    "another type": lambda module: module.double(),
}


def changed_between_steps(rank: int) -> dict[str, str]:
    found = {}
    for name, change in CHANGES.items():
        for sharding in ("none", "fsdp"):
            module = model()
            pipe = pipeline(module, sharding, SGD)
            pipe.step(*batch(0))
            change(module)
            x, y = (part.double() if name == "another type" else part for part in batch(1))
            found[f"{name}, {sharding}"] = said(partial(pipe.verify if "parameter" in name else pipe.step, x, y))
            pipe.close()
    pipe = pipeline(model(), "fsdp")
    with torch.inference_mode():
        found["inference"] = said(partial(pipe.step, *batch(0)))
    layers = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    found["sums in a forward"] = said(lambda: pipeline(layers, "none"))
    return found


def test_verify_finds_parameters_that_were_replaced_under_fsdp() -> None:
    """A step would put back the ones before. A model of another type ends in an error of torch's."""
    for outcome in run_ranks_to_end(2, changed_between_steps):
        found = outcome.value
        quiet = {"nothing, none", "nothing, fsdp", "another type, none"}
        assert {case for case, text in found.items() if text == "nothing"} == quiet, found
        for sharding in ("none", "fsdp"):
            replaced = found[f"other parameters, {sharding}"]
            assert "parameter 0.weight of stage 0 is another one than when ps.Pipeline was made" in replaced
            assert "parameter 2.bias of stage 0 is another one" in found[f"another parameter, {sharding}"]
        assert "must have the same dtype" in found["another type, fsdp"]
        assert found["inference"].startswith("step() was called under torch.inference_mode()")
        assert "`nn.SyncBatchNorm` and a pipeline over processes (1 of stage 0) exclude" in found["sums in a forward"]


def marked_parameters(rank: int) -> list[int]:
    """How many parameters an optimizer function is called with that have an attribute of the model's."""
    found = []

    def optimizer(parameters: list[nn.Parameter]) -> Optimizer:
        found.append(sum(hasattr(parameter, "no_decay") for parameter in parameters))
        return SGD(parameters, lr=0.1)

    for sharding in SHARDINGS:
        module = model()
        for layer in module:
            if isinstance(layer, nn.Linear):
                layer.bias.no_decay = True  # type: ignore[attr-defined]
        pipeline(module, sharding, optimizer).close()
    return found


def test_bug_parts_of_parameters_had_lost_their_attributes() -> None:
    for outcome in run_ranks_to_end(2, marked_parameters):
        assert outcome.value == [3] * len(SHARDINGS)
