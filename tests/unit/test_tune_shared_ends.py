"""Embedding and head that the ranks of a pipeline share: what is searched, predicted and refused."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import hf_families
import penstock as ps
import tune_models
import tune_sizes
from penstock.cli import main
from penstock.formats.profile import Profile
from penstock.train import command as train_command
from penstock.train.inputs import gather_inputs
from penstock.train.job import TrainJob
from penstock.train.settings import Settings
from penstock.tune import meter, session, verify
from penstock.tune.errors import TuneError
from penstock.tune.memory import memory_of
from penstock.tune.predict import links_of, predict, stage_costs
from penstock.tune.search import SearchFound, candidates, search, with_shared_ends
from penstock.tune.settings import TuneSettings
from penstock.tune.space import Shape, TuneSpace
from penstock.tune.tuned_model import tuned_model, why_no_shared_ends
from tune_models import profile, ranges, transfer

pytestmark = pytest.mark.unit

NANO = [*tune_sizes.NANO, "--batch", "8", "--microbatch-size", "2", "--pp", "2", "--dp", "1"]
MEMORY = 400.0
"""Enough for the heaviest half of `heavy`, and not for two copies of it on each rank, which balance it as well."""
LINKS = transfer(send=1.0, receive=2.0, delay=9.0)


def heavy(num_layers: int = 6) -> Profile:
    """Blocks of F 2, B 4 and a head of F 16, B 32: longer than a rank's share, whatever the cut."""
    f = [0.5, *[2.0] * (num_layers - 2), 16.0]
    rows = {"weight": [100.0, *[10.0] * (num_layers - 2), 90.0], "output": [8.0] * (num_layers - 1) + [0.0]}
    rows |= {name: [0.0] * num_layers for name in ("state", "update")}
    rows |= {"activation": [4.0] * num_layers, "held": [1.0] * num_layers}
    return profile(num_layers, f=f, f_split=f, b=[2 * each for each in f], i=f, w=f, **rows)


def half_of_ends(whole: Profile, num_ranks: int = 2) -> Profile:
    """The two ends of a profile as each of so many ranks has them, with a sum between ranks in F and in B."""
    rows = {
        name: [getattr(whole, name)[end] / num_ranks + (1.0 if name in "fbi" else 0.0) for end in (0, -1)]
        for name in ("f", "b", "f_split", "i", "w", "activation", "held", "output", "weight", "state", "update")
    }
    return profile(2, **{**rows, "output": [8.0, 0.0]}, num_sharing=num_ranks)


def test_the_rows_of_the_ends_take_the_place_of_the_whole_ones() -> None:
    whole = heavy()
    ends = half_of_ends(whole)
    joined = with_shared_ends(whole, ends)
    assert joined.num_sharing == 2
    assert joined.f == (ends.f[0], *whole.f[1:-1], ends.f[1])
    assert joined.weight == (50.0, 10.0, 10.0, 10.0, 10.0, 45.0)


@pytest.mark.slow
def test_ends_that_ranks_share_are_searched_and_win_where_the_head_is_heavy() -> None:
    whole = heavy()
    ends = half_of_ends(whole)
    space = TuneSpace(2, 8, pp=[2], dp=[1], microbatch_sizes=[1], shared_ends=(False, True))

    def found(space: TuneSpace) -> Any:
        return search(
            space,
            lambda _, again: whole,
            lambda _: transfer(),
            SearchFound(8, MEMORY),
            programs=True,
            ends_of=lambda _: ends,
        )

    best, without = found(space).best[0], found(dataclasses.replace(space, shared_ends=(False,))).best[0]
    assert best.candidate.has_shared_ends
    assert not without.candidate.has_shared_ends
    # The head alone keeps its rank for 8 * 48 ms; shared, both ranks work for half of that.
    assert without.prediction.makespan >= 8 * 48
    assert best.prediction.makespan < without.prediction.makespan
    only = found(dataclasses.replace(space, shared_ends=(True,))).best
    assert all(ranked.candidate.has_shared_ends for ranked in only)
    assert any(ranked.candidate.plan.program for ranked in only)
    for ranked in only:
        candidate = ranked.candidate
        ps.check(candidate.plan.schedule)
        assert candidate.plan.schedule.placement.num_pipelines == 1  # the runtime has no more with a shared stage
        assert (len(candidate.cut[0]), len(candidate.cut[-1]), sum(map(len, candidate.cut))) == (1, 1, 6)
        split = {op.stage for row in candidate.plan.schedule.order for op in row if op.kind in "IW"}
        assert split <= set(range(1, len(candidate.cut) - 1))


