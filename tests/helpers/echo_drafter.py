"""Mode echo: after a token come the tokens that followed it the last time."""

from dataclasses import dataclass

from sharesd.drafters.selection import options_of
from sharesd.drafters.spec import DrafterSpec, option
from sharesd.drafters.tables.base import Table
from sharesd.speculation.draft_proposal import Proposal, empty_proposal


@dataclass(frozen=True)
class Options:
    echo_length: int = option(4, "mode echo: tokens to guess", metavar="N")


class EchoTable(Table):
    name = "echo"

    def __init__(self, length):
        self.length, self.texts, self.places = length, {}, {}

    def begin(self, row, tokens):  # a new text
        self.texts[row], self.places[row] = [], {}
        self.extend(row, tokens)

    def extend(self, row, tokens):  # what the target has emitted
        text, places = self.texts[row], self.places[row]
        for token in tokens:
            places.update({text[-1]: len(text)} if text else {})
            text.append(token)

    def propose(self, row, budget, ahead=()):
        text = self.texts[row]
        start = self.places[row].get((*text, *ahead)[-1])
        if start is None:
            return empty_proposal()
        tokens = text[start : start + min(budget, self.length)]
        scores = [0.5 ** (depth + 1) for depth in range(len(tokens))]  # probability that the text comes this far
        return Proposal(tokens, list(range(-1, len(tokens) - 1)), scores)


def build(inputs):
    return EchoTable(options_of(inputs.config, "echo").echo_length)


SPEC = DrafterSpec(name="echo", kind="table", help="lookup by one token", build=f"{__name__}:build", options=Options)
