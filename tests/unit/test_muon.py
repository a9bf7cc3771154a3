"""Muon for hidden matrices and AdamW for the rest: the split, the step, what it goes with, and what it refuses."""

from __future__ import annotations

import copy
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import asynchronous_runs as runs
import penstock as ps
from copies_runs import grouped_step
from penstock.cli import main
from penstock.models import BERTConfig, GPTConfig, bert_stage, gpt_stage
from penstock.runtime import MuonAdamW, RuntimeFailure, leave_to_adamw
from penstock.runtime.parameters.muon import is_hidden_matrix, mark_ends, require_whole_matrices
from penstock.runtime.parameters.rules import rule_of
from train_runs import SMALL, losses

pytestmark = pytest.mark.unit


def parameters() -> list[Parameter]:
    torch.manual_seed(1)
    table = Parameter(torch.randn(8, 4))
    leave_to_adamw(table)
    return [Parameter(torch.randn(6, 4)), Parameter(torch.randn(4)), table, Parameter(torch.randn(3, 2, 2))]


def test_each_half_is_torchs_own_step() -> None:
    mine, theirs = parameters(), parameters()
    one = MuonAdamW(mine, lr=0.02)
    two = [
        torch.optim.Muon(theirs[:1], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(theirs[1:], lr=0.02, weight_decay=0.1, betas=(0.9, 0.95)),
    ]
    for step in range(3):
        for rows in (mine, theirs):
            torch.manual_seed(step + 2)
            for each in rows:
                each.grad = torch.randn_like(each)
        for optimizer in (one, *two):
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (step + 1)
            optimizer.step()
    for own, other in zip(mine, theirs, strict=True):
        assert torch.equal(own, other)


def test_the_state_goes_on_where_it_is_loaded() -> None:
    mine, again = parameters(), parameters()
    one, two = MuonAdamW(mine, lr=0.02), MuonAdamW(again, lr=0.02)
    for step in range(4):
        if step == 2:
            two.load_state_dict(copy.deepcopy(one.state_dict()))
            for own, other in zip(again, mine, strict=True):
                own.data.copy_(other)
        for rows, optimizer in ((mine, one), (again, two)):
            torch.manual_seed(step)
            for each in rows:
                each.grad = torch.randn_like(each)
            if optimizer is one or step >= 2:
                optimizer.step()
    for own, other in zip(mine, again, strict=True):
        assert torch.equal(own, other)


def hidden(stage: nn.Module) -> set[str]:
    return {name for name, p in stage.named_parameters() if is_hidden_matrix(p)}


def test_tables_and_output_layers_are_no_hidden_matrices() -> None:
    """Whatever their shapes: with as many tokens as the MLP is wide they look like its matrices."""
    blocks = {f"layers.1.{name}.weight" for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")}
    gpt = gpt_stage(GPTConfig(vocab_size=64, context=16, depth=1, width=16, num_heads=2), [0, 1, 2])
    mark_ends(gpt, is_last=True)
    assert hidden(gpt) == blocks
    config = BERTConfig(vocab_size=64, context=16, depth=1, width=16, num_heads=2, next_sentence=True)
    bert = bert_stage(config, [0, 1, 2])
    mark_ends(bert, is_last=True)
    assert hidden(bert) == blocks | {"layers.2.transform.weight", "layers.2.pool.weight"}
    own = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8), nn.LayerNorm(8))
    mark_ends(own, is_last=False)
    assert hidden(own) == {"1.weight", "2.weight"}
    mark_ends(own, is_last=True)
    assert hidden(own) == {"1.weight"}


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera", "amdp"])
def test_a_pipeline_steps_as_the_plain_loop(name: str) -> None:
    """Of updates as ops it steps masters, which have to know what they stand for."""
    options: dict[str, Any] = {"window": 8, "max_mismatch": 0} if name == "amdp" else {}
    schedule = ps.build(name, 4, 8, **options)
    model = runs.without_dropout(runs.model_of(schedule.num_stages))
    expected = runs.without_dropout(runs.model_of(schedule.num_stages))
    mark_ends(expected, is_last=True)
    optimizer = runs.MUON(list(expected.parameters()))
    pipe = ps.Pipeline(model, schedule, loss_fn=runs.MSE, optimizer=runs.MUON)
    for step in range(3):
        x, y = runs.batch_of(8, step)
        pipe.step(x, y)
        gradients = grouped_step(expected, x, y, schedule, step)[1]
        for n, p in expected.named_parameters():
            p.grad = gradients[n]
        optimizer.step()
    assert not runs.unlike(
        {n: p.detach() for n, p in pipe.named_parameters()}, {n: p.detach() for n, p in expected.named_parameters()}
    )
    kinds = {group["kind"]: len(group["params"]) for group in pipe.optimizer.param_groups}
    assert kinds["muon"] == schedule.num_stages - 1


