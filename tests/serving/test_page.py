"""The chat page in Chromium, under the strictest policy that it promises to work with."""

import json
import re
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.report.chromium import Chromium, Page, chromium_path, contrast, luminance
from tests.tasks.tiny import save
from tests.tasks.tiny_causal import make_causal

from .scripted_server import GiB, Reply, ScriptedServer, page, policy

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="needs Chromium")

IDLE = "document.getElementById('stop').hidden && [...document.querySelectorAll('.message')].length > 0"
NASTY = "<img src='http://example.invalid/x' onerror='window.hacked = 1'><script>window.hacked = 2</script><b>bold</b>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def tabs(browser):
    """Opens a page and waits until it knows its server. Closed after the test: a tab behind another draws nothing."""
    pages: list[Page] = []

    def opened(server: ScriptedServer, *, language: str = "en-US", path: str = "", **values) -> Page:
        tab = browser.page(**values)
        pages.append(tab)
        tab.send("Emulation.setUserAgentOverride", userAgent="Chromium", acceptLanguage=language)
        tab.send("Page.bringToFront")
        tab.open(server.url + path)
        if server.token is None:
            tab.wait_for("document.getElementById('device').textContent !== ''")
        return tab

    yield opened
    for tab in pages:
        tab.close()


def write(tab: Page, text: str) -> None:
    tab.run("document.getElementById('question').focus()")
    tab.send("Input.insertText", text=text)


def ask(tab: Page, text: str) -> None:
    """Asks, and waits for the end of the answer."""
    write(tab, text)
    tab.key("Enter")
    tab.wait_for(IDLE)


def click(tab: Page, selector: str) -> None:
    tab.run(f"document.querySelector({json.dumps(selector)}).click()")


def button(tab: Page, label: str) -> None:
    """Clicks the last button with this name."""
    found = f"[...document.querySelectorAll('button, summary')].filter(one => (one.ariaLabel ?? one.textContent) === {json.dumps(label)}).at(-1)"
    tab.wait_for(f"!!{found}")
    tab.run(f"{found}.click()")


def shown(tab: Page, selector: str) -> str:
    return tab.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.innerText).join('\\n')")


def answers(tab: Page) -> str:
    return shown(tab, ".assistant > .text")


def questions(tab: Page) -> str:
    return shown(tab, ".user > .text")


def sent(server: ScriptedServer, place: int = -1) -> list[str]:
    return [f"{one['role']}: {one['content']}" for one in server.bodies[place]["messages"]]


def refusal(status: int, message: str = "no", code: str | None = None, **headers: str) -> Reply:
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return Reply(status=status, error=error, headers={name.replace("_", "-"): value for name, value in headers.items()})


class Gated:
    """Answers that stop before their last piece until `open()`."""

    def __init__(self, *pieces: str) -> None:
        self.pieces, self.gate = pieces, threading.Event()

    def __call__(self, body) -> Reply:
        return Reply(pieces=self.pieces, gate=self.gate)

    def open(self) -> None:
        self.gate.set()


# ---- A conversation


def test_a_question_gets_its_answer_without_an_error_and_without_a_request_elsewhere(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "What colour is the sky?")
        assert questions(tab) == "What colour is the sky?" and answers(tab) == "It is blue."
        assert tab.errors == []
        assert {request.removeprefix(server.url) for request in tab.requests if not request.startswith("data:")} == {
            "",
            "status",
            "v1/chat/completions",
        }


def test_the_model_is_shown_the_whole_conversation(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "One?")
        ask(tab, "Two?")
        assert sent(server) == ["user: One?", "assistant: It is blue.", "user: Two?"]
        assert server.bodies[-1]["stream"] and server.bodies[-1]["model"] == "runs/chat-tiny"


def test_an_answer_appears_while_it_is_written(tabs):
    gated = Gated("It is ", "blue.")
    with ScriptedServer(gated) as server:
        tab = tabs(server)
        write(tab, "Sky?")
        tab.key("Enter")
        tab.wait_for("document.querySelector('.assistant > .text').innerText.trim() === 'It is'")
        gated.open()
        tab.wait_for(IDLE)
        assert answers(tab) == "It is blue."


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_stop_ends_the_request_and_keeps_what_has_come(tabs, by):
    with ScriptedServer(Gated("It is ", "blue.")) as server:
        tab = tabs(server)
        write(tab, "Sky?")
        tab.key("Enter")
        tab.wait_for("document.querySelector('.assistant > .text')?.innerText.trim() === 'It is'")
        click(tab, "#stop") if by == "button" else tab.key("Escape")
        tab.wait_for(IDLE)
        assert server.cancelled.wait(30)
        assert answers(tab).strip() == "It is" and "Stopped" in shown(tab, ".assistant .foot")
        assert "≈ 1 token" in shown(tab, ".assistant .foot")  # the server did not come to count them
        server.reply = lambda body: Reply()
        ask(tab, "And now?")
        assert answers(tab).endswith("It is blue.") and tab.errors == []


def test_asking_again_replaces_the_answer(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "Sky?")
        server.reply = lambda body: Reply(pieces=["Grey."])
        button(tab, "Ask again")
        tab.wait_for("document.querySelector('.assistant > .text').innerText === 'Grey.'")
        assert server.bodies[0]["messages"] == server.bodies[1]["messages"]


