"""The registry of architectures, and a family from outside the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sharesd import LLM, SamplingParams
from sharesd.models.architecture import BLOCK_NAMES, GGUF_BLOCK_NAMES, Architecture, GGUFLayout, llama_like
from sharesd.models.architectures import architecture_of, config_from_hf, model_types, register, unregister
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.hf_config import HFConfig
from sharesd.models.loader import load_decoder
from tests.helpers.gguf_files import write_gguf
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import make_checkpoint
from tests.models.folders import edit_config, edit_tensors

NAMES = {"self_attn.q_proj": "mixer.query", "self_attn.k_proj": "mixer.key", "self_attn.v_proj": "mixer.value"}
NAMES |= {"self_attn.o_proj": "mixer.out", "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2"}
NAMES |= {"mlp.gate_proj": "ffn.w1", "mlp.up_proj": "ffn.w3", "mlp.down_proj": "ffn.w2"}
"""Llama's modules -> those of the made-up family."""
FACTOR = 2.0  # on embeddings; exact in every dtype


def _read(config: HFConfig) -> DecoderConfig:
    if config.get("twisted"):
        raise config.unsupported("twisted branches")
    return llama_like(config, embedding_multiplier=config.get("embedding_factor", 1.0))


BANYAN = Architecture(
    model_type="banyan",
    to_decoder_config=_read,
    defaults={"embedding_factor": FACTOR},
    block_names={path: tuple(NAMES.get(name, name) for name in names) for path, names in BLOCK_NAMES.items()},
    ignored_prefixes=("roots.",),
    gguf=GGUFLayout(
        name="banyan",
        class_name="BanyanForCausalLM",
        block_names={part: NAMES[name] for part, name in GGUF_BLOCK_NAMES.items()},
        pairs_rows=True,
        fields={"embedding_scale": "embedding_factor"},
    ),
)
"""Llama with other names, and scaled embeddings."""


@pytest.fixture
def banyan() -> Iterator[None]:
    register(BANYAN)
    yield
    unregister("banyan")


def as_banyan(llama: Path, folder: Path) -> Path:
    """The same model as a checkpoint of the made-up family, its embedding divided by FACTOR."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensor, new_name = tensors.pop(name), name
            for old, new in NAMES.items():
                new_name = new_name.replace(old, new)
            tensors[new_name] = tensor / FACTOR if "embed_tokens" in name else tensor
        tensors["roots.weight"] = torch.zeros(3)

    shutil.copytree(llama, folder)
    return edit_tensors(edit_config(folder, model_type="banyan"), rename)


@pytest.mark.usefixtures("banyan")
def test_a_family_of_another_file_loads_and_decodes(tmp_path: Path) -> None:
    llama = make_checkpoint(tmp_path / "llama")
    params, texts = SamplingParams(max_new_tokens=12), []
    for folder in (llama, as_banyan(llama, tmp_path / "banyan")):
        with LLM(mode="share", target=str(folder), device="cpu", max_context=128) as llm:
            texts.append(llm.generate(["the cat sat on the"], params)[0].token_ids)
    assert texts[0] == texts[1] and len(set(texts[0])) > 3


@pytest.mark.usefixtures("banyan", "own_cache")
def test_its_gguf_files_are_converted(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "banyan.gguf", "banyan", extra={"embedding_scale": 4.0})
    plain = load_decoder(converted_folder(write_gguf(tmp_path / "llama.gguf")), dtype=torch.float32)
    scaled = load_decoder(converted_folder(file), dtype=torch.float32)
    assert scaled.config.model_type == "banyan" and scaled.config.embedding_multiplier == 4.0
    plain.embed.weight.data.mul_(4.0)  # and the head, which is tied
    of_plain, of_scaled = (model(torch.arange(40, 48)[None], model.new_cache(1, 16)) for model in (plain, scaled))
    assert torch.equal(of_plain / 4.0, of_scaled)
    names = architecture_of("banyan").gguf.tensor_names(1)
    assert "blk.0.attn_q.weight" in names and "blk.0.roots.weight" not in names


def test_what_a_family_refuses_is_named(request: pytest.FixtureRequest) -> None:
    with pytest.raises(UnsupportedArchitecture, match="'banyan' has no native decoder; it serves gemma2, .*smollm3"):
        config_from_hf({"model_type": "banyan"})
    request.getfixturevalue("banyan")
    assert "banyan" in model_types()
    with pytest.raises(UnsupportedArchitecture, match="'banyan' with twisted branches"):
        config_from_hf({"model_type": "banyan", "twisted": True})
    with pytest.raises(ValueError, match="this banyan checkpoint has no 'num_attention_heads'"):
        config_from_hf({"model_type": "banyan"})


@pytest.mark.subprocess
def test_architectures_import_no_torch() -> None:
    code = "import sys; from sharesd.models.architectures import model_types; print(len(model_types()), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    number, *modules = done.stdout.split()
    assert int(number) >= 9 and not {"torch", "transformers", "gguf"} & set(modules)
