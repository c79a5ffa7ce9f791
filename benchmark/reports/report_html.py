"""A summary and all answers as one page that needs nothing else: report.html, each token coloured by its origin."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup

from benchmark.questions.questions import Question
from benchmark.questions.records import TurnRecord
from benchmark.reports.report import category_rows, drafter_rows
from benchmark.reports.summary import BASE, tau, tokens_per_second
from benchmark.reports.table import HEADLINE, headline, tables_from
from benchmark.reports.text import number
from sharesd.cli.display import MEANINGS
from sharesd.models.tokenizer import TextStream, Tokenizer

Answer = tuple[str, TurnRecord]
"""(mode, what it answered)"""
SHADES = {"target": "#ffffff", "recovered": "#ffd9a0", "bonus": "#fff3a3"}
DRAFTER_SHADES = ("#b9ddf5", "#b4e6d2", "#f0cde0", "#d9d2f3", "#d6e8a8", "#e3d5c5")
"""Backgrounds of accepted tokens, by drafter; used again where there are more drafters."""

_TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 70em; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; } h3 { font-size: 1em; margin: 1.5em 0 0.3em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25em 0.8em; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
details { margin: 0.3em 0; } summary { cursor: pointer; }
.asked, .answer { white-space: pre-wrap; overflow-wrap: anywhere; }
.asked { border-left: 3px solid #ccc; padding-left: 0.7em; margin: 0.5em 0; }
.answer { border: 1px solid #ddd; padding: 0.6em; line-height: 1.7; }
.differs { color: #a40000; font-weight: bold; }
.legend { display: flex; flex-wrap: wrap; gap: 0.4em; }
.legend span { padding: 0.1em 0.5em; border: 1px solid #ddd; }
.bar { position: sticky; top: 0; background: #fff; padding: 0.5em 0; border-bottom: 1px solid #ddd; }
input { font: inherit; width: 20em; max-width: 100%; }
i { font-style: normal; border-radius: 2px; }
{% for name, shade, _ in origins %}.{{ name }} { background: {{ shade }}; }
{% endfor %}</style>
</head>
<body>
<h1>{{ title }}</h1>
{% macro table(head, rows) %}<div class="wide"><table>
<thead><tr>{% for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>{% endmacro %}
{% if not complete %}<p class="differs">Not complete: the figures are those of what is there.</p>{% endif %}
{{ table(*summary) }}
<p>{{ tables }} Speeds are over decoding alone; what the columns mean is in report.md.</p>
{% for name, data in plots %}<p><img alt="{{ name }}" src="data:image/png;base64,{{ data }}"></p>
{% endfor %}
<h2>Speed by category</h2>
{{ table(*categories) }}
{% if drafters[1] %}<h2>Accepted tokens by drafter</h2>
{{ table(*drafters) }}
{% endif %}
<h2>Answers</h2>
<div class="bar">
<p class="legend">{% for name, _, meaning in origins %}<span class="{{ name }}">{{ meaning }}</span>{% endfor %}</p>
<p><label>Search questions and answers: <input id="search" type="search"></label> <span id="found"></span></p>
</div>
{% for question in questions %}<section>
<h3>Question {{ question.id }} · {{ question.category }}</h3>
{% for turn in question.turns %}<div class="asked">{{ turn.text }}</div>
{% for answer in turn.answers %}<details>
<summary><b>{{ answer.mode }}</b> {{ answer.figures }}\
{% if answer.differs %} <span class="differs">differs from {{ base }}</span>{% endif %}</summary>
<div class="answer">{{ answer.text }}</div>
{% if not answer.coloured %}<p>Where its tokens came from was not recorded.</p>{% endif %}</details>
{% endfor %}{% endfor %}</section>
{% endfor %}
<script>
const sections = [...document.querySelectorAll("section")];
const texts = sections.map((section) => section.textContent.toLowerCase());
document.getElementById("search").addEventListener("input", (event) => {
  const wanted = event.target.value.toLowerCase();
  let count = 0;
  sections.forEach((section, i) => {
    section.hidden = !texts[i].includes(wanted);
    count += !section.hidden;
  });
  document.getElementById("found").textContent = wanted ? `${count} of ${sections.length} questions` : "";
});
</script>
</body>
</html>
"""


