"""The page loads nothing, holds the run's data, and lets no name break out of its place."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

import penstock as ps
from penstock.draw import to_html

pytestmark = pytest.mark.unit


class Page(HTMLParser):
    """Collects the tags, and the text inside each script and the title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags:
            self.texts.append((self.tags[-1][0], data))

    @property
    def data(self) -> Any:
        at = next(i for i, (tag, attrs) in enumerate(self.tags) if attrs.get("id") == "data")
        assert self.tags[at][1]["type"] == "application/json"
        return json.loads(next(text for tag, text in self.texts if tag == "script" and text.startswith("{")))


def slow_link(dispatch: str = "frozen") -> ps.Timeline:
    schedule = ps.build("zb", 4, 12, warmup=[7, 5, 3, 1])
    costs = ps.Costs.uniform(4, f=10, i=10, w=10)
    return ps.simulate(schedule, costs, links=ps.Links({(0, 1): 20.0}), dispatch=dispatch)


def test_it_loads_nothing() -> None:
    text = to_html(slow_link())
    assert "http:" not in text
    assert "https:" not in text
    page = Page(text)
    for tag, attrs in page.tags:
        assert not {"src", "href", "srcset", "action"} & set(attrs), tag
        assert tag not in ("link", "img", "iframe", "object", "embed")
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for word in ("@import", "url(", "fetch(", "XMLHttpRequest", "WebSocket", "innerHTML", "eval("):
        assert word not in text


def test_its_data_is_the_timeline() -> None:
    t = slow_link()
    (data,) = Page(to_html(t)).data["timelines"]
    kinds = [k["kind"] for k in Page(to_html(t)).data["kinds"]]
    assert data["start"] == [op.start for op in t.ops]
    assert data["end"] == [op.end for op in t.ops]
    assert data["first"] == [0, 36, 72, 108, 144]
    names = [f"{s}{kinds[k]}{m}" for s, k, m in zip(data["stage"], data["kind"], data["microbatch"], strict=True)]
    assert names == [str(op.op) for op in t.ops]
    for index, op in enumerate(t.ops):
        asked = data["waitedFor"][index]
        assert (names[asked] if asked >= 0 else None) == (str(op.waited_for) if op.waited_for else None)
        assert data["waited"][index] == op.waited
    assert data["recorded"] is True
    assert len(data["messages"]["sent"]) == len(t.messages)
    assert max(held for _, held in data["held"][3]) == 12


def test_an_op_that_waited_for_an_asynchronous_one_says_so() -> None:
    """Asynchronous ops are not in the page's rows, and the page said that the rank was idle."""
    stash = ps.NewOp("STASH", 0, {("F", 0): 1}, holds=-1, time=1.0, asynchronous=True)
    fetch = ps.NewOp("FETCH", 0, {("STASH", 0): 1}, {("B", 0): 1}, holds=1, time=90.0, asynchronous=True)
    program = ps.Program(ps.placements.one_to_one(2), 4, ops=[stash, fetch])
    t = ps.simulate(program.build(), program.all_costs)
    (data,) = Page(to_html(t)).data["timelines"]
    waited = {str(op.waited_for) for op in t.ops if op.waited_for and op.waited_for.kind == "FETCH"}
    assert waited
    assert waited <= set(data["waitedForAsync"])


def test_measured_timelines_get_the_messages_their_schedule_implies() -> None:
    t = slow_link()
    later = tuple(replace(op, start=op.start + 5000, end=op.end + 5000) for op in t.ops)
    measured = replace(t, ops=later, messages=(), source="measured")
    simulated, data = Page(to_html([t, measured])).data["timelines"]
    assert data["start"] == simulated["start"]
    assert data["recorded"] is False
    ends = zip(data["messages"]["source"], data["messages"]["target"], strict=True)
    assert set(ends) == set(zip(simulated["messages"]["source"], simulated["messages"]["target"], strict=True))
    assert min(data["messages"]["sent"]) >= 0


def test_posted_messages_have_all_their_times() -> None:
    schedule = ps.build("zb", 2, 4)
    t = ps.simulate(schedule, links=ps.Links({(0, 1): 3.0}), channels="nccl")
    posted, plain = Page(to_html([t, ps.simulate(schedule)])).data["timelines"]
    assert (posted["channels"], plain["channels"]) == (True, False)
    for name in ("sent", "left", "arrived", "taken", "posted"):
        assert posted["messages"][name] == [getattr(message, name) for message in t.messages]
    assert plain["messages"]["left"] == plain["messages"]["sent"]
    assert plain["messages"]["posted"] == []
    assert "frozen, nccl" in to_html(t)
    assert "waits to leave" in to_html(t)


def test_no_name_breaks_out() -> None:
    evil = '</script><img src=x onerror="alert(1)"><!-- {{data}} {{js}} &'
    text = to_html([slow_link()], titles=[evil])
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert page.data["timelines"][0]["title"] == evil
    assert "".join(text for tag, text in page.texts if tag == "title").strip() == evil
