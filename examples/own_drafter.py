"""A drafter of your own, in one file: after a token come the tokens that followed it the last time.

    sharesd bench check-drafter examples/own_drafter.py:EchoTable
    sharesd generate "Count to ten, twice." --drafter-module examples/own_drafter.py --mode echo --echo-length 3
    python examples/own_drafter.py

The text is that of plain decoding, whatever a drafter proposes. docs/how-to/add-a-drafter.md explains the parts.
"""

from dataclasses import dataclass

from sharesd.drafters.registry import DrafterSpec, option
from sharesd.drafters.selection import options_of
from sharesd.drafters.tables.base import Table
from sharesd.drafters.tables.proposal import Proposal, empty_proposal


@dataclass(frozen=True)
class Options:
    echo_length: int = option(4, "mode echo: draft tokens", metavar="N")  # --echo-length, LLM(echo_length=...)


class EchoTable(Table):
    name = "echo"

    def __init__(self, length):
        self.length, self.texts, self.places = length, {}, {}

    def begin(self, row, tokens):  # a new text in a row of the batch
        self.texts[row], self.places[row] = [], {}
        self.extend(row, tokens)

    def extend(self, row, tokens):  # what the target has emitted
        text, places = self.texts[row], self.places[row]
        for token in tokens:
            places.update({text[-1]: len(text)} if text else {})
            text.append(token)

    def propose(self, row, budget):  # at most `budget` tokens after the text
        text = self.texts[row]
        start = self.places[row].get(text[-1])
        if start is None:
            return empty_proposal()
        tokens = text[start : start + min(budget, self.length)]
        scores = [0.5 ** (depth + 1) for depth in range(len(tokens))]  # probability that the text comes this far
        return Proposal(tokens, list(range(-1, len(tokens) - 1)), scores)


def build(inputs):
    return EchoTable(options_of(inputs.config, "echo").echo_length)


SPEC = DrafterSpec(name="echo", kind="table", help="lookup by one token", build=f"{__name__}:build", options=Options)


def main(target=None):
    from sharesd import LLM, SamplingParams

    prompt, params = "one, two, three, one, two, three, one, two,", SamplingParams(max_new_tokens=24)
    with LLM(target, modes=("naive", "echo"), drafter_module=__file__, max_context=128, max_batch=1) as llm:
        plain, drafted = (llm.generate(prompt, params, mode=mode)[0] for mode in ("naive", "echo"))
    print(drafted.text)
    print(f"tokens per round: {drafted.stats.tau:.2f}; the same text: {plain.token_ids == drafted.token_ids}")


if __name__ == "__main__":
    main()
