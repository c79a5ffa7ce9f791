#!/usr/bin/env python
"""Time ShareSD and llama.cpp in turns in one process: one thread, one .gguf file, plain greedy decoding, a prompt.

Usage: peer_turns.py FILE [TURNS]. Needs llama-cpp-python. Times are of the clock: run it with real-time priority on a
core that others leave alone. A turn decodes 32 tokens; ratios are medians of turns, with the least and the greatest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from statistics import median

import llama_cpp

from sharesd import LLM, SamplingParams

TOKENS, PROMPT = 32, 1500


def passes(tokens: Iterable[object]) -> list[float]:
    """Return the time now, and at each token."""
    return [time.perf_counter(), *(time.perf_counter() for _ in tokens)]


def main() -> None:
    file, turns = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 11
    llm = LLM(file, mode="naive", device="cpu", max_context=2048, threads=1, max_batch=1, activations="exact")
    peer = llama_cpp.Llama(file, n_ctx=2048, n_threads=1, n_threads_batch=1, verbose=False)

    def ours(prompt: list[int], num: int) -> list[float]:
        return passes(llm.stream(prompt, SamplingParams(max_new_tokens=num, ignore_eos=True, temperature=0.0)))

    def theirs(prompt: list[int], num: int) -> list[float]:
        peer.reset()
        return passes(islice(peer.generate(prompt, temp=0.0), num))

    def compare(what: str, num: int, seconds: Callable[[Callable[[list[int], int], list[float]], int], float]) -> None:
        pairs = [(seconds(ours, turn), seconds(theirs, turn)) for turn in range(num)]
        ratios = [their / our for our, their in pairs]
        our_ms, their_ms = (1e3 * median(side) for side in zip(*pairs, strict=True))
        shown = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{what}: ShareSD {our_ms:.2f} ms, llama.cpp {their_ms:.2f} ms, {shown}", flush=True)

    def token(run: Callable[[list[int], int], list[float]], _: int) -> float:
        _, first, *rest = run([5, 6, 7, 8], TOKENS)
        return (rest[-1] - first) / len(rest)

    def prompt(run: Callable[[list[int], int], list[float]], turn: int) -> float:
        begin, first = run([5 + turn, *(3 + i * 7 % 250 for i in range(1, PROMPT))], 1)
        return first - begin

    token(ours, 0), token(theirs, 0)
    compare("a token", turns, token)
    compare(f"a prompt of {PROMPT} tokens", 3, prompt)


if __name__ == "__main__":
    main()
