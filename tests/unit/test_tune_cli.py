"""`penstock tune`, with and without `--profile-only`: what they print and write, and what they refuse."""

from __future__ import annotations

import json
import queue
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
import tune_models
import tune_sizes
from penstock.cli import main
from penstock.cli.options import number_of_bytes
from penstock.runtime import RuntimeFailure
from penstock.train import command as train_command
from penstock.train.inputs import gather_inputs
from penstock.train.job import TrainJob
from penstock.train.settings import Settings
from penstock.tune import meter, session, verify
from penstock.tune import search as tune_search
from penstock.tune.errors import TuneError
from penstock.tune.job import Task, announced
from penstock.tune.search import RankedCandidate, SearchFound, TuneCandidate, search
from penstock.tune.settings import TuneSettings
from penstock.tune.space import TuneSpace
from penstock.tune.tuned_model import tuned_model

pytestmark = pytest.mark.unit

NANO = [*tune_sizes.NANO, "--batch", "8", "--microbatch-size", "1,2"]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tune_models.Ranks:
    fake = tune_models.Ranks()
    monkeypatch.setattr(meter, "run_job", fake)
    monkeypatch.setattr(verify, "run_job", fake)
    monkeypatch.setattr(session, "num_devices", lambda settings: 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON object of a call."""
    assert main([*arguments, "--json"]) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    result: dict[str, Any] = json.loads(printed.out)
    return result


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The error of a call, which is the same in words and as JSON."""
    assert main(list(arguments)) == code
    printed = capsys.readouterr()
    assert "bug in penstock" not in printed.err
    message = told(capsys, *arguments, code=code)["error"]["message"]
    assert printed.err.endswith(f"penstock: {message}\n")
    return str(message)


@pytest.mark.slow
def test_it_measures_searches_and_remembers(
    ranks: tune_models.Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = told(capsys, "tune", *NANO)
    assert (first["num_measured"], first["num_reused"]) == (6, 0)  # two sizes, messages; for one rank and for two
    assert {task["do"] for task in ranks.tasks} == {"layers", "transfer"}
    second = told(capsys, "tune", *NANO)
    assert (second["num_measured"], second["num_reused"]) == (0, 6)
    assert second["best"] == first["best"]
    steps = [each["step_ms"] for each in first["best"]]
    assert steps == sorted(steps)
    assert len(list((tmp_path / "cache" / "penstock" / "measurements").iterdir())) == 6
    assert main(["tune", *NANO]) == 0
    assert "nothing measured, 6 measured before" in capsys.readouterr().out


@pytest.mark.slow
def test_the_best_run_and_are_shown_beside_their_prediction(
    ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    result = told(capsys, "tune", *NANO, "--verify", "2")
    trials = [task for task in ranks.tasks if task["do"] == "run"]
    assert len(trials) == 4  # two, twice each
    verified = [each for each in result["best"] if each["measured"]]
    assert verified == result["best"][:2]
    for each in verified:
        assert each["measured"]["step_ms"] == 51.0
        assert each["measured"]["predicted_over_measured"] == each["step_ms"] / 51.0
    assert {name: result["choice"][name] for name in verified[0]} == verified[0]
    assert main(["tune", *NANO, "--verify", "2"]) == 0
    assert "measured ms" in capsys.readouterr().out


def test_verification_says_which_run_begins_and_how_long_each_takes(
    ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *NANO, "--pp", "2", "--dp", "1", "--verify", "2"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("run ")]
    runs = [re.match(r"run (\d) of 4, about \d+ s each: candidate (\d) of 2, \S", line) for line in said]
    assert [(each[1], each[2]) for each in runs if each] == [("1", "1"), ("2", "2"), ("3", "2"), ("4", "1")]


def test_a_task_is_announced_when_those_before_it_are_done() -> None:
    """As "run 2 of 8", which was said with all others before the first had begun."""
    said: queue.Queue[str] = queue.Queue()
    done: set[int] = set()
    with announced(["first", "second", "third"], done.__contains__, said.put, every=0.001):
        assert said.get(timeout=10) == "first"
        time.sleep(0.02)
        assert said.empty()
        done.add(0)
        assert said.get(timeout=10) == "second"
    assert said.empty()


def test_more_to_verify_than_there_is_is_told(ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    result = told(capsys, "tune", *NANO, "--pp", "1", "--schedule", "1f1b", "--verify", "50")
    count = len(result["best"])
    assert len([each for each in result["best"] if each["measured"]]) == count
    assert result["notices"] == [f"50 candidates were to be verified; {count} were found"]


def test_what_was_measured_before_an_interrupt_is_kept(
    monkeypatch: pytest.MonkeyPatch, ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meter, "run_job", tune_models.Ranks(interrupt_at=4))
    assert main(["tune", *NANO]) == 130
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(meter, "run_job", tune_models.Ranks())
    again = told(capsys, "tune", *NANO)
    assert (again["num_measured"], again["num_reused"]) == (2, 4)


def test_interrupted_verification_shows_what_ran(
    monkeypatch: pytest.MonkeyPatch, ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "run_job", tune_models.Ranks(interrupt_at=1))
    result = told(capsys, "tune", *NANO, "--pp", "2", "--dp", "1", "--verify", "2", code=130)
    assert [each["measured"] is not None for each in result["best"]].count(True) == 1


@pytest.mark.slow
def test_the_best_schedule_trains(
    ranks: tune_models.Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "best.json"
    config = tmp_path / "run.toml"
    config.write_text(
        "preset = 'nano'\ndepth = 2\nclip = 0.5\noptimizer-options = {weight_decay = 0.0}\ntied = true\n"
    )
    more = ["--config", str(config), "--batch", "8", "--microbatch-size", "1,2"]
    result = told(capsys, "tune", *more, "--ranks", "2", "--pp", "2", "--out", str(out))
    best = result["choice"]
    schedule = ps.load(out)
    assert (schedule.num_ranks, schedule.num_microbatches) == (2, best["num_microbatches"])
    monkeypatch.chdir(tmp_path)
    orders: list[TrainJob] = []
    monkeypatch.setattr(train_command, "_carry_out", lambda order, *_: orders.append(order) or 0)
    assert main(shlex.split(result["train"])[1:]) == 0
    settings = orders[0].settings
    assert list(settings.cut or ()) == best["cut"]
    assert (settings.clip, settings.optimizer_options, settings.threads) == (0.5, {"weight_decay": 0.0}, 1)
    inputs = gather_inputs(settings)
    config = inputs.task.config
    assert (inputs.schedule, config.depth, config.tied) == (schedule, 2, True)


class RanksByWork(tune_models.Ranks):
    """Layers take as long as they have operations, so that the head is heavy."""

    def _answer(self, task: Task, rank: int, num_ranks: int) -> dict[str, Any]:
        found = super()._answer(task, rank, num_ranks)
        if task["do"] == "layers":
            costs = tuned_model(Settings.from_mapping(task["settings"])).costs
            times = {
                f"{layer} {kind}": 40.0 * costs[layer] / sum(costs) for layer in found["layers"] for kind in "fiw"
            }
            for layer in found["layers"]:
                times |= {f"{layer} f_split": times[f"{layer} f"], f"{layer} b": 2 * times[f"{layer} f"]}
            found["times"] = times | {f"{layer} update": 0.0 for layer in found["layers"]}
        return found


@pytest.mark.slow
def test_a_program_goes_to_a_file_so_that_the_line_trains(
    ranks: tune_models.Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "num_devices", lambda settings: 8)
    monkeypatch.setattr(meter, "run_job", RanksByWork())
    deep = ["--preset", "tiny", "--batch", "16", "--ranks", "4", "--pp", "4", "--dp", "1"]
    result = told(capsys, "tune", *deep, "--microbatch-size", "1")
    assert result["choice"]["program"]
    assert Path(result["out"]).parent == Path("runs")
    assert f"--schedule {result['out']}" in result["train"]
    ps.check(ps.load(result["out"]))
    written = told(capsys, "tune", *deep, "--microbatch-size", "1", "--out", str(tmp_path / "best.txt"))
    assert f"--schedule {tmp_path / 'best.txt'}" in written["train"]
    named = told(capsys, "tune", *deep, "--microbatch-size", "1", "--no-programs")
    assert not any(each["program"] for each in named["best"])
    assert named["best"][0]["step_ms"] >= result["best"][0]["step_ms"]


@pytest.mark.parametrize(
    ("sizes", "title"),
    [
        ("", "tiny"),
        ("depth = 8\nheads = 3", "tiny"),
        ("depth = 3\nwidth = 32\nheads = 2", "tiny with depth 3, width 32, heads 2"),
        ("tied = true\ndropout = 0.1", "tiny with dropout 0.1, tied weights"),
    ],
)
def test_the_title_says_which_sizes_are_others_than_the_presets(
    ranks: tune_models.Ranks, sizes: str, title: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Regression: it named the preset alone, whatever else was asked for."""
    (tmp_path / "run.toml").write_text(sizes)
    line = f"tune --preset tiny --config {tmp_path}/run.toml --batch 2 --ranks 1 --no-programs --schedule 1f1b"
    assert main(line.split()) == 0
    assert f"{title}: the fastest by prediction" in capsys.readouterr().out


def test_a_cut_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for cut in ("1,2", "1,2,3,40", "0,3,3,4"):
        assert main(["train", "--cut", cut, "--out", str(tmp_path / "run")]) == 2
        assert "give each of the 4 stages at least one of the 10 layers" in capsys.readouterr().err
    assert main(["train", "--cut", "1,x", "--out", str(tmp_path / "run")]) == 2
    assert "--cut 1,x: whole numbers are needed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_profile_written_is_read_again(
    ranks: tune_models.Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "num_devices", lambda settings: 3)  # a file does not say how many cores there are
    file = tmp_path / "costs.json"
    measure = [*tune_sizes.NANO, "--microbatch-size", "1,2", "--ranks", "2"]
    written = told(capsys, "tune", "--profile-only", *measure, "--out", str(file))
    assert (written["num_measured"], written["num_reused"]) == (4, 0)  # two sizes; one rank alone, and messages
    read = told(capsys, "tune", "--costs", str(file), "--ranks", "2", "--pp", "2", "--batch", "8")
    here = told(capsys, "tune", *NANO, "--ranks", "2", "--pp", "2")
    assert [(b["schedule"], b["step_ms"]) for b in read["best"]] == [
        (b["schedule"], b["step_ms"]) for b in here["best"]
    ]
    assert read["best"][0]["tokens_per_second"] is None
    assert main(["tune", "--profile-only", *measure]) == 0
    printed = capsys.readouterr().out
    assert "0 measured, 4 measured before" in printed
    assert "block 1" in printed
    assert "microbatches of 9" not in printed
    message = refused(capsys, "tune", "--costs", str(file), "--ranks", "2", "--microbatch-size", "4")
    assert "no profile of microbatches of 4; it has [1, 2]" in message
    assert "not say what is kept with recompute" in refused(
        capsys, "tune", "--costs", str(file), "--ranks", "2", "--recompute"
    )


def test_a_profile_has_messages_whatever_its_number_of_ranks(
    ranks: tune_models.Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: one of the default --ranks had none, and messages and sums of gradients were taken to be free."""
    file, search = tmp_path / "costs.json", ("--ranks", "2", "--batch", "4", "--microbatch-size", "1")
    written = told(capsys, "tune", "--profile-only", *tune_sizes.NANO, "--out", str(file))
    assert set(written["transfers"]) == {"1", "2"}
    found = told(capsys, "tune", "--costs", str(file), *search)["best"]
    assert all(each["step_ms"] > each["makespan_ms"] + each["update_ms"] + 0.5 for each in found)
    assert all(each["reduce_ms"] > 0 for each in found if each["dp"] > 1)
    old = json.loads(file.read_text())
    for left, number in (("1", 2), ("2", 1)):
        file.write_text(json.dumps({**old, "transfers": {left: old["transfers"][left]}}))
        message = refused(capsys, "tune", "--costs", str(file), *search)
        assert f"for {left} ranks, not for {number}; measure it again with penstock tune" in message


def test_messages_of_a_slow_link_wait_for_one_another(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: their time was a delay, and a link carried any number of them at once."""
    common = [
        "--ranks",
        "4",
        "--pp",
        "4",
        "--batch",
        "12",
        "--microbatch-size",
        "1",
        "--schedule",
        "gpipe",
        "--schedule",
        "1f1b",
    ]
    found = told(capsys, "tune", "--costs", "gpt2-7b:link_gb=0.25", *common)["best"]
    each_way = 12 * 2 * 1024 * 5120 / 0.25e6
    assert all(each["makespan_ms"] > 2 * each_way for each in found)


def test_a_tensor_parallel_preset_says_how_many_devices_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: it said "tp 1", and the times were those of layers that two devices share."""
    line = [
        "--costs",
        "gpt2-30b",
        "--ranks",
        "8",
        "--pp",
        "8",
        "--batch",
        "8",
        "--microbatch-size",
        "1",
        "--schedule",
        "1f1b",
    ]
    choice = told(capsys, "tune", *line)["choice"]
    assert (choice["tp"], choice["num_devices"]) == (2, 16)
    assert main(["tune", *line]) == 0
    assert "pp 8, dp 1, tp 2, 16 devices," in capsys.readouterr().out


def test_a_file_by_hand_grows_with_the_microbatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    rows = {"f": [1, 2], "i": [1, 2], "w": [1, 1], "weight_bytes": [10, 20], "activation": [5, 5]}
    file.write_text(json.dumps(rows))
    common = ["tune", "--costs", str(file), "--ranks", "1", "--batch", "4", "--schedule", "1f1b"]
    result = told(capsys, *common)
    assert {each["num_microbatches"]: each["step_ms"] for each in result["best"]} == {1: 32.0, 2: 32.0, 4: 32.0}
    assert {each["num_microbatches"]: each["memory_bytes"] for each in result["best"]} == {
        count: [2 * 30 + 10 * 4 / count] for count in (1, 2, 4)
    }
    assert result["train"] is None
    file.write_text(json.dumps({name: row for name, row in rows.items() if name != "weight_bytes"}))
    message = refused(capsys, *common, "--memory-limit", "1GiB")
    assert f"{file} does not say what weights take" in message


def test_memory_of_costs_without_weights_is_shown_as_activations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: three activations were shown as "3 bytes" per rank, with the bytes of messages added to them."""
    file = tmp_path / "mine.json"
    rows = {"f": [0.1, 4, 1], "i": [0.1, 5, 1], "w": [0.1, 3, 1], "message_bytes": 2e6}
    file.write_text(json.dumps(rows))
    common = ["tune", "--costs", str(file), "--ranks", "2", "--pp", "2", "--batch", "4", "--microbatch-size", "1"]
    line = [*common, "--schedule", "gpipe"]
    (found,) = told(capsys, *line)["best"]
    assert found["memory_bytes"] is None
    assert max(found["peak_activations"]) == 8
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "memory per rank" not in printed
    assert "bytes" not in printed
    assert printed.splitlines()[1].split()[-1] == "activations"
    assert printed.splitlines()[2].split()[-1] == "8"
    assert "\n1 candidate\n" in printed
    assert "does not say what is kept with recompute" in refused(capsys, *line, "--recompute")


def test_a_preset_stands_for_a_model_on_its_devices(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--ranks", "4", "--pp", "4", "--batch", "12", "--microbatch-size", "1", "--no-programs", "--top", "100"]
    result = told(capsys, "tune", "--costs", "gpt2-7b", *common)
    (plain,) = (each for each in result["best"] if (each["schedule"], each["options"]) == ("1f1b", {}))
    costs = ps.cost.costs_preset("gpt2-7b", num_stages=4)
    bound = 12 * max(f + b for f, b in zip(costs.f, costs.b, strict=True))
    assert sum(plain["cut"]) == 24
    assert (
        bound <= plain["makespan_ms"] == pytest.approx(ps.simulate(ps.build("1f1b", 4, 12), costs).makespan, rel=0.05)
    )
    weights = [2 * (weight + 6 * weight + weight) for weight in (costs.weight_bytes[0] / 2,)]
    assert plain["memory_bytes"][0] > weights[0]
    twice = told(capsys, "tune", "--costs", "gpt2-7b:tflops=494.5", *common)
    (slower,) = (each for each in twice["best"] if (each["schedule"], each["options"]) == ("1f1b", {}))
    assert slower["makespan_ms"] == pytest.approx(2 * plain["makespan_ms"], rel=0.01)
    again = told(capsys, "tune", "--costs", "gpt2-7b", *common, "--recompute")
    (recomputed,) = (each for each in again["best"] if (each["schedule"], each["options"]) == ("1f1b", {}))
    assert recomputed["makespan_ms"] > plain["makespan_ms"]
    assert max(recomputed["memory_bytes"]) < max(plain["memory_bytes"])


def test_recompute_is_tried_where_memory_is_limited(
    ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    free = told(capsys, "tune", *NANO, "--ranks", "2", "--top", "1000")
    assert not any(each["recompute"] for each in free["best"])
    least = min(max(each["memory_bytes"]) for each in free["best"])
    tight = told(capsys, "tune", *NANO, "--ranks", "2", "--memory-limit", f"{int(least) - 1}B")
    assert tight["num_too_large"] > 0
    assert all(each["recompute"] for each in tight["best"])
    assert all(max(each["memory_bytes"]) < least for each in tight["best"])


def test_full_asynchrony_is_chosen_by_name_alone(
    ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("tune", *NANO, "--ranks", "2", "--pp", "2")
    named = told(capsys, *common, "--schedule", "amdp")
    assert {(each["schedule"], each["mismatch"]) for each in named["best"]} == {("amdp", 1)}
    choice = named["choice"]
    assert f"--schedule amdp --pp 2 --microbatches {choice['num_microbatches']} --rule tentative" in named["train"]
    assert f"--window {choice['num_microbatches']}" in named["train"]
    assert main([*common, "--schedule", "amdp"]) == 0
    printed = capsys.readouterr().out
    assert "amdp mismatch 1" in printed
    assert "at most 1 update between F and B" in printed
    free = told(capsys, *common, "--no-programs")
    assert {each["mismatch"] for each in free["best"]} == {0}
    assert free["asynchronous"] is None or free["asynchronous"]["step_ms"] < free["best"][0]["step_ms"]
    assert "leave one of them out" in refused(capsys, *common, "--schedule", "amdp", "--verify", "1")


def test_an_impossible_memory_limit_says_the_least(
    ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, "tune", *NANO, "--ranks", "2", "--memory-limit", "1KiB")
    assert "nothing fits in 1 KiB per rank; the least is" in message
    assert "recompute" in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "tyni"], "no preset named 'tyni'; did you mean tiny"),
        (["--heads", "5"], "No such option: --heads; write it into a file for --config, such as depth = 8"),
        (["--memory-limit", "lots"], "--memory-limit lots: give a number with a unit of bytes, like 2GiB"),
        (["--memory-limit", "8"], "--memory-limit 8 has no unit"),
        (["--memory-limit", "8"], "give a unit, as in 35GiB"),
        (["--memory-limit", "1GiB,2GiB"], "one limit for all ranks is needed here"),
        (["--memory-limit", "0B"], "0B is no limit; give what is above 0"),
        (["--ranks", "2", "--pp", "4"], "no way to spread the batch is left"),
        (["--ranks", "2", "--pp", "two"], "--pp two: whole numbers are needed"),
        (["--ranks", "2", "--schedule", "zbv"], "did you mean"),
        (["--ranks", "2", "--schedule", "pipedream"], "only amdp is tuned"),
        (["--config", "nowhere.toml"], "--config nowhere.toml: No such file"),
        (["--costs", "gpt2-7b"], "give --ranks"),
        (["--costs", "gpt2-7b", "--ranks", "2", "--verify", "1"], "--verify runs the model on this machine"),
        (["--costs", "gpt2-7b", "--profile-only"], "leave out --costs"),
        (
            ["--profile-only", "--memory-limit", "1GiB"],
            "measures the layers here, and no more; leave out --memory-limit",
        ),
        (["--profile-only", "--schedule", "zb"], "leave out --schedule"),
        (["--profile-only", "--verify", "2"], "leave out --verify"),
        (["--costs", "gpt2-7b", "--ranks", "2", "--shared-ends"], "gpt2-7b says what layers cost one rank"),
        (["--costs", "gpt2-7b:tflops=0", "--ranks", "2"], "a device with tflops 0: give a number above 0"),
        (["--costs", "gpt2-7b", "--ranks", "2", "--preset", "small"], "so --preset changes nothing"),
        (["--costs", "gpt2-7b", "--ranks", "2", "--device", "cuda"], "so --device changes nothing"),
        (["--costs", "gpt2-7b:microbatch=4", "--ranks", "2"], "leave microbatch out"),
        (["--costs", "gpt2-7b:split=balanced", "--ranks", "2"], "leave split out"),
        (["--costs", "gpt2-8b", "--ranks", "2"], "neither a file nor a preset; did you mean gpt2-7b"),
        (["--costs", "nowhere.json", "--ranks", "2"], "nowhere.json: No such file"),
        (["--out", "best.svg"], "written as .json or .txt"),
        (["--device", "cuda"], "finds no GPU"),
    ],
)
def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in refused(capsys, "tune", *arguments)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("heads = 5", "the width must be a multiple of the number of heads"),
        ("optimizer = 'AdamQ'", "torch.optim has no optimizer 'AdamQ'"),
        ("optimizer-options = [1]", "optimizer_options"),
        ("dispatch = 'eager'", "no dispatch 'eager'"),
        ("pp = 2", "has ranks, which penstock tune chooses, or does not tune; leave it out of the file"),
        ("tp = 2", "has tp, which penstock tune chooses, or does not tune; leave it out of the file"),
        ("dept = 2", "has dept, which is no setting"),
    ],
)
def test_bad_settings_of_a_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content)
    assert said in refused(capsys, "tune", "--config", str(file))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "has no lists; to be cut into stages, costs need one entry per layer"),
        ('{"f": 1, "i": 1, "w": 1}', "has no lists; to be cut into stages, costs need one entry per layer"),
        ('{"f": [1], "i": [1]}', "field 'w' is missing"),
        ('{"f": [1, -1], "i": [1, 1], "w": [1, 1]}', "f of stage 1 is -1.0: give a number of at least 0"),
        ('{"f": [1, 1], "i": [1, 1], "w": [1]}', "field 'w' has 1 entries; give one per stage, 2 in all"),
        ('{"f": [1], "i": [1], "w": [1], "g": [1]}', "field 'g' is unknown"),
        ('{"f": [1], "i": [1], "w": [1], "uneven": [1, 2]}', "which tune does not simulate"),
        (
            '{"f": [1], "i": [1], "w": [1], "weight_bytes": [2], "gradient_bytes": [4]}',
            "gradient_bytes that are not its weight_bytes",
        ),
        ('{"f": [1], "i": [1], "w": [1], "weight_bytes": [2]}', "weight_bytes and no activation"),
        ('{"profiles": [], "version": 2}', "a list with at least one profile"),
        (
            '{"format": "penstock-profile", "version": 3, "profiles": []}',
            "expected a version that this Penstock reads",
        ),
        ('{"format": "penstock-profile", "version": 1, "profiles": [{}]}', "field 'profiles[0].model' is missing"),
    ],
)
def test_bad_cost_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(content)
    message = refused(capsys, "tune", "--costs", str(file), "--ranks", "2", "--batch", "4")
    assert str(file) in message
    assert said in message


def test_a_folder_of_measurements_that_is_a_file_is_told(
    ranks: tune_models.Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    message = refused(capsys, "tune", *NANO)
    assert message.startswith(f"measurements can't be kept in {file}")
    assert ranks.tasks == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3B", 1000),
        ("1024MiB", 2**30),
        ("1073741824B", 2**30),
        ("1.5KiB", 1536),
        ("2GB", 2e9),
        ("3 mib", 3 * 2**20),
        ("1TiB", 2**40),
        ("7B", 7),
    ],
)
def test_bytes_are_read(text: str, value: float) -> None:
    assert number_of_bytes("--memory-limit", text) == value


def test_copies_and_several_pipelines_are_recommended_where_they_are_fastest(
    ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The runtime runs both, so neither is marked, and the fastest of all is what to train with.
    monkeypatch.chdir(tmp_path)
    orders: list[TrainJob] = []
    monkeypatch.setattr(train_command, "_carry_out", lambda order, *_: orders.append(order) or 0)
    for extra in (["--dp", "2"], ["--pp", "2", "--dp", "1", "--schedule", "chimera"]):
        result = told(capsys, "tune", *NANO, "--ranks", "2", *extra)
        choice = result["choice"]
        assert {name: choice[name] for name in result["best"][0]} == result["best"][0]
        assert (choice["tp"], choice["sharding"], choice["dispatch"]) == (1, "copies", "frozen")
        assert result["refused"] == {}
        assert main(shlex.split(result["train"])[1:]) == 0
        settings = orders[-1].settings
        assert (settings.ranks, settings.dp, settings.microbatches) == (
            choice["pp"], choice["dp"], choice["num_microbatches"],
        )  # fmt: skip
        schedule = gather_inputs(settings).schedule
        assert schedule.name == choice["schedule"]
        assert main(["tune", *NANO, "--ranks", "2", *extra]) == 0
        printed = capsys.readouterr().out
        named = f"{choice['schedule']}, pp {choice['pp']}, dp {choice['dp']}, tp 1, {choice['num_microbatches']} "
        assert f"choice  {named}" in printed
        assert printed.rstrip().endswith(result["train"])
        assert "*" not in printed


def test_the_fastest_measured_is_the_choice(
    ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[TuneCandidate] = []

    def slower_first(
        best: list[RankedCandidate], *_: Any, **__: Any
    ) -> dict[TuneCandidate, verify.MeasuredCandidate]:
        ran.extend(ranked.candidate for ranked in best)
        return {each: verify.MeasuredCandidate(90.0 - 10 * n, 1.0, 9, 0.0, (1.0,)) for n, each in enumerate(ran)}

    monkeypatch.setattr(session, "verify", slower_first)
    result = told(capsys, "tune", *NANO, "--verify", "3")
    assert result["choice"]["measured"]["step_ms"] == 70.0
    assert {name: result["choice"][name] for name in result["best"][2]} == result["best"][2]


def test_what_train_refuses_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    space, model = TuneSpace(2, 4, pp=[2], dp=[1]), tune_models.profile(6)
    everything = search(space, lambda shape, again: model, lambda shape: tune_models.transfer(), SearchFound(4))
    assert not everything.refused

    def refuse_pipelines(schedule: ps.Schedule) -> None:
        if schedule.placement.num_pipelines > 1:
            raise RuntimeFailure("no two pipelines today")

    monkeypatch.setattr(tune_search, "require_runnable", refuse_pipelines)
    found = search(space, lambda shape, again: model, lambda shape: tune_models.transfer(), SearchFound(4))
    assert found.refused["no two pipelines today"] > 0
    assert found.num_tried == everything.num_tried
    assert all(ranked.candidate.plan.schedule.placement.num_pipelines == 1 for ranked in found.best)
    with pytest.raises(TuneError, match=r"penstock train refuses all .* because no two pipelines today"):
        search(
            replace(space, schedules=["chimera"]),
            lambda shape, again: model,
            lambda shape: tune_models.transfer(),
            SearchFound(4),
        )


@pytest.mark.parametrize("dispatch", ["dynamic", "auto"])
def test_another_dispatch_is_searched_as_such(monkeypatch: pytest.MonkeyPatch, dispatch: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"dispatch = '{dispatch}'")
    seen: list[object] = []

    def spy(*arguments: Any, **rest: Any) -> Any:
        seen.append(arguments[3].dispatch)
        return search(*arguments, **rest)

    monkeypatch.setattr(session, "search", spy)
    session.tune(TuneSettings(config=tmp_path / "run.toml", costs="gpt2-7b", ranks=2))
    assert seen == [dispatch]
