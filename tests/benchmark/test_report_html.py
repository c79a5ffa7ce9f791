"""The page of a measurement: whole, self-contained, escaped, every token in the colour of its origin."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.questions import records
from benchmark.questions.page import DRAFTER_SHADES, answers_of, token_pieces
from benchmark.questions.records import TurnRecord
from benchmark.questions.results import drafters, report_of
from benchmark.questions.summary import summarize
from benchmark.report import Report
from sharesd.engine.outputs import Completion, TokenChunk
from sharesd.engine.request import Request
from sharesd.engine.stats import Stats
from sharesd.engine.stop_checker import StopChecker
from sharesd.models.tokenizer import Tokenizer, load_tokenizer
from sharesd.reports.questions import Question
from sharesd.reports.tables import Section
from sharesd.sampling_params import SamplingParams
from tests.helpers.tiny_models import make_checkpoint

VOID = {"meta", "img", "input"}
HARM = "<script>alert('x')</script> & \"why\""


class Page(HTMLParser):
    """Checks that tags are closed in order; collects elements, their text, and everything that points elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[tuple[str, str, str]] = []  # tag, class, text
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.links += [values[name] or "" for name in ("src", "href", "action", "srcset") if name in values]
        if tag not in VOID:
            self.open.append((tag, values))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1][0] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            tag, values = self.open[-1]
            self.texts.append((tag, values.get("class") or "", data))

    def of(self, tag: str) -> list[tuple[str, str]]:
        """Class and text of each element of this kind."""
        return [(css, text) for name, css, text in self.texts if name == tag]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


def turn(tokenizer: Tokenizer, text: str, sources: str = "", drafters: str = "", **fields: Any) -> TurnRecord:
    ids = fields.pop("token_ids", None) or tokenizer.encode(text)
    plain: dict[str, Any] = {
        "run": 1,
        "question_id": 1,
        "category": "a & b",
        "turn": 1,
        "text": text,
        "token_ids": ids,
        "sources": {"target": len(ids)},
        "prompt_tokens": 5,
        "new_tokens": len(ids),
        "decoded_tokens": len(ids) - 1,
        "finish_reason": "length",
        "prefill_s": 0.1,
        "decode_s": 1.0,
        "draft_s": 0.1,
        "verify_s": 0.8,
        "overhead_s": 0.1,
        "rounds": len(ids) - 1,
        "accepted_at": [0],
        "accept_lengths": [1] * (len(ids) - 1),
        "token_sources": sources,
        "token_drafters": drafters,
    }
    return TurnRecord(**{**plain, **fields})


def page(tokenizer: Tokenizer, *answers: tuple[str, TurnRecord], turns: tuple[str, ...] = ("why",)) -> str:
    question = Question(id=1, category="a & b", turns=turns)
    with TemporaryDirectory() as folder:
        (Path(folder) / "speed.png").write_bytes(b"\x89PNG")
        report = Report(title="<m> on q", sections=[Section("<b>", ("<i>",), [["<u>"]])], plots=["speed.png"])
        return report.html(Path(folder), complete=True, **answers_of([question], answers, tokenizer))


def test_tokens_have_the_colour_of_their_origin(tokenizer: Tokenizer) -> None:
    given = {"accepted_by": {"suffix": 1, "share": 1}}
    answer = turn(tokenizer, "the cat on ", "tarabr", "-0-1--", **given)
    seen = Page(page(tokenizer, ("naive", turn(tokenizer, "the cat on ", "tttttt", "------")), ("x", answer)))
    pieces = ["the", " ", "cat", " ", "on", " "]
    plain, drafted = seen.of("i")[:6], seen.of("i")[6:]
    assert plain == [("t", text) for text in pieces]
    assert drafted == list(zip(["t", "a0", "r", "a1", "b", "r"], pieces, strict=True))
    legend = [(css, text) for css, text in seen.of("span") if css]
    assert [css for css, _ in legend] == ["t", "a0", "a1", "r", "b"]
    assert [text for _, text in legend][1:3] == ["accepted draft: suffix", "accepted draft: share"]
    style = "".join(text for _, text in seen.of("style"))
    assert f".a1 {{ background: {DRAFTER_SHADES[1]}; }}" in style
    assert "differs from naive" not in "".join(text for _, _, text in seen.texts)


