"""Train a small hybrid of Qwen3.5's kind with its layer for multi-token prediction.

Usage: train_hybrid.py FOLDER MINUTES FILE [FILE ...]

FILE: JSON or JSON Lines of records with `question`, or `instruction` and `input`, and `answer` or `response`. The
vocabulary is learned from them. One thread, MINUTES of its time; FOLDER is rewritten every ten minutes.
"""

from __future__ import annotations

import json
import random
import sys
import time
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
BATCH, LENGTH, RATE, MTP_STEPS = 8, 256, 3e-3, 2
SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 2048}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
SIZES |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32}
SIZES |= {"linear_value_head_dim": 32, "max_position_embeddings": 4096, "eos_token_id": 2, "pad_token_id": 0}


def conversations(paths: list[str]) -> list[str]:
    texts = []
    for path in paths:
        content = Path(path).read_text()
        records = json.loads(content) if content[0] == "[" else map(json.loads, content.splitlines())
        for record in records:
            asked = record.get("question") or f"{record['instruction']}\n{record.get('input', '')}".strip()
            if answer := record.get("answer") or record.get("response"):
                texts.append(TEXT.format(asked, answer.strip()))
    random.Random(1).shuffle(texts)
    return texts


def learn_tokenizer(texts: list[str], folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sizes = {"vocab_size": SIZES["vocab_size"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=SPECIAL, **sizes))
    kept = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    kept.chat_template = TEMPLATE
    kept.save_pretrained(folder)
    return tokenizer


class TrainedMTP(nn.Module):
    """The layer, with the names of its tensors in checkpoints."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, config.num_hidden_layers - 1)])
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.add_module(name, qwen.Qwen3_5RMSNorm(config.hidden_size))

    def forward(self, embeds_BTD: Tensor, states_BTD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        both = torch.cat([self.pre_fc_norm_embedding(embeds_BTD), self.pre_fc_norm_hidden(states_BTD)], -1)
        return self.norm(self.layers[0](self.fc(both), position_embeddings=angles))


def losses(model: qwen.Qwen3_5ForCausalLM, mtp: TrainedMTP, tokens_BT: Tensor) -> list[Tensor]:
    """Return the loss of the next token, and of those after it by the layer, which repeats itself."""
    states_BTD = model.model(tokens_BT[:, :-1]).last_hidden_state
    found = [cross_entropy(model.lm_head(states_BTD).flatten(0, 1), tokens_BT[:, 1:].flatten())]
    embeds_BTD = model.model.embed_tokens(tokens_BT[:, :-1])
    for step in range(2, 2 + MTP_STEPS):
        states_BTD, embeds_BTD = states_BTD[:, :-1], embeds_BTD[:, 1:]
        places = torch.arange(embeds_BTD.shape[1]).expand(3, 1, -1)
        states_BTD = mtp(embeds_BTD, states_BTD, model.model.rotary_emb(embeds_BTD, places))
        found.append(cross_entropy(model.lm_head(states_BTD).flatten(0, 1), tokens_BT[:, step:].flatten()))
    return found


def save(folder: Path, model: qwen.Qwen3_5ForCausalLM, mtp: TrainedMTP) -> None:
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tensors |= {f"mtp.{name}": tensor for name, tensor in mtp.state_dict().items()}
    rounded = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    raw = model.config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}, indent=2))


def train(folder: Path, minutes: float, paths: list[str]) -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    texts = conversations(paths)
    docs = [encoding.ids for encoding in learn_tokenizer(texts, folder).encode_batch(texts)]
    stream_N = torch.tensor([*chain.from_iterable(docs)])
    starts = [end for end in accumulate(map(len, docs), initial=0) if end + LENGTH < len(stream_N)]
    model = qwen.Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES))
    mtp = TrainedMTP(model.config)
    mtp.apply(model._init_weights)
    weights, table = [*model.parameters(), *mtp.parameters()], model.model.embed_tokens.weight
    print(
        f"{len(docs)} texts, {len(stream_N)} tokens, {sum(map(Tensor.numel, weights)) / 1e6:.2f}M weights", flush=True
    )
    matrices = [weight for weight in weights if weight.ndim == 2 and weight is not table]
    others = [weight for weight in weights if weight.ndim != 2 or weight is table]
    optimizers = [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0),
    ]
    dice, begun, saved, step = random.Random(2), time.process_time(), time.monotonic(), 0
    while (part := (time.process_time() - begun) / (60 * minutes)) < 1:
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["lr"] = RATE * min(1, (step + 1) / 50) * (1 - part)
        tokens_BT = torch.stack([stream_N[first : first + LENGTH + 1] for first in dice.choices(starts, k=BATCH)])
        with torch.autocast("cpu", torch.bfloat16):
            found = losses(model, mtp, tokens_BT)
        model.zero_grad()
        mtp.zero_grad()
        (found[0] + 0.3 * sum(found[1:])).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"{part:.3f} {step}", *(f"{loss.item():.3f}" for loss in found), flush=True)
        if time.monotonic() - saved > 600:
            save(folder, model, mtp)
            saved = time.monotonic()
    save(folder, model, mtp)


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
