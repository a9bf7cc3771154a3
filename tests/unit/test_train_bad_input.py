"""What a person can get wrong about `penstock train`: told at once, in a line or two, with nothing left behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from checkpoint_cases import flip_tensor
from penstock.cli import main
from penstock.train.settings import Settings
from train_runs import error_in, losses

pytestmark = pytest.mark.unit

SMALL = (
    "--preset nano --depth 4 --width 16 --heads 2 --context 16 --batch 8 --microbatches 4 --steps 2 "
    "--evaluate-every 0 --sample 0"
)

BAD: dict[str, tuple[str, list[str]]] = {
    "unknown schedule": ("--schedule zbv", ["no schedule named 'zbv'", "did you mean zb-v"]),
    "missing schedule file": ("--schedule nowhere.json", ["nowhere.json", "No such file"]),
    "stages not a multiple": ("--schedule interleaved-1f1b --stages 6", ["6", "4"]),
    "stages of 1f1b": ("--stages 8", ["1f1b", "stages"]),
    "option of no schedule": ("--option colour=red", ["1f1b has no option 'colour'"]),
    "option without a value": ("--option colour", ["--option colour", "write KEY=VALUE"]),
    "option with a setting": ("--schedule zb --option num_ranks=2", ["--option num_ranks: give --ranks"]),
    "stages of a file": ("--schedule two.json --stages 4", ["2 stages", "the run has", "--stages"]),
    "option of a file": ("--schedule two.json --option overlap=true", ["--option overlap", "two.json says it"]),
    "warm-up counts": ("--schedule zb --option warmup=[7,5]", ["2 counts", "one per rank", "4"]),
    "layers in words": ("--cut many", ["--cut many", "7,5,3,1"]),
    "more stages than layers": ("--ranks 8 --depth 2", ["8 stages", "4 layers"]),
    "schedule of wrong shape": ("--schedule wrong.json", ["wrong.json", "not a schedule"]),
    "schedule that is not JSON": ("--schedule bad.json", ["bad.json", "JSON"]),
    "schedule for other ranks": ("--schedule two.json --ranks 4", ["two.json", "2 ranks", "4", "leave out --ranks"]),
    "schedule that is not valid": ("--schedule stuck.txt", ["rank 3", "B0"]),
    "nccl without a GPU": ("--transport nccl", ["--transport nccl", "stages lie on cpu"]),
    "no ranks": ("--ranks 0", ["ranks is 0", "at least 1"]),
    "batch below microbatches": ("--batch 2", ["batch of 2", "4 microbatches", "at least 4"]),
    "heads": ("--heads 3", ["width 16", "3 heads", "multiple"]),
    "dropout": ("--set dropout=1", ["dropout 1", "below 1"]),
    "preset": ("--preset tny", ["no preset named 'tny'", "did you mean tiny"]),
    "optimizer": ("--optimizer Adamm", ["no optimizer 'Adamm'", "did you mean Adam"]),
    "optimizer's options": ("--set 'optimizer_options={\"momentum\": 1}'", ["AdamW", "momentum"]),
    "a rate among them": ("--set 'optimizer_options={\"lr\": 1}'", ["optimizer_options has lr", "give --lr"]),
    "optimizer's values": ("--set 'optimizer_options={\"betas\": [2, 0.9]}'", ["AdamW", "beta"]),
    "optimizer for sparse gradients": ("--optimizer SparseAdam", ["SparseAdam", "dense"]),
    "options not JSON": ("--set optimizer_options=momentum=1", ["--set optimizer_options", "not JSON"]),
    "options not an object": ("--set optimizer_options=3", ["--set optimizer_options", "object"]),
    "precision": ("--precision float8", ["no precision 'float8'", "float32, bfloat16 or float16"]),
    "float16 with updates as ops": (
        "--schedule amdp --window 4 --precision float16",
        ["amdp updates each stage by itself", "give --precision bfloat16"],
    ),
    "device": ("--device gpu", ["no device 'gpu'", "cpu or cuda"]),
    "dispatch": ("--dispatch eager", ["no dispatch 'eager'", "frozen, hinted, dynamic or auto"]),
    "learning rate": ("--lr 0", ["lr is 0", "above 0"]),
    "learning rate not a number": ("--lr nan", ["lr is nan", "finite"]),
    "timeout": ("--set timeout=-1", ["timeout is -1", "above 0"]),
    "missing data": ("--data nowhere.txt", ["nowhere.txt", "no such file or folder"]),
    "empty data": ("--data empty.txt", ["empty.txt", "the file is empty"]),
    "binary data": ("--data binary.txt", ["binary.txt", "not a text file"]),
    "folder without text": ("--data empty-folder", ["empty-folder", "no text files"]),
    "JSONL without text": ("--data bad.jsonl", ["bad.jsonl, line 2", "no text field"]),
    "too little data": ("--data short.txt", ["tokens of data", "context 16"]),
    "truncated .bin": ("--data cut.bin", ["cut.bin", "9001 bytes", "has 100"]),
    "damaged .idx": ("--data damaged.idx", ["damaged.idx"]),
    "half a pair": ("--data alone.bin", ["alone.idx"]),
    "data of another tokenizer": ("--data wide.bin", ["token 300", "vocabulary of 256", "tokenizer"]),
    "missing tokenizer": ("--tokenizer nowhere.json", ["nowhere.json", "no such tokenizer file"]),
    "damaged tokenizer": ("--tokenizer bad.json", ["bad.json", "not a tokenizers JSON file"]),
    "a file in the way": ("--out text.txt", ["text.txt", "--out"]),
    "a file on the way": ("--out text.txt/run", ["text.txt/run", "--out"]),
    "export into nowhere": ("--export nowhere/model.safetensors", ["there is no folder nowhere", "make it first"]),
    "export onto a folder": ("--export empty-folder", ["empty-folder is a folder", "give a file"]),
    "unknown link": ("--link 0:9=latency:3ms", ["--link", "link 0:9: ranks go from 0 to 3"]),
    "negative delay": ("--link 0:1=latency:-3ms", ["--link", "'-3ms'", "at least 0"]),
    "a trace with gaps": ("--link 0:1=latency:trace:gaps.txt", ["gaps.txt, line 2", "is a gap"]),
    "transport": ("--transport smoke", ["no transport 'smoke'", "host, gloo, direct, delegate or nccl"]),
    "a transport within a process": ("--in-process --transport direct", ["nothing is sent", "--transport direct"]),
    "a Redis that refuses": ("--adapt --set store=redis://127.0.0.1:1", ["--set store", "127.0.0.1:1"]),
    "a store for nothing": (
        "--set store=redis://:secret@127.0.0.1:1",
        ["--set store without --adapt", "add --adapt"],
    ),
    "host memory in bytes": ("--adapt --set host_memory=8GB", ["how many bytes an activation has", "like 4"]),
    "window not a multiple of the block": ("--schedule amdp --window 6", ["window", "4 microbatches", "got 6"]),
    "microbatches that are no block": (
        "--schedule amdp --rule none --microbatches 6",
        ["a multiple of 4 microbatches", "got 6", "--microbatches 4 or 8"],
    ),
    "odd ranks": ("--schedule amdp --ranks 3", ["ranks", "got 3", "2 or 4"]),
    "no window": ("--schedule amdp --window 0", ["window is 0", "at least 1"]),
    "a window below the ranks": ("--schedule pipedream-2bw --window 3", ["at least 4", "got 3"]),
    "a window that fits no pass": ("--schedule vnag --window 12 --drain-every 2", ["12", "8 or 16", "--drain-every"]),
    "XPipe without Adam": ("--schedule xpipe --optimizer SGD", ["--optimizer SGD", "torch.optim.Adam or AdamW"]),
    "SpecTrain without momentum": ("--schedule spectrain --optimizer AdamW", ["--optimizer AdamW", "momentum"]),
    "vNAG without NAdam": ("--schedule vnag --optimizer AdamW", ["NAdam(betas=(0.99, 0.999)"]),
    "no mismatch to bound": (
        "--max-mismatch 1",
        ["--max-mismatch 1", "with --schedule 1f1b", "leave --max-mismatch out"],
    ),
    "no rule of that name": (
        "--schedule amdp --rule adam",
        ["no rule named 'adam'", "pipedream-2bw, spectrain, xpipe"],
    ),
    "a rule without updates": ("--rule xpipe", ["--rule xpipe", "with --schedule 1f1b", "leave --rule out"]),
    "a rule without its optimizer": (
        "--schedule amdp --rule xpipe --optimizer SGD",
        ["--optimizer SGD", "torch.optim.Adam or AdamW"],
    ),
    "nothing to drain": ("--schedule zb-v --drain-every 2", ["--drain-every 2", "with --schedule zb-v"]),
    "a window without updates": ("--schedule two.json --window 4", ["two.json has no updates", "leave out --window"]),
    "more mismatch than allowed": ("--schedule xpipe --window 1 --max-mismatch 1", ["microbatch 2", "at most 1"]),
    "sharding": ("--schedule amdp --sharding maybe", ["no sharding 'maybe'", "none, copies, zero1 or fsdp"]),
    "no microbatch for each": ("--schedule amdp --batch 3", ["batch of 3", "4 microbatches"]),
    "no run": ("--resume empty-folder", ["empty-folder is no run", "settings.json"]),
    "no folder": ("--resume nowhere", ["nowhere is no run"]),
    "not a number": ("--steps many", ["'--steps'", "valid int", "see penstock train --help"]),
    "unknown option": ("--layers 3", ["--layers", "see penstock train --help"]),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good data and every kind of bad file."""
    folder = tmp_path_factory.mktemp("bad")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    (folder / "empty.txt").touch()
    (folder / "gaps.txt").write_text("0 10\n100 -\n")
    (folder / "short.txt").write_text("short")
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    (folder / "bad.jsonl").write_text('{"text": "yes"}\n{"body": "no"}\n')
    (folder / "empty-folder").mkdir()
    (folder / "wrong.json").write_text('{"num_ranks": 4}')
    (folder / "bad.json").write_text("{")
    ps.save(ps.build("1f1b", 2, 4), folder / "two.json")
    (folder / "stuck.txt").write_text(str(ps.build("1f1b", 4, 4)).replace("F0 B0", "B0 F0"))
    for name in ("cut", "damaged", "alone"):
        assert main(["data", "prepare", str(text), str(folder / name), "--json"]) == 0
    os.truncate(folder / "cut.bin", 100)
    (folder / "damaged.idx").write_bytes(b"not an index" * 10)
    (folder / "alone.idx").unlink()
    _write_wide(folder / "wide")
    return folder


