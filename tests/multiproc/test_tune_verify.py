"""The tuner from end to end on real processes: it measures, verifies, remembers, and says why ranks failed."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hf_families
import tune_sizes
from penstock.data import ByteTokenizer
from penstock.models import presets
from penstock.train.kinds import usual_of
from penstock.train.settings import Settings
from penstock.tune.errors import RanksFailed
from penstock.tune.job import run_job
from penstock.tune.layers import RankShare, measure_layers
from penstock.tune.transfer import SIZES
from penstock.tune.tuned_model import tuned_model
from processes import run_ranks
from train_runs import penstock

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(500)]

SMALL = tune_sizes.SMALL


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measurements that tests of this file share. Messages, which take seconds, are measured by the first of them."""
    return tmp_path_factory.mktemp("measured")


def told(words: list[str], cwd: Path, cache: Path | None = None) -> dict[str, Any]:
    """The object that a verb prints. Measurements are kept in `cache`, by default in `cwd`."""
    ended = penstock(words, cwd, environment={"XDG_CACHE_HOME": str(cache or cwd)})
    assert ended.code == 0, ended.err
    return ended.json


@pytest.mark.slow
def test_two_ranks_are_measured_and_the_best_is_run(cache: Path, tmp_path: Path) -> None:
    arguments = ["tune", *SMALL, "--ranks", "2", "--pp", "2", "--dp", "1", "--batch", "4", "--microbatch-size", "2"]
    arguments += ["--schedule", "1f1b", "--schedule", "zb-h1", "--seconds", "0.05"]
    result = told([*arguments, "--verify", "1", "--json"], tmp_path, cache)
    assert (result["num_measured"], result["num_reused"], result["num_tried"]) == (2, 0, 2)
    first, second = result["best"]
    assert first["step_ms"] <= second["step_ms"]
    assert second["measured"] is None
    measured = first["measured"]
    assert len(measured["steps_ms"]) == 20
    assert 0 <= measured["num_undisturbed"] <= 20
    assert 0 < measured["makespan_ms"] <= max(measured["steps_ms"])
    assert measured["predicted_over_measured"] == first["step_ms"] / measured["step_ms"]
    again = told([*arguments, "--json"], tmp_path, cache)
    assert (again["num_measured"], again["num_reused"]) == (0, 2)
    assert [each["step_ms"] for each in again["best"]] == [first["step_ms"], second["step_ms"]]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "extra",
    [
        ["--dp", "2"],
        ["--pp", "2", "--dp", "1", "--schedule", "chimera"],
    ],
)
def test_copies_and_several_pipelines_are_run_and_the_line_trains(
    extra: list[str], cache: Path, tmp_path: Path
) -> None:
    arguments = ["tune", *SMALL, "--ranks", "2", "--batch", "4", "--microbatch-size", "1", *extra]
    result = told([*arguments, "--seconds", "0.05", "--verify", "1", "--json"], tmp_path, cache)
    choice = result["choice"]
    assert choice["pp"] * choice["dp"] == 2
    assert len(choice["measured"]["steps_ms"]) == 20
    shortened = ["--steps", "2", "--sample", "0", "--out", "run", "--json"]
    assert told([*shlex.split(result["train"])[1:], *shortened], tmp_path)["steps"] == 2