def test_the_prediction_is_the_step_with_the_mean_gradient() -> None:
    (weight,) = parameters()[:1]
    optimizer = MuonAdamW([weight], lr=0.02, weight_decay=0.0)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    group, state = optimizer.param_groups[0], optimizer.state[weight]
    before = state["momentum_buffer"].clone()
    out = torch.empty_like(weight)
    rule_of("xpipe").predict(out, weight.detach(), 1, 0.02, group, state)
    assert torch.equal(state["momentum_buffer"], before)
    weight.grad = before.clone()
    optimizer.step()
    assert torch.equal(out, weight.detach())
    fresh = torch.empty_like(weight)
    rule_of("xpipe").predict(fresh, weight.detach(), 1, 0.02, group, {})
    assert torch.equal(fresh, weight.detach())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    draw = random.Random(1)
    path.write_text(" ".join(draw.choice(["rank", "stage", "op", "window", "update"]) for _ in range(2000)))
    return path


@pytest.mark.parametrize(
    "options", ["--schedule 1f1b --set tied=true", "--schedule amdp --rule xpipe", "--model bert"]
)
def test_trained_and_resumed_at_the_prompt(tmp_path: Path, text: Path, options: str) -> None:
    common = f"--optimizer muon --in-process --threads 1 --json --out {tmp_path / 'run'}"
    line = f"{SMALL} --data {text} --sample 0 --save-every 2 --drain-every 2 {options} {common} --steps 4"
    assert main(["train", *(line if "amdp" in options else line.replace("--drain-every 2", "")).split()]) == 0
    again = Path(shutil.copytree(tmp_path / "run", tmp_path / "again"))
    shutil.rmtree(again / "checkpoints/step-00000004")
    assert main(["train", "--resume", str(again), "--in-process", "--json"]) == 0
    assert losses(again) == losses(tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--tp 2", "with --tp 2 processes hold parts of them"),
        ("--dp 2 --sharding fsdp", "with --sharding fsdp processes hold parts of them"),
        ("--schedule spectrain", "no formula for MuonAdamW"),
        ('--set optimizer_options={"warmth":1}', "can't be used"),
    ],
)
def test_what_muon_does_not_go_with(text: Path, capsys: pytest.CaptureFixture[str], options: str, said: str) -> None:
    line = f"{SMALL} --data {text} --ranks 2 --steps 2 --optimizer muon {options}"
    assert main(["train", *line.split()]) == 2
    assert said in capsys.readouterr().err


def test_an_instance_that_was_made_before_the_output_layer_was_marked_is_refused() -> None:
    """It stepped embeddings and the output layer by Muon."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    schedule = ps.build("1f1b", 2, 2)
    with pytest.raises(RuntimeFailure, match=r"marked 1 embeddings and output layers, the first of shape \(2, 4\)"):
        ps.Pipeline(model, schedule, loss_fn=runs.MSE, optimizer=MuonAdamW(model.parameters()))
    ps.Pipeline(model, schedule, loss_fn=runs.MSE, optimizer=MuonAdamW(model.parameters())).close()  # marked by now


@pytest.mark.parametrize("make", [MuonAdamW, partial(torch.optim.Muon, lr=0.1)])
def test_parts_of_matrices_are_refused(make: Any) -> None:
    optimizer = make(parameters()[:1])
    require_whole_matrices(optimizer)
    with pytest.raises(RuntimeFailure, match=r"whole matrices even.*sharding='zero1'"):
        require_whole_matrices(optimizer, parts=True)
    require_whole_matrices(torch.optim.SGD(parameters(), lr=0.1), parts=True)


def test_looking_for_ends_computes_no_parametrized_weight() -> None:
    """Spectral norm goes one iteration on each time its weight is asked for: a pipeline that had only been made had
    other losses than the plain loop.
    """
    normed = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    stage = nn.Sequential(normed, torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))
    before = {name: value.clone() for name, value in stage.state_dict().items()}
    mark_ends(stage, is_last=True)
    assert all(torch.equal(value, before[name]) for name, value in stage.state_dict().items())
    assert is_hidden_matrix(normed.parametrizations.weight.original)
    assert not any(is_hidden_matrix(p) for name, p in stage[1].named_parameters() if "weight" in name)
