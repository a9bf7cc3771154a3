"""The tuner over the towers of a CLIP: every part is measured, layouts are found, and what is chosen is what runs."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
import tune_models
from penstock.cli import main
from penstock.formats.profile import KINDS, MessageCosts, Profile
from penstock.models import CLIPConfig, clip_presets, tower_costs
from penstock.runtime import partition
from penstock.train.kinds import CONTRAST
from penstock.train.settings import Settings
from penstock.train.tasks.clip import clip_config, clip_schedule, counts_of, cut_of
from penstock.tune import meter, verify
from penstock.tune.errors import TuneError
from penstock.tune.layers import NO_LAYER, RankShare, measure_layers
from penstock.tune.memory import memory_of
from penstock.tune.predict import links_of, predict, stage_costs
from penstock.tune.search import SearchFound, settings_of
from penstock.tune.space import TuneSpace
from penstock.tune.towers import TowerSpace, joined_profile, search_towers
from penstock.tune.tuned_model import parts_of, tuned_model

pytestmark = pytest.mark.unit

SETTINGS = Settings(model="clip", preset="nano", batch=64, microbatches=1, ranks=1, threads=1)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tune_models.Ranks:
    """In place of processes that measure and run."""
    found = tune_models.Ranks()
    monkeypatch.setattr(meter, "run_job", found)
    monkeypatch.setattr(verify, "run_job", found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("part", ["text", "video", CONTRAST])
def test_every_layer_of_a_part_is_measured(part: str, recompute: bool) -> None:
    told = measure_layers(RankShare(SETTINGS, 4, recompute, 0, 1, 0.01, part), lambda: None)
    model, config = parts_of(SETTINGS)[part], clip_presets["nano"]
    assert told["layers"] == list(range(model.num_layers))
    for layer in (NO_LAYER, *told["layers"]):
        assert all(f"{layer} {kind}" in told["times"] for kind in KINDS)
    sizes = [told["bytes"][str(layer)] for layer in told["layers"]]
    if part == CONTRAST:
        assert [(size["output"], size["weight"]) for size in sizes] == [(0, 4)]
        return
    tower = config.tower(part)
    hidden, said = 4 * 4 * tower.context * tower.width, 4 * 4 * config.shared_width
    assert [size["output"] for size in sizes] == [hidden] * (model.num_layers - 1) + [said]
    assert all(size["activation"] > 0 and size["weight"] > 0 for size in sizes)
    assert (sizes[1]["transient"] > sizes[1]["activation"]) == recompute


def test_towers_of_other_sizes_are_measured_anew() -> None:
    parts = parts_of(SETTINGS)
    other = parts_of(dataclasses.replace(SETTINGS, depth=3))
    assert len({part.digest for part in parts.values()}) == 4
    assert {name for name in parts if parts[name].digest != other[name].digest} == {"audio", "text", "video"}
    assert tuned_model(SETTINGS).num_layers == 4 * 3 + 1


def two_towers() -> ps.Schedule:
    """Audio on ranks 0 and 1 in 8 microbatches, text on rank 2 in 2; the contrast, on rank 2, in 4."""
    plain = ps.Rules(max_in_flight=8)
    towers = {
        "audio": ps.Branch(ps.placements.one_to_one(2), 8, plain, feeds=(CONTRAST,)),
        "text": ps.Branch(ps.placements.one_to_one(1), 2, plain, feeds=(CONTRAST,)),
        CONTRAST: ps.Branch(ps.placements.one_to_one(1), 4, plain, (2,)),
    }
    return ps.Program.of_branches(towers).build()


def test_messages_follow_the_branches_and_their_microbatches() -> None:
    """A stage sends to the stages that it feeds, and as often as their microbatches ask for."""
    profile = tune_models.profile(4, output=[100.0, 200.0, 300.0, 0.0])
    cut, schedule = tune_models.ranges(1, 1, 1, 1), two_towers()
    free = stage_costs(schedule, cut, profile, tune_models.transfer())
    told = stage_costs(schedule, cut, profile, tune_models.transfer(send=1.0, receive=10.0))
    # audio 0 -> audio 1 -> two messages for each of the contrast's; text lies where the contrast does
    assert [a - b for a, b in zip(told.f, free.f, strict=True)] == [1, 11, 0, 20]
    assert [a - b for a, b in zip(told.b, free.b, strict=True)] == [10, 11, 0, 2]
    late = links_of(schedule, cut, profile, tune_models.transfer(delay=7.0))
    assert {pair: late.delay(*pair) for pair in ((0, 1), (1, 2), (0, 2))} == {(0, 1): 7, (1, 2): 7, (0, 2): 0}
    posted = [memory.messages for memory in memory_of(schedule, cut, profile)]
    assert posted == [4 * 100, 4 * (100 + 200), 4 * (300 + 200 + 300)]


def test_a_larger_microbatch_is_cut_for_a_stage_with_smaller_ones() -> None:
    towers = {
        "audio": ps.Branch(ps.placements.one_to_one(1), 2, ps.Rules("forward-first"), feeds=(CONTRAST,)),
        CONTRAST: ps.Branch(ps.placements.one_to_one(1), 8, ps.Rules("forward-first"), (1,)),
    }
    schedule, cut = ps.Program.of_branches(towers).build(), tune_models.ranges(1, 1)
    profile = tune_models.profile(2, output=[400.0, 0.0])
    none = (0.0, 0.0)
    by_size = MessageCosts((0.0, 400.0), (0.0, 400.0), (0.0, 400.0), none, none, none)
    free, told = (stage_costs(schedule, cut, profile, each) for each in (tune_models.transfer(), by_size))
    assert told.f[0] - free.f[0] == 4 * 100, "four messages of 100 bytes"
    assert told.f[1] - free.f[1] == 100


def parts(config: CLIPConfig, size: int) -> dict[str, Profile]:
    """Profiles in which a layer takes as long as it has operations, of a microbatch of so many samples."""
    found = {}
    for name in (*config.towers, CONTRAST):
        work = [each * size / 1e5 for each in tower_costs(config, name)] if name != CONTRAST else [0.1 * size]
        rows: dict[str, Any] = dict.fromkeys(("f", "f_split", "i", "w"), work)
        rows |= {"b": [2 * each for each in work], "update": [0.5] * len(work), "weight": [100.0] * len(work)}
        rows |= {"activation": [10.0 * size] * len(work), "output": [float(size)] * len(work)}
        rows |= {"held": [0.0] * len(work), "state": [200.0] * len(work)}
        rows |= {"model": name, "layers": [f"{name} {k}" for k in range(len(work))], "microbatch_size": size}
        found[name] = tune_models.profile(len(work), **rows, op_overhead={"f": 0.3})
    return found


def found_with(num_ranks: int, settings: Settings = SETTINGS, **more: Any) -> SearchFound:
    limit, schedules = more.pop("memory_limit", None), more.pop("schedules", None)
    space = TuneSpace(num_ranks, settings.batch, **more)
    towers = TowerSpace.of(settings, space, schedules)
    config = clip_config(settings)
    return search_towers(
        towers,
        settings,
        lambda part, size, processes, again: parts(config, size)[part],
        lambda shape: tune_models.transfer(send=0.05, receive=0.05, delay=0.2),
        SearchFound(settings.batch, limit, num_best=5),
    )


def test_what_is_predicted_is_a_schedule_that_train_takes(tmp_path: Path) -> None:
    found = found_with(4, pp=[4], dp=[1], microbatch_sizes=[4, 8, 16])
    assert len(found.best) == 5
    for ranked in found.best:
        plan = ranked.candidate.plan
        ps.save(plan.schedule, tmp_path / "own.json")
        run = settings_of(ranked.candidate, SETTINGS)
        count = plan.schedule.num_microbatches
        run = dataclasses.replace(run, schedule=str(tmp_path / "own.json"), microbatches=count)
        assert run.cut is None
        config = clip_config(run)
        schedule = clip_schedule(config, run)
        assert schedule == plan.schedule
        cut = cut_of(config, schedule)
        microbatches = counts_of(cut, schedule)
        hosts = schedule.placement.pipelines[0]
        for name, tower in plan.towers:
            stages = cut.stages[name]
            assert (len(stages), microbatches[name]) == (tower.stages, tower.microbatches)
            assert {hosts[stage] for stage in stages} == {*tower.ranks}
        assert ranked.prediction.step > ranked.prediction.makespan
        assert len(ranked.prediction.memory) == 4
    steps = [ranked.prediction.step for ranked in found.best]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_it_finds_a_shorter_step_than_the_usual_layout() -> None:
    """Video is four times as deep as text here; what `penstock train` does unless told otherwise is beaten."""
    config = clip_presets["nano"]
    best = found_with(4, pp=[4], dp=[1]).best[0]
    usual = dataclasses.replace(SETTINGS, schedule="mixed", ranks=4, microbatches=2)
    schedule = clip_schedule(config, usual)
    each = parts(config, 32)
    profile = joined_profile("clip", [*each.values()])
    cut, first = [], 0
    for name, stages in (("audio", 1), ("text", 1), ("video", 4)):
        layers = partition(tower_costs(config, name), stages)
        cut += [range(first + part.start, first + part.stop) for part in layers]
        first = cut[-1].stop
    cut.append(range(first, first + 1))
    messages = tune_models.transfer(send=0.05, receive=0.05, delay=0.2)
    assert best.prediction.step < predict(schedule, cut, profile, messages).step


@pytest.mark.slow
def test_every_tower_has_one_of_the_schedules_asked_for() -> None:
    found = found_with(4, pp=[4], schedules=["interleaved-1f1b", "gpipe"])
    assert found.best
    for ranked in found.best:
        for _, tower in ranked.candidate.plan.towers:
            is_interleaved = tower.style == "interleaved-1f1b"
            assert tower.style == "gpipe" or tower.stages == len(tower.ranks) * (2 if is_interleaved else 1)
            assert is_interleaved == (tower.style != "gpipe" and len(tower.ranks) > 1)


def test_towers_share_ranks_where_there_are_fewer() -> None:
    found = found_with(2, pp=[2], dp=[1])
    assert len(found.best) == 5
    for ranked in found.best:
        hosts = ranked.candidate.plan.schedule.placement.pipelines[0]
        assert set(hosts) == {0, 1}
        ranks = [tower.ranks for _, tower in ranked.candidate.plan.towers]
        assert len(ranks) == 3
        assert ranks == sorted(ranks)


def test_replicas_leave_what_is_learnt_as_it_is() -> None:
    """The contrast tells a sample from as many others, however many replicas there are."""
    found = found_with(8, dp=[1, 2, 4, 8], pp=[1, 2])
    shapes = {ranked.candidate.shape for ranked in found.best}
    assert all(shape.dp * shape.num_microbatches == 2 for shape in shapes)
    assert all(shape.microbatch_size == 32 for shape in shapes)
    with pytest.raises(TuneError, match=r"the 2 microbatches of the contrast must divide the batch"):
        found_with(8, dp=[8])


@pytest.mark.slow
def test_memory_limits_hold_and_the_least_is_told() -> None:
    free = found_with(4, pp=[4], dp=[1], microbatch_sizes=[4, 8, 16])
    peak = min(ranked.prediction.peak_bytes for ranked in free.best)
    tight = found_with(4, pp=[4], dp=[1], microbatch_sizes=[4, 8, 16], memory_limit=peak - 1)
    assert tight.best
    assert all(ranked.prediction.peak_bytes < peak for ranked in tight.best)
    with pytest.raises(TuneError, match=r"no layout of the towers fits in 10 bytes per rank"):
        found_with(4, pp=[4], dp=[1], microbatch_sizes=[4, 8, 16], memory_limit=10.0)


@pytest.mark.slow
def test_the_closing_line_is_one_that_train_takes(
    ranks: tune_models.Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["tune", "--model", "clip", "--ranks", "4", "--pp", "4", "--dp", "1", "--microbatch-size", "8,16"]
    assert main([*line, "--verify", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_tried"] > len(found["best"]) > 1
    assert found["choice"]["measured"]["step_ms"] == 51.0
    assert found["num_measured"] == 3 * 2 + 1 + 1  # sizes of three towers, the contrast, messages
    trials = [task for task in ranks.tasks if task["do"] == "run"]
    assert len(trials) == 4
    assert all(Settings.from_mapping(task["settings"]).ranks == 4 for task in trials)
    assert set(found["choice"]["towers"]) == {"audio", "text", "video"}
    file = found["out"]
    assert file.startswith("runs/program-4x")
    assert found["train"].startswith(f"penstock train --model clip --preset nano --batch 64 --schedule {file} --pp 4")
    assert "--cut" not in found["train"]
    _, *words = shlex.split(found["train"])
    assert main([*words, "--steps", "1", "--in-process", "--out", "run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_ranks"], report["schedule"]) == (4, f"clip-{found['choice']['schedule']}")
    assert main([*line, "--out", "best.json"]) == 0
    printed = capsys.readouterr().out
    assert "ranks/stages/microbatches" in printed
    words = shlex.split(printed.splitlines()[-1])[1:]
    assert words[words.index("--schedule") + 1] == "best.json"
    assert main([*words, "--steps", "1", "--in-process", "--out", "again", "--json"]) == 0


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("tune --model clip --costs gpt2-7b --ranks 4", "--costs says what layers cost, so --model changes nothing"),
        (
            "tune --model clip --preset nano --profile-only",
            "penstock tune --model clip measures its towers and lays them out",
        ),
        ("tune --model clip --schedule zb --ranks 4", "--schedule zb is for a chain of stages; a tower's is 1f1b"),
        ("tune --model clip --pp 4 --ranks 4 --microbatch-size 5", "fits the ranks, schedules and microbatch sizes"),
    ],
)
def test_what_is_refused_says_why(
    ranks: tune_models.Ranks, line: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) != 0
    assert why in " ".join(capsys.readouterr().err.split())
