"""Record the texts of every mode in a file, or compare them with such a file.

    python scripts/record_texts.py FILE [--models "demo;AWQ"] [--device cpu]

Run it before a change that must leave texts as they are: it writes FILE. Run it again after the change: FILE is there,
and is compared. It takes up to 10 minutes on two quiet cores.

Each model decodes by every mode, at temperatures 0 and 1, one and four prompts at once, through `LLM` and the server.
FILE has a hash for each of these cells: of token ids through `LLM`, of texts through the server, which gives no ids. A
mode that a model refuses has the message in place of hashes.

The exit status is 1 if a text differs from FILE, or in itself: all modes must have the text of `naive`, and the server
that of `LLM`. Changed messages and new cells are printed only. Texts in bfloat16 may differ by
processor: record and compare on the same machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from serve.engine_thread import ServedModel  # noqa: E402
from serve.middleware import RequestLog  # noqa: E402
from sharesd import LLM, SamplingParams  # noqa: E402
from sharesd.devices.selection import device_of  # noqa: E402
from sharesd.drafters import registry  # noqa: E402
from sharesd.models.hub import gguf_of  # noqa: E402
from sharesd.models.loader import decoder_config  # noqa: E402
from sharesd.reports.environment import environment  # noqa: E402
from sharesd.startup import option_values  # noqa: E402
from tests.helpers.quantized_folders import write_quantized  # noqa: E402
from tests.helpers.served_model import Served, served  # noqa: E402
from tests.helpers.tiny_heads import make_head  # noqa: E402
from tests.helpers.tiny_models import make_checkpoint  # noqa: E402

Cells = dict[str, dict[str, Any]]
"""Cells of one model: mode, temperature, rows and way -> hash and number of tokens; or mode -> message of a refusal."""
Prepare = Callable[[Path], dict[str, Any]]
"""Function that may write a model into a folder; returns arguments of `LLM`."""

TEMPERATURES, ROWS = (0.0, 1.0), (1, 4)
PARAMS = SamplingParams(max_new_tokens=16, seed=5, ignore_eos=True)
PROMPTS = (
    "The cat sat on the mat, and the cat sat on the",
    "Why is the sky blue?",
    "To be or not to be, that is",
    "Seven colours of the rainbow: red, orange, yellow, green, blue,",
)
MACHINE = ("cpu", "cpu_capability", "num_threads", "gpu", "torch", "transformers", "python")
KEPT = ("date", "sharesd", "commit", "changed", *MACHINE)
"""Entries of `environment` in a recording, and those of them by which texts may differ."""


def quantized(kind: str, head: str, folder: Path) -> dict[str, Any]:
    """Write a tiny quantized model of this layout, with a trained head of its own."""
    target = write_quantized(folder / "model", kind, layers=2)
    made = make_head(folder / "head", decoder_config(target), head, dtype=torch.bfloat16, mlp=64)
    return {"target": str(target), "dequantize": False, "heads": (str(made),)}


def fallback(folder: Path) -> dict[str, Any]:
    """Write a tiny GPT-2, which runs through transformers' code."""
    sizes = {"vocab_size": 384, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():
        parameter.data.mul_(12 if parameter.ndim > 1 else 1)  # else the text hardly depends on the prompt
    model.save_pretrained(make_checkpoint(folder))
    return {"target": str(folder)}


MODELS: dict[str, Prepare] = {
    "demo": lambda _: {"dtype": "bfloat16"},
    "demo GGUF as stored": lambda _: {"target": str(gguf_of(None)), "dequantize": False},
    "demo GGUF expanded": lambda _: {"target": str(gguf_of(None)), "dequantize": True, "dtype": "bfloat16"},
    "AWQ": partial(quantized, "awq", "eagle"),
    "GPTQ": partial(quantized, "gptq", "parallel"),
    "fallback": fallback,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", default=";".join(MODELS), help="names with ; between them (default: %(default)s)")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    names = args.models.split(";")
    for name in names:
        if name not in MODELS:
            parser.error(f"there is no model {name!r}; choose from {', '.join(MODELS)}")
    before = json.loads(args.file.read_text()) if args.file.exists() else None
    found = environment(str(device_of(args.device)))
    RequestLog.write = lambda *_: None  # type: ignore[method-assign]  # a line for each request is of no use here
    now: dict[str, Any] = {**{name: found[name] for name in KEPT}, "models": {}}
    broken = []
    for name in names:
        started = time.monotonic()
        now["models"][name], lines = record(MODELS[name], device=args.device)
        broken += [f"broken: {name}: {line}" for line in lines]
        print(f"{name}: {len(now['models'][name])} cells in {time.monotonic() - started:.0f} s", flush=True)
    print("".join(f"{line}\n" for line in broken), end="")
    if before is None:
        args.file.write_text(json.dumps(now, indent=1) + "\n")
        print(f"recorded in {args.file}")
        return int(bool(broken))
    return int(compare(before, now) or bool(broken))


def record(prepare: Prepare, *, modes: Sequence[str] | None = None, device: str = "auto") -> tuple[Cells, list[str]]:
    """Return the cells of a model, and a line for each that breaks a guarantee."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_context": 256, "max_batch": max(ROWS), "device": device, **prepare(Path(folder))}
        llm, refused = load(options, modes or registry.modes())
        cells: Cells = {mode: {"refused": text.replace(folder, "FOLDER")} for mode, text in refused.items()}
        broken = []
        with llm:
            for mode in llm.modes:
                with serving(llm, mode) as server:
                    for T, rows in product(TEMPERATURES, ROWS):
                        params, prompts = replace(PARAMS, temperature=T), PROMPTS[:rows]
                        cell = f"T = {T:g}, rows = {rows}"
                        done = llm.generate(list(prompts), params, mode=mode)
                        ids, texts = [each.token_ids for each in done], [each.text for each in done]
                        cells[f"{mode}, {cell}, LLM"] = hashed(ids, sum(map(len, ids)))
                        heard, num_tokens = ask(server, params, prompts)
                        cells[f"{mode}, {cell}, server"] = hashed(heard, num_tokens)
                        if cells[f"{mode}, {cell}, LLM"] != cells[f"naive, {cell}, LLM"]:
                            broken.append(f"{mode}, {cell}: other tokens than those of naive")
                        if heard != texts:
                            broken.append(f"{mode}, {cell}: another text through the server than through LLM")
    return cells, broken


def load(options: dict[str, Any], modes: Sequence[str]) -> tuple[LLM, dict[str, str]]:
    """Load a model with all modes that it takes; return the messages of the others."""
    refused = refusals(modes, lambda mode: option_values.engine_config(options, modes=(mode,)))
    try:
        return LLM(modes=[mode for mode in modes if mode not in refused], **options), refused
    except ValueError:  # a mode is refused after options were checked; to find it takes a start of each
        refused = refusals(modes, lambda mode: LLM(modes=[mode], **options).close())
        return LLM(modes=[mode for mode in modes if mode not in refused], **options), refused


def refusals(modes: Sequence[str], attempt: Callable[[str], object]) -> dict[str, str]:
    """Return the messages of the modes with which an attempt raises ValueError."""
    found = {}
    for mode in modes:
        try:
            attempt(mode)
        except ValueError as error:
            found[mode] = str(error)
    return found


@contextmanager
def serving(llm: LLM, mode: str) -> Iterator[Served]:
    """Serve a mode of a loaded model over HTTP."""
    runtime = llm._runtime
    assert runtime is not None
    engine = runtime.warm_up(mode, each_kind=True)
    engine.mode = mode
    model = ServedModel(
        engine=engine,
        tokenizer=runtime.tokenizer,
        max_context=runtime.max_context,
        vocab_size=runtime.target.vocab_size,
        grammars=engine.grammars,
    )
    with served(lambda: model, {"mode": mode, "max_batch": max(ROWS)}) as server:
        server.wait(lambda: server.http.get("/health").status_code == 200)
        yield server


def ask(server: Served, params: SamplingParams, prompts: Sequence[str]) -> tuple[list[str], int]:
    """Return the texts that a server answers, and their tokens."""
    fields = {"temperature": params.temperature, "seed": params.seed, "max_tokens": params.max_new_tokens}
    answer = server.complete(list(prompts), ignore_eos=params.ignore_eos, **fields)
    return [choice["text"] for choice in answer["choices"]], answer["usage"]["completion_tokens"]


def hashed(answers: Sequence[Any], num_tokens: int) -> dict[str, Any]:
    """Return the cell of these answers, ids or texts."""
    return {"hash": hashlib.sha256(json.dumps(answers).encode()).hexdigest(), "tokens": num_tokens}


def compare(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Print what changed in the models of `now`; True if a text did, or is missing."""
    for name in MACHINE:
        if before[name] != now[name]:
            print(f"{name}: {before[name]} when recorded, {now[name]} now; texts in 16 bits may differ by it")
    same = differ = 0
    for model, cells in now["models"].items():
        recorded = before["models"].get(model, {})
        for cell in dict.fromkeys([*recorded, *cells]):
            old, new = recorded.get(cell), cells.get(cell)
            same += old == new
            differ += old != new and old is not None and "hash" in old
            if old != new:
                print(f"{_change(old, new)}: {model}: {cell}{_message(new)}")
    print(f"{same} cells are the same, {differ} texts differ or are missing")
    return bool(differ)


def _change(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    if old is None or new is None:
        return "new" if old is None else "missing"
    if "refused" in new:
        return "another message" if "refused" in old else "now refused"
    return "differs"


def _message(cell: dict[str, Any] | None) -> str:
    return f": {cell['refused']}" if cell and "refused" in cell else ""


if __name__ == "__main__":
    sys.exit(main())
