"""`penstock train --model captioner`: images of different sizes, packed and ordered by both towers' lengths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.cli import main
from penstock.cost import CostsByLength
from penstock.models import CrossEntropy, captioner_layers
from penstock.runtime import PartitionError
from penstock.train.checks import SettingsError
from penstock.train.inputs import gather_inputs
from penstock.train.settings import Settings
from penstock.train.tasks.captioner import CaptionerTask, tower_parts
from train_runs import losses

pytestmark = pytest.mark.unit

SMALL = "--model captioner --batch 12 --microbatches 4 --threads 1 --evaluate-every 0 --steps 3 --in-process"


@pytest.fixture
def train(tmp_path: Path, capfd: Any) -> Callable[..., Any]:
    """Trains into tmp_path/NAME; its report, or what it said where it fails."""

    def call(name: str, options: str, code: int = 0) -> Any:
        assert main(["train", *f"{SMALL} --out {tmp_path / name} {options} --json".split()]) == code
        out, err = capfd.readouterr()
        return json.loads(out) if code == 0 else out + err

    return call


def batches(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "batches.jsonl").read_text().splitlines()]


def test_losses_are_those_of_the_plain_loop_over_the_microbatches_and_a_run_repeats_to_the_bit(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    options = "--schedule zb-v --ranks 2 --lr-decay constant --lr-warmup 0 --clip 0"
    report = train("run", f"--packing planned --dispatch auto {options}")
    settings = Settings.from_mapping(json.loads((tmp_path / "run" / "settings.json").read_text()))
    inputs = gather_inputs(settings)
    documents = inputs.data.documents
    assert documents is not None
    layers = captioner_layers(inputs.config, None, settings.seed)
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1)
    loss_fn, found = CrossEntropy(), []
    for step, line in enumerate(batches(tmp_path / "run")):
        (microbatches,) = line["microbatches"]
        assert sorted(k for each in microbatches for k in each) == documents.of_step(step)
        given, targets = documents.example(microbatches)
        counts, total = [loss_fn.weight(each) for each in targets], None
        for value, wanted, count in zip(given, targets, counts, strict=True):
            for layer in layers:
                value = layer(value)
            loss = loss_fn(value, wanted) * (count / sum(counts))
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        assert total is not None
        found.append(float(total))
    assert losses(tmp_path / "run") == found
    assert report["tokens_per_second"] > 0
    assert "words that say what an image shows are right; 16.7% by chance" in str(report)
    train("again", f"--packing {tmp_path / 'run' / 'batches.jsonl'} --dispatch auto {options}")
    assert losses(tmp_path / "again") == found


def test_each_tower_gets_an_even_share_and_arrival_has_the_same_samples(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    options = "--ranks 2 --batch 24"
    train("planned", options)
    settings = Settings.from_mapping(json.loads((tmp_path / "planned" / "settings.json").read_text()))
    assert settings.packing == "planned"  # is usual
    data = gather_inputs(settings).data
    assert data.documents is not None
    costs, documents = data.documents.costs, data.documents

    def unevenness(bins: list[list[int]], tower: int) -> float:
        lengths = [[documents.stage_lengths(stage, own) for own in bins] for stage in (0, 1)]
        work = [sum(own) for own in lengths[tower]]
        return max(work) / (sum(work) / len(work))

    assert costs.towers == ("images", "words")
    (first, *_) = batches(tmp_path / "planned")
    assert unevenness(first["microbatches"][0], 0) < 1.5
    train("arrival", f"--packing arrival {options}")
    assert losses(tmp_path / "arrival")[0] == pytest.approx(losses(tmp_path / "planned")[0], rel=1e-5)


def test_costs_are_fitted_to_the_lengths_of_each_stage_s_tower(train: Callable[..., Any], tmp_path: Path) -> None:
    report = train("run", "--ranks 2 --length-costs measured --steps 9")
    assert any("costs by length, fitted to" in note for note in report["notices"])
    costs = tmp_path / "run" / "length-costs.json"
    assert CostsByLength.from_json(json.loads(costs.read_text())).towers == ("images", "words")
    train("next", f"--ranks 2 --length-costs {costs}")
    words = json.loads(costs.read_text())
    costs.write_text(json.dumps({**words, "towers": []}))
    assert "is by lengths of one kind of sequence" in train("wrong", f"--ranks 2 --length-costs {costs}", code=2)


def test_over_replicas_batches_are_dealt_by_the_work_of_both_towers(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    train("run", "--ranks 2 --dp 2 --microbatches 2 --recompute")
    assert [len(own) for own in batches(tmp_path / "run")[0]["microbatches"]] == [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ranks 1", "a captioner has two towers, each with stages of its own"),
        ("--ranks 2 --packing windows", "--packing windows cuts a text into fixed lengths"),
        ("--ranks 2 --data here.txt", "learns from samples that are generated for it"),
        (
            "--ranks 2 --cut 4,4",
            "a stage has layers 0 to 3, of both towers; the first 3 layers are the image tower's",
        ),
        ("--ranks 2 --microbatch-tokens 100", "no room for a sample as long as they may be, 832 patches and words"),
        ("--ranks 2 --schedule mllm", "a captioner begins with images"),
        ("--ranks 2 --tower images=ranks:1", "is for models of several towers"),
        ("--ranks 2 --context 5", "there must be at least 1, 2, 11 and 21"),
        ("--ranks 2 --schedule pipedream-2bw", "what each update gathers; give a schedule without such updates"),
        ("--ranks 2 --tied", "have one embedding and a head of its own"),
        ("--ranks 9", "9 stages asked of a model of 8 layers"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(
    train: Callable[..., Any], tmp_path: Path, options: str, message: str
) -> None:
    assert message in train("run", options, code=2)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_tuner_says_that_samples_differ(capfd: Any) -> None:
    assert main(["tune", "--model", "captioner", "--ranks", "2"]) == 2
    assert "samples of widely different lengths" in capfd.readouterr().err


def test_stages_are_of_one_tower_each_and_as_even_as_that_allows() -> None:
    costs = [2.0, 2, 2, 2, 4, 4, 4]
    assert tower_parts(costs, 4, ps.build("1f1b", 3, 3), None) == [range(4), range(4, 5), range(5, 7)]
    assert tower_parts(costs, 4, ps.build("1f1b", 2, 2), (4, 3)) == [range(4), range(4, 7)]
    assert len(tower_parts(costs, 4, ps.build("1f1b", 7, 7), None)) == 7
    with pytest.raises(PartitionError, match="8 stages asked of a model of 7 layers"):
        tower_parts(costs, 4, ps.build("1f1b", 8, 8), None)
    with pytest.raises(SettingsError, match="two towers"):
        tower_parts(costs, 4, ps.build("1f1b", 1, 1), None)


def test_messages_are_as_large_as_the_mean_sample_s() -> None:
    settings = Settings(model="captioner", preset="nano", packing="arrival", ranks=2, batch=8, microbatches=4)
    task = CaptionerTask(settings, settings.replica_schedule())
    sent, nothing = task.message_bytes(settings.replica_schedule())
    samples = task.read(None).documents
    assert samples is not None
    patches = [sum(own) for own in samples.lengths(range(256))["images"]]  # type: ignore[call-overload]
    assert sent == pytest.approx(4 * 2 * task.config.image_width * sum(patches) / 256)
    assert nothing == 0
