"""Files of llama.cpp that say something unusual: read as it means, or refused by name.

Token ids without a reference next to them are those of llama.cpp 0.3.36 (llama-cpp-python).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import TokenType
from transformers import AutoModelForCausalLM

from sharesd import LLM, SamplingParams
from sharesd.models.hub import resolve
from sharesd.models.tokenizer import load_tokenizer
from tests.cases.inputs import (
    BYTES,
    LONG,
    PLAIN,
    backend,
    byte_level,
    config_of,
    save,
    spm_pieces,
    weights,
    write_gemma,
    write_gguf,
)

SHORT_FACTORS, LONG_FACTORS = [1 + 0.75 * i for i in range(8)], [2 + 3.0 * i for i in range(8)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tokens_of(target: Path, prompt: str = LONG, num: int = 12, **params: Any) -> list[int]:
    with LLM(mode="naive", target=str(target), dtype="float32", device="cpu", max_context=128) as llm:
        [done] = llm.generate([backend().encode(prompt).ids], SamplingParams(max_new_tokens=num, **params))
    return done.token_ids


def right(folder: Path) -> list[int]:
    """Return transformers' reading of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([backend().encode(LONG).ids])
    return model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()


def longrope(folder: Path) -> tuple[Path, Path]:
    tensors = weights("phi3", seed=11, kv=4)
    config = config_of("phi3", tensors, num_key_value_heads=4, max_position_embeddings=1024)
    factor = math.sqrt(1 + math.log(4) / math.log(256))
    said = {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": factor}
    factors = {"rope_factors_short.weight": SHORT_FACTORS, "rope_factors_long.weight": LONG_FACTORS}
    scaling = {"type": "longrope", "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
    plain = config | {"rope_scaling": scaling, "original_max_position_embeddings": 256}
    return write_gguf(folder / "x.gguf", tensors, config, said, extra=factors), save(folder / "x", tensors, plain)


def yarn(folder: Path) -> tuple[Path, Path]:
    tensors = weights("qwen3", seed=12, heads=2, kv=1, size=128)
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    config = config_of("qwen3", tensors, max_position_embeddings=640, **sizes)
    scaling = {"type": "yarn", "factor": 10.0, "original_context_length": 64}
    said = {f"rope.scaling.{key}": value for key, value in scaling.items()}
    plain = {"rope_scaling": {"rope_type": "yarn", "factor": 10.0, "original_max_position_embeddings": 64}}
    return write_gguf(folder / "x.gguf", tensors, config, said), save(folder / "x", tensors, config | plain)


def biases(folder: Path) -> tuple[Path, Path]:
    tensors = weights(seed=13, biases="qkvo")
    config = config_of("llama", tensors)
    plain = save(folder / "x", tensors, config | {"attention_bias": True})
    return write_gguf(folder / "x.gguf", tensors, config), plain


def old_key(folder: Path) -> tuple[Path, Path]:
    tensors = weights("qwen2", seed=14, biases="qkv")
    config = config_of("qwen2", tensors, max_position_embeddings=2048)
    plain = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    file = write_gguf(folder / "x.gguf", tensors, config, {"rope.scale_linear": 8.0})
    return file, save(folder / "x", tensors, config | plain)


def whole(folder: Path) -> tuple[Path, Path]:
    tensors = weights(seed=111)
    config = config_of("llama", tensors)
    return write_gguf(folder / "x.gguf", tensors, config), save(folder / "x", tensors, config)


@pytest.mark.parametrize(
    "make",
    [
        whole,
        longrope,
        yarn,
        biases,
        old_key,
    ],
)
def test_a_file_is_read_as_it_means_or_refused(make: Any, tmp_path: Path) -> None:
    file, plain = make(tmp_path)
    assert tokens_of(plain) == right(plain)
    try:
        folder = resolve(file)
    except ValueError as error:
        assert any(word in str(error) for word in ("rope", "scale_linear", "bias")), error
    else:
        assert tokens_of(folder) == right(plain)


def test_an_unknown_splitter_is_refused_or_splits_as_it_should(tmp_path: Path) -> None:
    digits = [("2", "0"), ("20", "2"), ("202", "6"), ("4", "2")]
    fields = byte_level("deepseek-coder", digits)
    tensors = weights(vocab=len(fields["tokens"]), seed=15)
    file = write_gguf(tmp_path / "x.gguf", tensors, config_of("llama", tensors), tokenizer=fields)
    try:
        folder = resolve(file)
    except ValueError as error:
        assert "deepseek-coder" in str(error)
    else:
        expected = [67, 267, 269, 223, 20, 18, 20, 24, 291, 223, 22, 20]
        assert load_tokenizer(folder).encode("a bird in 2026 and 42", False) == expected


def write_spm(file: Path, scores: Callable[[int], float] = lambda i: -i, **general: str) -> Path:
    """Write a model with sentencepiece as Llama 2 has it: a space is put before texts."""
    names = ["<unk>", "<s>", "</s>", *BYTES]
    names += dict.fromkeys(["▁" * i for i in (2, 4, 8, 16)] + spm_pieces() + ["<|user|>"])
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * (len(names) - len(kinds) - 1) + [TokenType.CONTROL]
    ranks = [0.0] * 259 + [float(scores(i)) for i in range(len(names) - 259)]
    fields = {"model": "llama", "pre": "default", "tokens": names, "token_type": kinds, "scores": ranks}
    tensors = weights(vocab=len(names), seed=51)
    keys = {f"general.{key}": value for key, value in general.items()}
    tokenizer = fields | {"unknown_token_id": 0}
    return write_gguf(file, tensors, config_of("llama", tensors), keys, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def spm_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spm(tmp_path_factory.mktemp("spm") / "x.gguf")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the old tree", [329, 330, 358]),
        (" the old tree", [259, 296, 330, 358]),
        ("  the moon", [259, 329, 378]),
        ("   ", [260]),
    ],
)
def test_spaces_at_the_beginning(spm_llama: Path, text: str, expected: list[int]) -> None:
    assert load_tokenizer(resolve(spm_llama)).encode(text, False) == expected


def test_phi_3_takes_the_spaces_after_its_special_tokens(spm_llama: Path, tmp_path: Path) -> None:
    """llama.cpp tells it by `general.name`; the file has no other sign."""
    phi, other = (
        load_tokenizer(resolve(file)) for file in (write_spm(tmp_path / "x.gguf", name="Phi-3 Mini"), spm_llama)
    )
    for token in ("<|user|>", "</s>"):
        assert phi.encode(f"{token} \n the moon", False) == other.encode(f"{token}the moon", False)
        assert phi.encode(f"the moon {token}", False) == other.encode(f"the moon {token}", False)
    for text in ("<s> the moon", "  the moon ", "the \n moon"):
        assert phi.encode(text, False) == other.encode(text, False)
    assert other.encode("<|user|> the", False) != other.encode("<|user|>the", False)


def test_equal_scores_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolve(write_spm(tmp_path / "x.gguf"))
    assert "share a score" not in caplog.text
    resolve(write_spm(tmp_path / "y.gguf", lambda i: -(i // 2)))
    assert "tokens of the file's tokenizer share a score" in caplog.text


@pytest.mark.parametrize(
    ("num", "expected"),
    [
        (31, [293, 289, 323]),
        (32, [293, 289, 356]),
        (45, [293, 289, 272, 323]),
        (64, [293, 289, 289, 260, 323]),
    ],
)
def test_runs_of_spaces_are_the_longest_pieces_of_the_user(num: int, expected: list[int], tmp_path: Path) -> None:
    """Gemma's tokenizer, with pieces of 2 to 31 spaces; in a Llama, since only the tokenizer matters."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES, *(" " * i for i in range(2, 32)), *spm_pieces()]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.BYTE] * 256 + [TokenType.USER_DEFINED] * 30
    kinds += [TokenType.NORMAL] * (len(names) - len(kinds))
    fields: dict[str, Any] = {"model": "llama", "pre": "default", "tokens": names, "token_type": kinds}
    fields |= {"scores": [-1000.0] * len(names), "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3}
    fields |= {"padding_token_id": 0, "add_bos_token": False, "add_space_prefix": False}
    file = write_gemma(tmp_path / "x.gguf", fields)
    assert load_tokenizer(resolve(file)).encode("in" + num * " " + "the", False) == expected


@pytest.mark.parametrize("role", ["eot", "eom"])
def test_the_end_of_a_turn_ends_the_text(role: str, tmp_path: Path) -> None:
    fields = byte_level(more=["<|over_to_you|>"])
    end = len(fields["tokens"]) - 1
    tensors = weights(vocab=end + 1, seed=61)
    tensors["lm_head.weight"][-1] = 20 * tensors["lm_head.weight"][fields["tokens"].index("Ġmoon")]
    tokenizer = fields | {f"{role}_token_id": end}
    file = write_gguf(tmp_path / "x.gguf", tensors, config_of("llama", tensors), tokenizer=tokenizer)
    found = tokens_of(resolve(file), "the old tree", 40, temperature=1.0, seed=1)
    assert end in found and end not in found[:-1]


def test_a_template_for_tools_of_its_own_is_found(tmp_path: Path) -> None:
    tools = "{% if tools %}TOOLS: {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}" + PLAIN
    tensors = weights(seed=62)
    said = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": tools}
    tokenizer = load_tokenizer(resolve(write_gguf(tmp_path / "x.gguf", tensors, config_of("llama", tensors), said)))
    assert tokenizer.takes_tools


@pytest.mark.parametrize("part", [1, 2])
def test_a_file_in_parts_is_read_whole_or_refused(part: int, tmp_path: Path, own_cache: Path) -> None:
    tensors = weights(seed=111)
    config = config_of("llama", tensors)
    write_gguf(tmp_path / "parts.gguf", tensors, config, split=8)
    file = tmp_path / f"parts-0000{part}-of-00003.gguf"
    try:
        folder = resolve(file)
    except ValueError as error:
        assert "of 3" in str(error) and not list((own_cache / "checkpoints").glob("*"))
    else:
        assert tokens_of(folder) == right(save(tmp_path / "x", tensors, config))


def test_the_ending_may_be_in_capitals(tmp_path: Path) -> None:
    file, _ = whole(tmp_path)
    assert resolve(file.rename(tmp_path / "x.GGUF")).is_dir()


def some_biases(folder: Path) -> tuple[Path, Path]:
    """Biases of Q, K and V alone; transformers' class has one of the output, too."""
    tensors = weights(seed=16, biases="qkv")
    config = config_of("llama", tensors)
    zeros = {f"model.layers.{i}.self_attn.o_proj.bias": torch.zeros(64) for i in range(2)}
    plain = save(folder / "x", tensors | zeros, config | {"attention_bias": True})
    return write_gguf(folder / "x.gguf", tensors, config), plain


def divisors(folder: Path) -> tuple[Path, Path]:
    """Stored divisors of a rule without a name, with a factor; as longrope's short factors they are the same."""
    tensors = weights(seed=17)
    config = config_of("llama", tensors)
    said = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    scaling = {"rope_type": "longrope", "short_factor": [2 * each for each in SHORT_FACTORS]}
    scaling |= {"long_factor": scaling["short_factor"], "attention_factor": 1.0, "factor": 1.0}
    scaling |= {"original_max_position_embeddings": 512}
    plain = config | {"rope_scaling": scaling, "original_max_position_embeddings": 512}
    file = write_gguf(folder / "x.gguf", tensors, config, said, extra={"rope_freqs.weight": SHORT_FACTORS})
    return file, save(folder / "x", tensors, plain)


def yarn_with_magnitude(folder: Path) -> tuple[Path, Path]:
    tensors = weights("qwen2", seed=18, biases="qkv")
    config = config_of("qwen2", tensors, max_position_embeddings=2048)
    said = {"type": "yarn", "factor": 4.0, "original_context_length": 512, "attn_factor": 0.75, "yarn_beta_fast": 16.0}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0}
    scaling |= {"attention_factor": 0.75 * (0.1 * math.log(4.0) + 1)}
    file = write_gguf(folder / "x.gguf", tensors, config, {f"rope.scaling.{key}": said[key] for key in said})
    return file, save(folder / "x", tensors, config | {"rope_scaling": scaling})


def part_of_the_heads(folder: Path) -> tuple[Path, Path]:
    """Half of each head is rotated."""
    tensors = weights("phi3", seed=19, kv=4)
    config = config_of("phi3", tensors, num_key_value_heads=4)
    file = write_gguf(folder / "x.gguf", tensors, config, {"rope.dimension_count": 8})
    return file, save(folder / "x", tensors, config | {"partial_rotary_factor": 0.5})


@pytest.mark.parametrize("make", [some_biases, divisors, yarn_with_magnitude, part_of_the_heads])
def test_a_file_is_read_as_it_means(make: Any, tmp_path: Path) -> None:
    file, plain = make(tmp_path)
    assert tokens_of(resolve(file)) == right(plain)


def test_a_missing_part_is_named_and_nothing_stays(tmp_path: Path, own_cache: Path) -> None:
    tensors = weights(seed=111)
    (tmp_path / "model").mkdir()
    write_gguf(tmp_path / "model" / "parts.gguf", tensors, config_of("llama", tensors), split=8)
    resolve(tmp_path / "model")
    (tmp_path / "model" / "parts-00002-of-00003.gguf").unlink()
    for target in (tmp_path / "model", tmp_path / "model" / "parts-00003-of-00003.gguf"):
        with pytest.raises(ValueError, match="of 3, and parts-00002-of-00003.gguf is missing"):
            resolve(target)
    assert len(list((own_cache / "checkpoints").iterdir())) == 1


def test_a_key_can_be_ignored(tmp_path: Path) -> None:
    tensors = weights(seed=111)
    config = config_of("llama", tensors)
    file = write_gguf(tmp_path / "x.gguf", tensors, config, {"residual_scale": 0.5})
    with pytest.raises(ValueError, match=r"x.gguf: key 'llama.residual_scale' = 0.5 .* --ignore-key llama.residual_sc"):
        LLM(mode="naive", target=str(file))
    plain = save(tmp_path / "x", tensors, config)
    with LLM(
        mode="naive", target=str(file), ignore_keys=["llama.residual_scale"], dtype="float32", device="cpu"
    ) as llm:
        [done] = llm.generate([backend().encode(LONG).ids], SamplingParams(max_new_tokens=12))
    assert done.token_ids == right(plain)
