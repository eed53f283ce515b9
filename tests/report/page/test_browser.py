"""The page and the live page in Chromium: no error, no request, both themes, and what a reader does with it."""

import json
import re
import threading
from pathlib import Path

import pytest

from brimful.report.page.live import LivePage, LiveServer
from brimful.report.page.report import Report
from brimful.report.run_record import RunRecord
from tests.report.chromium import Chromium, Page, chromium_path, contrast, luminance
from tests.report.fake_runs import step_event

from .rich_runs import rich_run

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="needs Chromium")

VISIBLE_CHARTS = "[...document.querySelectorAll('figure.chart .plot')].filter(plot => plot.offsetParent).length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    return written(tmp_path_factory.mktemp("runs"), "one")


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> str:
    return written(tmp_path_factory.mktemp("runs"), "one", "other", "third")


def written(folder: Path, *names: str) -> str:
    runs = [RunRecord(rich_run(folder / name)) for name in names]
    (folder / "report.html").write_text(Report(runs).html(), encoding="utf-8")
    return (folder / "report.html").as_uri()


def opened(browser: Chromium, url: str, **values) -> Page:
    page = browser.page(**values)
    page.open(url)
    return page


def place(page: Page, selector: str) -> tuple[float, float]:
    """The middle of an element, in the window."""
    page.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = page.run(f"(() => {{const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]}})()")  # fmt: skip
    return tuple(box)


# ---- The saved page


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_opens_without_an_error_and_asks_for_nothing(browser, file, dark):
    page = opened(browser, file, dark=dark)
    assert page.run(VISIBLE_CHARTS) == 13  # the timeline has no plot
    assert page.errors == [] and page.requests == [file]


def test_several_runs_open_without_an_error_and_ask_for_nothing(browser, several):
    page = opened(browser, several)
    assert page.run(VISIBLE_CHARTS) >= 9
    assert page.errors == [] and page.requests == [several]


def test_curves_are_drawn_with_a_size(browser, file):
    page = opened(browser, file)
    boxes = page.run("[...document.querySelectorAll('#chart-memory .pane svg path.line')].map(path => {const box = path.getBoundingClientRect(); return [box.width, box.height]})")  # fmt: skip
    assert len(boxes) == 2 and all(width > 500 for width, _ in boxes)


@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_follows_the_system(browser, file, dark):
    page = opened(browser, file, dark=dark)
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) < 0.1) is dark


def test_the_button_changes_the_theme_and_back(browser, file):
    page = opened(browser, file)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.run("document.getElementById('theme').click()")
    assert luminance(page.run(ground)) < 0.1
    page.run("document.getElementById('theme').click()")
    assert page.run(ground) == light


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_curves_stand_out(browser, file, dark):
    """WCAG: 4.5 to 1 for text, 3 to 1 for lines."""
    page = opened(browser, file, dark=dark)
    grounds = [page.run(f"getComputedStyle(document.querySelector('{one}')).backgroundColor") for one in ("body", "figure.chart")]  # fmt: skip
    texts = (
        "body",
        "h1",
        ".facts",
        ".tile .small",
        "figcaption p",
        ".plot .x",
        "th",
        ".state",
        "td.soft",
        ".names .predicted",
    )
    for selector in texts:
        colour = page.run(f"getComputedStyle(document.querySelector('{selector}')).color")
        assert min(contrast(colour, ground) for ground in grounds) >= 4.5, selector
    for number in range(6):
        colour = page.run(f"(() => {{const one = document.createElement('i'); one.style.color = 'var(--c{number})'; document.body.append(one); const colour = getComputedStyle(one).color; one.remove(); return colour}})()")  # fmt: skip
        assert min(contrast(colour, ground) for ground in grounds) >= 3, number


def test_the_pointer_shows_the_values_under_it(browser, file):
    page = opened(browser, file)
    page.move(*place(page, "#chart-memory .pane"))
    tip = page.run("document.querySelector('#chart-memory .tip').innerText")
    assert re.search(r"run time .*\n.*reserved\s+16\.1 GiB\s+allocated\s+15\.2 GiB", tip)
    page.move(1, 1)
    assert page.run("document.querySelectorAll('.tip, .cross, .pin').length") == 0


def test_charts_of_one_axis_share_the_line_under_the_pointer(browser, file):
    page = opened(browser, file)
    page.move(*place(page, "#chart-memory .pane"))
    assert page.run("!!document.querySelector('#chart-speed .cross') && !document.querySelector('#chart-loss .cross')")


def test_the_keyboard_reads_values_too(browser, file):
    page = opened(browser, file)
    page.run("document.querySelector('#chart-rate .pane').focus()")
    page.key("Home")
    page.key("ArrowRight")
    assert page.run("document.querySelector('[role=status]').textContent").startswith("step 2")