def _write_wide(prefix: Path) -> None:
    """A pair with one token beyond the bytes, far from the first batch."""
    import numpy as np

    from penstock.data import IndexedWriter

    with IndexedWriter(prefix, 1000) as writer:
        row = np.zeros(5000, dtype=np.uint16)
        row[4321] = 300
        writer.add(row)


@pytest.fixture
def tell(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> Iterator[Callable[..., list[str]]]:
    """Runs `penstock train` with mistakes, twice, and returns the lines it says. Nothing new may lie anywhere."""
    monkeypatch.chdir(place)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def call(line: str, code: int | tuple[int, ...] = (1, 2)) -> list[str]:
        codes = (code,) if isinstance(code, int) else code
        before = _files(place)
        # Later options win, so that each case changes what it wants of the small run.
        arguments = ["train", *shlex.split(line)]
        got = main(arguments)
        out, err = capfd.readouterr()
        assert got in codes, err
        assert out == ""
        err = error_in(err)
        assert err.startswith("penstock: "), err
        lines = err.removeprefix("penstock: ").splitlines()
        got_json = main([*arguments, "--json"])
        out, err_json = capfd.readouterr()
        assert (got_json, err_json) == (got, "")
        assert json.loads(out)["error"]["message"].splitlines() == lines
        assert set(json.loads(out)) == {"error"}
        assert _files(place) == before
        assert "bug in penstock" not in err
        return lines

    return call


def _files(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p.relative_to(folder)), p.stat().st_mtime_ns) for p in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD.keys())
def test_a_mistake_is_told(tell: Callable[..., list[str]], options: str, words: list[str]) -> None:
    lines = tell(f"{SMALL} --data text.txt {options}")
    assert len(lines) <= (12 if "stuck" in options else 3 if "mismatch" in options else 2), lines
    for word in words:
        assert word in "\n".join(lines), lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu(tell: Callable[..., list[str]]) -> None:
    assert tell(f"{SMALL} --data text.txt --device cuda") == [
        "device 'cuda' was asked for and torch finds no GPU; use --device cpu"
    ]


