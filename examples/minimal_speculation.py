"""Speculative decoding with one shared model, in plain PyTorch: what ShareSD's engine does, without what makes it fast.

The demo model's linears exist twice, at full precision and in 4 bits. With the 4-bit linears the model drafts a few
tokens; with the full ones it verifies all of them in one forward pass. Both read and write the same KV cache. The text
is that of plain decoding.

    python examples/minimal_speculation.py "Name three colours of the rainbow." --max-new-tokens 48 --draft-length 3

The same steps in the engine: `draft` is sharesd/drafters/chain_draft.py, `verify` and `accept` are
sharesd/engine/decode_round.py and sharesd/sampling/acceptance.py, `prefill` is sharesd/engine/prefill_scheduler.py.
What it adds: batches, sampling (the noise of a position is fixed by the seed, so that sampled texts are identical,
too), draft lengths by measured costs, trees, fused CPU kernels, CUDA graphs.

Legend: T tokens of a step, V vocabulary.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.config import QuantConfig
from quant.quantize_model import quantize_linears
from quant.switch_linear import Switch
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.models.hub import resolve
from sharesd.models.loader import load_model
from sharesd.models.tokenizer import load_tokenizer
from sharesd.weights.quantize import head_name, layer_of, solver_config


def load(target: str | None = None) -> tuple[Decoder, Switch]:
    """Return a model in float32 whose linears have 4-bit copies, and the switch between the two."""
    model = load_model(resolve(target), dtype=torch.float32, device="cpu")
    assert isinstance(model, Decoder), "quantized drafts need an architecture of the native decoder"
    switch = Switch()
    solver = solver_config(torch.device("cpu"), None)
    names = {"head_name": head_name(model), "layer_of": layer_of}
    quantize_linears(model, QuantConfig(bits=4), switch, **names, solver_config=solver)
    return model, switch


def forward(model: CausalModel, cache: StaticKVCache, tokens: list[int]) -> Tensor:
    """Return logits [T, V] after each of `tokens`, whose KV goes to the slots after the cache's length.

    The length is not changed: what is not committed is overwritten by the next call.
    """
    return model.forward(torch.tensor([tokens]), cache)[0]


def prefill(model: CausalModel, cache: StaticKVCache, prompt: list[int]) -> int:
    """Read a prompt and return the first new token: the first root."""
    logits_TV = forward(model, cache, prompt)
    cache.lengths += len(prompt)
    return int(logits_TV[-1].argmax())


def draft(model: CausalModel, cache: StaticKVCache, switch: Switch, root: int, length: int) -> list[int]:
    """Return `length` tokens that the quantized model expects after the root.

    It reads the target's KV of the text, and writes its own KV above. The verify step overwrites that, so nothing of
    the quantized model stays.
    """
    start, tokens = cache.lengths.clone(), [root]
    with switch.quantized_weights():
        for _ in range(length):
            tokens.append(int(forward(model, cache, tokens[-1:])[-1].argmax()))
            cache.lengths += 1
    cache.lengths.copy_(start)
    return tokens[1:]


def verify(model: CausalModel, cache: StaticKVCache, root: int, drafted: list[int]) -> list[int]:
    """Return the target's own next token after the root and after each drafted token, from one pass."""
    return forward(model, cache, [root, *drafted]).argmax(-1).tolist()


def accept(drafted: list[int], targets: list[int]) -> list[int]:
    """Return the new tokens: drafted ones up to the first that differs, then the target's own."""
    num = 0
    while num < len(drafted) and drafted[num] == targets[num]:
        num += 1
    return targets[: num + 1]


@dataclass
class Result:
    tokens: list[int]
    """Emitted tokens, the end token included if there is one."""
    rounds: int
    """Passes of the target after the prompt."""


def decode(
    model: Decoder, prompt: list[int], max_new_tokens: int, *, switch: Switch | None = None, draft_length: int = 0
) -> Result:
    """Decode greedily, with drafts if there is a draft length."""
    cache = model.new_cache(batch=1, slots=len(prompt) + max_new_tokens + draft_length + 1)
    result = Result([prefill(model, cache, prompt)], rounds=0)
    while len(result.tokens) < max_new_tokens and result.tokens[-1] not in model.eos_ids:
        root = result.tokens[-1]  # emitted, but its KV is not in the cache yet: the verify step writes it
        drafted = draft(model, cache, switch, root, draft_length) if switch and draft_length else []
        new = accept(drafted, verify(model, cache, root, drafted))
        ends = [i for i, token in enumerate(new) if token in model.eos_ids]
        new = new[: ends[0] + 1] if ends else new
        cache.lengths += len(new)  # the commit: KV of the root and of all new tokens but the last, the next root
        result.tokens += new
        result.rounds += 1
    result.tokens = result.tokens[:max_new_tokens]
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="decode twice, plainly and with drafts of the model itself")
    parser.add_argument("question", nargs="?", default="Name three colours of the rainbow.")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--target", help="checkpoint folder, .gguf file or hub id; default: the demo model")
    args = parser.parse_args(argv)
    model, switch = load(args.target)
    tokenizer = load_tokenizer(resolve(args.target))
    prompt = tokenizer.ask(args.question)
    with torch.inference_mode():
        plain = decode(model, prompt, args.max_new_tokens)
        drafts = decode(model, prompt, args.max_new_tokens, switch=switch, draft_length=args.draft_length)
    print(tokenizer.decode(drafts.tokens))
    print(f"plain decoding: {plain.rounds} passes of the target; with drafts: {drafts.rounds}")
    print(f"the same text: {plain.tokens == drafts.tokens}")


if __name__ == "__main__":
    main()
