"""What rounding the inputs of 4-bit drafts costs in acceptance, as a GPU's kernel for one row would round them.

    python scripts/rows_in_8_bits.py answers --out answers.json [--target FOLDER] [--tokens 384]
    python scripts/rows_in_8_bits.py compare --answers answers.json [--target FOLDER] [--group 64]

`answers` decodes the held-out questions. `compare` drafts each token of the answers over the target's keys and values,
as the first draft of a round, in tensor operations that round where `compile/cuda/stream.cu` does: bfloat16 between
products, float32 in them. It prints CSV: the share of tokens that target and draft both choose, the overlap of their
probabilities, and the differences to rows of bfloat16 with 95 % intervals (by question).

For Llama's architecture. Legend: T tokens of a text, K inputs, N outputs, H heads, G groups, d width of a head.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from compile.quantizers import solve_hqq  # noqa: E402
from sharesd import LLM, SamplingParams  # noqa: E402
from sharesd.models.hub import resolve  # noqa: E402
from sharesd.reports.questions import first_turns, prompts_of  # noqa: E402

QUESTIONS = ROOT / "benchmark" / "data" / "held_out_questions.jsonl"
ROUNDINGS: dict[str, tuple[int, bool]] = {
    "pairs of int8 by 64": (64, True),
    "int8 by 32": (32, False),
    "int8 by 64": (64, False),
    "int8 by row": (0, False),
}
"""Name -> inputs that share a scale (0: the whole row), and whether a second int8 has what the first one leaves."""


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def rounded(x_TK: Tensor, inputs: int, pairs: bool) -> Tensor:
    """Round rows to int8, or pairs of them, with a scale for each `inputs`."""
    x_TGi = x_TK.unflatten(1, (-1, inputs or x_TK.shape[1]))
    top_TG1 = x_TGi.abs().amax(-1, keepdim=True)
    scaled_TGi = x_TGi * torch.where(top_TG1 > 1e-30, 127 / top_TG1, 0)
    codes_TGi = scaled_TGi.round()
    if pairs:
        codes_TGi += ((scaled_TGi - codes_TGi) * 254).round() / 254
    return (codes_TGi * (top_TG1 / 127)).flatten(1)


class Model:
    """A target, and its draft with weights of 4 bits."""

    def __init__(self, folder: Path, group: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.config = model.config
        plain = {name.removeprefix("model."): bf16(each) for name, each in model.state_dict().items()}
        self.draft = dict(plain)
        for name in plain:
            if name.endswith("_proj.weight") or name == "lm_head.weight":
                codes_NK, scale_NG, zero_NG = solve_hqq(plain[name], 4, group)
                scale_NG1, offset_NG1 = bf16(scale_NG)[..., None], bf16((8 - zero_NG) * scale_NG)[..., None]
                codes_NGi = codes_NK.float().unflatten(1, (-1, group))
                self.draft[name] = ((codes_NGi - 8) * scale_NG1 + offset_NG1).flatten(1)
        self.target = plain

    def forward(
        self,
        ids_T: Tensor,
        first: int,
        *,
        kv: list[tuple[Tensor, Tensor]] | None = None,
        rows: tuple[int, bool] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the target's logits of tokens from `first` on, and its KV.

        With its `kv`: logits of drafts over it, with inputs rounded as `rows` say.
        """
        config, weights = self.config, self.target if kv is None else self.draft
        round_rows = bf16 if rows is None else partial(rounded, inputs=rows[0], pairs=rows[1])

        def product(x_TK: Tensor, name: str, norm: str | None = None) -> Tensor:
            if norm is not None:
                x_TK = F.rms_norm(x_TK, x_TK.shape[1:], weights[norm + ".weight"], config.rms_norm_eps)
            return round_rows(x_TK) @ weights[name + ".weight"].t()

        T, H, num_kv = len(ids_T), config.num_attention_heads, config.num_key_value_heads
        d = config.head_dim or config.hidden_size // H
        theta = config.rope_parameters["rope_theta"]
        angles_Td = torch.outer(torch.arange(T).float(), theta ** (-torch.arange(0, d, 2) / d)).repeat(1, 2)

        def turned(x_T: Tensor) -> Tensor:
            x_HTd = x_T.unflatten(1, (-1, d)).transpose(0, 1)
            first, second = x_HTd.chunk(2, -1)
            return bf16(x_HTd * angles_Td.cos() + torch.cat([-second, first], -1) * angles_Td.sin())

        x, found = weights["embed_tokens.weight"][ids_T], []
        causal_TT = torch.ones(T, T, dtype=torch.bool).tril()
        for layer in range(config.num_hidden_layers):
            at = f"layers.{layer}."
            q, k, v = (bf16(product(x, f"{at}self_attn.{name}_proj", at + "input_layernorm")) for name in "qkv")
            q, k, v = turned(q), turned(k), v.unflatten(1, (-1, d)).transpose(0, 1)
            found.append((k, v))
            k_HTd, v_HTd = ((each.repeat_interleave(H // num_kv, 0)) for each in (k, v))
            scores = q @ (k_HTd if kv is None else kv[layer][0].repeat_interleave(H // num_kv, 0)).transpose(1, 2)
            if kv is not None:  # a draft sees the target's past and itself
                scores.diagonal(dim1=1, dim2=2).copy_((q * k_HTd).sum(-1))
            share_HTT = (scores * d**-0.5).masked_fill(~causal_TT, float("-inf")).softmax(-1)
            if kv is None:
                mixed = share_HTT @ v_HTd
            else:
                own_HT1 = share_HTT.diagonal(dim1=1, dim2=2)[..., None]
                past_HTd = kv[layer][1].repeat_interleave(H // num_kv, 0)
                mixed = share_HTT @ past_HTd + own_HT1 * (v_HTd - past_HTd)
            x = bf16(x + product(bf16(mixed.transpose(0, 1).flatten(1)), at + "self_attn.o_proj"))
            gate, up = (product(x, f"{at}mlp.{name}_proj", at + "post_attention_layernorm") for name in ("gate", "up"))
            x = bf16(x + product(bf16(F.silu(gate) * up), at + "mlp.down_proj"))
        return bf16(product(x[first:], "lm_head", "norm")), found


def answers(target: str | None, tokens: int, out: Path) -> None:
    with LLM(target, mode="naive", device="cpu", max_context=1024) as llm:
        asked = first_turns(str(QUESTIONS), None).questions
        prompts = list(prompts_of(llm.runtime.tokenizer, asked, max_new_tokens=tokens, max_context=1024).values())
        done = llm.generate(prompts, SamplingParams(max_new_tokens=tokens))
        out.write_text(json.dumps([[ids, each.token_ids] for ids, each in zip(prompts, done, strict=True)]))


def compare(folder: Path, group: int, texts: list[tuple[list[int], list[int]]]) -> None:
    model = Model(folder, group)
    forms: dict[str, tuple[int, bool] | None] = {"bfloat16": None, **ROUNDINGS}
    found: dict[str, list[tuple[float, float]]] = {form: [] for form in forms}
    sizes = []
    for prompt, answer in texts:
        ids_T, first = torch.tensor(prompt + answer)[:-1], len(prompt) - 1
        wanted, kv = model.forward(ids_T, first)
        sizes.append(len(wanted))
        for form, rows in forms.items():
            drafted, _ = model.forward(ids_T, first, kv=kv, rows=rows)
            agree = (drafted.argmax(-1) == wanted.argmax(-1)).sum()
            found[form].append((float(agree), float(torch.minimum(drafted.softmax(-1), wanted.softmax(-1)).sum())))
        print(f"{sum(sizes)} tokens", file=sys.stderr, flush=True)
    size = torch.tensor(sizes).double()
    print("rows,tokens,agree,overlap,agree_more,agree_interval,overlap_more,overlap_interval")
    for form, each in found.items():
        sums = torch.tensor(each).double()
        more = sums - torch.tensor(found["bfloat16"]).double()
        mean = more.sum(0) / size.sum()
        spread = 1.96 * (more - size[:, None] * mean).square().sum(0).sqrt() / size.sum()
        shares = (sums.sum(0) / size.sum()).tolist()
        values = (*shares, *(float(x) for pair in zip(mean, spread, strict=True) for x in pair))
        print(f"{form},{int(size.sum())}," + ",".join(f"{value:.5f}" for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("answers", "compare"))
    parser.add_argument("--target")
    parser.add_argument("--tokens", type=int, default=384, help="of an answer at most")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--group", type=int, default=64)
    args = parser.parse_args()
    if args.what == "answers":
        answers(args.target, args.tokens, args.out)
    else:
        with torch.inference_mode():
            compare(Path(resolve(args.target)), args.group, json.loads(args.answers.read_text()))


if __name__ == "__main__":
    main()
