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

    def __init__(self, browser: Browser, server: FakeServer | Served, *, model: str = MODEL) -> None:
        super().__init__(browser)
        self.server = server
        self.resize(1200)
        self.call("Page.navigate", url=server.url)
        self.wait_for(f"document.querySelector('#model')?.textContent === {json.dumps(model)}")

    def resize(self, width: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)

    def ask(self, question: str) -> None:
        """Write a question and press Enter."""
        self.evaluate("document.querySelector('#question').select()")
        self.type(question)
        self.press("Enter")

    def answer(self, question: str) -> None:
        """Ask, and wait for the answer."""
        self.ask(question)
        self.answered()

    def answered(self) -> None:
        """Wait until nothing runs."""
        self.wait_for("document.querySelector('#log').getAttribute('aria-busy') === 'false'")

    def spans(self) -> list[dict[str, str]]:
        """Text and data of each token of the last answer."""
        return self.evaluate(
            f"[...{LAST}.querySelectorAll('.text > *')].map(e => ({{text: e.textContent, ...e.dataset}}))"
        )

    def last(self, selector: str) -> str:
        """Text of a part of the last answer."""
        return self.evaluate(f"{LAST}.querySelector({json.dumps(selector)}).textContent")

    def focused(self) -> str:
        """Id or class of what has the focus."""
        return self.evaluate("document.activeElement.id || document.activeElement.className")

    def end(self) -> None:
        """Close it: nothing was thrown or complained of, and no other host was asked for anything."""
        assert not self.events("Runtime.exceptionThrown")
        assert not self.events("Runtime.consoleAPICalled")
        complaints = [event["entry"] for event in self.events("Log.entryAdded")]
        assert not [entry for entry in complaints if entry["source"] != "network"]  # those are answers with an error
        urls = {event["request"]["url"] for event in self.events("Network.requestWillBeSent")}
        assert urls and all(url.startswith(self.server.url) for url in urls)
        self.close()


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
    chat.end()


def test_tokens_have_the_colours_of_those_who_made_them(chat: Chat) -> None:
    entries = "[...document.querySelectorAll('#legend .token')].map(e => [e.dataset.source, e.textContent])"
    assert dict(chat.evaluate(entries)) == MEANINGS, "the terminal's words"
    chat.answer("Say <img src=x onerror=alert(1)>")
    assert chat.last(".text") == TEXT
    assert chat.evaluate("document.querySelectorAll('#log b, #log img').length") == 0, "text is never markup"
    spans = chat.spans()
    assert [(span["text"], span["source"]) for span in spans] == [(text, source) for text, source, _ in TOKENS]
    styles = {(token[2], span.get("style")) for span, token in zip(spans, TOKENS, strict=True)}
    assert styles == {("share", "0"), ("suffix", "1"), (None, None)}
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
    for index, says in ((2, 'Token 3 " was": accepted draft from share'), (3, 'Token 4 " right": bonus')):
        chat.click(f".text > :nth-child({index + 1})")
        assert chat.text("#detail") == says


def test_reasoning_is_folded_and_sent_back_apart(chat: Chat) -> None:
    chat.answer("think")
    thought = "".join(text for tokens in ROUNDS[:2] for text, *_ in tokens)
    assert chat.last(".reasoning p") == thought and chat.last(".text") == TEXT.removeprefix(thought)
    assert chat.evaluate(f"{LAST}.querySelector('.reasoning').open") is False
    assert chat.evaluate(f"{LAST}.querySelector('.reasoning').checkVisibility()")
    chat.answer("Two")
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
        chat.answer("the cat")
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
        chat.end()


def test_the_request_has_the_settings_and_the_conversation(chat: Chat) -> None:
    chat.evaluate("document.querySelector('#temperature').value = ''")
    chat.evaluate("document.querySelector('#settings').open = false")
    chat.ask("Hello")
    assert chat.focused() == "temperature" and not chat.server.requests, "a wrong one is shown and not sent"
    for name, value in (("temperature", 0.7), ("seed", 12), ("max-tokens", 99)):
        chat.evaluate(f"document.getElementById('{name}').value = {value}")
    chat.answer("One")
    chat.click("#speculate")
    chat.answer("Two")
    chat.click("#new-chat")
    assert chat.text("#log") == ""
    chat.answer("Three")
    first, second, third = chat.server.requests
    messages = [{"role": "user", "content": "One"}]
    settings = {"temperature": 0.7, "seed": 12, "max_tokens": 99, "speculate": True}
    assert first == {"model": MODEL, "messages": messages, "stream": True, "token_details": True, **settings}
    answer = {"role": "assistant", "content": TEXT}
    assert second == first | {"messages": [*messages, answer, {"role": "user", "content": "Two"}], "speculate": False}
    assert third["messages"] == [{"role": "user", "content": "Three"}]