@pytest.fixture(scope="module")
def run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished small run, outside the place that is watched."""
    folder = tmp_path_factory.mktemp("run") / "run"
    line = f"{SMALL} --ranks 2 --data {place}/text.txt --in-process --save-every 1 --out {folder} --json"
    assert main(["train", *line.split()]) == 0
    return folder


RESUMED: dict[str, tuple[str, list[str]]] = {
    "another width": ("--width 32", ["width 16", "not 32", "leave --width out, or start a new run"]),
    "another depth": ("--depth 6 --context 8", ["depth 4", "not 6"]),
    "tied": ("--set tied=true", ["tied None", "not True"]),
    "another rate": ("--lr 0.1", ["lr 0.004", "not 0.1"]),
    "another batch": ("--batch 16", ["batch 8", "not 16"]),
    "another seed": ("--seed 5", ["seed 0", "not 5"]),
    "another optimizer": ("--optimizer SGD", ["optimizer 'AdamW'", "not 'SGD'"]),
    "other data": ("--data other.txt", ["other data", "--data"]),
    "another folder": ("--out elsewhere", ["goes on in its own folder", "leave out --out"]),
    "fewer steps": ("--steps 1", ["at step 2", "--steps 2 or more"]),
    "more stages than layers": ("--ranks 8", ["8 stages", "6 layers"]),
}


@pytest.mark.parametrize(("options", "words"), RESUMED.values(), ids=RESUMED.keys())
def test_a_resumed_run_is_the_same_run(
    tell: Callable[..., list[str]], run: Path, place: Path, options: str, words: list[str]
) -> None:
    (place / "other.txt").write_text("Something else. " * 200)
    before = _files(run)
    lines = tell(f"--resume {run} {options}")
    assert _files(run) == before
    for word in words:
        assert word in "\n".join(lines), lines


def _damaged(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "damaged"))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "is damaged: it is no JSON object"),
        ("[1]", "is damaged: it is no JSON object"),
        ("[" * 100_000, "is damaged: it is no JSON object"),
        ('{"ranks": "four"}', "ranks is 'four'; give a whole number"),
        ('{"ranks": true}', "ranks is True; give a whole number"),
        ('{"width": 16.5}', "width is 16.5; give a whole number"),
        ('{"lr": NaN}', "lr is nan; give a finite number"),
        ('{"cut": ["a"]}', "give whole numbers"),
        ('{"optimizer_options": 3}', "give an object"),
        ('{"colour": "red", "length_costs": "sizes"}', "unknown settings: colour, length_costs; another version"),
    ],
)
def test_damaged_settings(tell: Callable[..., list[str]], run: Path, tmp_path: Path, text: str, word: str) -> None:
    copy = _damaged(run, tmp_path)
    (copy / "settings.json").write_text(text)
    (line,) = tell(f"--resume {copy}", 2)
    assert str(copy / "settings.json") in line
    assert word in line


def test_damaged_checkpoints(tell: Callable[..., list[str]], run: Path, tmp_path: Path) -> None:
    copy = _damaged(run, tmp_path)
    newest, older = copy / "checkpoints/step-00000002", copy / "checkpoints/step-00000001"
    file = flip_tensor(newest)
    before = _files(copy / "checkpoints")
    from penstock.runtime.checkpoint import CheckpointError
    from penstock.train.job import order_of
    from penstock.train.run_job import checked
    from penstock.train.start import run_job

    with pytest.raises(
        CheckpointError, match=rf"checksum differs; step-00000001 before it is whole: remove .*--resume {copy}"
    ):
        run_job(checked(order_of({}, None, str(copy), None, as_json=True)))
    assert _files(copy / "checkpoints") == before
    # Truncated ones are found out before anything starts; with none left there is nothing to go on from.
    os.truncate(file, 10)
    (line,) = tell(f"--resume {copy}")
    assert "has 10 bytes" in line
    assert f"go on from there with penstock train --resume {copy}" in line
    os.truncate(next(older.glob("*.distcp")), 10)
    (line,) = tell(f"--resume {copy}")
    assert "no older checkpoint is whole: copy one there, or start a new run" in line


def test_a_run_goes_on_from_an_older_checkpoint_when_the_damaged_one_is_renamed(run: Path, tmp_path: Path) -> None:
    copy = _damaged(run, tmp_path)
    newest = copy / "checkpoints/step-00000002"
    flip_tensor(newest)
    newest.rename(newest.with_suffix(".damaged"))
    assert main(["train", "--resume", str(copy), "--in-process"]) == 0
    assert losses(copy) == losses(run)


def test_a_folder_that_holds_a_run(tell: Callable[..., list[str]], run: Path) -> None:
    (line,) = tell(f"{SMALL} --data text.txt --out {run}", 2)
    assert line == f"{run} holds a run; go on with --resume {run}, or give another --out"


def test_metrics_of_a_run_without_a_checkpoint_were_overwritten(
    tell: Callable[..., list[str]], run: Path, tmp_path: Path, capfd: Any
) -> None:
    copy = _damaged(run, tmp_path)
    shutil.rmtree(copy / "checkpoints")
    before = (copy / "metrics.jsonl").read_text()
    (line,) = tell(f"{SMALL} --data text.txt --out {copy}", 2)
    assert line == f"{copy} holds a run; go on with --resume {copy}, or give another --out"
    assert (copy / "metrics.jsonl").read_text() == before
    assert main(["train", "--out", str(copy), "--resume", str(copy), "--in-process"]) == 0  # begins again
    assert "from the start, as it wrote no checkpoint" in capfd.readouterr().err
    assert losses(copy) == losses(run)
    # A run that failed in its first step has nothing to lose.
    shutil.rmtree(copy / "checkpoints")
    (copy / "metrics.jsonl").write_text("")
    (line,) = tell(f"{SMALL} --data nowhere.txt --out {copy}", 2)
    assert "no such file" in line


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("redis://:secret@127.0.0.1:6379/1", "redis://127.0.0.1:6379/1"),
        ("redis://me:se@cret@host:1", "redis://host:1"),
        ("redis://host:29500", "redis://host:29500"),
        (None, None),
    ],
)
def test_a_password_is_not_written_down(given: str | None, written: str | None) -> None:
    settings = Settings(adapt=given is not None, store=given)
    assert json.loads(settings.to_json())["store"] == written
    assert settings.store == given


def test_options_of_one_chain_are_refused_for_towers(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--model", "clip", "--option", "overlap=true", "--in-process"]) == 2
    assert "--option with --model clip: it is for one chain of stages" in capfd.readouterr().err