def test_a_library_schedule_has_shared_ends_or_none() -> None:
    whole = heavy()
    joined = with_shared_ends(whole, half_of_ends(whole))
    assert {each.plan.name for each in candidates(Shape(2, 1, 1, 4), joined, False)} == {"mllm"}
    assert "mllm" not in {each.plan.name for each in candidates(Shape(2, 1, 1, 4), whole, False)}
    assert list(candidates(Shape(8, 1, 1, 4), joined, False)) == []  # more stages than layers


def test_what_goes_into_a_shared_stage_is_sent_to_each_rank_and_what_comes_out_to_none() -> None:
    schedule = ps.build("mllm", 3, 4)
    told = profile(
        5, f=[1.0] * 5, b=[1.0] * 5, output=[8.0] * 4 + [0.0], weight=[6.0] * 5, activation=[0.0] * 5, num_sharing=3
    )
    costs = stage_costs(schedule, ranges(1, 1, 1, 1, 1), told, LINKS)
    # Stage 1 has the embedding's output at hand; stage 3 sends to two ranks; the head takes one message in.
    assert costs.f == (1.0, 1.0 + 1, 1.0 + 2 + 1, 1.0 + 2 + 2 * 1, 1.0 + 2)
    # The head's gradient is on all ranks; stage 1 sends the embedding's to two of them.
    assert costs.b == (1.0 + 2, 1.0 + 2 + 2 * 1, 1.0 + 1 + 2, 1.0 + 1, 1.0)
    links = links_of(schedule, ranges(1, 1, 1, 1, 1), told, LINKS)
    assert set(links.conditions) >= {(0, 1), (0, 2), (1, 2), (2, 0), (2, 1)}
    assert links.delay(2, 0) == 9 - (1 + 2)
    memory = memory_of(schedule, ranges(1, 1, 1, 1, 1), told)
    assert [rank.weights for rank in memory] == [3 * 6.0] * 3  # its own stage, and its part of both ends
    # Rank 1: two channels with rank 0 and two with rank 2 for its own stage, one from stage 3 and one from stage 1.
    assert memory[1].messages == 2 * 8.0 * (2 + 2 + 1 + 1)