def test_rounds_are_shown_if_asked_for(chat: Chat) -> None:
    chat.click("#rounds")
    chat.answer("Who are you?")
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
    chat.answer("Two")
    assert "round_details" not in chat.server.requests[-1]
    assert not chat.evaluate(f"{LAST}.querySelector('.rounds').checkVisibility()")


def test_figures_are_those_of_the_stream_and_then_the_servers(chat: Chat) -> None:
    chat.ask("slow and long")
    chat.wait_for(f"{LAST}.querySelectorAll('.token').length > 33")
    live = chat.evaluate(
        f"""(e => ({{speed: +e.querySelector('.speed').textContent, tau: +e.querySelector('.tau').textContent,
        count: +e.querySelector('.count').textContent, bars: e.querySelector('.bars').getAttribute('aria-label'),
        sources: [...e.querySelectorAll('.token')].slice(1).map(t => t.dataset.source)}}))({LAST})"""
    )
    rounds = sum(source != "accepted" for source in live["sources"])
    assert live["count"] == 1 + len(live["sources"])
    assert live["tau"] == pytest.approx(len(live["sources"]) / rounds, abs=0.006)
    assert live["speed"] > 0
    first, second = map(float, live["bars"].split())
    assert 1 >= first > second > 0
    chat.press("Escape")
    chat.answered()
    chat.answer("Again")
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
    chat.answer("Go on")
    roles = [message["role"] for message in chat.server.requests[-1]["messages"]]
    assert roles == (["user"] if by == "New chat" else ["user", "assistant", "user"])
    assert chat.last(".text") == TEXT


def test_side_by_side_says_identical_or_where_answers_differ(chat: Chat) -> None:
    chat.click("#compare")
    chat.answer("Who are you?")
    speeds = "60.0 tok/s with speculation, 40.0 without (1.50x)"
    assert chat.text(".verdict").splitlines() == [f"identical: {len(TOKENS)} tokens", speeds]
    assert TOKENS_PER_SECOND == {True: 60.0, False: 40.0}
    with_it, without = chat.server.requests
    assert (with_it["speculate"], without["speculate"]) == (True, False)
    assert with_it | {"speculate": False} == without  # the seed included
    assert {span["source"] for span in chat.spans()} == {"target"}
    assert chat.evaluate("document.querySelectorAll('.differs').length") == 0
    verdict = "[...document.querySelectorAll('.verdict')].at(-1)"
    chat.answer("Do they differ?")
    found = chat.evaluate(f"{verdict}.querySelector('strong').innerText")
    assert found == 'first difference at token 3: " was" with speculation, " is" without'
    assert chat.evaluate("[...document.querySelectorAll('.differs')].map(e => e.textContent)") == [" was", " is"]
    chat.ask("slow and long")
    chat.wait_for("[...document.querySelectorAll('.answer')].at(-2).querySelectorAll('.token').length > 10")
    chat.press("Escape")
    chat.answered()
    assert chat.evaluate(f"{verdict}.innerText") == "" and len(chat.server.requests) == 5, "it was stopped"


def test_errors_are_one_line(chat: Chat) -> None:
    chat.answer("The queue is full")
    assert chat.last(".end") == "the queue is full (64 requests): try again in 2 s"
    assert chat.evaluate("document.querySelector('#question').value") == "The queue is full"  # to be asked again
    chat.answer("A broken one")
    assert chat.last(".end") == "the engine failed"
    assert chat.last(".text") == "".join(text for tokens in ROUNDS[:3] for text, *_ in tokens)
    chat.answer("The line is cut")
    assert chat.last(".end") == "The connection ended before the answer did."
    chat.server.shutdown()
    chat.server.server_close()
    chat.answer("Is anybody there?")
    assert chat.last(".end").startswith("The server cannot be reached")
    assert chat.evaluate("document.querySelectorAll('.end.error').length") == 4


