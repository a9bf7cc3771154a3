"""The playground in a browser: what a person does there, at both widths, light and dark, without an error."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.play import page as page_text
from penstock.play import save
from tiers import others_nightly

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

MOMENT = 90.0
"""Seconds that the page may take to answer on however busy a machine."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("play") / "play.html"
    save(path)
    return path.as_uri()


class Playground:
    """The page as a person sees it."""

    def __init__(self, browser: Any, url: str, width: int = 1400, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url)
        self.wait("document.body.dataset.updates > 0")

    def __enter__(self) -> Playground:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def wait(self, expression: str) -> None:
        """Waits until it is true. (The page's policy forbids what playwright's own waiting does there.)"""
        end = time.monotonic() + MOMENT
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"{expression} stays false"
            self.page.wait_for_timeout(10)

    def updates(self) -> int:
        return int(self.page.evaluate("document.body.dataset.updates"))

    def after(self, act: Any) -> None:
        """Acts, and waits until the page has answered."""
        before = self.updates()
        act()
        self.wait(f"document.body.dataset.updates > {before}")

    def drag(self, slider: str, value: float) -> None:
        self.after(
            lambda: self.page.locator(slider).evaluate(
                "(input, to) => { input.value = to; input.dispatchEvent(new Event('input', { bubbles: true })); }",
                value,
            )
        )

    def type(self, grid: str) -> None:
        self.after(lambda: self.page.fill("#grid", grid))

    @property
    def grid(self) -> str:
        return str(self.page.input_value("#grid"))

    @property
    def proof(self) -> str:
        return str(self.page.inner_text("#proof"))

    def makespans(self) -> dict[str, float]:
        rows = self.page.locator("#numbers tr").all()
        return {
            row.locator("th").inner_text(): float(row.locator("td").first.inner_text().split()[0]) for row in rows
        }


@pytest.mark.parametrize(
    ("width", "scheme"), others_nightly(product([1400, 400], ["light", "dark"]), [(1400, "light"), (400, "dark")])
)
def test_a_person_edits_drags_plans_and_comes_back(
    browser: Any, file: str, width: int, scheme: str, tmp_path: Path
) -> None:
    with Playground(browser, f"{file}#s=zb-h1", width, scheme) as play:
        page = play.page
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert play.proof.startswith("Proved: 96 ops")
        built = ps.build("zb-h1", 4, 8)
        assert play.grid == str(built)

        # A cell that is wrong is shown under an arrow, and the timelines stay.
        play.type(play.grid.replace("F0 I0", "I0 F0", 1))
        with pytest.raises(ps.ScheduleError) as refused:
            ps.check(ps.schedule.parse(play.grid))
        assert play.proof.startswith(str(refused.value))
        assert "^^" in play.proof
        assert "last grid that was right" in play.proof
        play.type(str(built).replace("F3 I3", "Fx I3", 1))
        line, arrow = play.proof.splitlines()[1:3]
        assert line[arrow.index("^") :].startswith("Fx")
        play.after(lambda: page.click("#reset"))
        assert play.grid == str(built)
        assert play.proof.startswith("Proved")

        # A late link: hinted beside frozen.
        play.drag("#links .slider:nth-child(3) input", 30)
        late = ps.Links({(2, 3): 30, (3, 2): 30})
        costs = ps.Costs.uniform(4, 10, 10, 10)
        expected = {
            each: ps.simulate(built, costs, links=late, dispatch=each).makespan for each in ("frozen", "hinted")
        }
        assert play.makespans() == pytest.approx(expected)
        assert expected["hinted"] < expected["frozen"]
        play.after(lambda: page.select_option("#dispatch", "auto"))
        assert play.makespans().popitem()[1] == ps.simulate(built, costs, links=late, dispatch="auto").makespan

        # A plan for it, which a link to the page brings back.
        page.click("#plan")
        play.wait("!document.getElementById('plan').disabled")
        play.wait("document.querySelector('#grid').value.startsWith('schedule planned')")
        play.wait("document.querySelector('#numbers td').textContent.startsWith('300')")
        assert "proved the shortest" in page.inner_text("#planned")
        planned = ps.schedule.parse(play.grid)
        ps.check(planned)
        assert ps.simulate(planned, costs, links=late).makespan == play.makespans()["frozen"] == 300
        play.wait("location.hash.includes('g=schedule%20planned')")
        grid, shown = play.grid, play.makespans()
        page.reload()
        play.wait("document.body.dataset.updates > 0")
        assert play.grid == grid
        assert play.makespans() == shown

        for kind in ("txt", "json", "csv", "svg"):
            with page.expect_download() as coming:
                page.click(f"[data-save={kind}]")
            coming.value.save_as(tmp_path / f"planned.{kind}")
        for kind in ("txt", "json", "csv"):
            loaded = ps.load(tmp_path / f"planned.{kind}")
            assert ps.passes.remove_communication(loaded).order == planned.order
        assert (tmp_path / "planned.svg").read_text().count("<title>") == 2 * planned.num_ops
        assert play.errors == []


