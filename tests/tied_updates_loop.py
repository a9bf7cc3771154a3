"""Stages that share parameters, with updates among their ops: a loop that keeps every version, and runs beside it.

The loop shares no code with the runtime. It runs a schedule's ops one by one through autograd, on a module for each
copy of each stage, none of which shares anything. What is one parameter it treats by the definition: the owner, the
lowest stage, steps it; another stage reads at a forward what the owner's stage had made when it ran the forward of
the same microbatch, and at a backward what its rule says; gradients are added up deepest use first.

By a rule that predicts, another stage reads what stands for the same update as what the owner's stage reads in the
same op: in a forward the same tensor; in a backward the newest that has come, moved on by as many updates as are
missing to what the owner's stage will read in its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

import penstock as ps
import tie_runs
from packed import packed
from penstock.runtime.tensors.dtensor import whole
from penstock.schedule import Op
from penstock.schedule.weight_versions import PREDICTING, predictions_of
from waiting import PATIENCE

MSE = nn.MSELoss()
KEEPING = ("pipedream", "vnag", "pipedream-2bw")
"""Rules by which a backward reads the version that its forward read."""


class VersionsLoop:
    """Args:
    model: a stage a layer, some of which share parameters. clip_norm: of the gradient of a stage.
    num_replicas: of the pipelines, to which each window is dealt. autocast: of forwards and the loss.
    loss: of a microbatch.
    """

    def __init__(
        self,
        model: nn.Sequential,
        schedule: ps.Schedule,
        optimizer: Callable[..., Any],
        clip_norm: float | None,
        num_replicas: int = 1,
        autocast: torch.dtype | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = MSE,
    ) -> None:
        assert schedule.updates is not None
        self.schedule, self.clip_norm, self.autocast, self.loss = schedule, clip_norm, autocast, loss
        self.rule, self.window = schedule.updates.rule, schedule.updates.window
        self.num_pipelines = schedule.placement.num_pipelines
        first: dict[int, str] = {}
        self.owned_as: dict[str, str] = {}
        """Name of a parameter of a stage -> that of the same one on the lowest stage."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                self.owned_as[name] = first.setdefault(id(parameter), name)
        self.replicas = [
            [[copy.deepcopy(layer) for layer in model] for _ in range(self.num_pipelines)]
            for _ in range(num_replicas)
        ]
        self.copies = self.replicas[0]
        self.versions: dict[str, list[Tensor]] = {
            name: [model.get_parameter(name).detach().clone()] for name in dict.fromkeys(self.owned_as.values())
        }
        self.masters = {name: Parameter(found[0].clone()) for name, found in self.versions.items()}
        self.optimizer = optimizer(list(self.masters.values()))
        self.states: dict[str, list[dict[str, Any]]] = {name: [{}] for name in self.versions}
        """Of the optimizer, with each version."""
        self.made = {(k, s): 0 for k in range(self.num_pipelines) for s in range(len(model))}
        """By copy of a stage, the updates it has taken over."""
        self.seen = {(k, s, owner): 0 for k, s in self.made for owner in range(len(model))}
        """And of those of another stage, the ones that came with forwards."""
        self.first_window = 0
        self.tentative: dict[tuple[int, str, int], dict[int, Tensor]] = {}
        """By copy, parameter and version, what its PREDICT made, by the updates it looks ahead."""
        self.seen_tentative: dict[tuple[int, int, str, int], dict[int, Tensor]] = {}
        """The same that a copy of a stage has, with those of other stages that came with forwards."""

    def names(self, stage: int) -> list[tuple[str, str, str]]:
        """(name in the module, in the model, on the owner's stage) of a stage's parameters."""
        own = self.copies[0][stage].named_parameters()
        full = [(name, f"{stage}.{name}") for name, parameter in own if parameter.requires_grad]
        return [(name, each, self.owned_as[each]) for name, each in full]

    def step(self, inputs: list[Tensor], targets: list[Tensor]) -> None:
        windows, num = self.schedule.windows, len(self.replicas)
        assert windows is not None
        held: list[dict[Any, Any]] = [{} for _ in self.replicas]
        gradients: list[dict[tuple[int, str, int], Tensor]] = [{} for _ in self.replicas]
        self.all_gradients = gradients
        self.given: dict[tuple[int, int, str, int], Tensor] = {}
        dealt: list[list[int]] = [[] for _ in self.replicas]
        for window in windows.ranges:
            for r, places in enumerate(dealt):
                first = window.start * num + r * len(window)
                places += range(first, first + len(window))
        rows = [list(row) for row in self.schedule.order]
        done: set[Op] = set()
        while any(rows):
            before = len(done)
            for row in rows:
                while row and self.is_ready(row[0], done):
                    op = row.pop(0)
                    for r, places in enumerate(dealt):
                        self.copies, self.held, self.gradients = self.replicas[r], held[r], gradients[r]
                        self.inputs, self.targets = ([part[m] for m in places] for part in (inputs, targets))
                        if op.kind in "FBIRW" or (op.kind in ("U", "GIVE", "PREDICT") and not r):
                            getattr(self, op.kind)(op, self.schedule.pipeline_of(op))
                    done.add(op)
            assert len(done) > before
        self.first_window += windows.num_updates
        for k, s, owner in self.seen:
            self.seen[k, s, owner] = self.made[k, owner]

    def is_ready(self, op: Op, done: set[Op]) -> bool:
        kind, s, m = op
        if kind == "F":
            return s == 0 or Op("F", s - 1, m) in done
        if kind in "BI":
            return s == len(self.copies[0]) - 1 or bool({Op("B", s + 1, m), Op("I", s + 1, m)} & done)
        if kind not in ("F", "B", "I", "U", "PREDICT"):
            return True
        windows = self.schedule.windows
        assert windows is not None
        update, pipeline = windows.update_of(m)
        if pipeline:
            return Op(kind, s, m - pipeline) in done
        if kind == "PREDICT":
            gives = {op for row in self.schedule.order for op in row if op.kind == "GIVE" and op.stage == s}
            return {op for op in gives if windows.update_of(op.microbatch)[0] == update} <= done
        return all({Op("B", s, n), Op("W", s, n)} & done for n in windows.microbatches(update))

    def read(self, k: int, s: int, owner: int, m: int) -> int:
        """The version that a rule has an op read, by what is there."""
        newest = self.made[k, s] if owner == s else self.seen[k, s, owner]
        if self.rule == "pipedream-2bw":
            return min(newest, max(self.first_window + m // self.window - 1, 0))
        return newest

    def put(self, k: int, s: int, versions: Mapping[str, int], stands_for: Mapping[str, int] | None = None) -> None:
        """Has a copy hold these versions of its parameters, or where they will be after so many updates."""
        for name, full, owned in self.names(s):
            parameter = self.copies[k][s].get_parameter(name)
            value = self.versions[owned][versions[full]]
            if stands_for is not None and (steps := stands_for[full] - versions[full]) > 0:
                value = self.predicted(owned, versions[full], steps)
                if (made := self.seen_tentative.get((k, s, owned, versions[full]))) is not None:
                    value = made[steps]
            if self.rule not in KEEPING:
                parameter.data.copy_(value)
            else:
                parameter.data = value

    def predicted(self, name: str, version: int, steps: int) -> Tensor:
        """W - s lr v, or W - s lr m / (1 - b1^t) / (sqrt(r / (1 - b2^t)) + eps)."""
        return self.moved(name, self.versions[name][version], self.states[name][version], steps)

    def moved(self, name: str, weight: Tensor, state: dict[str, Any], steps: int) -> Tensor:
        (group,) = self.optimizer.param_groups
        if self.rule == "spectrain" or (self.rule == "tentative" and "momentum" in group):
            found = state.get("momentum_buffer")
            return weight if found is None else weight + found * -(steps * group["lr"])
        if not (t := float(state.get("step", 0))):
            return weight
        (b1, b2), rate = group["betas"], group["lr"]
        divisor = (state["exp_avg_sq"].sqrt() / (1 - b2**t) ** 0.5) + group["eps"]
        return torch.addcdiv(weight, state["exp_avg"], divisor, value=-(steps * (rate / (1 - b1**t))))

    def num_before(self, kinds: str, stage: int, m: int) -> int:
        """Updates of its copy before an op of a microbatch, in the order."""
        k = self.schedule.microbatch_pipeline[m]
        for row in self.schedule.order:
            made = 0
            for op in row:
                made += op.kind == "U" and op.stage == stage and self.schedule.pipeline_of(op) == k
                if op.kind in kinds and op[1:] == (stage, m):
                    return made
        raise AssertionError

    def stands_for(self, kinds: str, s: int, m: int) -> dict[str, int] | None:
        """By name after how many updates the weights are that an op reads; None where nothing is predicted.

        What a stage has of a tied parameter, and what it predicts, stands for what its owner's stage reads.
        """
        if self.rule in KEEPING or self.rule == "none":
            return None
        found = {}
        for _, full, owned in self.names(s):
            owner = int(owned.split(".")[0])
            made = self.num_before(kinds, owner, m)
            if self.rule == "spectrain":
                back = owner // 2
                made += (back if kinds == "BI" else back + len(self.copies[0]) - owner - 1) // self.window
            elif kinds == "F" or self.rule == "tentative":
                made = m // self.window
            found[full] = self.first_window + made
        return found

    def F(self, op: Op, k: int) -> None:
        _, s, m = op
        for owner in range(s):
            self.seen[k, s, owner] = max(self.seen[k, s, owner], self.held["made", owner, m])
        for _, _, owned in self.names(s):
            owner = int(owned.split(".")[0])
            at = self.held["tentative", owner, m] if owner < s else self.tentative
            key = owned, self.seen[k, s, owner] if owner < s else self.made[k, s]
            if (k, *key) in at:
                self.seen_tentative[k, s, *key] = at[k, *key]
        self.held["made", s, m], self.held["tentative", s, m] = self.made[k, s], dict(self.tentative)
        versions = {full: self.read(k, s, int(owned.split(".")[0]), m) for _, full, owned in self.names(s)}
        self.held["versions", s, m] = versions
        self.put(k, s, versions, self.stands_for("F", s, m))
        x = self.inputs[m] if s == 0 else self.held["sent", s - 1, m].detach().requires_grad_()
        y = self.called(k, s, m, x)
        self.held["x", s, m], self.held["y", s, m], self.held["sent", s, m] = x, y, y.detach()

    def called(self, k: int, s: int, m: int, x: Tensor) -> Tensor:
        """What the stage makes of a microbatch; the last one its part of the loss."""
        with torch.autocast(x.device.type, self.autocast) if self.autocast else nullcontext():
            y: Tensor = self.copies[k][s](x)
            if s < len(self.copies[0]) - 1:
                return y
            windows = self.schedule.windows
            assert windows is not None
            return self.loss(y, self.targets[m]) / (len(windows.microbatches(m // self.window)) * len(self.replicas))

    def R(self, op: Op, k: int) -> None:
        """The forward again, with the weights of the backward that follows."""
        _, s, m = op
        self.put(k, s, self.read_by_backward(s, k, m), self.stands_for("BI", s, m))
        self.held["y", s, m] = self.called(k, s, m, self.held["x", s, m])

    def read_by_backward(self, s: int, k: int, m: int) -> dict[str, int]:
        if self.rule in KEEPING:
            found: dict[str, int] = self.held["versions", s, m]
            return found
        return {full: self.read(k, s, int(owned.split(".")[0]), m) for _, full, owned in self.names(s)}

    def B(self, op: Op, k: int) -> None:
        _, s, m = op
        self.put(k, s, self.read_by_backward(s, k, m), self.stands_for("BI", s, m))
        module, x = self.copies[k][s], self.held["x", s, m]
        module.zero_grad()
        torch.autograd.backward(self.held["y", s, m], self.held.get(("g", s + 1, m)))
        self.held["g", s, m] = x.grad
        for name, full, owned in self.names(s):
            gradient = module.get_parameter(name).grad
            if gradient is None:
                continue
            if (came := self.held.pop(("sum", owned, m), None)) is not None:
                # Of what autocast makes of a parameter once, the uses are added up in its type.
                gradient = (
                    came + gradient if self.autocast is None else (came.bfloat16() + gradient.bfloat16()).float()
                )
            if full != owned:
                self.held["sum", owned, m] = gradient
                continue
            key = k, owned, m // self.window
            before = self.gradients.get(key)
            self.gradients[key] = gradient.clone() if before is None else before + gradient

    I = B

    def W(self, op: Op, k: int) -> None:
        """Its gradients are there already."""

    def GIVE(self, op: Op, k: int) -> None:
        """Notes what is known on other copies."""
        update, _ = self.schedule.windows.update_of(op.microbatch)  # type: ignore[union-attr]
        for r, gradients in enumerate(self.all_gradients):
            for (pipeline, name, of), gradient in gradients.items():
                if pipeline == k and of == update and name.startswith(f"{op.stage}."):
                    self.given[r, k, name, update] = gradient.clone()

    def PREDICT(self, op: Op, k: int) -> None:
        """What the optimizer makes of the gradient that is known, divided by the microbatches it is of."""
        windows, s = self.schedule.windows, op.stage
        assert windows is not None
        update, _ = windows.update_of(op.microbatch)
        own = [owned for _, full, owned in self.names(s) if full == owned]
        if k:
            for name in own:
                self.tentative[k, name, self.made[k, s]] = self.tentative[0, name, self.made[k, s]]
            return
        share = len(ps.schedule.known_to(self.schedule)[s, update]) / len(windows.microbatches(update))
        optimizer = copy.deepcopy(self.optimizer)
        masters = dict(zip(self.masters, optimizer.param_groups[0]["params"], strict=True))
        for name in own:
            sums = []
            for r, gradients in enumerate(self.all_gradients):
                parts = [gradients.get((0, name, update))]
                parts += [self.given.get((r, other, name, update)) for other in range(1, self.num_pipelines)]
                there = [part for part in parts if part is not None]
                sums.append(sum(there[1:], there[0]))
            masters[name].grad = sum(sums[1:], sums[0]) / share
        if self.clip_norm is not None and own:
            torch.nn.utils.clip_grad_norm_([masters[name] for name in own], self.clip_norm)
        optimizer.step()
        for name in own:
            state, weight = optimizer.state[masters[name]], masters[name].detach()
            self.tentative[k, name, self.made[k, s]] = {
                1 + more: self.moved(name, weight, state, more) if more else weight for more in range(5)
            }

    def U(self, op: Op, k: int) -> None:
        windows, s = self.schedule.windows, op.stage
        assert windows is not None
        update, _ = windows.update_of(op.microbatch)
        self.made[k, s] += 1
        if k:
            return
        own = [owned for _, full, owned in self.names(s) if full == owned]
        for name in own:
            sums = []
            for gradients in self.all_gradients:
                parts = [gradients.get((pipeline, name, update)) for pipeline in range(self.num_pipelines)]
                found = [part for part in parts if part is not None]
                sums += [sum(found[1:], found[0])] if found else []
            self.masters[name].grad = sum(sums[1:], sums[0]) if sums else None
        if self.clip_norm is not None and own:
            torch.nn.utils.clip_grad_norm_([self.masters[name] for name in own], self.clip_norm)
        self.optimizer.step()
        for name in own:
            self.masters[name].grad = None
            self.versions[name].append(self.masters[name].detach().clone())
            state = self.optimizer.state.get(self.masters[name], {})
            self.states[name].append({key: value.clone() for key, value in state.items() if torch.is_tensor(value)})


def with_rule(schedule: ps.Schedule, rule: str) -> ps.Schedule:
    """The same order, whose ops read weights by another rule."""
    assert schedule.updates is not None
    if rule == "tentative":
        return ps.schedule.with_tentative_updates(schedule)
    return replace(schedule, updates=replace(schedule.updates, rule=rule))


def batches(num_microbatches: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    size = 2 * num_microbatches, tie_runs.WIDTH
    return [(torch.randn(*size, generator=generator), torch.randn(*size, generator=generator)) for _ in range(count)]


def unlike_the_loop(
    schedule: ps.Schedule,
    optimizer: Callable[..., Any],
    given: str = "sequential",
    zero: bool = True,
    clip_norm: float | None = None,
    num_steps: int = 3,
    num_replicas: int = 1,
    **options: Any,
) -> list[str]:
    """What is not as in the loop after some steps, in words."""
    assert schedule.updates is not None
    assert schedule.updates.rule not in PREDICTING or predictions_of(schedule), "a case that predicts nothing"
    model, num = tie_runs.tied_model(schedule.num_stages), schedule.num_microbatches * num_replicas
    loop = VersionsLoop(copy.deepcopy(model), schedule, optimizer, clip_norm, num_replicas)
    source, tied = tie_runs.as_given(model, given)
    pipe = ps.Pipeline(
        source,
        schedule,
        loss_fn=MSE,
        optimizer=optimizer,
        timeout=PATIENCE,
        **packed(zero=zero, clip_norm=clip_norm, tied=tied, **options),
    )
    found: list[str] = []
    for number, (x, y) in enumerate(batches(num, num_steps)):
        loop.step(list(x.split(2)), list(y.split(2)))
        pipe.step(x, y)
        if (counted := pipe.mismatch()) != ps.schedule.count_mismatch(schedule):
            found.append(f"step {number}: mismatch {counted}")
        for name, parameter in pipe.named_parameters():
            value = whole(parameter.detach())
            if not torch.equal(value, loop.versions[name][-1]):
                far = float((value - loop.versions[name][-1]).abs().max())
                found.append(f"step {number}: {name} is off by {far}")
    found += _other_versions(pipe, options.get("sharding", "copies" if zero else "none"), num_replicas)
    x, y = batches(num, 1)[0]
    for layer in model:
        layer.requires_grad_(False)
    last = nn.Sequential(*(copy.deepcopy(layer) for layer in loop.copies[0]))
    for name, parameter in last.named_parameters():
        parameter.data = loop.versions[loop.owned_as[name]][-1]
    want = sum(MSE(last(x[i : i + 2]), y[i : i + 2]).item() for i in range(0, len(x), 2)) / num
    got = float(pipe.evaluate(x, y).loss)
    found += [] if abs(got - want) < 1e-6 else [f"evaluated {got}, want {want}"]
    pipe.close()
    return found


def _other_versions(pipe: ps.Pipeline, sharding: str, num_replicas: int) -> list[str]:
    """Where copies of stages here held another number of versions than is counted from the order."""
    state, ties = pipe._local.optimizer_state, pipe._local.model.ties.stages
    assert state.updating is not None
    counted = ps.schedule.count_versions(
        pipe.schedule, sharding=sharding, num_replicas=num_replicas, tied_stages=ties
    )
    held = {(stage, k): weights.versions.most for (k, stage), weights in state.updating.weights.items()}
    return [
        f"versions of {each}: {num}, counted {counted[each]}" for each, num in held.items() if num != counted[each]
    ]
