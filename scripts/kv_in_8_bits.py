"""Agreement and speed of KV in 8 bits (`--kv-dtype q8`), with one model's weights.

    python scripts/kv_in_8_bits.py agreement --questions test.jsonl [--target MODEL]
    python scripts/kv_in_8_bits.py speed --contexts 2000,8000 [--target MODEL]

`agreement` compares logits of texts of GSM8K with those of KV in the model's dtype. `speed` times steps of 1 and 5 rows
behind a cache of noise, 8 bits and the dtype in turn, and prints medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sharesd.config import EngineConfig  # noqa: E402
from sharesd.kvcache.static import StaticKVCache  # noqa: E402
from sharesd.models.decoder import Decoder  # noqa: E402
from sharesd.models.prefill import CHUNK  # noqa: E402
from sharesd.runtime import Runtime  # noqa: E402

FORMS = {"dtype": False, "q8": True}
"""Name of a form of KV -> `Decoder.q8_kv`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("agreement", "speed"))
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--contexts", default="2000,8000")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    config = EngineConfig(target=args.target, device="cpu", dtype=args.dtype, max_context=64, mode="naive")
    runtime = Runtime(config, ("naive",))
    with torch.inference_mode():
        if args.what == "agreement":
            agreement(runtime, args.questions, args.texts, args.length)
        else:
            for context in map(int, args.contexts.split(",")):
                speed(runtime, context, args.repeats)


def new_cache(runtime: Runtime, form: str, tokens: int) -> StaticKVCache:
    assert isinstance(runtime.target, Decoder)
    runtime.target.q8_kv = FORMS[form]
    return runtime.target.new_cache(1, tokens + 32)


def agreement(runtime: Runtime, questions: Path, num_texts: int, length: int) -> None:
    rows = map(json.loads, questions.read_text(encoding="utf-8").splitlines())
    text = "\n\n".join(f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows)
    ids = runtime.tokenizer.encode(text[: 8 * num_texts * length])
    divergences, same = [], []
    for first in range(0, num_texts * length, length):
        plain, ours = (log_probs(runtime, form, ids[first : first + length]) for form in FORMS)
        divergences.append((plain.exp() * (plain - ours)).sum(-1))
        same.append(plain.argmax(-1) == ours.argmax(-1))
    divergence, is_same = torch.cat(divergences), torch.cat(same).float()
    print(
        f"{len(divergence)} positions: KL mean {divergence.mean():.2e}, largest {divergence.max():.2e}; "
        f"same likeliest token {is_same.mean():.4f}"
    )


def log_probs(runtime: Runtime, form: str, ids: list[int]) -> Tensor:
    cache, parts = new_cache(runtime, form, len(ids)), []
    for first in range(0, len(ids), CHUNK):
        cache.lengths.fill_(first)
        parts.append(runtime.target.forward(torch.tensor([ids[first : first + CHUNK]]), cache)[0].float())
    return torch.cat(parts).log_softmax(-1)


def speed(runtime: Runtime, context: int, repeats: int) -> None:
    caches = {form: new_cache(runtime, form, context) for form in FORMS}
    text = torch.randint(runtime.target.vocab_size, (1, CHUNK), generator=torch.Generator().manual_seed(0))
    for cache in caches.values():
        runtime.target.forward(text[:, : min(CHUNK, context)], cache)
        for tensor in (*cache.k, *cache.v):  # the same slots again and again
            written = tensor[:, :, : CHUNK * tensor.shape[2] // cache.slots]
            for first in range(0, tensor.shape[2], written.shape[2]):
                part = tensor[:, :, first : first + written.shape[2]]
                part.copy_(written[:, :, : part.shape[2]].clone())
        cache.lengths.fill_(context)
    took: dict[tuple[str, int], list[float]] = {(form, rows): [] for form in FORMS for rows in (1, 5)}
    for _ in range(repeats + 1):
        for form, rows in took:
            start = time.perf_counter()
            runtime.target.forward(text[:, :rows], caches[form])
            took[form, rows].append(1e3 * (time.perf_counter() - start))
    for rows in (1, 5):
        plain, ours = (statistics.median(took[form, rows][1:]) for form in FORMS)
        sizes = ", ".join(f"{form} {cache.nbytes / 1e6:.0f} MB" for form, cache in caches.items())
        print(f"context {context}, {rows} rows: dtype {plain:.1f} ms, q8 {ours:.1f} ms ({plain / ours:.2f}x); {sizes}")


if __name__ == "__main__":
    main()