def test_a_step_is_the_simulated_one() -> None:
    schedule, told = (
        ps.build("mllm", 2, 4),
        profile(4, 3, num_sharing=2, update=[1.0, 5.0, 2.0, 1.0], output=[0.0] * 4),
    )
    found = predict(schedule, ranges(1, 1, 1, 1), told, transfer(step=0.5))
    expected = ps.simulate(schedule, ps.Costs(f=told.f, i=told.i, w=told.w, b=told.b))
    assert found.makespan == expected.makespan
    assert found.update == 1 + 5 + 1  # of both ends, and of the slower of the stages between
    assert found.reduce == 0.0


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tune_models.Ranks:
    fake = tune_models.Ranks()
    for module in (meter, verify):
        monkeypatch.setattr(module, "run_job", fake)
    monkeypatch.setattr(session, "num_devices", lambda settings: 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return fake


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON object of a call."""
    assert main([*arguments, "--json"]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_shared_ends_are_measured_once_and_the_line_trains(
    ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = told(capsys, "tune", *NANO, "--shared-ends")
    assert sorted(task["num_sharing"] for task in ranks.tasks if task["do"] == "layers") == [1, 2]
    assert all(each["shared_ends"] for each in result["best"])
    assert "mllm" in {each["schedule"] for each in result["best"]}
    again = told(capsys, "tune", *NANO, "--shared-ends")
    assert (again["num_measured"], again["best"]) == (0, result["best"])
    orders: list[TrainJob] = []
    monkeypatch.setattr(train_command, "_carry_out", lambda order, *_: orders.append(order) or 0)
    assert main(shlex.split(result["train"])[1:]) == 0
    inputs = gather_inputs(orders[0].settings)
    last = inputs.schedule.num_stages - 1
    assert dict(inputs.schedule.placement.shared) == {0: (0, 1), last: (0, 1)}
    assert main(["tune", *NANO, "--shared-ends", "--no-programs"]) == 0
    assert "embedding and head shared by 2 ranks" in capsys.readouterr().out


@pytest.mark.slow
def test_by_default_they_are_tried_where_an_end_is_heavy_or_memory_is_limited(
    ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    light = told(capsys, "tune", *NANO, "--top", "1000")
    assert not any(each["shared_ends"] for each in light["best"])
    assert {task["num_sharing"] for task in ranks.tasks if task["do"] == "layers"} == {1}
    limited = told(capsys, "tune", *NANO, "--top", "1000", "--memory-limit", "1TiB")
    assert {each["shared_ends"] for each in limited["best"]} == {False, True}
    narrow = [*tune_sizes.NARROW, *NANO[2:]]  # 257 words weigh more than two blocks then
    assert any(each["shared_ends"] for each in told(capsys, "tune", *narrow, "--top", "1000")["best"])
    named = told(capsys, "tune", *NANO, "--schedule", "mllm", "--schedule", "1f1b")
    assert {each["schedule"]: each["shared_ends"] for each in named["best"]} == {"mllm": True, "1f1b": False}
    without = told(capsys, "tune", *narrow, "--top", "1000", "--no-shared-ends")
    assert not any(each["shared_ends"] for each in without["best"])


OWN = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))
def loss_fn(output, target):
    return (output - target).square().mean()
def data():
    return torch.utils.data.TensorDataset(torch.ones(64, 4), torch.zeros(64, 4))
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--model", "net.py:Net", "--data", "net.py:data"],
            "--shared-ends: mllm has stages that several ranks share, which must be the embedding of words",
        ),
        (
            ["--model", "clip"],
            "--shared-ends: --model clip has an embedding for each tower, and no head; leave it out",
        ),
        (
            ["--preset", "nano", "--pp", "1"],
            "--shared-ends: embedding and head are shared by the ranks of a pipeline",
        ),
        (["--preset", "nano", "--ranks", "4", "--pp", "4"], "at most the 2 that can work at the same time here"),
        (["--preset", "nano", "--config", "shallow.toml"], "4 stages asked of a model of 3 layers"),
        (["--costs", "costs.json", "--ranks", "2"], "nothing of ranks that share embedding and head"),
    ],
)
def test_what_cannot_share_is_refused_by_name(
    ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "net.py").write_text(OWN)
    (tmp_path / "shallow.toml").write_text("depth = 1")
    (tmp_path / "costs.json").write_text(json.dumps({"f": [1] * 4, "i": [1] * 4, "w": [1] * 4}))
    assert said in told(capsys, "tune", *arguments, "--shared-ends", code=2)["error"]["message"]


@pytest.mark.parametrize("asked_for", [True, None])
def test_what_gpus_run_together_is_not_measured_yet(asked_for: bool | None) -> None:
    settings = Settings(preset="nano", depth=2, width=8, heads=1, context=8, microbatches=1, ranks=1)
    model, shapes = tuned_model(settings), [Shape(2, 1, 1, 4)]
    asked = TuneSettings(pp=(2,), shared_ends=asked_for)
    assert session._sharing(asked, settings, model, shapes, devices=2) == frozenset(shapes)
    settings = dataclasses.replace(settings, device="cuda")
    if asked_for:
        with pytest.raises(TuneError, match="--shared-ends with --device cuda: how long ops take"):
            session._sharing(asked, settings, model, shapes, devices=2)
    else:
        assert session._sharing(asked, settings, model, shapes, devices=2) == frozenset()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "can"), [("llama", True), ("gpt2", True), ("bert", True), ("t5", False)])
def test_hugging_face_models_say_whether_they_can(tmp_path: Path, name: str, can: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_families.config_of(name).to_dict()))
    settings = Settings(model=str(tmp_path / "config.json"), microbatches=1, ranks=1, batch=4)
    why = why_no_shared_ends(settings, 2)
    assert (why == "") == can, why
    assert can or why.endswith("config.json has an encoder")


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_models_of_ours_can_share(model: str) -> None:
    settings = Settings(model=model, preset="nano", microbatches=1, ranks=1)
    assert why_no_shared_ends(settings, 2) == ""
    assert "stages asked of a model" in why_no_shared_ends(settings, 16)