def html_page(
    summary: Mapping[str, Any],
    plots: Mapping[str, bytes],
    questions: Sequence[Question],
    answers: Iterable[Answer],
    tokenizer: Tokenizer,
) -> str:
    """The whole page. `plots` are PNG files by name, `answers` come in the order in which they are to be shown."""
    by_turn: dict[tuple[str | int, int], list[Answer]] = {}
    names: dict[str, None] = {}
    for mode, record in answers:
        by_turn.setdefault((record.question_id, record.turn), []).append((mode, record))
        names |= dict.fromkeys(record.accepted_by)
    classes = {name: f"a{place}" for place, name in enumerate(names)}
    settings, modes = summary["settings"], summary["modes"]
    return _template().render(
        title=f"{settings['model']} on {settings['questions']['label']}",
        complete=summary["status"]["complete"],
        summary=(HEADLINE, headline(summary)),
        tables=tables_from(settings),
        categories=category_rows(modes),
        drafters=drafter_rows(modes),
        plots=[(name, base64.b64encode(data).decode()) for name, data in plots.items()],
        origins=_origins(classes),
        base=BASE,
        questions=[_question(question, by_turn, classes, tokenizer) for question in questions],
    )


def token_pieces(record: TurnRecord, tokenizer: Tokenizer) -> list[tuple[str, str, str | None]]:
    """The answer's text token by token: (text, letter of the source, drafter). Empty if sources were not recorded.

    A character made of several tokens belongs to the last of them. Tokens without text of their own, and those behind a
    stop string, are left out.
    """
    count = len(record.token_ids)
    if len(record.token_sources) != count or len(record.token_drafters) != count:
        return []
    drafters = {str(place): name for place, name in enumerate(record.accepted_by)}
    stream, left = TextStream(tokenizer), len(record.text)
    pieces: list[tuple[str, str, str | None]] = []
    for i, (token, source, place) in enumerate(
        zip(record.token_ids, record.token_sources, record.token_drafters, strict=True), 1
    ):
        text = stream.push([token])
        if i == count:
            text += stream.finish()
        text = text[:left]
        left -= len(text)
        if text:
            pieces.append((text, source, drafters.get(place)))
    return pieces


def _question(
    question: Question,
    by_turn: Mapping[tuple[str | int, int], list[Answer]],
    classes: Mapping[str, str],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    turns = []
    for turn, text in enumerate(question.turns, 1):
        answers = by_turn.get((question.id, turn), [])
        base = {record.run: record.token_ids for mode, record in answers if mode == BASE}
        turns.append({"text": text, "answers": [_answer(*answer, base, classes, tokenizer) for answer in answers]})
    return {"id": question.id, "category": question.category, "turns": turns}


def _answer(
    mode: str,
    record: TurnRecord,
    base: Mapping[int, list[int]],
    classes: Mapping[str, str],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    pieces = token_pieces(record, tokenizer)
    marked = Markup("").join(
        Markup('<i class="{}">{}</i>').format(classes.get(drafter or "", source), text)
        for text, source, drafter in pieces
    )
    figures = f"{record.new_tokens} tokens, {number(tokens_per_second([record]))} tok/s"
    if mode != BASE:
        figures += f", {number(tau([record]), 2)} tokens per round"
    return {
        "mode": mode if record.run == 1 else f"{mode}, run {record.run}",
        "figures": figures,
        "differs": base.get(record.run, record.token_ids) != record.token_ids,
        "coloured": bool(pieces) or not record.text,
        "text": marked if pieces else record.text,
    }


def _origins(classes: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """CSS class, background and meaning of every origin. Accepted tokens have a class for each drafter."""
    meanings = {str(source): meaning for source, meaning in MEANINGS.items()}
    found = [(source[0], shade, meanings[source]) for source, shade in SHADES.items()]
    accepted = [("a", DRAFTER_SHADES[0], meanings["accepted"])]
    if classes:
        shades = [DRAFTER_SHADES[i % len(DRAFTER_SHADES)] for i in range(len(classes))]
        drafted = zip(classes.items(), shades, strict=True)
        accepted = [(css, shade, f"{meanings['accepted']}: {name}") for (name, css), shade in drafted]
    return [found[0], *accepted, *found[1:]]


@cache
def _template() -> Template:
    return Environment(autoescape=True).from_string(_TEMPLATE)