def test_the_loss_can_be_shown_on_a_logarithmic_scale(browser, file):
    page = opened(browser, file)
    shown = "[...document.querySelectorAll('#chart-loss .view')].filter(view => view.offsetParent).map(view => view.dataset.scale)"
    assert page.run(shown) == ["linear"]
    page.run("document.getElementById('loss-scale-log').click()")
    assert page.run(shown) == ["log"]


def test_the_losses_of_several_runs_can_be_shown_by_rows(browser, several):
    page = opened(browser, several)
    page.run("document.getElementById('loss-x-rows').click()")
    shown = "[...document.querySelectorAll('#chart-loss .view')].filter(view => view.offsetParent).map(view => [view.dataset.x, view.dataset.scale])"
    assert page.run(shown) == [["rows", "linear"]]


@pytest.mark.parametrize("name", ["file", "several"])
def test_a_phone_needs_no_scrolling_sideways(browser, name, request):
    page = opened(browser, request.getfixturevalue(name), width=390, height=800)
    assert page.run("document.documentElement.scrollWidth") == 390
    assert page.run("Math.max(...[...document.querySelectorAll('.plot .x span')].filter(one => one.offsetParent).map(one => one.getBoundingClientRect().right))") <= 390  # fmt: skip


def test_without_scripts_everything_but_the_read_out_is_there(browser, file):
    page = opened(browser, file, scripts=False)
    nodes = page.send("DOM.getDocument", depth=-1)
    assert nodes and page.errors == []
    size = page.send("Page.getLayoutMetrics")["cssContentSize"]
    assert size["height"] > 3000


def test_it_prints_light_and_whole(browser, file, tmp_path):
    page = opened(browser, file, dark=True)
    page.send("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert luminance(page.run("getComputedStyle(document.body).backgroundColor")) > 0.9
    assert page.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    page.paper(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_html_in_a_run_does_nothing(browser, tmp_path):
    nasty = (
        "</script><script>window.hacked = 1</script><img src='http://example.invalid/x' onerror='window.hacked = 2'>"
    )
    folder = rich_run(tmp_path / "a<b>", request={"task": nasty, "options": {"prompt": nasty}}, plan_values={"device_name": nasty, "warnings": [nasty]})  # fmt: skip
    (folder / "report.html").write_text(Report([RunRecord(folder)]).html(), encoding="utf-8")
    page = opened(browser, (folder / "report.html").as_uri())
    assert page.run("window.hacked") is None and page.errors == [] and len(page.requests) == 1
    assert nasty in page.run("document.body.innerText")


# ---- The live page


@pytest.fixture
def live(tmp_path):
    """A run that trains, and its server."""
    folder = rich_run(tmp_path / "live", running=True, done=100)
    with LiveServer(LivePage([RunRecord(folder)], every_s=0.1)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield folder, server
        finally:
            server.shutdown()
            thread.join(10)


def append(folder: Path, *events) -> None:
    with (folder / "events.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps({"event": event["event"], "time": "2026-01-31T09:10:00.000Z", **event}) + "\n")


def test_a_live_page_shows_a_new_step_by_itself(browser, live):
    folder, server = live
    page = opened(browser, server.url)
    assert "step 100 of 300" in page.run("document.querySelector('.lead').textContent")
    append(folder, step_event(101, steps=300))
    page.wait_for("document.querySelector('.lead').textContent.includes('step 101 of 300')")
    assert page.errors == [] and page.run(VISIBLE_CHARTS) == 13
    assert all(request.startswith(server.url) for request in page.requests)


def test_a_live_page_keeps_what_the_reader_has_chosen(browser, live):
    folder, server = live
    page = opened(browser, server.url)
    page.run(
        "document.getElementById('loss-scale-log').click(); document.querySelector('#learning details').open = true"
    )
    append(folder, step_event(101, steps=300))
    page.wait_for("document.querySelector('.lead').textContent.includes('step 101 of 300')")
    assert page.run("document.getElementById('loss-scale-log').checked && document.querySelector('#learning details').open")  # fmt: skip


def test_a_live_page_does_not_replace_what_is_under_the_pointer(browser, live):
    folder, server = live
    page = opened(browser, server.url)
    page.move(*place(page, "#chart-memory .pane"))
    append(folder, step_event(101, steps=300))
    page.wait_for("document.querySelector('.lead').textContent.includes('step 101 of 300')")
    assert page.run("!!document.querySelector('#chart-memory .tip')")


def test_a_live_page_says_when_its_server_has_gone(browser, live):
    _, server = live
    page = opened(browser, server.url)
    page.wait_for("Number(document.documentElement.dataset.updates) > 0")
    server.shutdown()
    server.server_close()
    page.wait_for("!document.getElementById('live').hidden")
    assert "does not answer" in page.run("document.getElementById('live').textContent")


@pytest.mark.parametrize("dark", [False, True])
def test_a_live_page_has_both_themes(browser, live, dark):
    page = opened(browser, live[1].url, dark=dark)
    assert (luminance(page.run("getComputedStyle(document.body).backgroundColor")) < 0.1) is dark
    assert page.errors == []