def test_a_page_around_this_one_says_whether_it_is_dark(browser: Any, file: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with Playground(browser, file) as play:
        assert play.page.evaluate(ground) == "rgb(255, 255, 255)"
        play.after(lambda: play.page.evaluate("postMessage({ scheme: 'dark' })"))
        assert play.page.evaluate(ground) == "rgb(15, 21, 29)"
        play.after(lambda: play.page.evaluate("postMessage({ scheme: 'light' })"))
        assert play.page.evaluate(ground) == "rgb(255, 255, 255)"


def test_the_page_opens_with_a_late_link_and_tells_what_planning_saves(browser: Any, file: str) -> None:
    with Playground(browser, file) as play:
        late, costs = ps.Links({(1, 2): 30, (2, 1): 30}), ps.Costs.uniform(4, 10, 10, 10)
        frozen = ps.simulate(ps.build("zb-h1", 4, 8), costs, links=late).makespan
        assert play.makespans()["frozen"] == frozen
        play.wait("!document.getElementById('offer').hidden")
        said = play.page.inner_text("#saves")
        assert said.startswith(
            f"Messages between ranks 1 and 2 are 30 ms late. zb-h1 takes {frozen:g} ms with that, a plan "
        )
        play.after(lambda: play.page.click("#take"))
        planned = ps.simulate(ps.schedule.parse(play.grid), costs, links=late).makespan
        held = [
            max(ps.simulate(order, costs, links=late).peak_activations)
            for order in (ps.schedule.parse(play.grid), ps.build("zb-h1", 4, 8))
        ]
        assert f"a plan {planned:g}: {1 - planned / frozen:.0%} less" in said
        assert said.endswith("with at most {:g} activations on a rank instead of {:g}.".format(*held))
        assert play.page.is_hidden("#offer")
        play.after(lambda: play.page.click("h1 a"))  # the way back to the beginning
        assert play.makespans()["frozen"] == frozen
        assert play.errors == []


def test_a_page_of_the_site_leads_to_its_home(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "play.html").write_text(page_text(home="index.html"), encoding="utf-8")
    with Playground(browser, (tmp_path / "play.html").as_uri()) as play:
        assert play.page.get_attribute(".home", "href") == "index.html"


def test_ops_are_dragged_and_each_edit_is_undone(browser: Any, file: str) -> None:
    with Playground(browser, f"{file}#s=zb-h1&p=2&n=4") as play:
        built = play.grid
        row = next(line for line in built.splitlines() if line.startswith("rank 0"))
        ops = [cell for cell in row.split("|")[1].split() if cell != "."]
        box = play.page.locator("#chart").bounding_box()

        def drag(cell: str, ms: float) -> None:
            """Drags an op of rank 0 in the frozen run, where every op takes 10 ms, so far to the right."""
            run = ps.simulate(ps.schedule.parse(built), ps.Costs.uniform(2, 10, 10, 10))
            scale = (box["width"] - 76) / run.makespan
            x, y = box["x"] + 62 + scale * (run.rows[0][ops.index(cell)].start + 5), box["y"] + 52
            play.page.mouse.move(x, y)
            play.page.mouse.down()
            play.page.mouse.move(x + scale * ms, y, steps=4)
            play.after(play.page.mouse.up)
            play.wait("document.getElementById('chart').className.includes('moving') === false")

        drag("W0", 24)
        moved = [cell for cell in play.grid.splitlines()[2].split("|")[1].split() if cell != "."]
        assert moved.index("W0") == ops.index("W0") + 2
        play.after(lambda: play.page.click("#undo"))
        drag("I0", 24)
        assert "it needs I0" in play.proof
        assert play.page.locator("#marks mark").text_content() == "W0", "the bad cell is marked in the text"
        play.after(lambda: play.page.click("#undo"))
        assert play.proof.startswith("Proved")
        assert play.page.locator("#marks mark").count() == 0
        drag("W0", 24)
        play.after(lambda: play.page.keyboard.press("Control+z"))
        assert play.grid == built
        assert play.page.is_disabled("#undo")
        assert play.errors == []


def test_on_a_phone_the_picture_stays_beside_the_sliders(browser: Any, file: str) -> None:
    with Playground(browser, file, 400) as play:
        play.page.locator("#links").scroll_into_view_if_needed()
        chart, links = (play.page.locator(each).bounding_box() for each in ("#chart", "#links"))
        assert 0 <= chart["y"] < chart["y"] + 100 < links["y"] < 900


def test_an_op_and_its_cell_lead_to_each_other(browser: Any, file: str) -> None:
    with Playground(browser, f"{file}#s=1f1b&p=2&n=4") as play:
        page = play.page
        box = page.locator("#chart").bounding_box()
        play.after(lambda: page.mouse.click(box["x"] + 80, box["y"] + 52))
        selected = page.evaluate("grid.value.slice(grid.selectionStart, grid.selectionEnd)")
        assert selected == "F0"
        assert page.inner_text("#asked").startswith("forward of microbatch 0 in stage 0, rank 0")
        play.after(lambda: page.click("#later"))
        assert "comes before it" in play.proof
        assert "^^" in play.proof
        play.after(lambda: page.click("#earlier"))
        assert play.proof.startswith("Proved")
        assert play.errors == []


def test_a_schedule_goes_to_torch_with_its_messages_placed(browser: Any, file: str, tmp_path: Path) -> None:
    built, late = ps.build("zb", 4, 8, warmup=[7, 5, 3, 1]), ps.Links({(2, 3): 30})
    costs = ps.Costs.uniform(4, 10, 10, 10)
    with Playground(browser, f"{file}#s=zb&p=4&n=8&l=2>3:30,3>2:30") as play:
        for channel in ("nccl", "gloo"):
            if channel != "nccl":
                play.after(lambda: play.page.select_option("#channel", "gloo"))
            with play.page.expect_download() as coming:
                play.page.click("[data-save=csv]")
            coming.value.save_as(tmp_path / "zb.csv")
            placed = ps.passes.add_communication(built, costs, late, channels=channel)
            assert (tmp_path / "zb.csv").read_text() == ps.formats.to_torch_csv(placed, channels=channel)
            assert f'"zb.csv", loss_fn=loss_fn, channels="{channel}")' in play.page.inner_text("#python")
        assert ps.load(tmp_path / "zb.csv").order == placed.order
        play.wait("location.hash.includes('over=gloo')")
        assert play.errors == []


def test_warm_ups_are_dragged_and_never_rise(browser: Any, file: str) -> None:
    with Playground(browser, f"{file}#s=zb&p=4&n=8") as play:
        play.drag("#warmup .slider:nth-child(2) input", 9)
        assert play.page.locator("#warmup output").all_inner_texts() == ["7", "7", "3", "1"]
        assert play.grid == str(ps.build("zb", 4, 8, warmup=[7, 7, 3, 1]))
        assert play.errors == []


@pytest.mark.parametrize(
    "address",
    [
        "#p=zz&n=-3&s=nothing&t=1,2&l=9>9:x&d=odd",
        "#g=%E0%A4%A",
        "#g=rank%200%20%7C%20F0",
        "#p=1&n=1",
        "#s=chimera&p=3",
        "#s=zb&p=4&o.warmup=1,2,3,4",
    ],
)
def test_odd_addresses_open_a_page_that_says_what_is_wrong(browser: Any, file: str, address: str) -> None:
    with Playground(browser, file + address) as play:
        assert play.proof
        assert play.errors == []
        play.after(lambda: play.page.select_option("#name", "gpipe"))
        assert play.proof.startswith("Proved")


def test_large_schedules_are_followed(browser: Any, file: str) -> None:
    with Playground(browser, f"{file}#s=zb-h1&p=32&n=128") as play:
        play.drag("#links .slider:nth-child(3) input", 20)
        built = ps.build("zb-h1", 32, 128)
        late = ps.Links({(2, 3): 20, (3, 2): 20})
        costs = ps.Costs.uniform(32, 10, 10, 10)
        assert play.makespans()["frozen"] == ps.simulate(built, costs, links=late).makespan
        assert play.errors == []
