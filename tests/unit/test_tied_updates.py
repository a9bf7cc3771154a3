"""Updates as ops of the schedule on stages that share parameters, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asynchronous_runs as runs
import penstock as ps
import tie_runs
import tied_updates_loop as loop
from penstock.schedule import with_updates
from tied_updates_loop import with_rule
from tiers import others_nightly

CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "amdp": (lambda: ps.build("amdp", 4, 16, window=4), runs.ADAM, {}),
    "amdp, a list": (lambda: ps.build("amdp", 4, 16, window=4), runs.ADAM, {"given": "list"}),
    "amdp, functions": (lambda: ps.build("amdp", 4, 16, window=4), runs.ADAM, {"given": "functions"}),
    "amdp, every copy steps, clipped": (
        lambda: ps.build("amdp", 4, 16, window=4),
        runs.ADAM,
        {"zero": False, "clip_norm": 0.05},
    ),
    "amdp without mismatch": (lambda: ps.build("amdp", 4, 16, window=4, max_mismatch=0), runs.ADAM, {}),
    "amdp of two ranks": (lambda: ps.build("amdp", 2, 8, window=4), runs.MOMENTUM, {}),
    "pipedream": (lambda: ps.build("pipedream", 4, 8, window=1), runs.ADAM, {}),
    "pipedream, functions": (lambda: ps.build("pipedream", 4, 8, window=1), runs.ADAM, {"given": "functions"}),
    "pipedream-2bw": (lambda: ps.build("pipedream-2bw", 4, 16, window=4), runs.ADAM, {}),
    "pipedream-2bw, functions": (
        lambda: ps.build("pipedream-2bw", 4, 16, window=4),
        runs.ADAM,
        {"given": "functions"},
    ),
    "vnag": (lambda: ps.build("vnag", 4, 8, window=1), runs.NADAM, {}),
    "windows of zb-h1": (lambda: ps.passes.repeat_windows(ps.build("zb-h1", 4, 8), 3), runs.ADAM, {}),
    "windows of chimera": (lambda: ps.passes.repeat_windows(ps.build("chimera", 4, 8), 3), runs.ADAM, {}),
    "windows of zb-v": (lambda: ps.passes.repeat_windows(ps.build("zb-v", 2, 4), 3), runs.ADAM, {}),
    "xpipe": (lambda: ps.build("xpipe", 4, 16, window=4), runs.ADAM, {}),
    "xpipe, functions": (lambda: ps.build("xpipe", 4, 8, window=1), runs.ADAM, {"given": "functions"}),
    "xpipe of two ranks": (lambda: ps.build("xpipe", 2, 8, window=1), runs.ADAM, {}),
    "xpipe of three ranks, clipped": (lambda: ps.build("xpipe", 3, 8, window=2), runs.ADAM, {"clip_norm": 0.05}),
    "tentative": (lambda: with_rule(ps.build("pipedream-2bw", 4, 16, window=8), "tentative"), runs.ADAM, {}),
    "tentative, SGD": (lambda: with_rule(ps.build("pipedream", 4, 16, window=2), "tentative"), runs.MOMENTUM, {}),
    "amdp, tentative": (lambda: with_rule(ps.build("amdp", 4, 24, window=8), "tentative"), runs.ADAM, {}),
    "amdp, tentative, every copy steps": (
        lambda: with_rule(ps.build("amdp", 4, 24, window=8), "tentative"),
        runs.MOMENTUM,
        {"zero": False},
    ),
    "spectrain": (lambda: ps.build("spectrain", 4, 8, window=1), runs.MOMENTUM, {"given": "list"}),
    "spectrain in windows": (lambda: ps.build("spectrain", 4, 8, window=2), runs.MOMENTUM, {}),
    "amdp, xpipe": (lambda: with_rule(ps.build("amdp", 4, 16, window=4), "xpipe"), runs.ADAM, {}),
    "amdp, xpipe, every copy steps": (
        lambda: with_rule(ps.build("amdp", 4, 16, window=4), "xpipe"),
        runs.ADAM,
        {"zero": False},
    ),
    "amdp, tentative, functions": (
        lambda: with_rule(ps.build("amdp", 4, 16, window=4), "tentative"),
        runs.ADAM,
        {"given": "functions", "clip_norm": 0.05},
    ),
    "updates in zb-h1, xpipe": (lambda: with_updates(ps.build("zb-h1", 4, 8), 1, rule="xpipe"), runs.ADAM, {}),
    "updates in zb-v, spectrain": (
        lambda: with_updates(ps.build("zb-v", 2, 8), 1, rule="spectrain"),
        runs.MOMENTUM,
        {"given": "functions"},
    ),
    "updates in interleaved-1f1b, tentative": (
        lambda: with_rule(with_updates(ps.build("interleaved-1f1b", 2, 16), 4), "tentative"),
        runs.ADAM,
        {},
    ),
}


@pytest.mark.parametrize("name", others_nightly(CASES, list(CASES)[::2]))
def test_a_tied_parameter_is_stepped_once_and_read_by_every_stage_as_the_owner_has_it(name: str) -> None:
    build, optimizer, options = CASES[name]
    assert loop.unlike_the_loop(build(), optimizer, **options) == []


def test_with_a_window_a_step_tied_amdp_is_the_synchronous_loop() -> None:
    """One update for all microbatches, so that nothing is asynchronous about it."""
    schedule = ps.build("amdp", 4, 8, window=8)
    found = []
    for each in (schedule, ps.build("amdp", 4, 8)):
        pipe = ps.Pipeline(tie_runs.tied_model(4), each, loss_fn=loop.MSE, optimizer=runs.ADAM)
        for x, y in loop.batches(8, 3):
            pipe.step(x, y)
        found.append({n: p.detach() for n, p in pipe.named_parameters()})
    assert not runs.unlike(*found)


@pytest.mark.parametrize("name", ["amdp", "pipedream", "pipedream-2bw", "xpipe", "amdp, xpipe"])
def test_a_tied_run_goes_on_from_a_checkpoint_in_the_middle_of_a_window(name: str, tmp_path: Path) -> None:
    name, _, rule = name.partition(", ")
    window = 1 if name == "pipedream" else 4
    data = loop.batches(16, 4)

    def made() -> ps.Pipeline:
        schedule = ps.build(name, 4, 16, window=window)
        schedule = with_rule(schedule, rule) if rule else schedule
        return ps.Pipeline(tie_runs.tied_model(4), schedule, loss_fn=loop.MSE, optimizer=runs.ADAM)

    whole, first, again = made(), made(), made()
    for number, (x, y) in enumerate(data):
        whole.step(x, y, update=number % 2 == 1)
    first.step(*data[0], update=False)
    first.save(tmp_path)
    again.step(*data[3])  # what it has learned is given up
    again.load(tmp_path)
    for number, (x, y) in enumerate(data[1:], start=1):
        again.step(x, y, update=number % 2 == 1)
    assert not runs.unlike(*({n: p.detach() for n, p in pipe.named_parameters()} for pipe in (whole, again)))


def test_what_is_done_to_a_tied_parameter_between_steps_reaches_all_its_stages() -> None:
    """As a user may set values between steps, of a model in one process."""
    schedule, data = ps.build("amdp", 4, 8, window=4), loop.batches(8, 2)
    found = []
    for late in (False, True):
        model = tie_runs.tied_model(4)
        pipe = ps.Pipeline(model, schedule, loss_fn=loop.MSE, optimizer=runs.MOMENTUM)
        if late:
            with torch.no_grad():
                model[0][0].weight.mul_(2)
            pipe.step(*data[0], rates=[0.0, 0.0])
            with torch.no_grad():
                model[0][0].weight.div_(2)
        else:
            pipe.step(*data[0], rates=[0.0, 0.0])
        losses = pipe.step(*data[1], rates=[0.0, 0.0]).losses
        found.append(losses)
    assert torch.equal(*found)


def test_in_the_forwards_of_a_microbatch_all_stages_read_one_prediction_of_a_tied_parameter() -> None:
    """In its backward the last stage reads the same, too: that follows at once, and no update has come since."""
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}
    torch.manual_seed(3)
    model = nn.Sequential(*(Noting(nn.Linear(tie_runs.WIDTH, tie_runs.WIDTH), stage, seen) for stage in range(4)))
    model[3].layer.weight = model[0].layer.weight
    pipe = ps.Pipeline(model, ps.build("xpipe", 4, 8, window=1), loss_fn=loop.MSE, optimizer=runs.ADAM)
    for x, y in loop.batches(8, 2):
        pipe.step(x, y)
    first, last, back = seen[0, "F"], seen[3, "F"], seen[3, "B"]
    assert len(first) == len(last) == 16
    for m in range(16):
        assert torch.equal(first[m], last[m])
        assert torch.equal(last[m], back[m])
    assert any(not torch.equal(first[m], seen[0, "B"][m]) for m in range(16))


class Noting(nn.Module):
    """A linear layer that notes which weights its forwards and backwards read."""

    def __init__(self, layer: nn.Linear, stage: int, seen: dict[tuple[int, str], list[torch.Tensor]]) -> None:
        super().__init__()
        self.layer, self._stage, self._seen = layer, stage, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note("F")
        y = self.layer(x)
        y.register_hook(lambda _: self.note("B"))
        return y

    def note(self, kind: str) -> None:
        self._seen.setdefault((self._stage, kind), []).append(self.layer.weight.detach().clone())


@pytest.mark.parametrize(("name", "then"), [("amdp", "amdp"), ("pipedream-2bw", "pipedream-2bw"), ("amdp", "1f1b")])
def test_what_a_run_with_updates_has_made_is_handed_over_amid_a_window(name: str, then: str, tmp_path: Path) -> None:
    """To another pipeline, as a checkpoint would bring it there."""
    data = loop.batches(16, 3)

    def made(name: str) -> ps.Pipeline:
        schedule = ps.build(name, 4, 16, **({} if name == "1f1b" else {"window": 4}))
        return ps.Pipeline(tie_runs.tied_model(4), schedule, loss_fn=loop.MSE, optimizer=runs.ADAM)

    first, loaded, handed = made(name), made(then), made(then)
    first.step(*data[0])
    first.step(*data[1], update=False)
    loaded.load(first.save(tmp_path))
    handed.step(*data[2])  # what it has learned is given up
    first.hand_over(handed)
    assert handed.num_updates == loaded.num_updates == 7
    for pipe in (loaded, handed):
        pipe.step(*data[2])
    assert not runs.unlike(*({n: p.detach() for n, p in pipe.named_parameters()} for pipe in (loaded, handed)))
