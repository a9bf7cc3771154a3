"""The command line: what it prints, its exit codes, and that planning starts without torch."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.train.command import train
from penstock.train.options import GROUPS, options_of
from penstock.train.settings import Settings

pytestmark = pytest.mark.unit

ZB = "zb --ranks 4 --microbatches 12 --warmup 7,5,3,1 --f 10 --i 10 --w 10"


class Ran:
    """What one call printed and returned."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1
        return json.loads(self.out)


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def call(line: str) -> Ran:
        code = main(line.split())
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return call


def test_the_command_line_says_what_auto_chose(penstock: Any) -> None:
    command = "simulate zb-h1 --ranks 8 --microbatches 16 --f 10 --i 10 --w 10 --link default=0.5 --dispatch"
    found = json.loads(penstock(f"{command} auto --json").out)
    assert found["makespan"] == found["considered"][found["dispatch"]] == min(found["considered"].values())
    assert "dispatch      hinted" in penstock(f"{command} auto").out
    assert json.loads(penstock(f"{command} hinted:1 --json").out)["dispatch"] == "hinted:1"


@pytest.mark.parametrize(
    ("options", "makespan"),
    [
        ("--dispatch frozen", 390),
        ("--link 0:1=10 --dispatch frozen", 400),
        ("--link 0:1=20 --dispatch frozen", 440),
        ("--link 0:1=20 --dispatch dynamic", 410),
        ("--link 0:1=20 --link 1:0=20", 440),
    ],
)
def test_simulate_gives_the_papers_figures(penstock: Any, options: str, makespan: float) -> None:
    ran = penstock(f"simulate {ZB} {options} --json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["makespan"] == makespan
    timeline = ran.json
    assert (timeline["num_ranks"], timeline["num_stages"], timeline["num_microbatches"]) == (4, 4, 12)
    assert timeline["bubble_ratio"] == pytest.approx(1 - 360 / makespan)
    assert timeline["busy"] == [360] * 4
    assert len(timeline["peak_activations"]) == 4
    assert timeline["costs"]["b"] == [20] * 4
    assert {"span", "name", "dispatch", "transport", "links", "num_ops", "blocked"} <= set(timeline)


def test_simulate_prints_a_summary_and_the_timeline(penstock: Any) -> None:
    ran = penstock(f"simulate {ZB} --link 0:1=20 --messages blocking:1")
    assert ran.code == 0
    assert "makespan" in ran.out
    assert "rank 3 |" in ran.out
    assert "blocking:1" in ran.out
    assert "\x1b" not in ran.out


def test_channels_of_torch_are_simulated_and_checked(penstock: Any, tmp_path: Path) -> None:
    late = f"simulate {ZB} --link 0:1=20 --json --messages"
    buffered, gloo, nccl = (
        json.loads(penstock(f"{late} {way}").out)["makespan"] for way in ("decoupled", "gloo", "nccl")
    )
    assert buffered <= gloo <= nccl
    by_link = json.loads(penstock(f"{late} nccl").out)["messages"]
    assert {link["count"] for link in by_link.values()} == {12}
    assert (by_link["0:1"]["travelled"], by_link["2:3"]["travelled"]) == (240, 0)
    assert by_link["0:1"]["waited_to_leave"] > 0
    path = tmp_path / "placed.csv"
    ps.save(ps.build("zb", 4, 8), path, dialect="torch:compute_comms", channels="gloo")
    assert "No deadlock on gloo" in penstock(f"check {path} --channels gloo").out
    refused = penstock(f"check {path} --channels nccl")
    assert refused.code == 1
    assert "messages wait for one another on nccl" in refused.err


def test_simulate_takes_costs_stage_by_stage_and_from_a_file(penstock: Any, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"f": [1, 2], "i": 3, "w": 1, "activation": 4, "freed_by_input": 0.25}')
    common = "simulate 1f1b --ranks 2 --microbatches 3 --json"
    by_flags = penstock(f"{common} --f 1,2 --i 3 --w 1 --cost activation=4 --cost freed_by_input=0.25")
    by_file = penstock(f"{common} --costs {path}")
    assert by_flags.json == by_file.json
    assert by_file.json["costs"]["b"] == [4, 4]


def test_simulate_takes_a_file_and_other_options(penstock: Any, tmp_path: Path) -> None:
    schedule = ps.build("interleaved-1f1b", 2, 4, num_stages=6)
    ps.save(schedule, tmp_path / "s.json")
    by_file = penstock(f"simulate {tmp_path}/s.json --link default=2 --dispatch dynamic --memory-limit 12 --json")
    by_name = penstock(
        "simulate interleaved-1f1b --ranks 2 --microbatches 4 --option num_stages=6 --link default=2 "
        "--dispatch dynamic --memory-limit 12,12 --json"
    )
    assert by_file.code == 0
    assert by_file.json == by_name.json


@pytest.mark.parametrize("ending", ["svg", "html", "txt", "json", "json.gz"])
def test_simulate_writes_pictures(penstock: Any, tmp_path: Path, ending: str) -> None:
    ran = penstock(f"simulate 1f1b --ranks 2 --microbatches 3 --timeline {tmp_path}/t.{ending} --json")
    assert ran.code == 0
    assert (tmp_path / f"t.{ending}").stat().st_size > 100


def test_a_file_of_another_kind_was_refused_without_saying_what_it_is(penstock: Any, tmp_path: Path) -> None:
    counts = "--ranks 2 --microbatches 3"
    assert penstock(f"simulate 1f1b {counts} --timeline {tmp_path}/trace.json").code == 0
    assert penstock(f"show 1f1b {counts} --out {tmp_path}/schedule.json").code == 0
    for verb in ("show", "simulate", "check"):
        assert "not a schedule: it is a trace, for penstock analyze" in penstock(f"{verb} {tmp_path}/trace.json").err
    said = penstock(f"analyze {tmp_path}/schedule.json").err
    assert (
        "schedule.json is no trace: it is a schedule; penstock simulate schedule.json --timeline trace.json" in said
    )
    assert "trace.json: this is a file; give the folder of a run" in penstock(f"report {tmp_path}/trace.json").err


def test_bug_a_csv_with_its_messages_was_shown_wider_than_any_terminal(penstock: Any, tmp_path: Path) -> None:
    penstock(f"show 1f1b --ranks 2 --microbatches 3 --dialect torch:compute_comms --out {tmp_path}/messages.csv")
    plain = penstock("show 1f1b --ranks 2 --microbatches 3").out
    shown = penstock(f"show {tmp_path}/messages.csv").out
    assert shown.splitlines()[-1] == "12 ops that send and receive are left out here; --json has them in its grid"
    assert shown.splitlines()[1:-1] == plain.splitlines()[1:]
    assert "SEND_F" in penstock(f"show {tmp_path}/messages.csv --json").json["grid"]


def test_check_says_what_was_proved(penstock: Any) -> None:
    ran = penstock("check zb-v --ranks 4 --microbatches 8")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("zb-v: valid. 192 ops of 4 ranks, 8 stages and 8 microbatches")
    found = penstock("check zb-v --ranks 4 --microbatches 8 --json").json["checked"][0]
    assert found["valid"]
    assert found["peak_in_flight"] == [8, 8, 8, 8]
    assert found["needed_channel_depth"] == 1


def test_check_tells_the_error_with_its_arrow(penstock: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(
        "schedule x: 2 ranks, 2 stages, 2 microbatches\npipeline 0: stages on ranks 0 1\n"
        "rank 0 | F0 B0 F1 B1\nrank 1 | F0 F1 B0 B1\n"
    )
    ran = penstock(f"check {path}")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"penstock: {path} is not valid: rank 0, step 1, B0 of stage 0: the ranks wait")
    assert "^^" in ran.err
    error = penstock(f"check {path} --json").json["error"]
    assert (error["rule"], error["rank"], error["step"], error["op"]) == ("deadlock", 0, 1, "0B0")
    assert error["peer"] == "B0 of stage 1 on rank 1"
    both = penstock(f"check 1f1b {path} --ranks 2 --microbatches 2 --json")
    assert both.code == 1
    assert [one["valid"] for one in both.json["checked"]] == [True, False]
    simulated = penstock(f"simulate {path} --json")
    assert (simulated.code, simulated.json["error"]["rule"]) == (1, "deadlock")


@pytest.mark.slow
def test_check_takes_limits(penstock: Any, tmp_path: Path) -> None:
    ps.save(ps.build("1f1b", 4, 8), tmp_path / "s.json")
    assert penstock(f"check {tmp_path}/s.json --option max_in_flight=4").code == 0
    assert penstock(f"check {tmp_path}/s.json --option max_in_flight=3").code == 1


@pytest.mark.parametrize("verb", ["show", "play --out p.html"])
def test_a_limit_given_for_a_file_is_proved_by_all_verbs(
    verb: str, penstock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`show` and `play` ignored it, which `check` and `simulate` proved."""
    monkeypatch.chdir(tmp_path)
    ps.save(ps.build("1f1b", 4, 8), "s.json")
    assert penstock(f"{verb} s.json --option max_in_flight=4").code == 0
    refused = penstock(f"{verb} s.json --option max_in_flight=3")
    assert (refused.code, "the limit is 3" in refused.err) == (1, True)


def test_show_writes_pictures_and_other_formats(penstock: Any, tmp_path: Path) -> None:
    shown = penstock("show 1f1b --ranks 2 --microbatches 3")
    assert shown.code == 0
    assert "rank 1 |.  F0 B0 F1 B1 F2 B2" in shown.out
    assert ps.parse(penstock("show 1f1b --ranks 2 --microbatches 3 --json").json["grid"]) == ps.build("1f1b", 2, 3)
    for ending in ("svg", "html", "txt", "json"):
        assert penstock(f"show 1f1b --ranks 2 --microbatches 3 --out {tmp_path}/s.{ending}").code == 0
    assert ps.load(tmp_path / "s.json") == ps.load(tmp_path / "s.txt") == ps.build("1f1b", 2, 3)
    assert penstock(f"show {tmp_path}/s.json --out {tmp_path}/t.txt").out == f"wrote {tmp_path}/t.txt\n"
    assert ps.load(tmp_path / "t.txt") == ps.build("1f1b", 2, 3)


def test_data_prepare(penstock: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    ran = penstock(f"data prepare {tmp_path}/a.txt {tmp_path}/out --json")
    assert ran.code == 0
    assert (ran.json["num_documents"], ran.json["num_tokens"]) == (1, 6)
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "out.bin", "out.idx"}
    missing = penstock(f"data prepare {tmp_path}/none {tmp_path}/out --json")
    assert missing.code == 2
    assert "no such file or folder" in missing.json["error"]["message"]


MISUSE = {
    "simulte": "No such command 'simulte'. Did you mean 'simulate', 'emulate'?",
    "simulate": "Missing argument 'NAME|FILE...'",
    "simulate zb --rank 4": "No such option: --rank (Possible options: --link, --ranks)",
    "simulate zb --ranks four": "Invalid value for '--ranks'",
    "simulate zbb --ranks 4 --microbatches 4": "no schedule named 'zbb'; did you mean zb",
    "simulate zbb": "no schedule named 'zbb'; did you mean zb",
    "simulate zb": "zb is a library schedule: give --ranks and --microbatches too",
    "simulate zb --ranks 4": "zb is a library schedule: give --microbatches too",
    "simulate zb --ranks 4 --microbatches 0": "zb needs at least 1 of microbatches, got 0",
    "simulate 1f1b --ranks 4 --microbatches 4 --warmup 1": "1f1b has no option 'warmup'",
    "simulate zb --ranks 2 --microbatches 4 --warmup 3,x": "--warmup 3,x: whole numbers are needed, like 7,5,3,1",
    "simulate interleaved-1f1b --ranks 4 --microbatches 6 --option num_stages=6": "interleaved-1f1b needs",
    "simulate none.json": "none.json: No such file or directory",
    "simulate none.json --ranks 4": "--ranks is for library schedules; the file none.json says it itself",
    "simulate s.yaml": "s.yaml: schedules are read from .json, .txt or .csv",
    f"simulate {ZB} --f 1,2": "--f has 2 entries; give one, or one per stage: 4",
    f"simulate {ZB} --f ten": "--f ten: 'ten' is not a number",
    f"simulate {ZB} --f nan": "f of stage 0 is nan: give a number of at least 0",
    f"simulate {ZB} --link 0-1": "link '0-1': write RANK:RANK=CONDITION, like 0:1=20",
    f"simulate {ZB} --link 0:1=x": "link '0:1=x': 'x' is not a number",
    f"simulate {ZB} --link 0:9=1": "link 0:9: ranks go from 0 to 3",
    f"simulate {ZB} --link 0:1=1 --link 0:1=2": "link '0:1=2': link 0:1 is given twice",
    f"simulate {ZB} --link default=-1": "the default delay is -1.0",
    f"simulate {ZB} --dispatch warm": "dispatch 'warm': give 'frozen', 'hinted' or 'dynamic'",
    f"simulate {ZB} --messages slow": "--messages slow: write decoupled, blocking, blocking:DEPTH, or buffered, gloo",
    f"simulate {ZB} --messages blocking:0": "a blocking link of depth 0 can carry nothing",
    "show 1f1b --ranks 2 --microbatches 2 --option max_in_flight=2,1": "--option max_in_flight=2,1: a schedule",
    "check 1f1b --ranks 2 --microbatches 2 --option max_in_flight=NaN": "--option max_in_flight=nan: a schedule",
    "check 1f1b --ranks 2 --microbatches 2 --option max_in_flight=0": "--option max_in_flight=0: a schedule",
    "play 1f1b --ranks 2 --microbatches 2 --max-in-flight 3": "No such option: --max-in-flight; give --option",
    f"simulate {ZB} --memory-limit 9,8": "--memory-limit 9,8 has 2 entries; give one, or one per rank: 4",
    f"simulate {ZB} --costs c.json": "--costs c.json and --f both give costs; use one of them",
    f"simulate {ZB} --timeline x.bmp": "--timeline x.bmp: pictures are written as",
    f"simulate {ZB} --timeline no/such/x.svg": "no/such/x.svg: No such file or directory",
    "check": "Missing argument 'NAME|FILE...'",
    "check none.txt": "none.txt: No such file or directory",
    f"simulate {ZB} --cost GATHER=5": "--cost GATHER: no schedule here has such ops; leave it out",
    "simulate 1f1b gpipe --ranks 2 --microbatches 2 --cost U=5": "--cost U: no schedule here has such ops",
    "play --option warmup=[1]": "--option is for a schedule: name one",
    "play --out p.html --port 8080": "--port 8080 is for a page that is served",
    "show zb --ranks 4 --microbatches 12 --declare-order": "--declare-order is for the rows of a file",
    "show zb-q --ranks 2 --microbatches 2": "no schedule named 'zb-q'; did you mean",
    "show a.txt --dialect torch --out b.json": "--dialect torch is for .csv files; read or write one",
    "show a.csv --dialect jax --out b.json": "no dialect 'jax'; there are torch, torch:compute_only",
    "show none.json --out b.txt": "none.json: No such file or directory",
    "convert a.txt b.json": "penstock convert is gone since 0.2; penstock show IN --out OUT writes",
}


@pytest.mark.parametrize("line", MISUSE)
def test_misuse_is_two_lines_at_most_and_exit_2(
    penstock: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = penstock(line)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"penstock: {MISUSE[line]}"), ran.err
    assert ran.err.count("\n") <= 2
    as_json = penstock(f"{line} --json")
    assert (as_json.code, as_json.err) == (2, "")
    assert as_json.json["error"]["message"].startswith(MISUSE[line])
    assert set(as_json.json["error"]) == {"rule", "rank", "step", "op", "peer", "line", "column", "message"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"format": "penstock-schedule", "version": 99}',
            "version is 99: this Penstock reads and writes version 1",
        ),
        ("[]", "not a schedule: a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_a_file_that_holds_no_schedule_is_invalid(penstock: Any, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    for verb in ("check", "simulate", "show"):
        ran = penstock(f"{verb} {path}")
        assert ran.code == 1
        assert message in ran.err
        assert ran.err.count("\n") <= 2


def test_a_memory_limit_that_is_not_met_is_invalid_not_misuse(penstock: Any) -> None:
    assert penstock("simulate 1f1b --ranks 4 --microbatches 8 --option max_in_flight=3 --json").code == 1


def test_a_bug_is_one_message_and_no_trace(penstock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(ps, "simulate", broken)
    ran = penstock(f"simulate {ZB}")
    assert ran.code == 1
    assert ran.err == "penstock: a bug in penstock: KeyError: 'lost'\nwith PENSTOCK_TRACEBACK=1 it says where\n"
    monkeypatch.setenv("PENSTOCK_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["simulate", *ZB.split()])


def test_help_names_every_verb(penstock: Any) -> None:
    for line in ("--help", "-h", ""):
        ran = penstock(line)
        assert ran.code == (0 if line else 2)
        for verb in ("simulate", "check", "show", "links", "data"):
            assert f"\n  {verb} " in ran.out + ran.err
    assert penstock("--version").out == f"penstock {ps.__version__}\n"
    assert "--link A:B=CONDITION" in penstock("simulate --help").out


STARTS = ("--help", "simulate --help", f"simulate {ZB} --json", "check zb --ranks 2 --microbatches 4")
SLOW = ("torch", "rich.console")


@pytest.mark.slow
@pytest.mark.parametrize("line", STARTS)
def test_planning_starts_without_torch(line: str) -> None:
    code = (
        "import sys\nfrom penstock.cli import main\n"
        f"code = main({line.split()!r})\n"
        f"print([name for name in {SLOW!r} if name in sys.modules], code, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert ran.stderr == "[] 0\n"


@pytest.mark.slow
def test_the_program_ends_quietly_when_its_reader_does() -> None:
    command = f"{sys.executable} -m penstock show gpipe --ranks 16 --microbatches 400 --json | head -c 10"
    ran = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=250, check=False
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ('{"name": "', "", 0)


@pytest.mark.slow
def test_the_terminal_may_lack_letters() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "penstock", "simulate", "1f1b", "--ranks", "2", "--microbatches", "2"],
        env={"PYTHONIOENCODING": "ascii", "FORCE_COLOR": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True, timeout=250, check=True,
    )  # fmt: skip
    assert b"\x1b[48;5;" in ran.stdout


def test_the_help_of_training_is_in_groups_and_leaves_nothing_out(penstock: Any) -> None:
    said = penstock("train --help-all").out
    titles = [
        line.rstrip(":") for line in said.splitlines() if line.endswith(":") and not line.startswith((" ", "-"))
    ]
    assert titles == list(GROUPS)
    options = options_of(Settings)
    names = {name: option.flags[0] for name, option in options.items() if not option.said.is_rare}
    flowing = " ".join(said.split())  # a line may end behind a name
    assert all(f"{name}: " in flowing for name, option in options.items() if option.said.is_rare)
    own = inspect.signature(train).parameters.keys() - {"call", "as_json", "more"} - names.keys()
    names |= {"more": "--set"}
    names |= {name: f"--{name.replace('_', '-')}" for name in own} | {"as_json": "--json"}
    assert all(f"{flag} " in said or f"{flag}," in said for flag in names.values())
    short = penstock("train --help").out
    assert len(short.splitlines()) <= 62
    common = [option for option in options.values() if option.said.is_common]
    assert all(f"{option.flags[0]} " in short or f"{option.flags[0]}," in short for option in common)
    assert "host_memory" not in short
    hidden = len(names) - len(common) - len({"out", "resume", "export", "config", "as_json", "help_all"})
    assert f"{hidden} more options, with --help-all" in short


def test_the_settings_of_a_file_are_those_of_its_options(penstock: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'steps = 1\nlr-decay = "constant"\nranks = 1\nlink = ["0:1=latency:3ms"]\noption = {colour = "red"}\n'
    )
    assert "1f1b has no option 'colour'" in penstock(f"train --config {file} --ranks 2").err
    file.write_text("layers = 3\n")
    assert penstock(f"train --config {file}").err.startswith(
        f"penstock: --config {file} has layers, which is no setting"
    )
    file.write_text('out = "runs/mine"\n')
    assert "give --out, --resume, --verify and --export on the command line" in penstock(f"train --config {file}").err
    file.write_text("steps 3\n")
    assert "can't be read" in penstock(f"train --config {file}").err
    file.write_text("steps = 2.5\n")
    assert "steps is 2.5; give a whole number" in penstock(f"train --config {file}").err


@pytest.mark.parametrize(
    ("words", "now"),
    [
        ("tune --model tiny", "sizes by name, like tiny, are given by --preset"),
        ("tune --profile-only --model tiny", "sizes by name, like tiny, are given by --preset"),
        ("plan --ranks 2 --microbatches 2 --placement v", "choose among one-to-one, circular, v-shape, wave"),
        ("lab make --hosts 2", "penstock lab make is gone since 0.2; penstock lab run without a COMMAND"),
        ("train --device emulated", "penstock emulate runs a schedule on emulated devices"),
        ("train --warmup 3,1", "No such option: --warmup; give --option warmup=[7,5,3,1]"),
        ("check zb --stages 4", "No such option: --stages; give --option num_stages=8"),
        ("plan --lengths 1,2", "No such option: --lengths; give --cost lengths=[512,2048]"),
        ("train --keep 3", "No such option: --keep; give --set keep=VALUE"),
        ("train --set steps=3", "--set steps=3: give --steps"),
        ("train --set keep", "--set keep: write NAME=VALUE with one of store, host_memory"),
        ("train --set keep=1 --set keep=2", "--set keep=2: keep is given twice"),
        ("train --set keep=many", "keep is 'many'; give a whole number"),
        ("emulate zb --message-cap 1KB", "No such option: --message-cap; give --set message_cap=VALUE"),
        ("simulate zb --a(", "No such option: --a("),  # it was read as a pattern
        ("show zb --warmup 3,1", "No such option: --warmup; give --option warmup=[7,5,3,1]"),
        ("plan --ranks 2 --microbatches 2 --b 3", "No such option: --b; give --cost b=20"),
        ("data generate 5", "penstock data generate is gone since 0.2; experiments/uneven/long_tails.py"),
    ],
)
def test_a_value_without_an_option_of_its_own_says_how_it_is_given(words: str, now: str, penstock: Any) -> None:
    done = penstock(words)
    assert done.code == 2
    assert now in done.err


def test_the_help_shows_no_empty_default(penstock: Any) -> None:
    assert "[]" not in penstock("simulate --help").out


@pytest.mark.parametrize("words", ["bench", "bench --help", "bench split --width 8 --json"])
def test_a_verb_that_left_says_where_its_work_is_done_now(words: str, penstock: Any) -> None:
    done = penstock(words)
    assert done.code == 2
    said = json.loads(done.out)["error"]["message"] if "--json" in words else done.err
    assert "benchmarks/README.md" in said
    assert said.strip().count("\n") == 0


def test_options_of_a_library_schedule_are_reached(penstock: Any) -> None:
    counts = "--ranks 2 --microbatches 4"
    eight = penstock(f"show interleaved-1f1b {counts} --json --option num_stages=8").json
    assert eight["num_stages"] == 8
    warm = penstock(f"show zb {counts} --json --option warmup=[3,1]").json
    assert warm["grid"] == str(ps.build("zb", 2, 4, warmup=[3, 1]))
    for extra, said in (
        ("--option num_stages", "write KEY=VALUE, like num_stages=8"),
        ("--option num_stages=8 --option num_stages=4", "num_stages is given twice"),
        ("--option num_ranks=3", "--option num_ranks: give --ranks"),
        ("--option costs=gpt2-7b", "schedules take costs in Python alone"),
        ("--option colour=red", "takes num_stages"),
    ):
        done = penstock(f"check interleaved-1f1b {counts} {extra}")
        assert done.code in (1, 2)
        assert said in done.err, done.err
    twice = penstock(f"simulate zb {counts} --option warmup=[2,1] --warmup 2,1")
    assert "--option warmup and --warmup say the same" in twice.err


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        ("show 1f1b --ranks 2 --microbatches 2", "svg"),
        ("show 1f1b --ranks 2 --microbatches 2", "json"),
        ("simulate 1f1b --ranks 2 --microbatches 2", "svg"),
        ("plan --ranks 2 --microbatches 2 --time 0.1", "json"),
        ("plan --placement all --ranks 2 --microbatches 2", "html"),
        ("play", "html"),
    ],
)
def test_whatever_a_verb_writes_it_says_so(words: str, ending: str, penstock: Any, tmp_path: Path) -> None:
    path = tmp_path / f"made.{ending}"
    option = "--timeline" if words.startswith("simulate") else "--out"
    assert penstock(f"{words} {option} {path}").out.endswith(f"wrote {path}\n")
    assert path.stat().st_size > 0
