"""Updates as ops: where they stand, what the check says of them, and what every other part does with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

import penstock as ps
from penstock.draw import to_html, to_svg, to_terminal
from penstock.draw.panel import panels
from penstock.formats import from_json, to_json
from penstock.formats.perfetto import to_perfetto
from penstock.formats.torch_csv import to_torch_csv
from penstock.passes import add_communication, recompute, separate_gradients
from penstock.schedule import needed_channel_depth, peak_in_flight

pytestmark = pytest.mark.unit
Row = list[ps.Op]


def rows_of(schedule: ps.Schedule) -> list[str]:
    return [" ".join(op.short() for op in row) for row in schedule.order]


def changed(schedule: ps.Schedule, rank: int, change: Callable[[Row], Row]) -> ps.Schedule:
    rows = [list(row) for row in schedule.order]
    rows[rank] = change(rows[rank])
    return replace(schedule, order=tuple(map(tuple, rows)))


def moved(op: ps.Op, place: int) -> Callable[[Row], Row]:
    """Puts an op of a row at a place among the others."""

    def change(row: Row) -> Row:
        others = [other for other in row if other != op]
        return [*others[:place], op, *others[place:]]

    return change


def without_updates(schedule: ps.Schedule) -> ps.Schedule:
    rows = tuple(tuple(op for op in row if op.kind != "U") for row in schedule.order)
    return replace(schedule, order=rows, updates=None)


def two_pipelines() -> ps.Schedule:
    return ps.build("amdp", 4, 16, window=8)


def test_pipedream_updates_after_every_backward() -> None:
    assert rows_of(ps.build("pipedream", 3, 4, window=1)) == [
        "F0 F1 F2 B0 U0 F3 B1 U1 B2 U2 B3 U3",
        "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 B3 U3",
        "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3",
    ]


def test_2bw_updates_after_a_window_and_after_a_last_one_that_is_not_full() -> None:
    assert rows_of(ps.build("pipedream-2bw", 2, 5, window=2)) == [
        "F0 F1 B0 F2 B1 U0 F3 B2 F4 B3 U1 B4 U2",
        "F0 B0 F1 B1 U0 F2 B2 F3 B3 U1 F4 B4 U2",
    ]


def test_amdp_owner_takes_an_update_after_all_pipelines_and_copies_after_the_owner() -> None:
    schedule = two_pipelines()
    timeline = ps.simulate(schedule, ps.Costs.uniform(4, b=2.0))
    start = {t.op: t.start for t in timeline.ops}
    end = {t.op: t.end for t in timeline.ops}
    for stage in range(4):
        for update in range(2):
            owner, copy = ps.Op("U", stage, 2 * update), ps.Op("U", stage, 2 * update + 1)
            assert schedule.hosts(owner) == (stage,)
            assert schedule.hosts(copy) == (3 - stage,)
            last = max(end[ps.Op("B", stage, m)] for m in range(8 * update, 8 * update + 8))
            assert last <= start[owner]
            assert end[owner] <= start[copy]


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("num_microbatches", [1, 3, 9])
def test_updates_leave_the_forwards_and_backwards_of_one_pipeline_where_they_are(
    name: str, num_microbatches: int
) -> None:
    plain = ps.build(name, 4, num_microbatches)
    assert plain.updates is None
    assert plain.order == ps.build("1f1b", 4, num_microbatches).order
    assert without_updates(ps.build(name, 4, num_microbatches, window=4)).order == plain.order


def test_mismatch_of_a_drawn_schedule() -> None:
    schedule = ps.parse("""
        schedule mine: 2 ranks, 2 stages, 4 microbatches
        pipeline 0: stages on ranks 0 1
        updates every 1 microbatch
        rank 0 | F0 F1 F2 . . B0 U0 B1 U1 B2 U2 F3 . B3 U3
        rank 1 | .  F0 B0 F1 U0 B1 F2 B2 U1 U2 . . F3 B3 U3
    """)
    ps.check(schedule)
    assert ps.schedule.count_mismatch(schedule) == {
        (0, 0, 0): 0, (0, 0, 1): 1, (0, 0, 2): 2, (0, 0, 3): 0,
        (1, 0, 0): 0, (1, 0, 1): 1, (1, 0, 2): 0, (1, 0, 3): 0,
    }  # fmt: skip


def test_mismatch_of_split_backwards_ends_with_the_input_gradient() -> None:
    schedule = ps.parse("""
        schedule mine: 1 rank, 1 stage, 2 microbatches
        pipeline 0: stages on ranks 0
        updates every 1 microbatch
        rank 0 | F0 F1 I0 W0 I1 U0 W1 U1
    """)
    ps.check(schedule)
    assert ps.schedule.count_mismatch(schedule) == {(0, 0, 0): 0, (0, 0, 1): 0}


def test_too_much_mismatch_is_told_with_the_updates_that_make_it() -> None:
    schedule = ps.build("pipedream", 3, 5, window=1)
    ps.check(schedule, max_mismatch=2)
    with pytest.raises(ps.ScheduleError) as caught:
        ps.check(schedule, max_mismatch=1)
    error = caught.value
    assert (error.rule, error.rank, error.op) == ("mismatch", 0, ps.Op("B", 0, 2))
    assert schedule.order[0][error.step or 0] == error.op
    said = str(error)
    assert said.startswith(
        "rank 0, step 9, B2 of stage 0: microbatch 2 meets 2 updates of stage 0 between its forward, at step 2, and "
        "this backward: U0 (update 0) at step 4, U1 (update 1) at step 7; at most 1 may fall there."
    )
    assert said.endswith("^^")


def test_the_schedules_own_bound_is_checked() -> None:
    schedule = ps.build("pipedream", 3, 5, window=1)
    with pytest.raises(ps.ScheduleError, match="rule: mismatch"):
        ps.check(replace(schedule, updates=ps.schedule.Updates(1, 1)))


def broken() -> dict[str, tuple[ps.Schedule, str, str]]:
    two = two_pipelines()
    one = ps.build("pipedream-2bw", 2, 6, window=2)
    owner, copy = ps.Op("U", 1, 0), ps.Op("U", 1, 1)
    return {
        "missing": (
            changed(two, 2, lambda row: [op for op in row if op != copy]),
            "coverage",
            "U1 of stage 1 is missing: update 0 of pipeline 1's copy, after microbatches 0 to 7",
        ),
        "twice": (changed(one, 0, lambda row: [*row, ps.Op("U", 0, 2)]), "coverage", "the op occurs twice"),
        "early on its rank": (
            changed(one, 1, moved(ps.Op("U", 1, 0), 3)),
            "order",
            "it needs B1 of stage 1, which comes later",
        ),
        "before the one before it": (
            changed(one, 1, moved(ps.Op("U", 1, 0), 99)),
            "order",
            "it needs U0 of stage 1, which comes later",
        ),
        "owner before the others": (
            changed(two, 1, moved(owner, 2)),
            "order",
            "it needs B0 of stage 1, which comes later",
        ),
        "copy before the owner": (changed(two, 2, moved(copy, 0)), "deadlock", "the ranks wait for one another"),
        "on another rank": (
            changed(one, 0, lambda row: [*row, ps.Op("U", 1, 0)]),
            "placement",
            "stage 1 is placed on rank 1",
        ),
        "above the last": (
            changed(one, 0, lambda row: [*row, ps.Op("U", 0, 3)]),
            "range",
            "its number goes from 0 to 2",
        ),
        "without a window": (replace(one, updates=None), "kind", "the schedule does not say what an update gathers"),
        "own counts": (
            replace(one, stage_graph=ps.schedule.StageGraph(2, ((0, 1),), (6, 3))),
            "updates",
            "an update gathers the same window of them on every stage",
        ),
    }


@pytest.mark.parametrize("what", list(broken()))
def test_check_refuses(what: str) -> None:
    schedule, rule, message = broken()[what]
    with pytest.raises(ps.ScheduleError) as caught:
        ps.check(schedule)
    assert caught.value.rule == rule
    assert message in str(caught.value)


@pytest.mark.parametrize("wrong", [(0, None), (4, -1), (True, None), (2.0, None), (None, 1)])
def test_updates_that_make_no_sense(wrong: tuple[int, int | None]) -> None:
    with pytest.raises(ps.ScheduleError, match="of the updates is"):
        ps.schedule.Updates(*wrong)


def test_text_says_the_window_and_the_bound() -> None:
    schedule = ps.build("pipedream-2bw", 2, 4, window=2)
    assert "\nupdates every 2 microbatches, mismatch at most 1, weights by pipedream-2bw\n" in str(schedule)
    assert ps.parse(str(schedule)) == schedule
    twice = str(schedule).replace("rank 0", "updates every 3 microbatches\nrank 0")
    with pytest.raises(ps.ScheduleError, match="line 4, column 1: the line of updates is given twice"):
        ps.parse(twice)


@pytest.mark.parametrize(
    "wrong",
    [[8, 1], {"window": 8}, {"window": "8", "max_mismatch": None}, {"window": True, "max_mismatch": 1}, {"rule": 1}],
)
def test_updates_of_another_form_are_refused(wrong: object) -> None:
    value = json.loads(to_json(two_pipelines()))
    assert value["updates"] == {"window": 8, "max_mismatch": 1, "rule": "none"}
    assert from_json(json.dumps(value)) == two_pipelines()
    with pytest.raises(ps.ScheduleError, match=r"field 'updates.*(expected|is missing; the fields are window, )"):
        from_json(json.dumps(value | {"updates": wrong}))


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw", "spectrain", "xpipe", "vnag"])
def test_files_keep_the_rule(name: str) -> None:
    schedule = ps.build(name, 3, 7, window=3)
    assert f"\nupdates every 3 microbatches, mismatch at most 1, weights by {name}\n" in str(schedule)
    assert ps.parse(str(schedule)) == schedule
    value = json.loads(to_json(schedule))
    assert value["updates"] == {"window": 3, "max_mismatch": 1, "rule": name}
    assert from_json(json.dumps(value)) == schedule


def test_what_says_no_rule_reads_the_newest_weights_and_another_rule_is_refused() -> None:
    schedule = ps.build("xpipe", 3, 7, window=3)
    newest = replace(schedule, updates=ps.schedule.Updates(3, 1))
    value = json.loads(to_json(schedule))
    assert from_json(json.dumps(value | {"updates": {"window": 3, "max_mismatch": 1}})) == newest
    assert ps.parse(str(schedule).replace(", weights by xpipe", "")) == newest
    for read, text in ((from_json, json.dumps(value).replace('"rule": "xpipe"', '"rule": "pipe"')),
                       (ps.parse, str(schedule).replace("by xpipe", "by pipe"))):  # fmt: skip
        with pytest.raises(
            ps.ScheduleError, match="no rule named 'pipe' says which weights ops read; there are none"
        ):
            read(text)


def test_simulation_times_updates_and_sends_one_message_of_gradients_a_copy() -> None:
    schedule = two_pipelines()
    plain = ps.simulate(schedule, ps.Costs.uniform(4, b=2.0))
    costs = ps.Costs.uniform(4, b=2.0).with_other({("U", stage): 0.5 for stage in range(4)})
    timeline = ps.simulate(schedule, costs)
    assert sum(timeline.busy) == pytest.approx(sum(plain.busy) + 8 * 0.5)  # the owners' alone
    taken = ps.simulate(schedule, replace(costs, take_over=[0.25] * 4))
    assert sum(taken.busy) == pytest.approx(sum(plain.busy) + 8 * 0.5 + 8 * 0.25)
    assert timeline.peak_activations == plain.peak_activations == tuple(map(float, peak_in_flight(schedule)))
    sent = [m for m in timeline.messages if m.target.kind == "U"]
    gradients = [m for m in sent if m.source.kind == "B"]
    assert len(gradients) == 8
    assert len(sent) == 16
    last = {
        (stage, window): max((t.end, t.op) for t in timeline.ops if t.op in ops)[1]
        for stage in range(4)
        for window in range(2)
        if (ops := {ps.Op("B", stage, m) for m in range(8 * window, 8 * window + 8) if m % 2})
    }
    assert {m.source for m in gradients} == set(last.values())


def test_update_messages_take_a_link_for_as_long_as_they_weigh() -> None:
    schedule = two_pipelines()
    costs = ps.Costs.uniform(4, b=2.0)
    links = ps.Links.parse(["0:3=bandwidth:1GB/s"])
    heavy = replace(costs, update_bytes=[4e6] * 4)
    for given, least in ((costs, 0.0), (heavy, 4.0)):
        messages = ps.simulate(schedule, given, links=links).messages
        took = {
            m.arrived - m.sent for m in messages if m.target.kind == "U" and {m.source_rank, m.target_rank} == {0, 3}
        }
        assert min(took) >= least
        assert least or max(took) == 0
    assert heavy.message_size(("B", 1), ("U", 1)) == heavy.message_size(("U", 1), ("U", 1)) == 4e6
    assert heavy.message_size(("B", 2), ("B", 1)) == 0.0


def test_channels_of_depth_one_carry_activations_while_updates_have_lines_of_their_own() -> None:
    schedule = ps.build("pipedream", 3, 6, window=1)
    assert needed_channel_depth(schedule) == needed_channel_depth(without_updates(schedule))
    ps.check(two_pipelines(), channel_depth=needed_channel_depth(two_pipelines()))


def test_drawings_show_updates() -> None:
    schedule = two_pipelines()
    timeline = ps.simulate(schedule, ps.Costs.uniform(4, b=2.0).with_other({("U", s): 1.0 for s in range(4)}))
    assert "U update" in to_svg(timeline)
    picture = to_svg(timeline)
    assert picture.count("<title>0U0: rank 0") == 1
    assert ", update 0, by its owner</title>" in picture
    assert ", update 1, taken over by pipeline 1's copy</title>" in picture
    assert "(of U the update, ' on a copy)" in picture
    assert "U update" in to_terminal(timeline, color=False)
    assert "0U2" in to_terminal(schedule, color=False)
    drawn = panels(schedule)[0]
    assert [drawn.number(ps.Op("U", 2, n)) for n in range(4)] == ["0", "0'", "1", "1'"]
    assert drawn.number(ps.Op("F", 2, 3)) == "3"
    assert {t.end - t.start for t in drawn.timeline.ops if t.op.kind == "U"} == {0.5}
    for rank, row in enumerate(schedule.order):  # the colour of a U is that of its own copy of the stage
        colours = {(op.stage, schedule.pipeline_of(op)): drawn.chunk(rank, op) for op in row if op.kind == "F"}
        for op in row:
            assert drawn.chunk(rank, op) == colours[op.stage, schedule.pipeline_of(op)]
    assert '"updates":[' in to_html(schedule)
    assert '"updates":null' in to_html(without_updates(schedule))
    names = [e["name"] for e in json.loads(to_perfetto(timeline))["traceEvents"] if e["ph"] == "X"]
    assert sum(name.split()[0] in ("U", "0U", "1U", "2U", "3U") for name in names) >= 16


def test_passes_that_cannot_keep_updates_say_so() -> None:
    schedule = ps.build("pipedream-2bw", 4, 8, window=4)
    for apply in (lambda: separate_gradients(schedule), lambda: recompute(schedule, ps.Costs.uniform(4), 2.0)):
        with pytest.raises(ps.ScheduleError, match=r"has updates as ops \(U, every 4 microbatches\)") as caught:
            apply()
        assert caught.value.rule == "updates"
    with pytest.raises(ps.ScheduleError, match="not what updates send between the copies"):
        add_communication(two_pipelines())
    with pytest.raises(ps.ScheduleError, match="torch's pipelining lacks updates as ops of the schedule"):
        to_torch_csv(schedule)
    with pytest.raises(ps.ScheduleError, match="has updates as ops"):
        ps.schedule.with_updates(schedule, 4)
    with pytest.raises(ps.ScheduleError, match="schedules with one pipeline"):
        ps.schedule.with_updates(ps.build("chimera", 4, 8), 4)


def test_passes_that_keep_updates() -> None:
    sent = add_communication(ps.build("pipedream-2bw", 4, 8, window=4))
    ps.check(sent)
    assert [op for op in sent.order[0] if op.kind == "U"] == [ps.Op("U", 0, 0), ps.Op("U", 0, 1)]


def test_a_synchronous_schedule_with_one_update_has_no_mismatch() -> None:
    for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "hanayo"):
        schedule = ps.schedule.with_updates(ps.build(name, 4, 8), 8, max_mismatch=0)
        ps.check(schedule)
        assert sum(op.kind == "U" for row in schedule.order for op in row) == schedule.num_stages
