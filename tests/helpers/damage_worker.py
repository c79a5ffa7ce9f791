"""`python -m tests.helpers.damage_worker KIND FIRST LAST ... FOLDER`: load damaged files through the command line.

Prints a JSON line per file: kind, number, outcome, seconds and the text on stderr. Memory is limited. Several kinds run
one after the other, in a fork each, so that what takes seconds to import is imported once.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import random
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from safetensors.torch import load_file, save_file

from compile import cpp_extension
from sharesd.cli.console import main_guard
from sharesd.cli.generate_file import read
from sharesd.data.prompt_files import read_prompts
from sharesd.models.loader import decoder_config
from sharesd.reports.questions import load
from sharesd.startup import cost_profiler
from sharesd_command import main
from tests.cases import inputs
from tests.helpers import damage
from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

MAX_BYTES = 4 << 30
"""Address space of this process."""
MAX_LINE = 1500
"""Characters of an error at most, paths included."""
OPTIONS = ("--max-new-tokens", "2", "--max-context", "512", "--dtype", "float32", "--threads", "1")
NAIVE = ("--mode", "naive")
CONFIG_FIELDS: dict[str, Any] = {
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32},
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "text_config": {"model_type": "llama", "hidden_size": 64},
    "quantization_config": {"quant_method": "gptq"},
    "layer_types": ["full_attention", "sliding_attention"],
}
CONFIG_FIELDS |= {"model_type": "gemma3_text", "sliding_window": 16, "head_dim": 32, "eos_token_id": [2, 3]}
CONFIG_FIELDS |= {"num_hidden_layers": 3, "attention_bias": True, "partial_rotary_factor": 0.5}
CONFIG_FIELDS |= {"tie_word_embeddings": True, "num_nextn_predict_layers": 1, "max_position_embeddings": 1 << 20}
CONFIG_FIELDS |= {"no_rope_layers": [1, 0], "query_pre_attn_scalar": 16}
CONFIG_FIELDS |= {"auto_map": {"AutoModelForCausalLM": "code.Model"}}
TOKENIZER_FIELDS: dict[str, Any] = {
    "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}, "999999": {"content": "<far>"}},
    "extra_special_tokens": {"image_token": "<image>"},
    "additional_special_tokens": ["<one>", {"content": "<two>"}],
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
    "tokenizer_class": "LlamaTokenizer",
    "eos_token": {"content": "<|im_end|>", "lstrip": True, "normalized": False},
    "unk_token": "<unk>",
    "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_id": 0, "pad_token": "x"},
}
ADAPTER_FIELDS: dict[str, Any] = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 8}}
ADAPTER_FIELDS |= {"modules_to_save": ["lm_head"], "use_rslora": True, "use_dora": True}
ADAPTER_FIELDS |= {"init_lora_weights": "gaussian", "target_modules": "all-linear"}
RECORDS = (
    '{"prompt": "the cat"}',
    '"the mat"',
    '{"instruction": "why", "input": "the sky", "output": "blue", "instances": [{"input": "x", "output": "y"}]}',
    '{"messages": [{"role": "user", "content": "how"}, {"role": "assistant", "content": "so"}]}',
    '{"conversations": [{"from": "human", "value": "the"}, {"from": "gpt", "value": "red"}], "system": "be"}',
    '{"question_id": 81, "category": "writing", "turns": ["the cat", "the mat"]}',
)


def gguf_case(base: Path, dice: random.Random, here: Path) -> Path:
    file = dice.choice(sorted(base.glob("*.gguf")))
    for other in base.glob(f"{file.stem.partition('-0')[0]}-0*.gguf"):  # the other parts of its model
        if other != file:
            (here / other.name).symlink_to(other)
    target = here / file.name
    target.write_bytes(damage.damaged_gguf(file.read_bytes(), dice))
    return target


def folder_case(names: tuple[str, ...], besides: str = "") -> Callable[..., Path]:
    """Return what writes a folder, one of whose named files is damaged; `besides`: a folder that is left alone."""

    def write(base: Path, dice: random.Random, here: Path) -> Path:
        folders = [path for path in sorted(base.iterdir()) if path.name != besides]
        source = dice.choice([path for path in folders if any((path / name).exists() for name in names)])
        name = dice.choice([name for name in names if (source / name).exists()])
        folder = here / source.name
        folder.mkdir()
        for file in source.iterdir():
            if file.name != name:
                (folder / file.name).symlink_to(file)
        data = (source / name).read_bytes()
        if name.endswith(".safetensors"):
            written = damage.damaged_safetensors(data, dice)
        elif name.endswith(".json"):
            fields = {"config.json": CONFIG_FIELDS, "adapter_config.json": ADAPTER_FIELDS}
            more = fields.get(name, TOKENIZER_FIELDS if "token" in name else {})
            written = damage.damaged_json(data.decode(), dice, more)
        else:
            written = damage.damaged_bytes(data, dice)
        (folder / name).write_bytes(written)
        return folder

    return write


def prompts_case(base: Path, dice: random.Random, here: Path) -> Path:
    lines = [dice.choice(RECORDS) for _ in range(3)]
    text = f"[{', '.join(lines)}]" if dice.random() < 0.2 else "\n".join(lines)
    data = damage.damaged_lines(text, dice)
    if packed := dice.random() < 0.1:
        data = damage.damaged_bytes(gzip.compress(data, mtime=0), dice)
    file = here / ("prompts" + dice.choice((".jsonl", ".json", ".txt")) + (".gz" if packed else ""))
    file.write_bytes(data)
    return file


TOKENIZERS = [f"{name}.json" for name in ("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens")]
KINDS: dict[str, Callable[..., Path]] = {
    "gguf": gguf_case,
    "weights": folder_case(("model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin")),
    "tokenizer": folder_case((*TOKENIZERS, "vocab.json", "merges.txt", "tokenizer.json", "chat_template.jinja")),
    "config": folder_case(("config.json", "config.json", "generation_config.json", "model.safetensors.index.json")),
    "adapter": folder_case(("adapter_config.json", "adapter_model.safetensors")),
    "heads": folder_case(("config.json", "config.json", "model.safetensors"), besides="llama"),
    "prompts": prompts_case,
}


def make_base(kind: str, base: Path) -> None:
    """Write the undamaged files."""
    base.mkdir()
    if kind == "gguf":
        yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
        for name, *more in (("llama",), ("gemma3", "spm"), ("qwen3", "qwen2", yarn), ("phi3", "spm")):
            write_gguf(base / f"{name}.gguf", name, *more)
        tensors = inputs.weights(seed=4)
        inputs.write_gguf(base / "parts.gguf", tensors, inputs.config_of("llama", tensors), split=8)
        return
    make_checkpoint(base / "llama")
    if kind == "adapter":  # of rank 4, for one linear
        (base / "tuned").mkdir()
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
        config["base_model_name_or_path"] = "owner/base"
        (base / "tuned" / "adapter_config.json").write_text(json.dumps(config))
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        factors = {f"{module}.lora_A.weight": torch.ones(4, 64), f"{module}.lora_B.weight": torch.ones(64, 4)}
        save_file(factors, base / "tuned" / "adapter_model.safetensors")
    elif kind == "heads":
        target = decoder_config(base / "llama")
        for head in ("eagle", "eagle3", "parallel", "glide"):
            make_head(base / head, target, head, ids=range(64) if head == "eagle3" else None, dtype=torch.float32)
    elif kind != "prompts":
        _make_folders(kind, base)


def _make_folders(kind: str, base: Path) -> None:
    """Store more models, with files of every name."""
    for i, family in enumerate(("qwen2", "qwen3", "phi3")):
        tensors = inputs.weights(family, seed=i, kv=4 if family == "phi3" else 2, biases="qkv" if i == 0 else "")
        inputs.save(base / family, tensors, inputs.config_of(family, tensors, num_key_value_heads=4 if i == 2 else 2))
    if kind == "config":  # an architecture that runs through transformers
        tensors = {name: each for name, each in inputs.weights(seed=3).items() if "norm" not in name}
        config = inputs.config_of("llama", tensors) | {"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}
        inputs.save(base / "olmo", tensors, config)
    for folder in sorted(base.iterdir()):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1], "temperature": 0.6}))
    _split(base / "llama")
    phi3 = base / "phi3"
    torch.save(load_file(phi3 / "model.safetensors"), phi3 / "pytorch_model.bin")
    (phi3 / "model.safetensors").unlink()
    if kind == "tokenizer":  # a vocabulary and merges, which transformers converts
        inputs.backend().model.save(str(phi3))
        (phi3 / "tokenizer.json").unlink()
        config = json.loads((phi3 / "tokenizer_config.json").read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
        (phi3 / "tokenizer_config.json").write_text(json.dumps(config))
    special = {"eos_token": "<|close|>", "unk_token": {"content": "<u>"}}
    (base / "qwen2" / "special_tokens_map.json").write_text(json.dumps(special))
    (base / "qwen2" / "added_tokens.json").write_text(json.dumps({"<extra>": 500, "<more>": 501}))


def _split(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shard = {name: f"model-0000{1 + (i > len(tensors) // 2)}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for each in set(shard.values()):
        save_file({name: tensors[name] for name in tensors if shard[name] == each}, folder / each)
    index = {"metadata": {}, "weight_map": shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def command(kind: str, case: Path, number: int, base: Path, here: Path) -> Callable[[], int]:
    prompts, target, more = ["the cat"], base / "llama", NAIVE
    if kind == "adapter":
        more = ("--lora", str(case), *NAIVE)
    elif kind == "heads":
        more = ("--draft-head", str(case), "--mode", case.name.replace("eagle3", "eagle"))
    elif kind != "prompts":
        target = case
    elif number % 10:
        return lambda: main_guard(lambda: _read_prompts(case, number % 3))
    else:
        prompts = ["--prompts", str(case), "--out", str(here / "out.jsonl"), "--max-batch", "2"]
    return lambda: main(["generate", *prompts, "--target", str(target), *OPTIONS, *more])


def _read_prompts(case: Path, reader: int) -> int:
    (lambda: read(case, raw=False), lambda: load("mtbench", case), lambda: read_prompts([str(case)]))[reader]()
    return 0


def outcome(status: int, text: str, case: Path) -> str:
    """Return "loaded", "refused", or what is wrong with the end."""
    lines = [line for line in text.splitlines() if line and not line.startswith(("warning:", "sharesd"))]
    if "Traceback" in text or "panicked" in text:
        return "traceback"
    if status == 0 or (status == 1 and " answered + " in text):
        return "loaded"
    if len(lines) != 1 or not lines[0].startswith("error: "):
        return f"status {status} with {len(lines)} lines"
    if len(lines[0]) > MAX_LINE:
        return "a long line"
    if lines[0].startswith(("error: a prompt ", "error: the logits of ")):
        return "refused"
    # A folder's files, or the parts next to a file. A converted file's folder in the cache begins with its name.
    files = [file.name for file in (case if case.is_dir() else case.parent).iterdir()]
    if not any(name in lines[0] for name in (str(case), f"{case.stem}-", *files)):
        return "no file is named"
    if "out of memory" in lines[0] or "LOGLEVEL=DEBUG" in lines[0]:
        return "error of a library"
    return "refused"


def leftovers(cache: Path, status: int) -> list[str]:
    """Return what should not be in the cache, and empty it."""
    found = sorted((cache / "checkpoints").glob("*"))
    whole = [path for path in found if (path / "converted.json").exists() or (path / "lora_adapter").exists()]
    wrong = [path.name for path in found if path.name.startswith(".") or (status == 2 and path not in whole)]
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return wrong


def warm_up(kind: str, base: Path) -> None:
    """Load what takes seconds: kernels, and for some kinds transformers."""
    target = base / {"config": "olmo", "tokenizer": "phi3"}.get(kind, "llama")
    if kind == "gguf":
        header = damage.GGUFHeader.read((base / "llama.gguf").read_bytes())
        header.fields[0] = (header.fields[0][0], header.fields[0][1].replace(b"llama", b"mamba"))
        target = base.parent / "mamba.gguf"
        target.write_bytes(header.write())
    with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
        main(["generate", "the cat", "--target", str(target), *OPTIONS, *NAIVE])


def run(kind: str, first: int, last: int, folder: Path, results: TextIO) -> None:
    for dtype in ("float32", "bfloat16", "sampling_ops"):
        cpp_extension.library(dtype)
    cost_profiler.SECONDS, cost_profiler.SWEEPS = 0.0, (1, 1)
    torch.set_num_threads(1)
    cache, base, said = folder / "cache", folder / "base", folder / "stderr"
    os.environ["SHARESD_CACHE_DIR"] = str(cache)
    make_base(kind, base)
    warm_up(kind, base)
    stream = said.open("w+")
    os.dup2(stream.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    sys.stdout = os.fdopen(1, "w", closefd=False)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    for number in range(first, last):
        here = folder / str(number)
        here.mkdir()
        case = KINDS[kind](base, random.Random(f"{kind} {number}"), here)
        stream.seek(0)
        stream.truncate()
        os.lseek(2, 0, os.SEEK_SET)
        print(json.dumps({"number": number, "began": True}), file=results, flush=True)
        started = time.monotonic()
        try:
            status, what = command(kind, case, number, base, here)(), ""
        except BaseException as error:
            status, what = 3, "traceback"
            where = "".join(traceback.format_exception(error)[-3:])
            print(f"{type(error).__name__}: {error}"[:2000] + "\n" + where[-1500:], file=sys.stderr)
        record = {"kind": kind, "number": number, "seconds": round(time.monotonic() - started, 3)}
        gc.collect()  # models in cycles take room below the limit
        sys.stderr.flush()
        text = said.read_text(errors="replace")
        what = what or outcome(status, text, case)
        wrong = leftovers(cache, status)
        if wrong and what in ("loaded", "refused"):
            what = f"left {wrong[0]} in the cache"
        record |= {"outcome": what, "text": text[:3000]}
        record["max_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(record), file=results, flush=True)
        shutil.rmtree(here)


def run_forked(kind: str, first: int, last: int, folder: Path, results: TextIO) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(kind, first, last, folder, results)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        end = {"kind": kind, "number": -1, "outcome": f"exit status {status}", "text": ""}
        print(json.dumps(end), file=results, flush=True)


if __name__ == "__main__":
    *jobs, folder = sys.argv[1:]
    results, run_job = os.fdopen(os.dup(1), "w"), run if len(jobs) == 3 else run_forked
    for at in range(0, len(jobs), 3):
        place = Path(folder) / jobs[at]
        place.mkdir()
        run_job(jobs[at], int(jobs[at + 1]), int(jobs[at + 2]), place, results)
