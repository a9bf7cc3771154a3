"""The page says the same as the JSON, loads nothing, lets no name break out, and keeps its form."""

from __future__ import annotations

import re

import pytest

from penstock.report import to_page
from penstock.report.from_logs import read_story
from penstock.report.run_story import RunRecord
from penstock.report.words import headline, seconds
from report_cases import Page, log_of, story_of

pytestmark = pytest.mark.unit


def test_the_page_loads_nothing() -> None:
    text = to_page(story_of())
    assert "https:" not in text
    assert set(re.findall(r"http:[^\s\"']*", text)) <= {"http://www.w3.org/2000/svg"}
    page = Page(text)
    for tag, attrs in page.tags:
        assert not {"src", "srcset", "action"} & set(attrs), tag
        assert (attrs.get("href") or "#").startswith("#"), tag  # the shape of a mark, in the same picture
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"url\((?!#)", text)  # url(#...) is a shape in the same picture
    for word in ("@import", "fetch(", "XMLHttpRequest", "WebSocket", "innerHTML", "eval("):
        assert word not in text


def test_the_page_says_what_the_json_says() -> None:
    story = story_of()
    page, value = Page(to_page(story)), story.to_json()
    assert page.data == value
    assert [text.replace("\u2060", "") for text in page.texts["h1"]] == [headline(story)]
    assert f"of {seconds(value['lost_ms'])} that late links would have cost" in headline(story)
    assert f"{seconds(value['saved_ms'])} were saved" in headline(story)
    large = dict(zip(page.texts["span"], page.texts["b"], strict=False))
    assert large["iterations with a late link"] == f"{value['num_late']} of {value['num_iterations']}"
    assert large["lost, had nothing been changed"] == seconds(value["lost_ms"])
    assert large["of it saved, measured"] == seconds(value["saved_ms"])
    decisions = page.tables["Decisions"][1:]
    assert [(int(row[0]), row[1], row[3]) for row in decisions] == [
        (each["number"], each["action"], each["reason"]) for each in value["decisions"]
    ]
    assert [row[5:7] for row in decisions] == [
        [f"after {each['made']}", str(each["first"])] for each in value["decisions"]
    ]
    (late,) = page.tables["Late links"][1:]
    assert late[2] == str(value["spells"][0]["num_late"])


def test_bug_the_page_of_a_run_said_1_593e_04_tokens_a_second() -> None:
    record = RunRecord("run", (1, 2), {"loss": (5.63, 2.2123), "tokens_per_second": (15123.4, 15934.2)})
    large = Page(to_page(None, record)).texts["b"]
    assert large[:2] == ["2.212", "15,930"]


def test_names_do_not_break_out_of_the_page() -> None:
    evil = '</script><img src=x onerror="alert(1)"><!-- {{data}} {{js}} &'
    page = Page(to_page(read_story(log_of(), name=evil, facts=[(evil, evil)])))
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert page.data["name"] == evil


def test_pictures_are_told_in_words_and_every_style_is_there() -> None:
    text = to_page(story_of())
    page = Page(text)
    svgs = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(svgs) == 2 * 4
    assert all(attrs.get("role") == "img" and attrs.get("aria-label") for attrs in svgs)
    used = {
        name
        for _, attrs in page.tags
        for name in (attrs.get("class") or "").split()
        if name.startswith(("r-", "pc-"))
    }
    unstyled = {name for name in used if f".{name}" not in text}
    assert unstyled <= {"pc-small", "pc-text"}
    assert "{{" not in text
