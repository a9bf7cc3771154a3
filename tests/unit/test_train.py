"""`penstock train` in one process: what it reads, what it writes, and that the numbers do not depend on how."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import penstock as ps
from penstock.cli import main
from penstock.runtime import RuntimeFailure
from penstock.train import inputs
from penstock.train import settings as settings_module
from penstock.train.folder import RunFolder
from penstock.train.metrics import Metrics
from penstock.train.rank import known_before
from penstock.train.report import Report
from penstock.train.settings import Settings, learning_rate
from penstock.train.tasks.task import Task
from tiers import others_nightly
from train_runs import ENDLESS, SMALL, checkpoints, losses, metrics

pytestmark = pytest.mark.unit

Train = Callable[..., dict[str, Any]]
WORDS = ["rank", "stage", "link", "op", "slack", "bubble", "makespan", "plan", "prove", "draw", "run"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    draw = random.Random(1)
    path.write_text(" ".join(draw.choice(WORDS) for _ in range(3000)))
    return path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def train(tmp_path: Path, text: Path, capfd: Any) -> Train:
    """Trains in this process, into tmp_path/NAME; returns the one JSON object it prints."""

    def call(name: str, options: str = "", small: str = f"{SMALL} --steps 6", code: int = 0) -> dict[str, Any]:
        data = "" if "--data" in options or "--resume" in options else f"--data {text}"
        folder = "" if "--resume" in options else f"--out {tmp_path / name}"
        line = f"{small} --threads 1 --in-process {data} {folder} {options} --json"
        assert main(["train", *line.split()]) == code
        out, err = capfd.readouterr()
        assert err == ""
        assert out.count("\n") == 1
        value: dict[str, Any] = json.loads(out)
        return value

    return call


@pytest.mark.slow
def test_options_of_a_library_schedule_are_those_of_its_file(train: Train, tmp_path: Path) -> None:
    """`--option` builds what `penstock show --option` writes. A run goes on with it; another schedule drops it."""
    paired, plain = tmp_path / "paired.json", tmp_path / "plain.json"
    for path, overlap in ((paired, True), (plain, False)):
        ps.save(ps.build("dualpipe-v", 4, 8, overlap=overlap), path)
    small = f"{SMALL} --microbatches 8 --depth 6 --steps 2"
    train("named", "--schedule dualpipe-v --option overlap=true", small)
    train("file", f"--schedule {paired}", small)
    assert ps.load(tmp_path / "named" / "schedule.txt") == ps.load(paired) != ps.load(plain)
    assert losses(tmp_path / "named") == losses(tmp_path / "file")
    train("named", f"--resume {tmp_path / 'named'} --steps 3", "")
    saved = json.loads((tmp_path / "named" / "settings.json").read_text())
    assert saved["schedule_options"] == {"overlap": True}
    train("named", f"--resume {tmp_path / 'named'} --steps 4 --schedule gpipe", "")
    assert json.loads((tmp_path / "named" / "settings.json").read_text())["schedule_options"] == {}


def test_what_a_run_leaves(train: Train, tmp_path: Path, text: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model.safetensors"
    options = (
        f"--save-every 2 --evaluate-every 4 --set keep=2 --set lr_warmup=4 --steps 9 --sample 20 --export {model}"
    )
    report = train("run", options)
    assert sorted(p.name for p in run.iterdir() if p.name != "tensorboard") == [
        "checkpoints",
        "metrics.jsonl",
        "report.json",
        "sample.txt",
        "schedule.svg",
        "schedule.txt",
        "settings.json",
        "timeline.html",
        "timeline.json",
    ]
    assert checkpoints(run) == ["step-00000008", "step-00000009"]
    assert ps.load(run / "schedule.txt") == ps.build("1f1b", 4, 4)
    assert "<svg" in (run / "schedule.svg").read_text()
    assert "<html" in (run / "timeline.html").read_text()
    assert json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert (run / "sample.txt").read_text()
    saved = json.loads((run / "settings.json").read_text())
    assert Settings.from_mapping(saved) == Settings.from_mapping(
        {"preset": "nano", "depth": 6, "width": 16, "heads": 2, "context": 16, "batch": 8, "microbatches": 4}
        | {"evaluate_every": 4, "save_every": 2, "keep": 2, "lr_warmup": 4, "steps": 9, "sample": 20}
        | {"data": str(text), "threads": 1, "in_process": True}
    )

    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(9))
    for step, line in enumerate(lines):
        assert line["lr"] == learning_rate(step, 9, 4e-3, 4, "cosine")
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
        assert 0 <= line["bubble"] < 1
        assert ("validation_loss" in line) == (step in (3, 7, 8))

    assert json.loads((run / "report.json").read_text()) == report
    assert (report["steps"], report["interrupted"], report["num_ranks"]) == (9, False, 4)
    assert report["train_loss"] == lines[-1]["loss"]
    assert report["loss"] == lines[-1]["validation_loss"]
    assert report["unit"] == f"nats a token on the validation text; {math.log(256):.3f} by guessing"
    assert all(math.isfinite(value) and value >= 0 for value in report["timing"].values())
    assert report["timing"]["simulated_makespan"] > 0
    assert all(Path(path).exists() for path in report["files"].values())

    weights = load_file(model)
    assert sum(w.numel() for w in weights.values()) == report["num_parameters"]
    assert {"layers.0.token.weight", "layers.1.attention.qkv.weight", "layers.7.output.weight"} <= set(weights)


@pytest.mark.slow
def test_a_run_learns_and_its_report_says_what_guessing_gives(train: Train) -> None:
    """A text in which a pair says little, and the letters before it all."""
    report = train("run", "--steps 120 --lr 0.02 --set lr_warmup=5 --sample 30")
    assert report["loss"] < 0.5 * math.log(256)
    assert "5.545 by guessing" in report["unit"]


SAME = {
    "1 rank": "--ranks 1",
    "zb-v": "--schedule zb-v",
    "interleaved": "--schedule interleaved-1f1b --ranks 2 --stages 4",
    "dynamic": "--dispatch dynamic",
    "auto": "--dispatch auto --schedule zb",
    "adapt": "--adapt --schedule zb-h1",
    "dynamic zb": "--schedule zb --option warmup=[4,3,2,1] --dispatch dynamic",
    "recompute": "--recompute",
    "recompute with split backward": "--recompute --schedule zb-h1",
}

KINDS = {
    "plain": "",
    "tied": "--set dropout=0.1 --set tied=true",
    "bfloat16": "--precision bfloat16",
    "float16": "--precision float16",
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Callable[[str], list[float]]:
    """The losses of a plain run with some options."""
    found: dict[str, list[float]] = {}

    def of(options: str) -> list[float]:
        if options not in found:
            folder = tmp_path_factory.mktemp("expected") / "run"
            line = f"{SMALL} --steps 6 --threads 1 --in-process --data {text} --out {folder} {options} --json"
            assert main(["train", *line.split()]) == 0
            found[options] = losses(folder)
        return found[options]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kind"),
    others_nightly(
        product(SAME, KINDS), [(way, list(KINDS)[number % len(KINDS)]) for number, way in enumerate(SAME)]
    ),
)
def test_the_same_losses(train: Train, tmp_path: Path, expected: Any, way: str, kind: str) -> None:
    train("run", f"{SAME[way]} {KINDS[kind]}")
    assert losses(tmp_path / "run") == expected(KINDS[kind])


RESUMED = {
    "adamw": "",
    "momentum": '--optimizer SGD --set optimizer_options={"momentum":0.9}',
    "dropout and tied": "--set dropout=0.1 --set tied=true",
    "bfloat16": "--precision bfloat16",
    "float16": "--precision float16",
    "an optimizer with odd state": "--optimizer NAdam",
    "no clipping": "--clip 0",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", others_nightly(RESUMED, ["adamw", "dropout and tied", "float16", "an optimizer with odd state"])
)
def test_resumed_elsewhere(train: Train, tmp_path: Path, expected: Any, kind: str) -> None:
    """Saved at step 2, gone on with under two other schedules and numbers of ranks."""
    options = f"{RESUMED[kind]} --set lr_decay=constant"
    train("run", f"{options} --steps 2")
    folder = tmp_path / "run"
    train("run", f"--resume {folder} --schedule zb-v --ranks 2 --steps 4", small="")
    report = train("run", f"--resume {folder} --schedule 1f1b --ranks 1 --steps 6", small="")
    assert losses(folder) == expected(options)
    assert report["steps"] == 6


def test_a_model_is_exported_when_no_rank_waits_any_more(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks waited for the rank that exports, and gave up after `--set timeout`."""
    done: list[str] = []

    def noted(owner: type, name: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **more: (done.append(name), method(*given, **more))[1])

    noted(ps.Pipeline, "close")
    noted(Task, "export")
    train("run", f"--export {tmp_path / 'm.safetensors'}")
    assert done[done.index("export") - 1 :] == ["close", "export"]


