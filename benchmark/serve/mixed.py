"""Requests of all kinds: short and long, greedy and sampled, with penalties, stop texts and several choices."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from benchmark.serve.client import Endpoint
from benchmark.serve.workload import RandomLengths, random_words

LONGEST = 1500
"""Words of the one long prompt; each is a token or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixed:
    """One request, without what must not change its texts: `stream` and `speculate`."""

    endpoint: Endpoint
    body: dict[str, Any]


def mixed(num: int, seed: int, longest: int = LONGEST) -> list[Mixed]:
    """`num` requests, the same ones for the same seed. One prompt has `longest` words, the others at most a quarter.

    A third of the prompts begin alike, as those with a system prompt do.
    """
    dice = Random(seed)
    words = random_words(num + 1, RandomLengths(input_len=longest // 8, output_len=1, range_ratio=0.96), seed)
    shared, *texts = [str(request.prompt) for request in words]
    texts[dice.randrange(num)] = str(
        random_words(1, RandomLengths(input_len=longest, output_len=1), seed + 1)[0].prompt
    )
    return [_request(f"{shared}\n{text}" if dice.random() < 1 / 3 else text, dice) for text in texts]


def _request(text: str, dice: Random) -> Mixed:
    body: dict[str, Any] = {
        "seed": dice.randrange(2**32),
        "temperature": dice.choice([0, 0, 0.5, 1, 1.5]),
        "max_tokens": dice.randint(4, 64),
        "ignore_eos": dice.random() < 0.8,
        "n": 2 if dice.random() < 0.2 else 1,
    }
    optional: dict[str, list[Any]] = {
        "top_p": [0.8, 0.95],
        "top_k": [5, 40],
        "min_p": [0.05],
        "repetition_penalty": [1.1, 1.3],
        "presence_penalty": [0.5, 1.5],
        "frequency_penalty": [0.5, -0.3],
        "logit_bias": [{"260": -100, "28": 3}],
        "stop": [[" the"], [".", "and "]],
    }
    for name, values in optional.items():
        if dice.random() < 0.25:
            body[name] = dice.choice(values)
    if dice.random() < 0.5:
        more = {"logprobs": True, "top_logprobs": 3} if dice.random() < 0.2 else {}
        return Mixed(endpoint="chat", body={"messages": [{"role": "user", "content": text}], **body, **more})
    return Mixed(endpoint="completions", body={"prompt": text, **body})