def test_the_last_question_can_be_edited_and_sent_again(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "First?")
        ask(tab, "Skyy?")
        button(tab, "Edit what you wrote")
        tab.wait_for("document.activeElement.matches('.editor textarea')")
        tab.run("document.activeElement.value = 'Sky?'")
        tab.key("Enter")
        tab.wait_for(f"document.querySelectorAll('.editor').length === 0 && {IDLE}")
        assert questions(tab) == "First?\nSky?"
        assert sent(server) == ["user: First?", "assistant: It is blue.", "user: Sky?"]


def test_a_question_without_an_answer_is_not_shown_to_the_model(tabs):
    with ScriptedServer(lambda body: refusal(500)) as server:
        tab = tabs(server)
        ask(tab, "One?")
        server.reply = lambda body: Reply()
        ask(tab, "Two?")
        assert sent(server) == ["user: Two?"]


def test_thoughts_are_folded_away_and_not_sent_back(tabs):
    with ScriptedServer(lambda body: Reply(pieces=["<think>Hm, ", "sky.</think>\n\n", "Blue."])) as server:
        tab = tabs(server)
        ask(tab, "Sky?")
        assert answers(tab) == "Blue."
        assert tab.run("document.querySelector('.thought div').textContent") == "Hm, sky."
        ask(tab, "Sure?")
        assert sent(server) == ["user: Sky?", "assistant: Blue.", "user: Sure?"]


# ---- Keys