def test_pieces(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("😀")
    assert len(smile) == 4  # its bytes: text comes with the last one
    record = turn(tokenizer, "the😀", "tarab", "-0-0-", accepted_by={"share": 2})
    assert token_pieces(record, tokenizer) == [("the", "t", None), ("😀", "b", None)]
    cut = turn(
        tokenizer, "the c", "taa", "-00", accepted_by={"share": 2}, token_ids=tokenizer.encode("the cat")
    )  # a stop string
    assert token_pieces(cut, tokenizer) == [("the", "t", None), (" ", "a", "share"), ("c", "a", "share")]
    torn = turn(
        tokenizer, "the\ufffd", "ta", "-0", accepted_by={"share": 1}, token_ids=[*tokenizer.encode("the"), smile[0]]
    )
    assert token_pieces(torn, tokenizer) == [("the", "t", None), ("\ufffd", "a", "share")]


def test_everything_is_escaped(tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode(HARM))
    text = page(tokenizer, ("naive", turn(tokenizer, HARM, "t" * count, "-" * count)), turns=(HARM,))
    seen = Page(text)
    assert seen.tags.count("script") == 1 and "alert" not in "".join(body for _, body in seen.of("script"))
    assert "".join(body for _, body in seen.of("i")) == HARM
    assert HARM in [body for _, body in seen.of("div")] and ("", "<m> on q") in seen.of("h1")
    assert ("", "<b>") in seen.of("h2") and ("", "<i>") in seen.of("th") and ("", "<u>") in seen.of("td")


def test_words_of_the_report_are_marked(tmp_path: Path) -> None:
    text = "**Not complete:** 2 * 3\n- `naive`: 1 < 2\n  - `<m>`"
    html = Report(title="t", intro="`x`", sections=[Section("s", text=text)]).html(tmp_path)
    assert "<code>x</code>" in html and "<b>Not complete:</b> 2 * 3" in html
    assert "• <code>naive</code>: 1 &lt; 2" in html and "  • <code>&lt;m&gt;</code>" in html


def test_nothing_is_fetched(tokenizer: Tokenizer) -> None:
    text = page(tokenizer, ("naive", turn(tokenizer, "the cat", "ttt", "---")))
    assert Page(text).links == ["data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()]
    assert "http" not in text and "@import" not in text and "url(" not in text


def test_answers_that_differ_and_old_records(tokenizer: Tokenizer) -> None:
    old = turn(tokenizer, "the mat")
    text = page(tokenizer, ("naive", turn(tokenizer, "the cat", "ttt", "---")), ("share", old))
    seen = Page(text)
    assert ("differs", "differs from naive") in seen.of("span")
    assert ("answer", "the mat") in seen.of("div") and "were not recorded" in text


def test_old_records_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    line = asdict(turn(tokenizer, "the cat"))
    for name in ("token_sources", "accepted_by", "token_drafters"):
        del line[name]
    records.answers_file(tmp_path, "share").write_text(json.dumps(line) + "\n")
    [record] = records.read(tmp_path, "share").values()
    assert (record.token_sources, record.accepted_by, record.token_drafters) == ("", {}, "")


def test_completion_knows_the_drafters(tokenizer: Tokenizer) -> None:
    completion, params = Completion(), SamplingParams()
    request = Request([0], params, 0, StopChecker(tokenizer, params, eos_ids=(), room=9), Stats())
    completion.add(TokenChunk(request, [1], ["target"], [None], ""))
    completion.add(TokenChunk(request, [2, 3], ["accepted", "bonus"], ["suffix", None], ""))
    completion.add(TokenChunk(request, [4], ["recovered"], [None], ""))
    assert completion.drafters == [None, "suffix", None, None]


def test_shares_of_drafters(tokenizer: Tokenizer) -> None:
    counts = ({"a": 1}, {"b": 2, "a": 1}, {"b": 4}, {})
    turns = [turn(tokenizer, "the", accepted_by=each, question_id=i) for i, each in enumerate(counts)]
    found = summarize({"hybrid": {each.key: each for each in turns}}, [each.key for each in turns])
    assert list(found["hybrid"]["accepted_by"].items()) == [("b", 6), ("a", 2)]
    modes = {"naive": {"accepted_by": {}}, "hybrid": {"accepted_by": {"b": 6, "a": 2}}, "a": {"accepted_by": {"a": 5}}}
    section = drafters(modes)
    assert section.head == ["mode", "b", "a"]
    assert section.rows == [["hybrid", "75.0 %", "25.0 %"], ["a", "-", "100 %"]]
    assert not drafters({"share": {}}).rows


def test_a_measurement_writes_the_page(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("sharesd_files", "sharesd.runtime", "sharesd.weights.quantize"):
        monkeypatch.setattr(f"{module}.cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr("sharesd.cli.console.set_up_logging", lambda level: None)
    questions = [{"question_id": i, "category": "c", "turns": ["why is the sky blue", "and red"]} for i in (1, 2)]
    Path("q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    modes = ("naive", "share", "hybrid")
    sizes = ["--max-new-tokens", "24", "--max-context", "256", "--num-speculative-tokens", "3", "--compile", "off"]
    given = ["--target", str(model), "--questions", "q.jsonl", "--mode", ",".join(modes), "--out-dir", "out"]
    assert main(["mtbench", *given, *sizes]) == 0
    text = Path("out/report.html").read_text()
    seen = Page(text)
    assert seen.tags.count("details") == 2 * 2 * len(modes) and seen.tags.count("img") == 2
    tokenizer = load_tokenizer(model)
    summary = json.loads(Path("out/summary.json").read_text())
    for mode in modes:
        total: dict[str, int] = {}
        for record in records.read(Path("out"), mode).values():
            assert len(record.token_sources) == len(record.token_drafters) == len(record.token_ids)
            counts = {name: record.token_sources.count(name[0]) for name in record.sources}
            assert counts == record.sources
            assert sum(record.accepted_by.values()) == record.sources.get("accepted", 0)
            for place, (name, count) in enumerate(record.accepted_by.items()):
                assert record.token_drafters.count(str(place)) == count
                total[name] = total.get(name, 0) + count
            assert "".join(piece for piece, *_ in token_pieces(record, tokenizer)) == record.text
        assert summary["modes"][mode]["accepted_by"] == total
    assert not summary["modes"]["naive"]["accepted_by"] and summary["modes"]["share"]["accepted_by"].keys() == {"share"}
    report = Path("out/report.md").read_text()
    assert (
        "## Accepted tokens by drafter" in report
        and "## Accepted tokens by drafter" in report_of(summary, []).markdown()
    )
