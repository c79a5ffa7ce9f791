"""A draft model whose vocabulary is padded to another size: exact, and padding is never drafted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharesd import SamplingParams
from sharesd.config import EngineConfig
from sharesd.models.tokenizer import load_tokenizer
from sharesd.runtime import Runtime
from tests.cases.inputs import llama

TARGET, SMALLER, LARGER = 640, 384, 704


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets and drafts of the same weights."""
    folder = tmp_path_factory.mktemp("padding")
    for vocab in (TARGET, SMALLER, LARGER):
        llama(folder / str(vocab), vocab=vocab, seed=31)
    return folder


def runtime(folder: Path, vocab: int, **options: Any) -> Runtime:
    config = EngineConfig(
        target=str(folder / str(TARGET)),
        draft=str(folder / str(vocab)),
        device="cpu",
        dtype="float32",
        max_context=128,
        max_batch=2,
        **options,
    )
    return Runtime(config, ("naive", "classic"))


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot": {"temperature": 3.0, "seed": 2},
    "truncated": {"temperature": 3.0, "top_p": 0.99, "repetition_penalty": 1.2, "seed": 3},
    "rejection": {"temperature": 3.0, "seed": 4, "acceptance": "rejection"},
    "block": {"temperature": 3.0, "seed": 5, "acceptance": "block"},
}


@pytest.mark.parametrize("vocab", [SMALLER, LARGER])
@pytest.mark.parametrize("options", [{"num_draft": 3}, {"tree": (3, 3, 8), "num_draft": 8}], ids=str)
def test_texts_are_those_of_naive(folder: Path, vocab: int, options: dict[str, Any]) -> None:
    """With a hot target that emits ids that the smaller model does not have, and a prompt of such ids."""
    loaded = runtime(folder, vocab, **options)
    naive, classic = loaded.engine("naive"), loaded.engine("classic")
    prompts = [loaded.tokenizer.encode("the old tree"), [5, TARGET - 1, SMALLER, 7]]
    drafted: set[int] = set()
    commit = classic.drafter.commit  # type: ignore[union-attr]

    def noted(context: Any, tree: Any, *rest: Any) -> Any:
        drafted.update(tree.tokens.flatten().tolist())
        return commit(context, tree, *rest)

    classic.drafter.commit = noted  # type: ignore[union-attr, method-assign]
    for name, sampling in SAMPLING.items():
        if "acceptance" in sampling and "tree" in options:
            continue
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, **sampling)
        found = classic.generate(prompts, params)
        if name in ("greedy", "hot", "truncated"):
            wanted = naive.generate(prompts, params)
            assert [done.token_ids for done in found] == [done.token_ids for done in wanted]
        if name == "greedy" and "tree" not in options:
            sources = [source for done in found for source in done.sources[1:]]
            assert sources.count("recovered") <= 2, "the same model guesses right"
        elif name == "hot":
            assert any(token >= SMALLER for done in found for token in done.token_ids)
    assert drafted and max(drafted) < min(vocab, TARGET)
    loaded.close()


def test_another_tokenizer_of_the_same_size_is_refused(folder: Path, tmp_path: Path) -> None:
    other = llama(tmp_path / str(SMALLER), vocab=SMALLER, seed=31)
    said = json.loads((other / "tokenizer.json").read_text())
    ids = said["model"]["vocab"]
    ids["Ġmoon"], ids["Ġgreen"] = ids["Ġgreen"], ids["Ġmoon"]
    (other / "tokenizer.json").write_text(json.dumps(said))
    assert load_tokenizer(other).vocab_size == load_tokenizer(folder / str(TARGET)).vocab_size
    with pytest.raises(ValueError, match="another vocabulary"):
        Runtime(EngineConfig(target=str(folder / str(TARGET)), draft=str(other), device="cpu"), ("classic",))