HOST = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(("local", "threads"), [({}, 2), (HOST, 8)])
def test_ranks_of_other_hosts_take_no_cores_of_this_one(
    monkeypatch: pytest.MonkeyPatch, local: dict[str, str], threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    for name, value in local.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(settings_module, "num_cores", lambda: 16)
    assert Settings(ranks=8).num_threads == threads


def test_a_finished_run_may_be_resumed(train: Train, tmp_path: Path) -> None:
    """Nothing is trained; the report comes, and the model may be exported."""
    first = train("run")
    before = (tmp_path / "run/metrics.jsonl").read_text()
    again = train("run", f"--resume {tmp_path / 'run'} --export {tmp_path / 'm.safetensors'}", small="")
    assert again["loss"] == first["loss"]
    assert (again["train_loss"], again["tokens_per_second"], again["steps"]) == (None, None, 6)
    assert (tmp_path / "run/metrics.jsonl").read_text() == before
    assert (tmp_path / "m.safetensors").exists()


def test_resumed_from_another_folder(train: Train, tmp_path: Path, text: Path, monkeypatch: Any) -> None:
    """The data given as a relative path is found again."""
    monkeypatch.chdir(text.parent)
    train("run", f"--data {text.name} --steps 2")
    monkeypatch.chdir(tmp_path)
    report = train("run", "--resume run --steps 4", small="")
    assert (report["first_step"], report["steps"]) == (2, 4)


@pytest.mark.parametrize(("first_step", "words"), [(0, "4 steps of"), (2, "2 steps (3 to 4) of"), (4, "4 steps of")])
def test_bug_a_resumed_run_said_that_its_last_part_had_run_all_steps(
    tmp_path: Path, first_step: int, words: str
) -> None:
    values: dict[str, Any] = {"schedule": "1f1b", "dispatch": "frozen", "num_ranks": 2, "interrupted": False}
    values |= {"seconds": 1.0, "notices": [], "said_before": 0, "steered": None, "details": {}, "pace": ""}
    report = Report(folder=RunFolder(tmp_path), steps=4, first_step=first_step, rows=[], **values)
    assert report.to_text().splitlines()[0].split(maxsplit=1)[1].startswith(words)
    assert (report.to_json()["first_step"], report.to_json()["steps"]) == (first_step, 4)


def test_losses_of_no_run_are_equal_to_nothing(tmp_path: Path) -> None:
    """A test that named the wrong folders compared two empty lists."""
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"step": 0')
    for folder in ("none", "begun"):
        assert metrics(tmp_path / folder) == []
        with pytest.raises(AssertionError, match=f"{folder} has no losses of a run"):
            losses(tmp_path / folder)


@pytest.mark.usefixtures("interruptible")
def test_interrupted_in_process(train: Train, tmp_path: Path) -> None:
    """Ctrl-C finishes the step and saves; the handler that was there before is there again."""
    folder = tmp_path / "run"
    ended = threading.Event()

    def press() -> None:
        while len(metrics(folder)) < 3 and not ended.is_set():
            time.sleep(0.001)
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press)
    finger.start()
    try:
        report = train("run", ENDLESS, code=130)
    finally:
        ended.set()
        finger.join()
    assert report["interrupted"] is True
    assert 3 <= report["steps"] == len(losses(folder))
    assert checkpoints(folder) == [f"step-{report['steps']:08d}"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_the_background_only_sigterm_ends_it(train: Train, tmp_path: Path) -> None:
    """A shell starts a job in the background with SIGINT ignored; it stays so."""
    folder = tmp_path / "run"

    ended = threading.Event()

    def press() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = len(metrics(folder))
            while len(metrics(folder)) < before + 2 and not ended.is_set():
                time.sleep(0.001)
            if not ended.is_set():
                os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        finger = threading.Thread(target=press)
        finger.start()
        report = train("run", ENDLESS, code=143)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        ended.set()
        finger.join()
        signal.signal(signal.SIGINT, before)
    assert report["interrupted"] is True
    assert 4 <= report["steps"] == len(losses(folder)) < 5000
    assert checkpoints(folder) == [f"step-{report['steps']:08d}"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The same text as a folder, JSONL and a pair; and a tokenizer."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "folder").mkdir()
    words = text.read_text().split(" ")
    parts = [" ".join(words[i : i + 100]) for i in range(0, len(words), 100)]
    for number, part in enumerate(parts):
        (folder / f"folder/{number:03d}.txt").write_text(part)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    assert main(["data", "prepare", str(folder / "folder"), str(folder / "pair"), "--json"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["folder", "text.jsonl", "pair", "pair.bin", "pair.idx"])
def test_data(train: Train, tmp_path: Path, sources: Path, name: str) -> None:
    report = train("run", f"--data {sources / name} --steps 2")
    assert report["unit"].startswith("nats a token")
    assert len(losses(tmp_path / "run")) == 2


def test_a_tokenizer(train: Train, tmp_path: Path, text: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(["<eos>", "?", *WORDS])}, "?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    train("run", f"--tokenizer {tmp_path / 'tokenizer.json'} --steps 2 --sample 12")
    written = (tmp_path / "run/sample.txt").read_text().split()
    assert set(written) <= {*WORDS, "?"}
    prepare = ["data", "prepare", str(text), str(tmp_path / "pair"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert main([*prepare, "--json"]) == 0


def test_a_schedule_file_says_its_counts(train: Train, tmp_path: Path) -> None:
    ps.save(ps.build("zb-h1", 2, 8), tmp_path / "mine.json")
    report = train(
        "run", f"--schedule {tmp_path / 'mine.json'}", small=SMALL.replace("--microbatches 4", "--steps 2")
    )
    assert (report["num_ranks"], report["schedule"]) == (2, "zb-h1")


def test_steps_that_do_not_divide(train: Train, tmp_path: Path, expected: Any) -> None:
    """A batch of 7 in 4 microbatches."""
    train("run", "--batch 7 --schedule zb-h1")
    train("one", "--batch 7 --ranks 1")
    assert losses(tmp_path / "run") == losses(tmp_path / "one")


@pytest.mark.parametrize(
    ("step", "decay", "rate"),
    [
        (0, "cosine", 0.1),
        (9, "cosine", 1.0),
        (10, "cosine", 1.0),
        (60, "cosine", 0.55),
        (110, "cosine", 0.1),
        (500, "cosine", 0.1),
        (60, "constant", 1.0),
    ],
)
def test_learning_rate(step: int, decay: str, rate: float) -> None:
    assert learning_rate(step, 110, 1.0, 10, decay) == pytest.approx(rate)


def test_learning_rate_without_warm_up() -> None:
    assert learning_rate(0, 10, 1.0, 0, "cosine") == 1.0


def test_one_microbatch_of_one_sample_is_no_plural(text: Path, tmp_path: Path, capfd: Any) -> None:
    line = f"{SMALL} --steps 1 --batch 1 --microbatches 1 --in-process --data {text} --out {tmp_path / 'run'}"
    assert main(["train", *line.split()]) == 0
    assert "(in one process), 1 microbatch of 1 sample, frozen" in capfd.readouterr().err


@pytest.mark.slow
def test_the_report_for_people(train: Train, tmp_path: Path, text: Path, capfd: Any) -> None:
    folder = tmp_path / "run"
    line = f"{SMALL} --steps 3 --sample 3 --in-process --data {text} --out {folder}"
    assert main(["train", *line.split()]) == 0
    out, err = capfd.readouterr()
    told = err.splitlines()
    assert told[0] == "starting 4 ranks: reading the data, cutting the model ..."
    assert told[1].startswith(f"data    {text}: 1 documents")
    assert told[2] == "plan    1f1b over 4 ranks (in one process), 4 microbatches of 2 samples, frozen"
    assert told[3] == f"folder  {folder}"
    assert told[4].startswith("note    4 ranks took turns in one process")
    assert told[5] == "building the stages ..."
    assert [t.split("  ")[0] for t in told[6:9]] == ["step 1/3", "step 2/3", "step 3/3"]
    assert told[9:] == ["writing the report, for which the model writes 3 tokens (--sample) ..."]
    assert [row.split("  ")[0] for row in out.splitlines()] == ["", "run", "loss", "one step", "wrote"]
    assert not any(c for c in out if not c.isprintable() and c != "\n")
    loss = next(row for row in out.splitlines() if row.startswith("loss")).removeprefix("loss").strip()
    assert main(["report", str(folder)]) == 0
    assert f"The loss is {loss}." in capfd.readouterr().out


def test_the_report_knows_how_large_messages_are(train: Train) -> None:
    """Two samples of 16 tokens, 16 wide, in float32 are 2048 bytes: 20.48 ms each way at 100 KB/s."""
    report = train("run", "--ranks 2 --steps 2 --link 0:1=bandwidth:100KB/s")
    assert report["timing"]["simulated_makespan"] >= 4 * 20.48
    assert report["timing"]["measured_makespan"] >= 4 * 20.48
    assert "link 0:1=bandwidth:100KB/s was injected" in report["notices"]


def test_metrics_on_a_full_disk_end_with_one_sentence_and_are_resumed_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    said = r"^step 2 .*metrics\.jsonl: File too large; make room there.*--resume"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70, before[1]))
    try:
        with Metrics(path, 0) as lines:
            lines.write(0, {"loss": 1.25})
            lines.write(1, {"loss": 1.25})
            with pytest.raises(RuntimeFailure, match=said):
                lines.write(2, {"loss": 1.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with Metrics(path, 1) as lines:
        lines.write(1, {"loss": 1.5})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "loss": 1.25},
        {"step": 1, "loss": 1.5},
    ]


@pytest.mark.parametrize(
    ("options", "delegated"), [({}, False), ({"transport": "delegate"}, True), ({"adapt": True}, True)]
)
def test_bug_every_run_could_delegate_and_so_none_used_shared_memory(
    text: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], delegated: bool
) -> None:
    """Ranks of one host then sent by gloo, whose thread took 0.3 ms of a core for each message."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(inputs, "Pipeline", lambda *_, **named: given.update(named))
    inputs.build_pipeline(inputs.gather_inputs(Settings(data=str(text), ranks=2, microbatches=2, **options)))
    assert (given["transport"].delegates is not None) is delegated


def test_ranks_that_share_a_gpu_were_not_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(device="cuda", ranks=4)
    for num_gpus, said in ((4, []), (1, ["4 ranks shared 1 GPU; they are simulated with one each"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num=num_gpus: num)
        assert known_before(settings) == said
    assert known_before(Settings(device="cuda", dp=2, ranks=1)) == [
        "2 processes shared 1 GPU; they are simulated with one each"
    ]
