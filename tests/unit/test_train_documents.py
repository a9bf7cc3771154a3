"""`penstock train` on whole documents: the plain loop's losses, runs that repeat to the bit, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.cli import main
from penstock.data import ByteTokenizer
from penstock.models import CrossEntropy, build_layers
from penstock.runtime import RuntimeFailure
from penstock.train.checks import SettingsError
from penstock.train.inputs import gather_inputs
from penstock.train.settings import Settings
from penstock.train.tasks.chain import gpt_config
from penstock.train.tasks.documents import BatchRecord, PlannedBatches, StepBatch
from train_runs import losses, metrics

pytestmark = pytest.mark.unit

SMALL = (
    "--preset nano --depth 4 --width 16 --heads 2 --context 64 --batch 16 --microbatches 4 --ranks 2 --threads 1 "
    "--evaluate-every 0 --sample 4 --steps 4 --in-process"
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of very different lengths."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"the document {number} goes on. " * (1 + number * number // 60))
    return folder


@pytest.fixture
def train(tmp_path: Path, texts: Path, capfd: Any) -> Callable[..., Any]:
    """Trains into tmp_path/NAME; its report, or what it said where it fails."""

    def call(name: str, options: str, code: int = 0) -> Any:
        data = f"--data {texts} --out {tmp_path / name}" if "--resume" not in options else ""
        given = SMALL if "--resume" not in options else "--in-process"
        assert main(["train", *f"{given} {data} {options} --json".split()]) == code
        out, err = capfd.readouterr()
        return json.loads(out) if code == 0 else out + err

    return call


def batches(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "batches.jsonl").read_text().splitlines()]


def test_losses_are_those_of_the_plain_loop_over_the_microbatches_that_were_planned(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    report = train("run", "--packing planned --schedule zb-v --set lr_decay=constant --set lr_warmup=0 --clip 0")
    settings = Settings.from_mapping(json.loads((tmp_path / "run" / "settings.json").read_text()))
    documents = gather_inputs(settings).data.documents
    assert documents is not None
    layers = build_layers(gpt_config(settings, ByteTokenizer().vocab_size), None, settings.seed)
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1)
    loss_fn, found = CrossEntropy(), []
    lines = batches(tmp_path / "run")
    for step, line in enumerate(lines):
        (microbatches,) = line["microbatches"]
        assert sorted(k for each in microbatches for k in each) == sorted(documents.of_step(step))
        inputs, targets = documents.example(microbatches)
        tokens, total = sum(each.numel() for each in targets), None
        assert tokens == sum(documents.lengths(documents.of_step(step)))
        for value, wanted in zip(inputs, targets, strict=True):
            for layer in layers:
                value = layer(value)
            loss = loss_fn(value, wanted) * (wanted.numel() / tokens)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        assert total is not None
        found.append(float(total))
    assert losses(tmp_path / "run") == found
    assert {line["packing"] for line in lines} != {"arrival"}
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert any("4 of them" in note and "times as fast as in order of arrival" in note for note in report["notices"])
    assert report["files"]["batches"].endswith("batches.jsonl")


@pytest.mark.slow
def test_a_run_is_repeated_from_its_record_and_goes_on_from_a_checkpoint_to_the_bit(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    train("run", "--packing planned --schedule 1f1b --steps 10 --save-every 4")
    record = tmp_path / "run" / "batches.jsonl"
    train("again", f"--packing {record} --steps 10")
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    before = record.read_text()
    # Killed after step 8: its record has steps that no checkpoint has.
    (tmp_path / "run" / "checkpoints" / "step-00000010").rename(tmp_path / "aside")
    kept = metrics(tmp_path / "run")[:8]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    train("run", f"--resume {tmp_path / 'run'}")
    assert losses(tmp_path / "run") == losses(tmp_path / "again")
    assert record.read_text() == before


def test_bug_a_finished_run_of_a_record_could_not_be_resumed_for_its_report(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    train("run", "--packing planned --schedule 1f1b --steps 2")
    first = train("again", f"--packing {tmp_path / 'run' / 'batches.jsonl'} --steps 2")
    again = train("again", f"--resume {tmp_path / 'again'}")
    assert (again["loss"], again["train_loss"], again["steps"]) == (first["loss"], None, 2)


def test_bug_a_resumed_run_could_change_from_windows_to_whole_documents(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    """How whole documents are packed may change: a limit for planned batches is dropped with them."""
    train("run", "--steps 1")
    said = train("run", f"--resume {tmp_path / 'run'} --packing planned --steps 2", code=2)
    assert "was started with packing 'windows', not 'planned'" in said
    train("whole", "--packing planned --set microbatch_tokens=512 --steps 1")
    assert train("whole", f"--resume {tmp_path / 'whole'} --packing arrival --steps 2")["steps"] == 2


def test_over_several_replicas_as_they_arrive_and_planned(train: Callable[..., Any], tmp_path: Path) -> None:
    options = "--dp 2 --microbatches 2 --schedule 1f1b"
    train("planned", f"--packing planned {options}")
    (line, *_) = batches(tmp_path / "planned")
    assert [len(own) for own in line["microbatches"]] == [2, 2]
    train("arrival", f"--packing arrival {options}")
    assert not (tmp_path / "arrival" / "batches.jsonl").exists()
    # The mean over the same tokens, before the first update.
    assert losses(tmp_path / "planned")[0] == pytest.approx(losses(tmp_path / "arrival")[0], rel=1e-5)


@pytest.mark.slow
def test_each_step_is_dispatched_as_is_best_for_its_lengths(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    step = ps.Pipeline.step

    def noted(pipe: ps.Pipeline, *given: Any, **options: Any) -> Any:
        ran.append(pipe.dispatch.value)
        return step(pipe, *given, **options)

    monkeypatch.setattr(ps.Pipeline, "step", noted)
    options = "--schedule zb-h1 --ranks 4 --batch 32 --microbatches 8 --steps 6"
    report = train("run", f"--packing planned --dispatch auto {options}")
    record = tmp_path / "run" / "batches.jsonl"
    assert [[each] for each in ran] == [line["dispatches"] for line in batches(tmp_path / "run")]
    assert report["dispatch"] == "auto"
    train("frozen", f"--packing {record} {options}")
    assert {*ran[6:]} == {"frozen"}
    assert losses(tmp_path / "frozen") == losses(tmp_path / "run")
    line = json.loads(record.read_text().splitlines()[0])
    for wrong in (["late"], ["frozen", "frozen"]):
        record.write_text(json.dumps({**line, "dispatches": wrong}) + "\n")
        assert "dispatches by replica" in train("wrong", f"--packing {record} {options}", code=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--packing planned --model bert", "which only a built-in GPT and decoders of Hugging Face"),
        (
            "--packing planned --schedule pipedream-2bw --ranks 2",
            "order of microbatches says what each of its updates gathers",
        ),
        (
            "--packing arrival --set microbatch_tokens=100",
            "only where their batches are planned; add --packing planned",
        ),
        ("--packing planned --set microbatch_tokens=63", "no room for a document of the context's length, 64"),
        ("--packing nowhere.jsonl", "no such file; give windows, arrival, planned"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(
    train: Callable[..., Any], tmp_path: Path, options: str, message: str
) -> None:
    assert message in train("run", options, code=2)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_whose_last_batch_was_cut_off_where_it_was_killed_could_not_go_on(tmp_path: Path) -> None:
    """Of the batch that is half there nothing is lost: it is planned again, and the record is whole then."""
    path = tmp_path / "batches.jsonl"
    first, again = StepBatch([[[0, 1], [2]]], ()), StepBatch([[[3], [4, 5]]], ())
    BatchRecord(path).write(0, first, {})
    BatchRecord(path).write(1, again, {})
    whole = path.read_text()
    begun = len(whole.splitlines(True)[0]) + len('{"step"')
    for cut in range(begun, len(whole)):
        path.write_text(whole[:cut])
        record = BatchRecord(path)
        assert record._steps == {0: first}
        record.write(1, again, {})
        assert path.read_text() == whole
    path.write_text(whole.replace("]", "x", 1))
    with pytest.raises(SettingsError, match=r"line 1 is no batch"):
        BatchRecord(path)


def test_records_of_other_runs_are_refused(train: Callable[..., Any], tmp_path: Path) -> None:
    train("run", "--packing planned --steps 2")
    record = tmp_path / "run" / "batches.jsonl"
    assert "has no batch of step 2 with the" in train("more", f"--packing {record}", code=2)
    assert "has no batch of step 0 with the" in train("other", f"--packing {record} --steps 2 --seed 1", code=2)
    assert "in 1 x 2 microbatches" in train("counts", f"--packing {record} --steps 2 --microbatches 2", code=2)
    record.write_text(record.read_text() + '{"step": 2, "microbatches": [["a"]]}\n')
    assert "line 3 is no batch" in train("damaged", f"--packing {record} --steps 2", code=2)
    (tmp_path / "no.jsonl").write_bytes(bytes(range(128, 256)))  # a record that is no text was a traceback
    assert "has no batch of step 0" in train("text", f"--packing {tmp_path / 'no.jsonl'} --steps 2", code=2)


def test_a_step_that_no_plan_fits_is_named(tmp_path: Path, texts: Path) -> None:
    documents = gather_inputs(Settings(packing="planned", data=str(texts), preset="nano")).data.documents

    def plan(lengths: Any, costs: Any) -> Any:
        raise ValueError("no room; raise the limit")

    batches = PlannedBatches(documents, plan, BatchRecord(tmp_path / "batches.jsonl"), lambda value: value, print)
    with pytest.raises(RuntimeFailure, match=r"the batch of step 3 can't be planned: no room; raise"):
        batches[3]