def test_shift_enter_breaks_the_line(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        write(tab, "one")
        for kind in ("keyDown", "keyUp"):
            tab.send("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", modifiers=8, windowsVirtualKeyCode=13, text="\r")  # fmt: skip
        write(tab, "two")
        assert tab.run("document.getElementById('question').value") == "one\ntwo" and server.requests == []
        ask(tab, "")
        assert sent(server) == ["user: one\ntwo"]


def test_the_enter_that_ends_a_chinese_word_does_not_send(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        tab.run("document.getElementById('question').focus()")
        tab.send("Input.imeSetComposition", text="tian", selectionStart=4, selectionEnd=4)
        tab.key("Enter")
        assert server.requests == [] and questions(tab) == ""
        tab.send("Input.insertText", text="天")
        tab.key("Enter")
        tab.wait_for(IDLE)
        assert sent(server) == ["user: 天"]


def test_enter_on_a_touch_keyboard_breaks_the_line(tabs):
    """It has no Shift+Enter."""
    with ScriptedServer() as server:
        tab = tabs(server, width=360, height=740)
        tab.send("Emulation.setTouchEmulationEnabled", enabled=True)
        tab.wait_for("matchMedia('(pointer: coarse)').matches")
        write(tab, "one")
        for kind in ("keyDown", "keyUp"):
            tab.send("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")  # fmt: skip
        assert tab.run("document.getElementById('question').value") == "one\n"
        click(tab, "#send")
        tab.wait_for(IDLE)
        assert sent(server) == ["user: one"]


def test_nothing_is_sent_while_an_answer_is_written(tabs):
    gated = Gated("It is ", "blue.")
    with ScriptedServer(gated) as server:
        tab = tabs(server)
        write(tab, "Sky?")
        tab.key("Enter")
        write(tab, "Next?")
        tab.key("Enter")
        gated.open()
        tab.wait_for(IDLE)
        assert len(server.requests) == 1 and tab.run("document.getElementById('question').value") == "Next?"


def test_arrow_up_edits_the_last_question(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "Sky?")
        tab.run("document.getElementById('question').focus()")
        tab.key("ArrowUp")
        assert tab.run("document.querySelector('.editor textarea').value") == "Sky?"


# ---- What is kept


def test_a_reload_keeps_the_conversation_and_the_draft(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "Sky?")
        write(tab, "And the")
        tab.open(server.url)
        assert questions(tab) == "Sky?" and answers(tab) == "It is blue."
        assert tab.run("document.getElementById('question').value") == "And the"
        ask(tab, " sea?")
        assert sent(server) == ["user: Sky?", "assistant: It is blue.", "user: And the sea?"]
        assert tab.errors == []


def test_a_reload_in_the_middle_of_an_answer_keeps_what_has_come(tabs):
    with ScriptedServer(Gated("It is ", "blue.")) as server:
        tab = tabs(server)
        write(tab, "Sky?")
        tab.key("Enter")
        tab.wait_for("document.querySelector('.assistant > .text')?.innerText.trim() === 'It is'")
        tab.open(server.url)
        assert answers(tab).strip() == "It is" and "incomplete" in shown(tab, ".assistant").lower()


def test_several_conversations_are_kept_and_opened(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "First?")
        click(tab, "#new")
        ask(tab, "Second?")
        assert shown(tab, "#list .name") == "Second?\nFirst?" and sent(server) == ["user: Second?"]
        button(tab, "First?")
        assert questions(tab) == "First?"
        tab.open(server.url)
        assert questions(tab) == "First?"


def test_an_answer_goes_on_while_another_conversation_is_open(tabs):
    gated = Gated("It is ", "blue.")
    with ScriptedServer(gated) as server:
        tab = tabs(server)
        write(tab, "First?")
        tab.key("Enter")
        click(tab, "#new")
        gated.open()
        tab.wait_for("document.querySelectorAll('#list .busy').length === 0")
        button(tab, "First?")
        assert answers(tab) == "It is blue."


def test_a_deleted_conversation_is_gone_and_can_be_brought_back(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "Sky?")
        button(tab, "Delete “Sky?”")
        assert tab.run("Object.keys(localStorage).length") == 0 and shown(tab, "#list .name") == ""
        button(tab, "Undo")
        button(tab, "Sky?")
        assert answers(tab) == "It is blue."


def test_a_damaged_conversation_does_no_harm(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "Sky?")
        tab.run("localStorage.setItem('brimful:conversation:x', '{\"messages'); localStorage.setItem('brimful:conversation:y', '7'); localStorage.setItem('brimful:settings', '{')")  # fmt: skip
        tab.open(server.url)
        assert answers(tab) == "It is blue." and shown(tab, "#list .name") == "Sky?" and tab.errors == []


# ---- Text stays text


def test_html_stays_text_everywhere(tabs):
    pieces = [
        NASTY[:20],
        NASTY[20:],
        "\n\n```html\n",
        NASTY,
        "\n```\n\n- ",
        NASTY,
        "\n\n|",
        NASTY,
        "|\n|-|\n|",
        NASTY,
        "|",
    ]
    with ScriptedServer(lambda body: Reply(pieces=pieces), model=NASTY) as server:
        tab = tabs(server)
        ask(tab, NASTY)
        assert questions(tab) == NASTY and answers(tab).count(NASTY) == 5
        server.reply = lambda body: refusal(400, NASTY)
        ask(tab, "Again")
        assert NASTY in shown(tab, ".problem")
        assert tab.run("document.querySelectorAll('#app img, #app script, #app b:not(#model)').length") == 0
        assert tab.run("window.hacked") is None
        assert all(request.startswith((server.url, "data:")) for request in tab.requests)


@pytest.mark.parametrize(
    "text", ["[x](javascript:alert(1))", "[x](data:text/html,hi)", "[x](/status)", "![x](javascript:alert(1))"]
)
def test_only_web_addresses_become_links(tabs, text):
    with ScriptedServer(lambda body: Reply(pieces=[text])) as server:
        tab = tabs(server)
        ask(tab, "Link?")
        assert answers(tab) == text and tab.run("document.querySelectorAll('#thread a').length") == 0


MARKDOWN = [
    ("**a** and *b* and `c`", "p(strong(a) and em(b) and code(c))"),
    ("**重点：**文字", "p(strong(重点：)文字)"),
    ("***a***, ~~b~~, 2 * 3 * 4, snake_case_name, a ** b", "p(strong(em(a)), del(b), 2 * 3 * 4, snake_case_name, a ** b)"),
    ("`**a**` \\*b\\* **open", "p(code(**a**) *b* **open)"),
    ("one\ntwo\n\nthree", "p(one\ntwo)p(three)"),
    ("# A\n\n### B", "h3(A)h5(B)"),
    ("Steps:\n1. a\n2. b\n   - c\n   - d\n\n3. e", "p(Steps:)ol(li(p(a))li(p(b)ul(li(p(c))li(p(d))))li(p(e)))"),
    ("It was\n1987. A year.", "p(It was\n1987. A year.)"),
    ("- a\n\n  more\n- b\n\nend", "ul(li(p(a)p(more))li(p(b)))p(end)"),
    ("> a\n> - b", "blockquote(p(a)ul(li(p(b))))"),
    ("|a|b|\n|-|-|\n|1|`x`|", "div(table(thead(tr(th(a)th(b)))tbody(tr(td(1)td(code(x))))))"),
    ("```py\nx = 1\n\ny\n```\nend", "div(header(span(py)button())pre(code(x = 1\n\ny)))p(end)"),
    ("1. a\n   ```\n   x\n   ```\n2. b", "ol(li(p(a)div(header(span()button())pre(code(x))))li(p(b)))"),
    ("a\n\n---\n\nb", "p(a)hr()p(b)"),
    ("See https://example.com/a_b_c. Or [this](https://example.com/).", "p(See a(https://example.com/a_b_c). Or a(this).)"),
    ("![a cat](https://example.com/cat.png)", "p(a(a cat))"),
]  # fmt: skip
OUTLINE = """(() => {
  const outline = node => node.nodeType === 3 ? node.data : node.tagName === "svg" ? "" : `${node.tagName.toLowerCase()}(${[...node.childNodes].map(outline).join("")})`;
  return [...document.querySelector(".assistant:last-child > .text").childNodes].map(outline).join("");
})()"""


@pytest.mark.parametrize("at_once", [True, False], ids=["whole", "token by token"])
def test_markdown_becomes_nodes_the_same_way_whole_and_in_pieces(tabs, at_once):
    place = iter(MARKDOWN)
    with ScriptedServer(lambda body: Reply(pieces=[next(place)[0]] if at_once else list(next(place)[0]))) as server:
        tab = tabs(server)
        for text, outline in MARKDOWN:
            ask(tab, "Next?")
            assert tab.run(OUTLINE) == outline, text
        assert tab.errors == []


@pytest.mark.parametrize("text", ["*a " * 20_000, ">" * 20_000, "[" * 20_000, "- " * 5_000 + "x", "`" * 9_999 + " a"])
def test_hostile_markdown_neither_hangs_nor_breaks_the_page(tabs, text):
    with ScriptedServer(lambda body: Reply(pieces=[text])) as server:
        tab = tabs(server)
        ask(tab, "Next?")
        assert tab.run("document.querySelector('.assistant .problem')") is None and tab.errors == []
        server.reply = lambda body: Reply()
        ask(tab, "And now?")
        assert answers(tab).endswith("It is blue.")


def test_what_is_finished_is_not_drawn_again_while_the_answer_grows(tabs):
    gated = Gated("One.\n\n", "Two")
    with ScriptedServer(gated) as server:
        tab = tabs(server)
        write(tab, "Count")
        tab.key("Enter")
        tab.wait_for("!!document.querySelector('.assistant p') && (document.querySelector('.assistant p').mine = true)")
        gated.open()
        tab.wait_for(IDLE)
        assert tab.run("document.querySelector('.assistant p').mine && document.querySelectorAll('.assistant p').length") == 2  # fmt: skip


# ---- Copy, export, settings


def test_copies_are_what_the_model_wrote(tabs, browser):
    text = "Use **this**:\n\n```py\nx = 1\n```"
    with ScriptedServer(lambda body: Reply(pieces=[text])) as server:
        tab = tabs(server)
        browser.send("Browser.grantPermissions", origin=server.url, permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])  # fmt: skip
        ask(tab, "How?")
        button(tab, "Copy code")
        tab.wait_for("document.getElementById('announce').textContent === 'Copied'")
        assert tab.run("navigator.clipboard.readText()") == "x = 1"
        tab.run("document.getElementById('announce').textContent = ''")
        button(tab, "Copy")
        tab.wait_for("document.getElementById('announce').textContent === 'Copied'")
        assert tab.run("navigator.clipboard.readText()") == text


def test_a_conversation_is_exported_as_json_and_markdown(tabs, tmp_path):
    with ScriptedServer() as server:
        tab = tabs(server)
        tab.send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        ask(tab, "天空 a/b?")
        click(tab, "#as-json")
        click(tab, "#as-markdown")
        json_file, markdown_file = tmp_path / "天空 a b.json", tmp_path / "天空 a b.md"
        for file in (json_file, markdown_file):
            wait_until(file.exists)
        messages = json.loads(json_file.read_text(encoding="utf-8"))["messages"]
        assert [(one["role"], one["content"]) for one in messages] == [("user", "天空 a/b?"), ("assistant", "It is blue.")]  # fmt: skip
        assert messages[1]["usage"]["completion_tokens"] == 3
        assert markdown_file.read_text(encoding="utf-8") == "# 天空 a/b?\n\n## You\n\n天空 a/b?\n\n## chat-tiny\n\nIt is blue.\n"  # fmt: skip


def wait_until(fact) -> None:
    for _ in range(600):
        if fact():
            return
        threading.Event().wait(0.05)
    raise TimeoutError


def settle(tab: Page, **values: str) -> None:
    click(tab, "#open-settings")
    for name, value in values.items():
        tab.run(f"document.querySelector('#settings [name={name}]').focus()")
        tab.run("document.activeElement.select()")
        tab.send("Input.insertText", text=value)
    tab.run("document.getElementById('settings').close()")


def test_settings_reach_the_server_and_survive_a_reload(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        settle(tab, system="Be brief.", temperature="0.7", top_p="0.9", max_tokens="64", seed="3", stop="END\n\\n\\n")
        tab.open(server.url)
        ask(tab, "Sky?")
        options = {name: server.bodies[0].get(name) for name in ("temperature", "top_p", "max_tokens", "seed", "stop")}
        assert options == {"temperature": 0.7, "top_p": 0.9, "max_tokens": 64, "seed": 3, "stop": ["END", "\n\n"]}
        assert sent(server)[0] == "system: Be brief."


def test_what_is_not_set_is_left_to_the_server(tabs):
    with ScriptedServer() as server:
        ask(tabs(server), "Sky?")
        assert set(server.bodies[0]) == {"model", "messages", "stream", "stream_options"}


def test_a_setting_out_of_range_is_marked_and_not_sent(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        settle(tab, temperature="0.5", max_tokens="0")
        assert tab.run("document.querySelector('#settings [name=max_tokens]').matches(':invalid')")
        ask(tab, "Sky?")
        assert server.bodies[0]["temperature"] == 0.5 and "max_tokens" not in server.bodies[0]


# ---- Scrolling

LONG = [f"Line {number}.\n\n" for number in range(80)]
DISTANCE = "(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.getElementById('log'))"


def test_the_view_follows_the_answer(tabs):
    with ScriptedServer(lambda body: Reply(pieces=LONG, every_s=0.002)) as server:
        tab = tabs(server)
        ask(tab, "Count")
        tab.wait_for(f"{DISTANCE} < 2")
        assert tab.run("document.getElementById('latest').hidden")


def test_the_view_does_not_fight_the_reader(tabs):
    gated = Gated(*LONG, "The end.")
    with ScriptedServer(gated) as server:
        tab = tabs(server)
        write(tab, "Count")
        tab.key("Enter")
        tab.wait_for("document.querySelectorAll('.assistant p').length === 80")
        tab.wait_for(f"{DISTANCE} < 2")
        tab.send("Input.dispatchMouseEvent", type="mouseWheel", x=700, y=400, deltaX=0, deltaY=-200)
        tab.wait_for(f"{DISTANCE} > 150")
        top = tab.run("document.getElementById('log').scrollTop")
        gated.open()
        tab.wait_for(IDLE)
        assert abs(tab.run("document.getElementById('log').scrollTop") - top) < 1
        click(tab, "#latest")
        tab.wait_for(f"{DISTANCE} < 2")


# ---- What can go wrong


def test_a_token_is_asked_for_and_kept_as_long_as_the_tab(tabs):
    with ScriptedServer(token="secret") as server:
        tab = tabs(server)
        tab.wait_for("document.getElementById('token').open")
        tab.send("Input.insertText", text="wrong")
        button(tab, "Continue")
        tab.wait_for("document.getElementById('token').open && !document.getElementById('token-wrong').hidden")
        tab.send("Input.insertText", text="secret")
        button(tab, "Continue")
        tab.wait_for("document.getElementById('device').textContent !== ''")
        ask(tab, "Sky?")
        tab.open(server.url)
        tab.wait_for("document.getElementById('device').textContent !== ''")
        assert answers(tab) == "It is blue." and "secret" not in tab.run("JSON.stringify(localStorage)")


def test_a_message_asks_for_the_token_that_was_refused(tabs):
    with ScriptedServer(token="secret") as server:
        tab = tabs(server)
        tab.wait_for("document.getElementById('token').open")
        button(tab, "Cancel")
        write(tab, "Sky?")
        tab.key("Enter")
        tab.wait_for("document.getElementById('token').open")
        button(tab, "Cancel")
        tab.wait_for("!!document.querySelector('.problem')")
        assert "needs a token" in shown(tab, ".problem")


def test_a_token_in_the_address_is_taken_and_removed(tabs):
    with ScriptedServer(token="se/cret") as server:
        tab = tabs(server, path="#token=se%2Fcret")
        tab.wait_for("document.getElementById('device').textContent !== ''")
        assert tab.run("location.href") == server.url


def test_a_busy_server_is_asked_again(tabs):
    replies = iter([refusal(429, Retry_After="1"), Reply()])
    with ScriptedServer(lambda body: next(replies)) as server:
        tab = tabs(server)
        write(tab, "Sky?")
        tab.key("Enter")
        tab.wait_for(
            "document.querySelector('.problem')?.innerText.includes('The server is busy. Trying again in 1 s.')"
        )
        tab.wait_for(IDLE)
        assert answers(tab) == "It is blue." and shown(tab, ".problem") == ""


def try_now(tab: Page, server: ScriptedServer, attempt: int) -> None:
    """Until the attempt has arrived: a click while one is under way does nothing."""
    while len(server.requests) < attempt:
        tab.run("[...document.querySelectorAll('.problem.wait button')].forEach(one => one.click())")


def test_waiting_for_a_busy_server_can_be_stopped_or_cut_short(tabs):
    with ScriptedServer(lambda body: refusal(429, Retry_After="60")) as server:
        tab = tabs(server)
        write(tab, "Sky?")
        tab.key("Enter")
        for attempt in range(2, 4):
            try_now(tab, server, attempt)
        tab.wait_for("!!document.querySelector('.problem')")
        click(tab, "#stop")
        tab.wait_for(IDLE)
        assert "Stopped" in shown(tab, ".assistant .foot")


def test_a_server_that_stays_busy_is_given_up(tabs):
    with ScriptedServer(lambda body: refusal(429, Retry_After="60")) as server:
        tab = tabs(server)
        write(tab, "Sky?")
        tab.key("Enter")
        for attempt in range(2, 6):
            try_now(tab, server, attempt)
        tab.wait_for(IDLE)
        assert "still busy after 5 attempts" in shown(tab, ".problem")


def test_a_server_that_is_gone_is_reported_and_found_again(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "Sky?")
    ask(tab, "Sea?")
    assert "The server does not answer." in shown(tab, ".problem")
    tab.wait_for("document.getElementById('note').innerText.startsWith('The server does not answer.')")
    with ScriptedServer(port=server.server_port, uptime_s=1.0) as server:
        button(tab, "Try again")
        tab.wait_for(f"document.querySelectorAll('.problem').length === 0 && {IDLE}")
        tab.wait_for("document.getElementById('toast').innerText.includes('The server was restarted.')")
        assert sent(server) == ["user: Sky?", "assistant: It is blue.", "user: Sea?"]
        assert tab.run("document.getElementById('note').hidden")


def test_an_answer_that_breaks_off_is_called_incomplete(tabs):
    with ScriptedServer(lambda body: Reply(pieces=["It is"], breaks_off=True)) as server:
        tab = tabs(server)
        ask(tab, "Sky?")
        assert answers(tab) == "It is" and "The connection was lost" in shown(tab, ".problem")
        server.reply = lambda body: Reply()
        button(tab, "Try again")
        tab.wait_for("document.querySelector('.assistant > .text').innerText === 'It is blue.'")
        assert sent(server) == ["user: Sky?"]


def test_an_error_in_the_stream_is_shown_in_the_servers_words(tabs):
    error = {"message": "Out of memory even with one request.", "type": "server_error", "code": None}
    with ScriptedServer(lambda body: Reply(pieces=["It"], error=error)) as server:
        tab = tabs(server)
        ask(tab, "Sky?")
        assert "Out of memory even with one request." in shown(tab, ".problem")


def test_after_a_prompt_that_is_too_long_the_earlier_turns_can_be_left_out(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "One?")
        server.reply = lambda body: Reply() if len(body["messages"]) == 1 else refusal(400, "3012 tokens, and the model reads 2048", "context_length_exceeded")  # fmt: skip
        ask(tab, "Two?")
        assert "longer than the model can read" in shown(tab, ".problem") and "3012 tokens" in shown(tab, ".problem")
        button(tab, "Ask without the earlier turns")
        tab.wait_for(f"document.querySelectorAll('.problem').length === 0 && {IDLE}")
        assert sent(server) == ["user: Two?"] and "does not see what is above" in shown(tab, ".cut")


def test_a_single_question_that_is_too_long_is_to_be_shortened(tabs):
    with ScriptedServer(lambda body: refusal(400, code="context_length_exceeded")) as server:
        tab = tabs(server)
        ask(tab, "One?")
        assert "Shorten it." in shown(tab, ".problem") and tab.run("document.querySelectorAll('.problem button').length") == 0  # fmt: skip


# ---- Kinds of models


def test_a_model_of_questions_gets_only_the_last_one_and_the_page_says_so(tabs):
    with ScriptedServer(kind="questions") as server:
        tab = tabs(server)
        tab.wait_for("document.getElementById('empty').innerText.includes('does not remember earlier ones')")
        ask(tab, "One?")
        ask(tab, "Two?")
        assert sent(server) == ["user: Two?"] and "does not remember earlier ones" in shown(tab, "#note")
        click(tab, "#open-settings")
        assert tab.run("document.getElementById('for-system').hidden")


def test_a_model_of_continuations_goes_on_with_the_whole_text(tabs):
    with ScriptedServer(lambda body: Reply(pieces=[" upon", " a time"]), kind="continuation") as server:
        tab = tabs(server)
        ask(tab, "Once")
        assert server.requests[0][0] == "/v1/completions" and server.bodies[0]["prompt"] == "Once"
        tab.run("document.getElementById('question').focus()")
        tab.key("Enter")
        tab.wait_for(f"document.querySelectorAll('.assistant').length === 2 && {IDLE}")
        assert server.bodies[1]["prompt"] == "Once upon a time"
        assert "".join(tab.run("[...document.querySelectorAll('.message > .text')].map(one => one.textContent)")) == "Once upon a time upon a time"  # fmt: skip


def test_a_continuation_is_one_running_text(tabs):
    with ScriptedServer(lambda body: Reply(pieces=[" upon"]), kind="continuation") as server:
        tab = tabs(server)
        ask(tab, "Once")
        tops = tab.run("[...document.querySelectorAll('.message > .text')].map(one => one.getClientRects()[0].top)")
        assert len(tops) == 2 and tops[0] == tops[1]


# ---- The server's state


def test_speed_and_memory_are_shown(tabs):
    with ScriptedServer(lambda body: Reply(pieces=list("abcdefgh"), every_s=0.02)) as server:
        tab = tabs(server)
        assert shown(tab, "#memory") == "1.5 GiB of 4.0 GiB memory" and shown(tab, "#peak") == "Predicted peak 2.0 GiB"
        assert tab.run("(bar => bar.firstChild.getBoundingClientRect().width / bar.getBoundingClientRect().width)(document.getElementById('bar'))") == pytest.approx(0.375, abs=0.01)  # fmt: skip
        ask(tab, "Sky?")
        assert re.fullmatch(r"8 tokens · [\d.]+ tokens/s · [\d.]+ s", shown(tab, ".assistant .figures"))


def test_an_answer_says_how_full_the_context_is_once_half_is_used(tabs):
    with ScriptedServer(context_length=16) as server:
        tab = tabs(server)
        ask(tab, "Sky?")
        assert "10 of 16 tokens of context" in shown(tab, ".assistant .figures")


def test_memory_that_nobody_measures_is_not_made_up(tabs):
    with ScriptedServer(memory={"used_bytes": None, "predicted_bytes": GiB, "limit_bytes": 4 * GiB}) as server:
        tab = tabs(server)
        assert shown(tab, "#memory") == "4.0 GiB memory limit" and shown(tab, "#peak") == "Predicted peak 1.0 GiB"


def test_the_server_is_asked_for_its_state_only_while_the_page_is_visible(tabs, browser):
    with ScriptedServer() as server:
        tab = browser.page()
        tab.send("Page.addScriptToEvaluateOnNewDocument", source="""
            Object.defineProperty(document, "visibilityState", {get: () => window.seen ?? "hidden"});
            window.delays = []; const real = window.setTimeout;
            window.setTimeout = (call, delay, ...rest) => { window.delays.push(delay); return real(call, delay, ...rest); };
        """)  # fmt: skip
        tab.open(server.url)
        tab.wait_for("document.getElementById('device').textContent !== ''")
        assert tab.run("window.delays.includes(5000)") is False
        before = server.polls
        tab.run("window.seen = 'visible'; document.dispatchEvent(new Event('visibilitychange'))")
        tab.wait_for("window.delays.includes(5000)")
        assert server.polls == before + 1
        tab.close()


def test_another_model_after_a_restart_is_reported(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        server.status.update(model="other", uptime_s=1.0, kind="questions")
        tab.run("window.dispatchEvent(new Event('online'))")
        tab.wait_for("document.getElementById('toast').innerText.includes('The server now runs other.')")
        assert "Ask other" in shown(tab, "#empty")


# ---- How it looks


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_in_both_themes(tabs, dark):
    """WCAG: 4.5 to 1."""
    with ScriptedServer(
        lambda body: Reply(pieces=["Use `this` or [that](https://example.com).\n\n> quoted"])
    ) as server:
        tab = tabs(server, dark=dark)
        ask(tab, "How?")
        server.reply = lambda body: refusal(400, "no such thing")
        ask(tab, "Why?")
        assert (luminance(tab.run("getComputedStyle(document.body).backgroundColor")) < 0.1) is dark
        grounds = {"body": ["p", "h1", "#line", ".text a", "blockquote", ".figures"], "#side": ["#new", "#device", "#theme"], ".user > .text": [".user > .text"], ".problem": [".problem", ".problem small"]}  # fmt: skip
        for ground, texts in grounds.items():
            behind = tab.run(f"getComputedStyle(document.querySelector('{ground}')).backgroundColor")
            for text in texts:
                assert contrast(tab.run(f"getComputedStyle(document.querySelector('{text}')).color"), behind) >= 4.5, (
                    text
                )


def test_the_theme_can_be_chosen_and_is_kept(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ground = "getComputedStyle(document.body).backgroundColor"
        click(tab, "#theme")
        assert luminance(tab.run(ground)) < 0.1
        tab.open(server.url)
        assert luminance(tab.run(ground)) < 0.1
        click(tab, "#theme")
        assert luminance(tab.run(ground)) > 0.9


def test_the_language_is_the_browsers_and_can_be_changed(tabs):
    with ScriptedServer() as server:
        tab = tabs(server, language="zh-CN")
        assert tab.run("document.documentElement.lang") == "zh-CN" and "新对话" in shown(tab, "#side")
        ask(tab, "天空？")
        assert "重新回答" in tab.run("[...document.querySelectorAll('.foot button')].map(one => one.title).join()")
        button(tab, "English")
        assert "New conversation" in shown(tab, "#side") and "Ask again" in tab.run("[...document.querySelectorAll('.foot button')].map(one => one.title).join()")  # fmt: skip
        tab.open(server.url)
        assert "New conversation" in shown(tab, "#side") and tab.errors == []


def test_every_word_has_the_same_values_in_both_languages():
    words = re.findall(r'^  (\w+): \["(.*?)", "(.*?)"\],$', page(), re.MULTILINE)
    assert len(words) > 80
    for name, english, chinese in words:
        assert set(re.findall(r"{\w+}", english)) == set(re.findall(r"{\w+}", chinese)), name
        assert (
            name == "topP" or re.search(r"[\u4e00-\u9fff]|token/s", chinese) or chinese in ("{n} token", "1 token")
        ), name


WIDE = (
    "x" * 300
    + "\n\n```\n"
    + "y" * 300
    + "\n```\n\n|"
    + "wide cell|" * 20
    + "\n|"
    + "-|" * 20
    + "\n\nhttps://example.com/"
    + "z" * 300
)


def test_a_phone_shows_everything_without_scrolling_sideways(tabs):
    with ScriptedServer(lambda body: Reply(pieces=[WIDE]), model="m" * 80) as server:
        tab = tabs(server, width=360, height=740)
        ask(tab, "w" * 200)
        assert (
            tab.run("Math.max(document.documentElement.scrollWidth, document.getElementById('log').scrollWidth)") == 360
        )
        for selector in (".user > .text", ".assistant > .text", "#composer", "#send", "#open-settings"):
            assert tab.run(f"document.querySelector('{selector}').getBoundingClientRect().right") <= 360, selector
        click(tab, "#open-settings")
        assert tab.run("document.getElementById('settings').getBoundingClientRect().right <= 360 && document.getElementById('settings').scrollWidth <= 360")  # fmt: skip


def test_on_a_phone_the_conversations_are_in_a_drawer(tabs):
    with ScriptedServer() as server:
        tab = tabs(server, width=360, height=740)
        ask(tab, "First?")
        left = "document.getElementById('side').getBoundingClientRect().right > 0"
        assert not tab.run(left)
        click(tab, "#menu")
        tab.wait_for(left)
        assert tab.run("document.activeElement.id") == "close"
        tab.key("Escape")
        tab.wait_for(f"!({left})")
        click(tab, "#menu")
        button(tab, "New conversation")
        tab.wait_for(f"!({left})")
        assert questions(tab) == ""


def test_everything_that_can_be_used_has_a_name(tabs):
    with ScriptedServer(lambda body: Reply(pieces=["a\n\n```\nb\n```"])) as server:
        tab = tabs(server)
        ask(tab, "Sky?")
        for place in ("", "#open-settings"):
            if place:
                click(tab, place)
            nodes = tab.send("Accessibility.getFullAXTree")["nodes"]
            usable = [one for one in nodes if not one["ignored"] and one["role"]["value"] in ("button", "textbox", "spinbutton", "link", "meter", "DisclosureTriangle", "dialog")]  # fmt: skip
            assert len(usable) > 8
            assert [one for one in usable if not one.get("name", {}).get("value")] == []


def test_a_screen_reader_hears_the_whole_answer_once(tabs):
    with ScriptedServer() as server:
        tab = tabs(server)
        ask(tab, "Sky?")
        assert tab.run("document.getElementById('announce').textContent").strip() == "It is blue."
        assert (
            tab.run(
                "document.querySelectorAll('#thread [aria-live], #thread [role=status], #thread [role=log]').length"
            )
            == 0
        )


# ---- The real server


@contextmanager
def running(folder: Path, **changes):
    """`brimful serve` in this process: its address, and what it says of itself."""
    from brimful.planning.plan_options import PlanOptions
    from brimful.planning.target import find_target
    from brimful.serving.api import Api
    from brimful.serving.chat_model import ChatModel
    from brimful.serving.engine import Engine, EngineOptions
    from brimful.serving.server import Server, ServerOptions, listen
    from brimful.tasks.generate import GenerateOptions

    defaults, options = GenerateOptions(**changes), ServerOptions(port=0)
    target = find_target(PlanOptions(device="cpu", memory_limit="1GiB"))
    model = ChatModel(str(folder), defaults, device=target.device, autocast=None)
    engine = Engine(model.generator, target, EngineOptions()).start()
    server, listener, ready = Server(Api(model, engine, "tiny", defaults), options), listen(options), threading.Event()
    thread = threading.Thread(target=server.run, args=(listener, ready.set))
    thread.start()
    try:
        assert ready.wait(60)
        yield SimpleNamespace(url=f"http://127.0.0.1:{listener.getsockname()[1]}/", token=None, engine=engine)
    finally:
        server.stop()
        thread.join(60)
        engine.close()
        listener.close()


def test_a_conversation_with_a_real_model(tabs, causal):
    with running(causal.model) as server:
        tab = tabs(server)
        ask(tab, "甲的花？")
        assert answers(tab) == "红色。"
        ask(tab, "车？")
        assert answers(tab) == "红色。\n红车。"  # which it knows only from the first question
        tab.open(server.url)
        assert questions(tab) == "甲的花？\n车？" and answers(tab) == "红色。\n红车。"
        assert re.search(r"3 tokens · .* tokens/s", shown(tab, ".assistant .figures"))
        tab.wait_for("document.getElementById('memory').textContent.includes('GiB memory')")
        assert tab.errors == [] and all(one.startswith((server.url, "data:")) for one in tab.requests)


def test_questions_to_a_real_model(tabs, tiny):
    with running(tiny.model) as server:
        tab = tabs(server)
        ask(tab, "甲的花是什么颜色？")
        ask(tab, "乙的花是什么颜色？")
        assert answers(tab) == "红色。\n橙色橙色。" and "does not remember" in shown(tab, "#note") and tab.errors == []


def test_a_real_model_is_stopped_and_goes_on(tabs, causal, tmp_path):
    """It knows nothing, so it does not know when to end."""
    endless = save(make_causal(vocab_size=causal.template.vocab_size, max_position_embeddings=65_536), tmp_path / "endless", causal.tokenizer)  # fmt: skip
    (endless / "chat_template.jinja").unlink()
    with running(endless, max_new_tokens=60_000) as server:
        tab = tabs(server)
        write(tab, "甲的花")
        tab.key("Enter")
        tab.wait_for("document.querySelector('.assistant > .text').textContent.length > 20")
        assert server.engine.state().running == 1
        click(tab, "#stop")
        tab.wait_for(IDLE)
        wait_until(lambda: server.engine.state().running == 0)
        text = tab.run("document.querySelector('.assistant > .text').textContent")
        tab.open(server.url)
        assert tab.run("document.querySelector('.assistant > .text').textContent") == text
        assert tab.errors == []


# ---- The file


def test_the_page_has_one_style_and_one_script_and_nothing_from_elsewhere():
    html = page()
    assert len(re.findall(r"<style", html)) == len(re.findall(r"<script", html)) == 1
    assert not re.search(r"\sstyle=|\son\w+=|innerHTML|\beval\b|<link (?!rel=\"icon\")", html)
    assert policy(html).count("sha256-") == 2
    assert len(html.encode()) < 80_000