def test_a_key_is_asked_for_where_the_server_wants_one(browser: Browser, server: FakeServer) -> None:
    server.wants_key = True
    chat = Chat(browser, server, model="")
    chat.wait_for("document.querySelector('#key-dialog').open")
    assert chat.text("#key-reason") == "the API key is missing or wrong"
    chat.press("Escape")
    chat.wait_for("document.querySelector('#model').textContent === 'the API key is missing or wrong'")
    chat.ask("Hello")  # and it can be corrected
    for key in ("wrong", KEY):
        chat.wait_for("document.activeElement.id === 'key' && document.activeElement.value === ''")
        chat.type(key)
        chat.press("Enter")
    chat.wait_for(f"document.querySelector('#model').textContent === {MODEL!r}")
    chat.answered()
    assert chat.last(".text") == TEXT
    assert not any(KEY in event["request"]["url"] for event in chat.events("Network.requestWillBeSent"))
    chat.end()


def test_everything_has_a_name_and_is_reached_by_keyboard(chat: Chat) -> None:
    assert chat.focused() == "question"
    chat.type("one")
    chat.press("Enter", shift=True)
    chat.type("two")
    chat.press("Enter")
    chat.answered()
    assert chat.server.requests[0]["messages"][0]["content"] == "one\ntwo"
    assert chat.focused() == "question"
    nodes = chat.call("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "textbox", "spinbutton", "switch", "log", "group", "image"}
    found = [node for node in nodes if not node["ignored"] and node["role"]["value"] in named]
    assert {"button", "textbox", "spinbutton", "switch", "log"} <= {node["role"]["value"] for node in found}
    details = [node for node in found if not node.get("name", {}).get("value")]
    assert [node["role"]["value"] for node in details] in ([], ["group"])  # the settings, which their summary names
    assert chat.text("#status") == "Answer complete."
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


def test_text_is_readable(chat: Chat) -> None:
    for question in ("The queue is full", "Hello"):
        chat.answer(question)
    for scheme in ("light", "dark"):
        chat.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        pairs = chat.evaluate(
            """[...document.querySelectorAll('.token, .end.error, #model, #detail, dt, #send, .question')].map(e => {
              let under = e;
              while (getComputedStyle(under).backgroundColor === 'rgba(0, 0, 0, 0)') under = under.parentElement;
              return [getComputedStyle(e).color, getComputedStyle(under).backgroundColor];
            })"""
        )
        assert len(pairs) > 20
        lights = [sorted(map(luminance, pair)) for pair in pairs]
        assert min((light + 0.05) / (dark + 0.05) for dark, light in lights) >= 4.5  # WCAG 2, level AA
        back = luminance(chat.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert (back > 0.2) == (scheme == "light")


def test_a_phone_shows_all_of_it(chat: Chat) -> None:
    chat.resize(320)
    chat.evaluate("document.querySelector('#settings').open = true")
    chat.click("#compare")
    chat.answer("Do they differ?" + " Averylongword" * 20)
    outside = "[...document.body.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > 320.5)"
    assert chat.evaluate(f"{outside}.map(e => e.outerHTML)") == []
    bottom = "document.querySelector('.verdict').getBoundingClientRect().bottom"
    assert chat.evaluate(f"{bottom} <= document.querySelector('footer').getBoundingClientRect().top")  # in view


def test_nothing_jumps(chat: Chat) -> None:
    chat.answer("Hello")
    chat.click("#compare")
    chat.answer("slow")
    shifts = """new Promise(resolve => {
      const sum = list => resolve(list.getEntries().reduce((total, entry) => total + entry.value, 0));
      new PerformanceObserver(sum).observe({type: "layout-shift", buffered: true});
      setTimeout(() => resolve(0), 200);
    })"""
    assert chat.evaluate(shifts) < 0.01


def test_the_policy_forbids_scripts_and_hosts_of_others(browser: Browser, server: FakeServer) -> None:
    chat = Chat(browser, server)
    script = "Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'})"
    chat.evaluate(f"document.body.append({script})")
    assert chat.evaluate("window.ran ?? null") is None
    other = FakeServer()  # another origin
    refused = chat.evaluate(f"fetch({(other.url + 'v1/models')!r}, {{mode: 'no-cors'}}).then(() => false, () => true)")
    other.server_close()
    assert refused
    complaints = [event["entry"]["source"] for event in chat.events("Log.entryAdded")]
    assert complaints.count("security") >= 2
    chat.close()


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(...)`, as WCAG 2 defines it."""
    shares = [float(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
    red, green, blue = (c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
