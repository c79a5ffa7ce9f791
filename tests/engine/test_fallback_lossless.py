"""Models that run by transformers are exact, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quant.config import QuantConfig
from quant.quantize_model import quantize_linears
from quant.switch_linear import Switch
from sharesd.config import EngineConfig
from sharesd.runtime import Runtime
from tests.engine.test_lossless import PROMPTS, ids, params_of
from tests.helpers.oracle import (
    VOCAB,
    new_engine,
    share_engine,
)
from tests.helpers.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("sampling", ["greedy, penalties", "min-p, penalties"])
def test_the_fallback_is_exact_at_one_width(sampling: str, tmp_path: Path) -> None:
    """Learned positions, Conv1D linears; every step has 8 rows, some of them beyond the last position."""
    import transformers  # takes seconds

    from sharesd.models.hf import load_hf

    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=32, eos_token_id=None
    )
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config)
    for tensor in base.parameters():
        tensor.data.mul_(12 if tensor.ndim > 1 else 1)
    base.save_pretrained(tmp_path)
    model, switch = load_hf(tmp_path, dtype=torch.float64), Switch()
    quantize_linears(
        model,
        QuantConfig(bits=4, group_size=32),
        switch,
        head_name="model.lm_head",
        layer_of=lambda path: int(path.split(".")[3]) if ".h." in path else None,
    )
    options: dict[str, Any] = {"batch": 3, "max_context": 32, "widths": (8,)}
    params = params_of(sampling, 40, logprobs=True)
    prompts = [[*PROMPTS[1], *PROMPTS[1]], *PROMPTS[:2]]
    cache = model.new_cache(3, 32 + 2 * 8)
    naive = new_engine(model, cache=cache, **options)
    share = share_engine(model, switch, cache=cache, **options)
    done = naive.generate(prompts, params)
    want = ids(done)
    assert [len(p) + len(t) for p, t in zip(prompts, want, strict=True)] == [32] * 3
    assert all(len(set(tokens)) > 3 for tokens in want)
    assert ids(share.generate(prompts, params)) == want and 0.2 < share.stats.alpha < 1
    for prompt, completion in zip(prompts, done, strict=True):
        with torch.inference_mode():
            logits = model.model(torch.tensor([[*prompt, *completion.token_ids]]), use_cache=False).logits
        direct = logits[0, len(prompt) - 1 : -1].log_softmax(-1)[range(len(completion.token_ids)), completion.token_ids]
        torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), direct, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "asked, said",
    [
        (
            {"drafter_options": {"draft_window": 64}},
            "draft_window is 64 and gpt2 (transformers) attends to all tokens; use off or auto",
        ),
        ({"tree": (2, 2, 4)}, "gpt2 (transformers) supports chains only; drop --tree"),
    ],
)
def test_the_fallback_says_what_it_cannot_do(asked: dict[str, Any], said: str, tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=384, n_embd=64, n_layer=1, n_head=2, n_positions=64, eos_token_id=None)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(make_checkpoint(tmp_path))
    options: dict[str, Any] = {"target": str(tmp_path), "device": "cpu", "compile": "off", "max_context": 64}
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        Runtime(EngineConfig(**options, **asked), ("share",))
    assert (
        Runtime(EngineConfig(**options, drafter_options={"draft_window": "auto"}), ("share",)).engine("share").drafter
        is not None
    )
