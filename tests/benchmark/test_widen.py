"""Widening keeps the function, aligns its seams, refuses what it cannot do, and never leaves half a folder."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from benchmark.gpu.shapes import SHAPES, WideShape
from benchmark.studies import widening
from benchmark.studies.widening import GROUP, describe, wide_tensors, widen, widen_head
from quant.formats.hqq.solver import solve
from sharesd.config import EngineConfig
from sharesd.drafters.heads.checkpoint import load_head
from sharesd.models.checkpoint import read_config, weight_files
from sharesd.models.hub import EMBEDDED, model_name
from sharesd.models.loader import decoder_config, load_decoder
from sharesd.models.tokenizer import load_tokenizer
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from tests.helpers.in_mode import in_mode
from tests.helpers.tiny_heads import logits_of as logits_of_head
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

WIDE = WideShape(hidden_size=192, intermediate_size=320, num_attention_heads=12, num_key_value_heads=6, num_layers=5)
FOURFOLD = replace(WIDE, hidden_size=256)
TOKENS = list(range(3, 90, 4))


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A tiny Llama with 4 query and 2 key/value heads of 16, hidden size 64, untied."""
    return make_checkpoint(tmp_path / "real")


def edit_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def logits_of(folder: Path, dtype: torch.dtype) -> Tensor:
    """[1, T, V], eager."""
    decoder = load_decoder(folder, dtype=dtype)
    with torch.inference_mode():
        return decoder.forward(torch.tensor([TOKENS]), decoder.new_cache(1, 64))


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_logits_stay(real: Path, tmp_path: Path, tie_word_embeddings: bool) -> None:
    def in_float64(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Norms that change something; no head where the embedding is it."""
        left_out = ["lm_head.weight"] if tie_word_embeddings else []
        wide = {name: tensor.double() for name, tensor in tensors.items() if name not in left_out}
        return {name: tensor * 1.3 if name.endswith("norm.weight") else tensor for name, tensor in wide.items()}

    edit_weights(real, in_float64)
    edit_config(real, tie_word_embeddings=tie_word_embeddings)
    widen(real, tmp_path / "wide", WIDE, name="wide")
    before, after = logits_of(real, torch.float64), logits_of(tmp_path / "wide", torch.float64)
    assert before.abs().max() > 1
    assert (after - before).abs().max() <= 1e-12 * before.abs().max()


def test_fourfold_width_keeps_the_bits_of_bfloat16(real: Path, tmp_path: Path) -> None:
    """sqrt(D/D') is 1/2 then; the kernels add the zeros last. All modes, so quantized weights stay as good, too."""
    widen(real, tmp_path / "wide", FOURFOLD, name="wide")
    params = SamplingParams(max_new_tokens=48, ignore_eos=True)
    texts: list[list[int]] = []
    rounds: list[int] = []
    for folder in (real, tmp_path / "wide"):
        runtime = Runtime(EngineConfig(target=str(folder), num_draft=3, max_context=128), ("naive", "share"))
        for mode in ("naive", "share"):
            engine = in_mode(runtime, mode)
            texts.append(engine.generate([TOKENS], params)[0].token_ids)
            rounds.append(engine.stats.rounds)
    assert texts == 4 * texts[:1] and rounds[1] == rounds[3] < rounds[0]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_widened_head_guesses_the_same(real: Path, tmp_path: Path, kind: str) -> None:
    """From the widened model's hidden states, which are zero where the real ones end."""
    edit_weights(real, lambda tensors: {name: tensor.double() for name, tensor in tensors.items()})
    head = make_head(tmp_path / "head", decoder_config(real), kind, bias=False)
    widen(real, tmp_path / "wide", WIDE, name="wide")
    widen_head(head, real, tmp_path / "wide-head", WIDE)
    features_TPD = torch.randn(len(TOKENS), 2 if kind == "eagle3" else 1, 64, dtype=torch.float64)
    found = []
    for folder, mine, added in ((real, head, 0), (tmp_path / "wide", tmp_path / "wide-head", 128)):
        loaded = load_head(mine, load_decoder(folder, dtype=torch.float64))
        features_BTF = F.pad(features_TPD, (0, added)).flatten(1)[None]
        with torch.inference_mode():
            states = loaded.unroll(torch.tensor([TOKENS]), features_BTF, 3)
            found.append(torch.stack([logits_of_head(loaded, each) for each in states])[:, :, 3:])
    assert (found[0] - found[1]).abs().max() <= 1e-12 * found[0].abs().max()


def test_groups_never_mix_what_must_be_zero_is_and_the_rest_is_noise(real: Path, tmp_path: Path) -> None:
    """The codes, scales and zeros of the real columns are those of the real matrix alone."""
    widen(real, tmp_path / "wide", WIDE, name="wide")
    small, large = stored(real), stored(tmp_path / "wide")
    for kind in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        matrix, wide = small[f"model.layers.1.{kind}.weight"], large[f"model.layers.1.{kind}.weight"]
        rows, columns = matrix.shape
        assert wide.shape[1] > columns and columns % GROUP == 0
        alone, inside = solve(matrix, 4, GROUP), solve(wide[:rows].contiguous(), 4, GROUP)
        assert torch.equal(alone.q, inside.q[:, :columns])
        assert torch.equal(alone.scale, inside.scale[:, : columns // GROUP])
        assert torch.equal(alone.zero, inside.zero[:, : columns // GROUP])
        low = inside.dequantize()[:, columns:]
        assert low.isfinite().all() and (kind not in ("self_attn.o_proj", "mlp.down_proj") or not low.any())
    assert not large["model.embed_tokens.weight"][:, 64:].any()
    for layer in range(WIDE.num_layers):
        for kind in ("self_attn.o_proj", "mlp.down_proj"):
            added = large[f"model.layers.{layer}.{kind}.weight"].clone()
            if layer < 2:
                rows, columns = small[f"model.layers.{layer}.{kind}.weight"].shape
                added[:rows, :columns] = 0
            assert not added.any()
        for kind in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            matrix = small[f"model.layers.{layer % 2}.{kind}.weight"]
            noise = large[f"model.layers.{layer}.{kind}.weight"][len(matrix) :]
            assert float(noise.float().std() / matrix.float().std()) == pytest.approx(1, abs=0.1)


def test_what_is_widened_in_memory_is_what_would_be_written(real: Path, tmp_path: Path) -> None:
    """A runtime takes it from there, and the folder has no weights: `classic` asks for them a second time."""
    widen(real, tmp_path / "wide", WIDE, name="wide")
    written, made = stored(tmp_path / "wide"), dict(wide_tensors(real, WIDE, device="cpu"))
    assert written.keys() == made.keys() and all(torch.equal(written[name], made[name]) for name in made)
    (tmp_path / "bare").mkdir()
    describe(real, tmp_path / "bare", WIDE, name="wide")
    assert not list((tmp_path / "bare").glob("*.safetensors*"))
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    texts = []
    for folder, tensors in (("wide", None), ("bare", lambda: wide_tensors(real, WIDE, device="cpu"))):
        config = EngineConfig(target=str(tmp_path / folder), num_draft=3, max_context=128)
        runtime = Runtime(config, ("naive", "classic"), tensors=tensors)
        texts += [in_mode(runtime, mode).generate([TOKENS], params)[0].token_ids for mode in ("naive", "classic")]
    assert texts == 4 * texts[:1]


def test_a_seed_gives_the_same_bytes(real: Path, tmp_path: Path) -> None:
    for out, seed, shard_bytes in (("a", 0, 10**9), ("b", 0, 100_000), ("c", 1, 10**9)):
        widen(real, tmp_path / out, WIDE, name="wide", seed=seed, shard_bytes=shard_bytes)
    a, b, c = (stored(tmp_path / out) for out in "abc")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    gate, up = (a[f"model.layers.0.mlp.{kind}_proj.weight"][-64:].float() for kind in ("gate", "up"))
    assert abs((gate * up).mean() / (gate.std() * up.std())) < 0.1  # noise differs from tensor to tensor
    files = weight_files(tmp_path / "b")
    assert len(files) > 3 and all(file.stat().st_size < 120_000 or len(load_file(file)) == 1 for file in files)


def test_dithered_weights_lie_on_no_grid(real: Path, tmp_path: Path) -> None:
    """The error of each weight is at most half a step of its block: 4 bits, in embedding and head 8."""
    same = WideShape(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, num_layers=2)

    def expanded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: _expanded(tensor.float(), name) if tensor.ndim == 2 else tensor for name, tensor in tensors.items()
        }

    edit_weights(real, expanded)
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        widen(real, tmp_path / out, same, name="dithered", seed=seed, dither=True)
    before, a, b, c = stored(real), *(stored(tmp_path / out) for out in "abc")
    assert all(torch.equal(a[name], b[name]) for name in before) and before.keys() == a.keys()
    for name, weight in before.items():
        if weight.ndim < 2:
            assert torch.equal(a[name], weight)
            continue
        assert weight.any() and not torch.equal(a[name], c[name])
        blocks = weight.unflatten(-1, (-1, 32))
        peak = 2 * blocks.abs().amax(-1, keepdim=True) / 254
        step = peak if _is_table(name) else (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
        error = (a[name] - weight).unflatten(-1, (-1, 32)) / step.clamp(min=1e-9)
        assert error.abs().max() <= 0.5 + 1e-4
        assert float(error[step.flatten(1)[:, 0] > 0].std()) == pytest.approx(12**-0.5, rel=0.1)  # uniform


def _expanded(weight: Tensor, name: str) -> Tensor:
    """Weights as blocks of 32 with 4 bits hold them, or with 8."""
    blocks = weight.unflatten(-1, (-1, 32))
    low, levels = blocks.amin(-1, keepdim=True), 255 if _is_table(name) else 15
    step = ((blocks.amax(-1, keepdim=True) - low) / levels).clamp(min=1e-9)
    return (((blocks - low) / step).round() * step + low).flatten(-2)


def _is_table(name: str) -> bool:
    return "embed" in name or "lm_head" in name


def test_the_folder_is_a_whole_checkpoint(real: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    num = widen(real, tmp_path / "in/wide", WIDE, name="Tiny widened", progress=lambda *call: calls.append(call))
    folder = tmp_path / "in/wide"
    assert num == sum(tensor.numel() for tensor in stored(folder).values())
    assert load_tokenizer(folder).fingerprint() == load_tokenizer(real).fingerprint()
    assert load_tokenizer(folder).has_chat_template
    assert [done for _, done, _ in calls] == list(range(1, len(stored(folder)) + 1))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored(folder).keys() and index["metadata"]["total_size"] == 2 * num
    assert read_config(folder)["rms_norm_eps"] == pytest.approx(1e-5 / 3)
    assert [path.name for path in folder.parent.iterdir()] == ["wide"]  # no left-overs
    assert model_name(str(folder)) == "Tiny widened"
    assert (model_name(None), model_name(str(real)), model_name("owner/name")) == (EMBEDDED, "real", "name")


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"model_type": "qwen2"}, {}, "'qwen2' cannot be widened; use llama or mistral"),
        ({"attention_bias": True}, {}, "with biases cannot be widened"),
        ({}, {"hidden_size": 0}, "hidden size is already 64, and the shape has 0"),
        ({}, {"num_layers": 1}, "number of layers is already 2"),
        ({}, {"intermediate_size": 160}, r"MLP size is 160 \(160 columns\), not a multiple of 64"),
        ({"intermediate_size": 96}, {}, r"MLP size is 96 \(96 columns\), not a multiple of 64"),
        ({"num_attention_heads": 2, "head_dim": 16}, {}, r"query heads is 2 \(32 columns\), not a multiple of 64"),
        ({}, {"num_key_value_heads": 4}, "on 2 key/value heads, and the shape 12 on 4, which is a different ratio"),
        ({"intermediate_size": 192}, {}, r"mlp.gate_proj.weight has shape \[128, 64\] where config.json asks for"),
    ],
)
def test_what_does_not_fit_is_refused(
    real: Path, tmp_path: Path, changes: dict[str, Any], shape: dict[str, int], message: str
) -> None:
    edit_config(real, **changes)
    with pytest.raises(ValueError, match=message):
        widen(real, tmp_path / "wide", replace(WIDE, **shape), name="wide")
    assert [path.name for path in tmp_path.iterdir()] == ["real"]


def test_damaged_checkpoints_are_refused(real: Path, tmp_path: Path) -> None:
    edit_weights(real, lambda tensors: {k: v for k, v in tensors.items() if k != "model.layers.1.mlp.up_proj.weight"})
    with pytest.raises(ValueError, match="has no tensor model.layers.1.mlp.up_proj.weight; use a complete checkpoint"):
        widen(real, tmp_path / "wide", WIDE, name="wide")
    (real / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        widen(real, tmp_path / "wide", WIDE, name="wide")
    torch.save({"model.norm.weight": torch.zeros(10_000)}, real / "pytorch_model.bin")
    (real / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="pytorch_model.bin is a pickle; use a checkpoint in safetensors"):
        widen(real, tmp_path / "wide", WIDE, name="wide")
    assert [path.name for path in tmp_path.iterdir()] == ["real"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_nothing(real: Path, tmp_path: Path, error: Any, monkeypatch: Any) -> None:
    def fail_late(tensors: dict[str, Tensor], file: Path, **kwargs: Any) -> None:
        save_file(tensors, file, **kwargs)
        if "00003" in file.name:
            raise error

    monkeypatch.setattr(widening, "write_tensors", fail_late)
    with pytest.raises(type(error)):
        widen(real, tmp_path / "wide", WIDE, name="wide", shard_bytes=100_000)
    assert [path.name for path in tmp_path.iterdir()] == ["real"]


def test_a_full_disk_and_a_taken_folder_are_one_line(real: Path, tmp_path: Path, monkeypatch: Any, bench: Any) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    with pytest.raises(ValueError, match="taken already exists; remove it or use another folder"):
        widen(real, tmp_path / "taken", WIDE, name="wide")
    with pytest.raises(ValueError, match="which is a file; use another folder"):
        widen(real, tmp_path / "taken/file/wide", WIDE, name="wide")
    usage = namedtuple("usage", "total used free")(0, 0, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"wide needs \d+\.\d MB and .* has 1.0 MB free; free some space there"):
        widen(real, tmp_path / "wide", WIDE, name="wide")
    status, _, error = bench("widen", "--to", "1b", "--target", str(real), "--out", str(tmp_path / "wide"))
    assert status == 2 and error.count("\n") == 1
    assert "4 query heads on 2 key/value heads, and the shape 24 on 8" in error


def test_the_command_names_its_result(real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Any) -> None:
    monkeypatch.setitem(SHAPES, "1b", WIDE)
    argv = ("widen", "--to", "1b", "--target", str(real), "--out", str(tmp_path / "wide"))
    status, out, _ = bench(*argv)
    assert status == 0 and out.startswith("real widened to 1B: 0.00e9 parameters in ")
    assert model_name(argv[-1]) == read_config(tmp_path / "wide")["sharesd_name"] == "real widened to 1B"
    other = str(tmp_path / "dithered")
    status, out, _ = bench("widen", "--to", "1b", "--target", str(real), "--out", other, "--dither")
    assert status == 0 and out.startswith("real widened to 1B, dithered: ") and model_name(other).endswith("dithered")
    assert bench(*argv)[0] == 2


def test_shapes_have_the_sizes_that_they_are_named_for() -> None:
    model: dict[str, Any] = {"vocab_size": 49152, "head_dim": 64, "tie_word_embeddings": True}
    sizes = {to: shape.num_parameters(**model) / 1e9 for to, shape in SHAPES.items()}
    assert sizes == pytest.approx({"135m": 0.13, "1b": 1.01, "7b": 6.73, "13b": 12.87}, abs=0.01)
    for to, shape in SHAPES.items():
        assert shape.num_attention_heads == 3 * shape.num_key_value_heads
        columns = (shape.hidden_size, shape.intermediate_size, 64 * shape.num_attention_heads)
        assert all(size % (64 if to == "135m" else 128) == 0 for size in columns)
