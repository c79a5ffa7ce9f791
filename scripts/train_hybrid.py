"""Train a small hybrid of Qwen3.5's kind with its layer for multi-token prediction, or make a copy with more weights.

    python scripts/train_hybrid.py FOLDER MINUTES FILE [FILE ...]
    python scripts/train_hybrid.py --pad FOLDER OUT LAYERS MLP

FILE: JSON or JSON Lines of records with `question`, or `instruction` and `input`, and `answer` or `response`. The
vocabulary is learned from them. One thread; FOLDER is rewritten every ten minutes. A padded copy has added layers whose
outputs are zero, and zero rows in each MLP: its texts are the same, its steps cost what such a model's cost.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB, WIDTH, BATCH, LENGTH, RATE, MTP_STEPS = 2048, 192, 8, 256, 3e-3, 2
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": VOCAB}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
SIZES |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32}
SIZES |= {"linear_value_head_dim": 32, "max_position_embeddings": 4096, "eos_token_id": 2, "pad_token_id": 0}


def conversations(paths: list[str]) -> list[str]:
    """Return the records of the files as texts of the chat template."""
    texts = []
    for path in paths:
        content = Path(path).read_text()
        records = json.loads(content) if content[0] == "[" else [json.loads(line) for line in content.splitlines()]
        for record in records:
            asked = record.get("question") or f"{record['instruction']}\n{record.get('input', '')}".strip()
            answer = record.get("answer") or record.get("response")
            if answer:
                texts.append(
                    f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer.strip()}<|im_end|>\n"
                )
    random.Random(1).shuffle(texts)
    return texts


def learn_tokenizer(texts: list[str]) -> Tokenizer:
    """Return byte-level BPE of `VOCAB` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    )
    return tokenizer


class TrainedMTP(nn.Module):
    """The layer, with the names of its tensors in checkpoints."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, config.num_hidden_layers - 1)])
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(config.hidden_size)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(config.hidden_size)
        self.norm = qwen.Qwen3_5RMSNorm(config.hidden_size)

    def forward(self, embeds_BTD: Tensor, states_BTD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        both = torch.cat([self.pre_fc_norm_embedding(embeds_BTD), self.pre_fc_norm_hidden(states_BTD)], -1)
        return self.norm(self.layers[0](self.fc(both), position_embeddings=angles))


def losses(model: qwen.Qwen3_5ForCausalLM, mtp: TrainedMTP, tokens_BT: Tensor) -> list[Tensor]:
    """Return the loss of the next token, and of those after it by the layer, which repeats itself."""
    states_BTD = model.model(tokens_BT[:, :-1]).last_hidden_state
    found = [cross_entropy(model.lm_head(states_BTD).flatten(0, 1), tokens_BT[:, 1:].flatten())]
    embeds_BTD = model.model.embed_tokens(tokens_BT[:, :-1])
    for step in range(1, MTP_STEPS + 1):
        states_BTD, embeds_BTD = states_BTD[:, :-1], embeds_BTD[:, 1:]
        places = torch.arange(embeds_BTD.shape[1]).expand(3, 1, -1)
        states_BTD = mtp(embeds_BTD, states_BTD, model.model.rotary_emb(embeds_BTD, places))
        found.append(cross_entropy(model.lm_head(states_BTD).flatten(0, 1), tokens_BT[:, step + 1 :].flatten()))
    return found


def save(folder: Path, model: qwen.Qwen3_5ForCausalLM, mtp: TrainedMTP) -> None:
    """Write weights in bfloat16, and the config."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tensors |= {f"mtp.{name}": tensor for name, tensor in mtp.state_dict().items()}
    rounded = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    raw = model.config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}, indent=2))


def train(folder: Path, minutes: float, paths: list[str]) -> None:
    """Train for a time; print the losses."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    texts = conversations(paths)
    tokenizer = learn_tokenizer(texts)
    kept = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    kept.chat_template = TEMPLATE
    kept.save_pretrained(folder)
    docs = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    starts, stream = [], []
    for ids in docs:
        starts.append(len(stream))
        stream += ids
    starts = [start for start in starts if start + LENGTH + MTP_STEPS <= len(stream)]
    stream_N = torch.tensor(stream)
    model = qwen.Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES))
    mtp = TrainedMTP(model.config)
    mtp.apply(model._init_weights)
    weights = [*model.parameters(), *mtp.parameters()]
    print(f"{len(texts)} texts, {len(stream)} tokens, {sum(w.numel() for w in weights) / 1e6:.2f}M weights", flush=True)
    matrices, others = [w for w in weights if w.ndim == 2], [w for w in weights if w.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    dice, begun, saved, step = random.Random(2), time.monotonic(), 0, 0
    while (part := (time.monotonic() - begun) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 100) * (1 - part)
        firsts = dice.choices(starts, k=BATCH)
        with torch.autocast("cpu", torch.bfloat16):
            found = losses(model, mtp, torch.stack([stream_N[first : first + LENGTH + 1] for first in firsts]))
        optimizer.zero_grad()
        (found[0] + 0.3 * sum(found[1:])).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"{part:.3f} {step}", *(f"{loss.item():.3f}" for loss in found), flush=True)
        if part * minutes >= 10 * (saved + 1):
            save(folder, model, mtp)
            saved += 1
    save(folder, model, mtp)


def pad(folder: Path, out: Path, num_layers: int, mlp: int) -> None:
    """Write the copy with more weights."""
    tensors, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    own = raw["num_hidden_layers"]
    for name in [name for name in tensors if name.startswith("model.layers.")]:
        _, _, number, rest = name.split(".", 3)
        for copy in range(int(number) + own, num_layers, own):
            is_out = rest.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
            tensors[f"model.layers.{copy}.{rest}"] = (torch.zeros_like if is_out else torch.clone)(tensors[name])
    for name, tensor in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = nn.functional.pad(tensor, (0, 0, 0, mlp - len(tensor)))
        elif name.endswith("down_proj.weight"):
            tensors[name] = nn.functional.pad(tensor, (0, mlp - tensor.shape[1]))
    out.mkdir(parents=True)
    for path in folder.glob("*.json*"):
        (out / path.name).write_bytes(path.read_bytes())
    kinds = [raw["layer_types"][i % own] for i in range(num_layers)]
    raw |= {"num_hidden_layers": num_layers, "intermediate_size": mlp, "layer_types": kinds}
    (out / "config.json").write_text(json.dumps(raw, indent=2))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    if sys.argv[1] == "--pad":
        pad(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        train(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