@pytest.mark.slow
def test_ends_that_two_ranks_share_are_measured_and_run_and_the_line_trains(cache: Path, tmp_path: Path) -> None:
    """A library schedule and a program with them, which are run; the line learns what a plain pipeline learns."""
    deep = [*SMALL, "--batch", "4"]
    arguments = ["tune", *deep, "--ranks", "2", "--pp", "2", "--dp", "1", "--microbatch-size", "1", "--shared-ends"]
    result = told([*arguments, "--seconds", "0.05", "--verify", "2", "--json"], tmp_path, cache)
    assert {each["program"] for each in result["best"][:2]} == {False, True}
    for each in result["best"][:2]:
        assert len(each["measured"]["steps_ms"]) == 20
        for held, predicted in zip(each["measured"]["memory_bytes"], each["memory_bytes"], strict=True):
            assert held == pytest.approx(predicted, rel=0.3)
    assert result["choice"]["shared_ends"]
    shortened = ["--steps", "2", "--sample", "0", "--json"]
    line = shlex.split(result["train"])[1:]
    found = told([*line, *shortened, "--out", "run"], tmp_path)
    plain = told(["train", *deep, "--pp", "2", "--microbatches", "4", *shortened, "--out", "plain"], tmp_path)
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert found["num_parameters"] == plain["num_parameters"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "sizes", ["model = 'bert'\npreset = 'nano'\ndepth = 2", "model = 'config.json'\ncontext = 16"]
)
def test_a_bert_and_a_hugging_face_model_share_their_ends(sizes: str, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(sizes)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    (tmp_path / "config.json").write_text(json.dumps(hf_families.config_of("llama").to_dict()))
    shape = "--data text.txt --batch 4 --ranks 2 --pp 2 --dp 1 --microbatch-size 1 --shared-ends"
    result = told(f"tune --config run.toml {shape} --seconds 0.05 --verify 1 --json".split(), tmp_path, cache)
    assert result["choice"]["shared_ends"]
    assert result["choice"]["measured"]["step_ms"] > 0
    shortened = ["--steps", "2", "--sample", "0", "--out", "run", "--json"]
    assert told([*shlex.split(result["train"])[1:], *shortened], tmp_path)["steps"] == 2


def _ends(rank: int, texts: dict[str, str]) -> bytes:
    """Of each model what this rank measures of the ends that two ranks share."""
    found = {}
    for name, settings in texts.items():
        asked = Settings.from_mapping(json.loads(settings))
        share = RankShare(asked, 2, False, rank, 2, 0.02, None, 2)
        found[name] = measure_layers(share, dist.barrier)
    return pickle.dumps(found)


@pytest.mark.slow
def test_ends_of_several_kinds_of_model_are_measured_in_parts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    (tmp_path / "config.json").write_text(json.dumps(hf_families.config_of("llama").to_dict()))
    usual = {"microbatches": 1, "ranks": 1, "threads": 1, "batch": 4}
    text = {"data": str(tmp_path / "text.txt"), "context": 16}
    asked = {
        "gpt": Settings(preset="nano", **usual),
        "bert": Settings(model="bert", preset="nano", depth=2, **usual, **{**usual_of("bert"), **text}),
        "hf": Settings(model=str(tmp_path / "config.json"), **usual, **{**usual_of("config.json"), **text}),
    }
    texts = {name: json.dumps(dataclasses.asdict(settings)) for name, settings in asked.items()}
    outcomes = run_ranks(2, _ends, texts)
    assert all(outcome.value is not None for outcome in outcomes), outcomes[0].text
    found = [pickle.loads(outcome.value) for outcome in outcomes]
    for name, settings in asked.items():
        last = tuned_model(settings).num_layers - 1
        for told_by_rank in found:
            told_of = told_by_rank[name]
            assert told_of["layers"] == [0, last]
            assert all(told_of["times"][f"{layer} {kind}"] > 0 for layer in (0, last) for kind in ("f", "b"))
            assert all(told_of["bytes"][str(layer)]["weight"] > 0 for layer in (0, last))
    config = presets["nano"]
    told_of, vocabulary = found[0]["gpt"]["bytes"], ByteTokenizer().vocab_size
    words = 4 * config.width * vocabulary // 2
    assert told_of["0"]["weight"] == words + 4 * config.width * config.context
    assert told_of[str(config.num_layers - 1)]["weight"] == words + 4 * 2 * config.width
    assert told_of["0"]["output"] == 4 * 2 * config.context * config.width


@pytest.mark.slow
def test_messages_and_layers_are_profiled(cache: Path, tmp_path: Path) -> None:
    arguments = ["tune", "--profile-only", *SMALL, "--ranks", "2", "--seconds", "0.05", "--json"]
    result = told([*arguments, "--recompute"], tmp_path, cache)
    (profile,) = result["profiles"]
    assert profile["layers"] == ["embedding", "block 0", "block 1", "head"]
    assert profile["f"][1] == profile["f"][2] > 0
    assert profile["transient"] > profile["activation"][1] > 0
    transfer = result["transfers"]["2"]
    assert transfer["sizes"] == list(SIZES)
    assert all(value > 0 for value in transfer["delay"])
    exchanged = {"reduce", "sums", "values"}
    assert transfer["per_tensor"].keys() == exchanged
    assert all(len(transfer[row]) == len(SIZES) for row in exchanged)
    assert profile["tensors"] == [2, 12, 12, 3]


@pytest.mark.slow
def test_ranks_that_fail_say_why() -> None:
    with pytest.raises(RanksFailed, match=r"rank \d failed: KeyError: 'settings'"):
        run_job([{"do": "layers", "text": "nothing"}], 1, 1)
