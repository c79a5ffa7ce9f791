"""The server's page in a real browser: what it asks, shows and says; by mouse, by keyboard, on small screens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from sharesd.cli.display import MEANINGS
from tests.helpers.chromium import CHROMIUM, Browser, Tab
from tests.helpers.fake_page_server import KEY, MODEL, ROUNDS, TOKENS_PER_SECOND, FakeServer
from tests.helpers.served_model import Served, served
from tests.serve.test_reasoning import ANALYSIS, FINAL, HARMONY, NEXT, QWEN, R1

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
TOKENS = [token for tokens in ROUNDS for token in tokens]
TEXT = "".join(text for text, *_ in TOKENS)
LAST = "[...document.querySelectorAll('.answer')].at(-1)"


class Chat(Tab):
    """The page at a server, and what its user does."""

    def __init__(self, browser: Browser, server: FakeServer | Served, *, model: str = MODEL, width: int = 1200) -> None:
        super().__init__(browser)
        self.server = server
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=server.url)
        self.wait_for(f"document.querySelector('#model')?.textContent === {json.dumps(model)}")

    def ask(self, question: str) -> None:
        """Write a question and press Enter."""
        self.evaluate("document.querySelector('#question').select()")
        self.type(question)
        self.press("Enter")

    def answered(self) -> None:
        """Wait until nothing runs."""
        self.wait_for("document.querySelector('#log').getAttribute('aria-busy') === 'false'")

    def spans(self, answer: str = LAST) -> list[dict[str, str]]:
        """Text and data of each token of an answer."""
        return self.evaluate(
            f"[...{answer}.querySelectorAll('.text > *')].map(e => ({{text: e.textContent, ...e.dataset}}))"
        )

    def last(self, selector: str) -> str:
        """Text of a part of the last answer."""
        return self.evaluate(f"{LAST}.querySelector({json.dumps(selector)}).textContent")

    def focused(self) -> str:
        """Id or class of what has the focus."""
        return self.evaluate("document.activeElement.id || document.activeElement.className")

    def check(self) -> None:
        """Nothing was thrown or complained of, and no other host was asked for anything."""
        assert not self.events("Runtime.exceptionThrown")
        assert not self.events("Runtime.consoleAPICalled")
        complaints = [event["entry"] for event in self.events("Log.entryAdded")]
        assert not [entry for entry in complaints if entry["source"] != "network"]  # those are answers with an error
        urls = {event["request"]["url"] for event in self.events("Network.requestWillBeSent")}
        assert urls and all(url.startswith(self.server.url) for url in urls)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def chat(browser: Browser, server: FakeServer) -> Iterator[Chat]:
    chat = Chat(browser, server)
    yield chat
    chat.check()
    chat.close()


def test_tokens_have_the_colours_of_those_who_made_them(chat: Chat) -> None:
    chat.ask("Who are you?")
    chat.answered()
    spans = chat.spans()
    assert [(span["text"], span["source"]) for span in spans] == [(text, source) for text, source, _ in TOKENS]
    styles = {drafter: {span.get("style") for span, token in zip(spans, TOKENS, strict=True) if token[2] == drafter}
              for drafter in ("share", "suffix", None)}  # fmt: skip
    assert styles == {"share": {"0"}, "suffix": {"1"}, None: {None}}
    looks = """(root => Object.fromEntries([...root.querySelectorAll('.token')].map(e => {
      const {backgroundColor, textDecorationLine, textDecorationStyle, boxShadow} = getComputedStyle(e);
      return [e.dataset.source + (e.dataset.style ?? ""),
              [backgroundColor, textDecorationLine, textDecorationStyle, boxShadow].join("|")]})))"""
    shown = chat.evaluate(f"{looks}({LAST})")
    legend = chat.evaluate(f"{looks}(document.querySelector('#legend'))")
    assert len(set(shown.values())) == len(shown) == 5  # target, accepted by two drafters, recovered, bonus
    assert {name: legend[name] for name in shown} == shown
    colours = {name.rstrip("01"): look.split("|")[0] for name, look in shown.items()}
    assert len(set(colours.values())) == 4


def test_the_legend_has_the_terminals_words(chat: Chat) -> None:
    entries = "[...document.querySelectorAll('#legend .token')].map(e => [e.dataset.source, e.textContent])"
    assert dict(chat.evaluate(entries)) == MEANINGS


def test_text_of_a_model_is_never_markup(chat: Chat) -> None:
    chat.ask("Say <img src=x onerror=alert(1)>")
    chat.answered()
    assert chat.last(".text") == TEXT
    assert chat.evaluate("document.querySelectorAll('#log b, #log img').length") == 0


def test_reasoning_is_folded_and_sent_back_apart(chat: Chat) -> None:
    chat.ask("think")
    chat.answered()
    thought = "".join(text for tokens in ROUNDS[:2] for text, *_ in tokens)
    assert chat.last(".reasoning p") == thought and chat.last(".text") == TEXT.removeprefix(thought)
    assert chat.evaluate(f"{LAST}.querySelector('.reasoning').open") is False
    assert chat.evaluate(f"{LAST}.querySelector('.reasoning').checkVisibility()")
    chat.ask("Two")
    chat.answered()
    assert not chat.evaluate(f"{LAST}.querySelector('.reasoning').checkVisibility()"), "there is none"
    answer = {"role": "assistant", "content": TEXT.removeprefix(thought), "reasoning_content": thought}
    assert chat.server.requests[-1]["messages"][1] == answer


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (QWEN, "<think>\nwhy is the sky blue\n</think>\n\nthe mat"),
        (R1, "why is the sky blue\n</think>\nthe mat"),
        (HARMONY, f"{ANALYSIS}why is the sky blue{NEXT}{FINAL}the mat"),
    ],
)
def test_a_thinking_model_is_shown_without_its_marks(browser: Browser, template: str, answer: str) -> None:
    with served(template=template, max_context=2048) as server:
        server.engine.scripts["the cat"] = answer
        half = len(server.engine.tokenizer.encode(answer.partition("sky")[0]))
        server.engine.held = lambda: len(server.engine.added) == 2 and server.engine.running[0].position >= half
        chat = Chat(browser, server, model="fake")
        chat.ask("the cat")
        chat.answered()
        assert (chat.last(".reasoning p"), chat.last(".text")) == ("why is the sky blue", "the mat")
        assert chat.evaluate(f"{LAST}.querySelector('.reasoning').open") is False
        assert set(chat.evaluate(f"[...{LAST}.querySelectorAll('p > *')].map(e => e.className)")) == {"token"}
        chat.ask("the cat")
        chat.evaluate("document.querySelectorAll('.reasoning')[1].open = true")
        chat.wait_for(f"{LAST}.querySelector('.reasoning p').innerText.startsWith('why is')")
        prompt = server.engine.tokenizer.decode(server.engine.added[1].prompt_ids, skip_special_tokens=False)
        assert chat.last(".text") == "" and "the mat" in prompt and "why is" not in prompt, "the template drops it"
        server.engine.held = lambda: False
        chat.answered()
        assert (chat.last(".reasoning p"), chat.last(".text")) == ("why is the sky blue", "the mat")
        chat.check()
        chat.close()


def test_the_request_has_the_settings_and_the_conversation(chat: Chat) -> None:
    chat.evaluate(
        "['temperature', 'seed', 'max-tokens'].forEach((id, i) => document.getElementById(id).value = [0.7, 12, 99][i])"
    )
    chat.ask("One")
    chat.answered()
    chat.click("#speculate")
    chat.ask("Two")
    chat.answered()
    chat.click("#new-chat")
    assert chat.text("#log") == ""
    chat.ask("Three")
    chat.answered()
    first, second, third = chat.server.requests
    messages = [{"role": "user", "content": "One"}]
    assert first == {
        "model": MODEL,
        "messages": messages,
        "temperature": 0.7,
        "seed": 12,
        "max_tokens": 99,
        "stream": True,
        "token_details": True,
        "speculate": True,
    }
    answer = {"role": "assistant", "content": TEXT}
    assert second == first | {"messages": [*messages, answer, {"role": "user", "content": "Two"}], "speculate": False}
    assert third["messages"] == [{"role": "user", "content": "Three"}]


def test_rounds_are_shown_if_asked_for(chat: Chat) -> None:
    chat.click("#rounds")
    chat.ask("Who are you?")
    chat.answered()
    assert chat.server.requests[-1]["round_details"] is True
    assert chat.evaluate(f"{LAST}.querySelector('.rounds').open") is False
    rounds = chat.evaluate(f"[...{LAST}.querySelectorAll('.rounds li')].map(e => e.textContent)")
    assert len(rounds) == len(ROUNDS) - 1
    times = "draft 1.2 ms, verify 20.0 ms, overhead 0.0 ms"
    assert rounds[0] == f'share: " draft" " was" " no"  → 3 tokens; {times}'
    assert rounds[2] == f"no draft (plain is faster) → 1 token; {times}"
    kept = chat.evaluate(f"[...{LAST}.querySelectorAll('.rounds ins')].map(e => e.textContent)")
    assert kept[:2] == ['" draft"', '" was"'] and len(kept) == 5
    chat.click("#rounds")
    chat.ask("Two")
    chat.answered()
    assert "round_details" not in chat.server.requests[-1]
    assert not chat.evaluate(f"{LAST}.querySelector('.rounds').checkVisibility()")


def test_a_wrong_setting_is_shown_and_not_sent(chat: Chat) -> None:
    chat.evaluate("document.querySelector('#temperature').value = ''")
    chat.evaluate("document.querySelector('#settings').open = false")
    chat.ask("Hello")
    assert chat.focused() == "temperature"
    assert not chat.server.requests


def test_figures_are_those_of_the_stream_and_then_the_servers(chat: Chat) -> None:
    chat.ask("slow and long")
    chat.wait_for(f"{LAST}.querySelectorAll('.token').length > 33")
    live = json.loads(
        chat.evaluate(
            f"""JSON.stringify({{speed: +{LAST}.querySelector('.speed').textContent,
            tau: +{LAST}.querySelector('.tau').textContent,
            count: +{LAST}.querySelector('.count').textContent,
            bars: {LAST}.querySelector('.bars').getAttribute('aria-label'),
            sources: [...{LAST}.querySelectorAll('.token')].slice(1).map(e => e.dataset.source)}})"""
        )
    )
    rounds = sum(source != "accepted" for source in live["sources"])
    assert live["count"] == 1 + len(live["sources"])
    assert live["tau"] == pytest.approx(len(live["sources"]) / rounds, abs=0.006)
    assert live["speed"] > 0
    first, second = map(float, live["bars"].split())
    assert 1 >= first > second > 0
    chat.press("Escape")
    chat.answered()
    chat.ask("Again")
    chat.answered()
    assert [chat.last(name) for name in (".speed", ".tau", ".count")] == ["60.0", "2.50", str(len(TOKENS))]
    assert chat.evaluate(f"{LAST}.querySelector('.bars').getAttribute('aria-label')") == "0.75 0.50"
    heights = chat.evaluate(f"[...{LAST}.querySelectorAll('.bars span')].map(e => e.offsetHeight)")
    assert len(heights) == 2 and heights[0] > heights[1] > 0


@pytest.mark.parametrize("by", ["Escape", "button", "New chat"])
def test_stop_leaves_the_server_and_keeps_the_text(chat: Chat, by: str) -> None:
    chat.ask("slow and long")
    chat.wait_for(f"{LAST}?.querySelectorAll('.token').length > 5")
    assert chat.text("#send") == "Stop"
    assert not chat.server.hung_up.is_set()
    if by == "Escape":
        chat.press("Escape")
    else:
        chat.click("#send" if by == "button" else "#new-chat")
    assert chat.server.hung_up.wait(10)
    chat.answered()
    assert chat.text("#send") == "Send"
    if by == "New chat":
        assert chat.text("#log") == ""
    else:
        assert chat.last(".end") == "Stopped."
        kept = chat.last(".text")
        assert len(kept) > 5 and (TEXT * 60).startswith(kept)
    chat.ask("Go on")
    chat.answered()
    roles = [message["role"] for message in chat.server.requests[-1]["messages"]]
    assert roles == (["user"] if by == "New chat" else ["user", "assistant", "user"])
    assert chat.last(".text") == TEXT


def test_side_by_side_says_identical(chat: Chat) -> None:
    chat.click("#compare")
    chat.ask("Who are you?")
    chat.answered()
    assert chat.text(".verdict").splitlines() == [
        f"identical: {len(TOKENS)} tokens",
        "60.0 tok/s with speculation, 40.0 without (1.50x)",
    ]
    assert TOKENS_PER_SECOND == {True: 60.0, False: 40.0}
    with_it, without = chat.server.requests
    assert (with_it["speculate"], without["speculate"]) == (True, False)
    assert with_it | {"speculate": False} == without  # the seed included
    assert {span["source"] for span in chat.spans()} == {"target"}
    assert chat.evaluate("document.querySelectorAll('.differs').length") == 0


def test_side_by_side_says_where_answers_differ(chat: Chat) -> None:
    chat.click("#compare")
    chat.ask("Do they differ?")
    chat.answered()
    assert chat.text(".verdict strong") == 'first difference at token 3: " was" with speculation, " is" without'
    assert chat.evaluate("[...document.querySelectorAll('.differs')].map(e => e.textContent)") == [" was", " is"]


def test_side_by_side_of_a_stopped_answer_says_nothing(chat: Chat) -> None:
    chat.click("#compare")
    chat.ask("slow and long")
    chat.wait_for("document.querySelectorAll('.token').length > 10")
    chat.press("Escape")
    chat.answered()
    assert chat.text(".verdict") == ""
    assert len(chat.server.requests) == 1


def test_errors_are_one_line(chat: Chat) -> None:
    chat.ask("The queue is full")
    chat.answered()
    assert chat.last(".end") == "the queue is full (64 requests): try again in 2 s"
    assert chat.evaluate("document.querySelector('#question').value") == "The queue is full"  # to be asked again
    chat.ask("A broken one")
    chat.answered()
    assert chat.last(".end") == "the engine failed"
    assert chat.last(".text") == "".join(text for tokens in ROUNDS[:3] for text, *_ in tokens)
    chat.ask("The line is cut")
    chat.answered()
    assert chat.last(".end") == "The connection ended before the answer did."
    chat.server.shutdown()
    chat.server.server_close()
    chat.ask("Is anybody there?")
    chat.answered()
    assert chat.last(".end").startswith("The server cannot be reached")
    assert chat.evaluate("document.querySelectorAll('.end.error').length") == 4


def test_a_key_is_asked_for_where_the_server_wants_one(browser: Browser, server: FakeServer) -> None:
    server.wants_key = True
    chat = Chat(browser, server, model="")
    chat.wait_for("document.querySelector('#key-dialog').open")
    assert chat.text("#key-reason") == "the API key is missing or wrong"
    for key in ("wrong", KEY):
        assert chat.wait_for("document.activeElement.id === 'key' && document.activeElement.value === ''")
        chat.type(key)
        chat.press("Enter")
    chat.wait_for(f"document.querySelector('#model').textContent === {MODEL!r}")
    chat.ask("Hello")
    chat.answered()
    assert chat.last(".text") == TEXT
    assert not any(KEY in event["request"]["url"] for event in chat.events("Network.requestWillBeSent"))
    chat.check()
    chat.close()


def test_no_key_is_an_error_and_can_be_mended(browser: Browser, server: FakeServer) -> None:
    server.wants_key = True
    chat = Chat(browser, server, model="")
    chat.wait_for("document.querySelector('#key-dialog').open")
    chat.press("Escape")
    chat.wait_for("document.querySelector('#model').textContent === 'the API key is missing or wrong'")
    chat.ask("Hello")
    chat.wait_for("document.querySelector('#key-dialog').open")
    chat.type(KEY)
    chat.press("Enter")
    chat.wait_for(f"document.querySelector('#model').textContent === {MODEL!r}")
    chat.answered()
    assert chat.last(".text") == TEXT
    chat.close()


def test_everything_is_reached_by_keyboard(chat: Chat) -> None:
    assert chat.focused() == "question"
    chat.type("one")
    chat.press("Enter", shift=True)
    chat.type("two")
    chat.press("Enter")
    chat.answered()
    assert chat.server.requests[0]["messages"][0]["content"] == "one\ntwo"
    assert chat.focused() == "question"
    reached = []
    for _ in range(14):
        chat.press("Tab")
        reached.append(chat.focused())
        if reached[-1] == "text":
            chat.press("ArrowRight")
            assert chat.text("#detail") == 'Token 2 " draft": accepted draft from share'
            assert chat.evaluate("document.querySelector('.current').textContent") == " draft"
    wanted = {"send", "new-chat", "log", "text", "temperature", "seed", "max-tokens", "speculate", "rounds", "compare"}
    assert wanted <= set(reached)
    chat.evaluate("document.querySelector('#compare').focus()")
    chat.press(" ")
    assert chat.evaluate("document.querySelector('#compare').checked && document.querySelector('#speculate').disabled")


def test_everything_has_a_name(chat: Chat) -> None:
    chat.ask("Hello")
    chat.answered()
    nodes = chat.call("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "textbox", "spinbutton", "switch", "log", "group", "image"}
    found = [node for node in nodes if not node["ignored"] and node["role"]["value"] in named]
    assert {"button", "textbox", "spinbutton", "switch", "log"} <= {node["role"]["value"] for node in found}
    details = [node for node in found if not node.get("name", {}).get("value")]
    assert [node["role"]["value"] for node in details] in ([], ["group"])  # the settings, which their summary names
    assert chat.text("#status") == "Answer complete."


def test_pointing_at_a_token_says_who_made_it(chat: Chat) -> None:
    chat.ask("Hello")
    chat.answered()
    for index, says in ((2, 'Token 3 " was": accepted draft from share'), (3, 'Token 4 " right": bonus')):
        chat.click(f".text > :nth-child({index + 1})")
        assert chat.text("#detail") == says


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(chat: Chat, scheme: str) -> None:
    chat.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    chat.ask("The queue is full")
    chat.answered()
    chat.ask("Hello")
    chat.answered()
    pairs = chat.evaluate(
        """[...document.querySelectorAll('.token, .end.error, #model, #detail, dt, #send, .question')].map(e => {
          let under = e;
          while (getComputedStyle(under).backgroundColor === 'rgba(0, 0, 0, 0)') under = under.parentElement;
          return [getComputedStyle(e).color, getComputedStyle(under).backgroundColor];
        })"""
    )
    assert len(pairs) > 20
    assert min(contrast(*map(rgb, pair)) for pair in pairs) >= 4.5  # WCAG 2, level AA
    back = rgb(chat.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (sum(back) > 3 * 128) == (scheme == "light")


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_shows_all_of_it(browser: Browser, server: FakeServer, width: int) -> None:
    chat = Chat(browser, server, width=width)
    chat.evaluate("document.querySelector('#settings').open = true")
    chat.click("#compare")
    chat.ask("Do they differ?" + " Averylongword" * 20)
    chat.answered()
    outside = f"[...document.body.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > {width} + 0.5)"
    assert chat.evaluate(f"{outside}.map(e => e.outerHTML)") == []
    bottom = "document.querySelector('.verdict').getBoundingClientRect().bottom"
    assert chat.evaluate(f"{bottom} <= document.querySelector('footer').getBoundingClientRect().top")  # in view
    chat.check()
    chat.close()


def test_nothing_jumps(chat: Chat) -> None:
    chat.ask("Hello")
    chat.answered()
    chat.click("#compare")
    chat.ask("slow")
    chat.answered()
    shifts = """new Promise(resolve => {
      const sum = list => resolve(list.getEntries().reduce((total, entry) => total + entry.value, 0));
      new PerformanceObserver(sum).observe({type: "layout-shift", buffered: true});
      setTimeout(() => resolve(0), 200);
    })"""
    assert chat.evaluate(shifts) < 0.01


def test_the_policy_forbids_scripts_and_hosts_of_others(browser: Browser, server: FakeServer) -> None:
    chat = Chat(browser, server)
    chat.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    assert chat.evaluate("window.ran ?? null") is None
    other = FakeServer()  # another origin
    refused = chat.evaluate(f"fetch({(other.url + 'v1/models')!r}, {{mode: 'no-cors'}}).then(() => false, () => true)")
    other.server_close()
    assert refused
    complaints = [event["entry"]["source"] for event in chat.events("Log.entryAdded")]
    assert complaints.count("security") >= 2
    chat.close()


def rgb(colour: str) -> tuple[float, ...]:
    """Red, green and blue of `rgb(...)`, 0 to 255."""
    return tuple(map(float, colour.removeprefix("rgb(").rstrip(")").split(",")))


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Contrast ratio of two colours, as WCAG 2 defines it."""
    light = []
    for colour in (one, other):
        linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)
