"""`penstock train --model ...`: every kind of model through the same command, in one process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

import penstock as ps
from penstock.cli import main
from penstock.models import clip_presets
from penstock.train.settings import Settings
from penstock.train.tasks.clip import Tower, clip_schedule, counts_of, cut_of, ranks_of_towers, schedule_of_towers
from tiers import examples, others_nightly
from train_runs import losses

pytestmark = pytest.mark.unit

Train = Callable[..., dict[str, Any]]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SIZES = "--preset nano --depth 3 --width 16 --heads 2 --context 16 --batch 16 --sample 8"
MODELS = {
    "gpt": f"{SIZES} --lr 0.02",
    "bert": f"--model bert {SIZES} --lr 0.01",
    "clip": "--model clip --batch 32",
    "decoder": "--model llama --context 16 --batch 16 --sample 8 --lr 0.03",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    draw = random.Random(1)
    (folder / "text.txt").write_text(" ".join(draw.choice(["rank", "stage", "op", "plan"]) for _ in range(2000)))
    (folder / "llama").mkdir()
    (folder / "llama/config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def train(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Iterator[Train]:
    """Trains in this process, into tmp_path/NAME; returns the one JSON object it prints."""
    monkeypatch.chdir(place)
    before = torch.get_num_threads()

    def call(name: str, options: str) -> dict[str, Any]:
        text = "" if "clip" in options or "--resume" in options else "--data text.txt"
        out = "" if "--resume" in options else f"--out {tmp_path / name}"
        line = f"{text} {out} --threads 1 --in-process --evaluate-every 0 {options} --json"
        assert main(["train", *line.split()]) == 0, capfd.readouterr()
        value: dict[str, Any] = json.loads(capfd.readouterr().out)
        return value

    yield call
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("model", others_nightly(MODELS, ["bert", "clip"]))
def test_it_learns_and_goes_on(train: Train, tmp_path: Path, model: str) -> None:
    """Under another number of ranks than it began with, to the same losses as a run without a break."""
    options = f"{MODELS[model]} --steps 12"
    report = train("whole", f"{options} --ranks 4")
    whole = losses(tmp_path / "whole")
    assert sum(whole[-2:]) < 0.9 * sum(whole[:2])
    assert (report["mesh"], report["sharding"]) == ({"pp": 4, "dp": 1, "tp": 1}, "copies")
    # The learning rate follows from the number of steps, so the break is one of the same run.
    train("part", f"{options} --ranks 2 --save-every 5 --set keep=3")
    for name in ("step-00000012", "step-00000010"):
        for file in (tmp_path / "part/checkpoints" / name).iterdir():
            file.unlink()
        (tmp_path / "part/checkpoints" / name).rmdir()
    train("part", f"--resume {tmp_path / 'part'} --ranks 3 {'' if model == 'clip' else '--schedule zb-h1'}")
    assert losses(tmp_path / "part") == whole


@pytest.mark.slow
def test_what_each_kind_is_held_against(train: Train) -> None:
    told = {model: train(model, f"{options} --steps 3 --ranks 2") for model, options in MODELS.items()}
    for model in ("gpt", "decoder"):
        assert told[model]["unit"].startswith("nats a token on the validation text; ")
        assert "sample" in told[model]["files"]
    assert told["bert"]["unit"].startswith("nats a sample of the validation text")
    assert "by chance" in told["clip"]["unit"]
    assert "sample" not in told["clip"]["files"]
    assert [told[model]["model"].rsplit("/", 1)[-1] for model in MODELS] == ["gpt", "bert", "clip", "llama"]


@pytest.mark.slow
def test_no_text_is_announced_of_a_model_that_writes_none(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    line = f"train {MODELS['clip']} --steps 1 --ranks 2 --threads {torch.get_num_threads()} --in-process"
    assert main([*line.split(), "--out", str(tmp_path / "run")]) == 0
    assert capfd.readouterr().err.splitlines()[-1] == "writing the report ..."


@pytest.mark.slow
def test_a_decoder_begins_with_the_weights_in_its_folder(train: Train, place: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = place / "weights"
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}))
    model.save_pretrained(folder)
    options = "--context 16 --batch 16 --sample 0 --steps 1 --ranks 2 --lr 1e-12"
    fresh = [train(f"fresh-{seed}", f"{options} --model llama --seed {seed}")["loss"] for seed in (0, 1)]
    stored = train("stored", f"{options} --model weights")["loss"]
    drawn = train("drawn", f"{options} --model weights/config.json")["loss"]
    assert fresh[0] != fresh[1]
    assert stored not in fresh
    assert drawn == fresh[0]
    again = train("again", f"{options} --model weights --ranks 3 --recompute")["loss"]
    assert again == stored


def test_a_decoder_comes_with_its_tokenizer(train: Train, place: Path, tmp_path: Path) -> None:
    folder = place / "words"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    vocabulary = {word: number for number, word in enumerate(["rank", "stage", "op", "plan", "[UNK]"])}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    words = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    report = train("words", "--model words --context 16 --batch 16 --sample 4 --steps 1 --ranks 2")
    assert report["unit"].endswith("1.609 by guessing"), "five words, and not letters"
    settings = json.loads((tmp_path / "words/settings.json").read_text())
    assert (settings["tokenizer"], settings["lr"]) == (str(folder / "tokenizer.json"), 1e-3)
    written = (tmp_path / "words/sample.txt").read_text().split()
    assert set(written) <= set(vocabulary), "the model has 300 words, its tokenizer five"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_recomputing_changes_no_number(train: Train, tmp_path: Path, model: str) -> None:
    options = f"{MODELS[model]} --steps 2 --ranks 2"
    train("kept", options)
    train("recomputed", f"{options} --recompute")
    assert losses(tmp_path / "recomputed") == losses(tmp_path / "kept")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "clip"])
def test_replicas_in_one_process_are_more_microbatches(train: Train, tmp_path: Path, model: str) -> None:
    options = f"{MODELS[model]} --steps 2 --ranks 2"
    train("one", f"{options} --microbatches 4")
    report = train("two", f"{options} --microbatches 2 --dp 2")
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert any("ranks took turns in one process" in notice for notice in report["notices"])


NANO = clip_presets["nano"]
STYLES = ["mixed", "1f1b", "interleaved-1f1b", "gpipe"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("schedule", STYLES)
def test_towers_share_any_number_of_ranks(schedule: str, ranks: int) -> None:
    built = clip_schedule(NANO, Settings(model="clip", schedule=schedule, ranks=ranks, batch=64, microbatches=4))
    assert built.num_ranks == ranks
    cut = cut_of(NANO, built)
    hosts = [{built.placement.hosts(0, stage)[0] for stage in part} for part in cut.stages.values()]
    assert set.union(*hosts) == set(range(ranks))
    if ranks >= 3:
        assert sum(map(len, hosts)) == ranks, "no two towers on one rank"
    if schedule == "mixed" and ranks in (4, 5):
        assert max(map(len, cut.stages.values())) > ranks - 2, "two stages a rank in one tower"
        assert sum(len(part) == len(own) for part, own in zip(cut.stages.values(), hosts, strict=True)) == 2


@hypothesis(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_any_microbatches_that_match(data: st.DataObject) -> None:
    counts = {name: data.draw(st.sampled_from([1, 2, 4, 8]), name) for name in (*NANO.towers, "contrast")}
    styles = {name: data.draw(st.sampled_from(STYLES[1:]), f"{name}'s schedule") for name in NANO.towers}
    ranks = ranks_of_towers(NANO, data.draw(st.integers(3, 8), "ranks"))
    towers = {name: Tower(own, len(own), counts[name], styles[name]) for name, own in ranks.items()}
    built = schedule_of_towers(NANO, towers, counts["contrast"], "matching")
    assert counts_of(cut_of(NANO, built), built) == counts


def test_a_file_of_towers_runs(train: Train, place: Path) -> None:
    built = clip_schedule(NANO, Settings(model="clip", schedule="1f1b", ranks=3, batch=32, microbatches=2))
    ps.save(built, place / "own.json")
    report = train("own", "--model clip --schedule own.json --batch 32 --steps 1")
    assert (report["num_ranks"], report["steps"]) == (3, 1)


@pytest.mark.slow
def test_towers_learn_what_they_tell_of(train: Train) -> None:
    """Each by a schedule of its own: partners in new combinations are found by far better than by chance."""
    report = train("towers", "--model clip --ranks 5 --steps 32")
    by_chance = float(report["unit"].split("; ")[1].split()[0])
    assert report["loss"] < 0.5 * by_chance, report["unit"]
