"""What the exactness tests compare with: tiny models, decoding written out, and a drafter that knows the future.

Legend: B rows, N draft tokens, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from torch import Tensor, nn

from compile.kv_layout import pack_kv, unpack_kv
from quant.config import QuantConfig
from quant.quantize_model import quantize_linears
from quant.switch_linear import Switch, SwitchLinear
from sharesd import sampling
from sharesd.drafters.base import DraftContext, Drafter
from sharesd.drafters.classic.drafter import ClassicDrafter
from sharesd.drafters.share.drafter import ShareDrafter
from sharesd.engine.engine import Engine
from sharesd.engine.options import EngineOptions
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.architectures import config_from_hf
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.models.tokenizer import Tokenizer
from sharesd.sampling import RowSampling, SamplingKind
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_tree import DraftRecord, DraftShape, DraftTree, chains, shapes_of, with_windows
from tests.helpers.in_mode import InMode

_WORDS = "Ã © the an he ing tion ab ba aba abab of .. , ! is it er Ġa Ġth"
PIECES = [*"abcdefghijklmnop", " ", *_WORDS.split()]
"""Tokens of one to four characters; two of them are the halves of an é."""
VOCAB = 40
MAX_CONTEXT = 96
RAW: dict[str, Any] = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64}
RAW |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
"""The config.json of a tiny model."""


def tiny_decoder(seed: int = 0, *, dtype: torch.dtype = torch.float64, vocab: int = VOCAB, **sizes: int) -> Decoder:
    """A random Llama whose next token depends on all tokens before it. No token ends the text."""
    config = config_from_hf({**RAW, "vocab_size": vocab, "eos_token_id": None, **sizes})
    decoder = Decoder(config, dtype=dtype).eval().requires_grad_(False)
    dice = torch.Generator().manual_seed(seed)
    for name, tensor in decoder.named_parameters():
        noise = torch.randn(tensor.shape, generator=dice, dtype=torch.float64)
        tensor.copy_(noise * 2.5 * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 1 + noise * 0.2)
        if name.endswith("A_log"):  # so that a delta rule forgets slowly
            tensor.sub_(4)
    decoder.eos_ids = ()
    return decoder


def tiny_mixture(dtype: torch.dtype = torch.float32, **sizes: Any) -> Decoder:
    """A random Qwen3-MoE, whose layers have 6 experts, 3 for each token."""
    shape: dict[str, Any] = {"model_type": "qwen3_moe", "moe_intermediate_size": 24, "head_dim": 8}
    return tiny_decoder(2, dtype=dtype, **shape | {"num_experts": 6, "num_experts_per_tok": 3} | sizes)


def tiny_tokenizer() -> Tokenizer:
    """One token for each of PIECES (byte-level, without merges); further ids have no token and no text."""
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def new_engine(
    target: CausalModel,
    drafter: Drafter | None = None,
    *,
    batch: int = 1,
    max_context: int = MAX_CONTEXT,
    cache: StaticKVCache | None = None,
    **options: Any,
) -> Any:
    """An eager engine in the mode of this drafter. `cache` for drafters and engines that share one."""
    width = 1 + (drafter.shapes[-1].nodes if drafter else 0)
    mode = drafter.name if drafter else "naive"
    engine = Engine(
        target=target,
        tokenizer=tiny_tokenizer(),
        cache=cache or target.new_cache(batch, max_context + 2 * width),
        drafters={mode: drafter},
        options=EngineOptions(max_context=max_context, **options),
    )
    return InMode(engine, mode)


def share_engine(model: CausalModel, switch: Switch, *, num_draft: int = 4, batch: int = 1, **options: Any) -> Any:
    """`share` with a model that has its switched linears already."""
    max_context = options.get("max_context", MAX_CONTEXT)
    top, shapes = shapes_for(num_draft, options.pop("tree", None))
    cache = options.pop("cache", None) or model.new_cache(batch, max_context + SCRATCH * (1 + num_draft))
    shapes = with_windows(shapes, (options.pop("window", 0),))
    drafter = ShareDrafter(model, cache, switch, shapes=shapes, quantized_bytes=0, branching=top)
    return new_engine(model, drafter, cache=cache, **options)


SCRATCH = 4
"""Slots behind the context for each row of a verify step, of these small engines: trees write there too."""


def shapes_for(num_draft: int, tree: tuple[int, int, int] | None) -> tuple[int, Sequence[DraftShape]]:
    """Nodes expanded per level, and the shapes of drafts: chains, or a tree of (K, depth, budget)."""
    return (tree[0], shapes_of(*tree)) if tree else (1, chains(num_draft))


def classic_engine(target: Decoder, draft: CausalModel, *, num_draft: int = 4, batch: int = 1, **options: Any) -> Any:
    slots = options.get("max_context", MAX_CONTEXT) + SCRATCH * (1 + num_draft)
    top, shapes = shapes_for(num_draft, options.pop("tree", None))
    drafter = ClassicDrafter(draft, batch=batch, slots=slots, shapes=shapes, weight_bytes=0, branching=top)
    return new_engine(target, drafter, batch=batch, **options)


def layer_of(path: str) -> int | None:
    return int(path.split(".")[1]) if path.startswith("blocks.") else None


def quantized(model: Decoder, config: QuantConfig) -> tuple[Decoder, Switch]:
    twin, switch = copy.deepcopy(model), Switch()
    quantize_linears(twin, config, switch, head_name="head", layer_of=layer_of)
    return twin, switch


def switched(model: Decoder, noise: float = 0.0) -> tuple[Decoder, Switch]:
    """A copy of the model whose "quantized" linears are the full ones, plus some noise."""
    twin, switch = copy.deepcopy(model), Switch()
    dice = torch.Generator().manual_seed(1)
    for path, linear in [(path, m) for path, m in twin.named_modules() if isinstance(m, nn.Linear)]:
        low = copy.deepcopy(linear)
        random = torch.randn(low.weight.shape, generator=dice, dtype=torch.float64)
        low.weight.add_(noise * low.weight.std() * random)
        twin.set_submodule(path, SwitchLinear(linear, low, switch))
    return twin, switch


def near(model: Decoder, noise: float) -> Decoder:
    """A second model: this one with noise on its weights, which guesses wrong now and then."""
    twin, switch = switched(model, noise)
    switch.quantized = True
    return twin


def kv_of(cache: StaticKVCache) -> list[Tensor]:
    """Copies of the keys [B, K, S, d] of all layers with attention, then of the values, then the inputs of others."""
    pairs = [unpack_kv(k, v, size) for k, v, size in zip(cache.k, cache.v, cache.sizes, strict=True) if len(k[0])]
    return [k for k, _ in pairs] + [v for _, v in pairs] + [state.clone() for state in _states(cache)]


def _states(cache: StaticKVCache) -> list[Tensor]:
    state = cache.recurrent
    if state is None:
        return []
    return [state.inputs_NBRD, *(() if state.matrices is None else (state.matrices, state.held_NB))]


def put_kv(cache: StaticKVCache, tensors: Sequence[Tensor]) -> None:
    layers = [i for i, k in enumerate(cache.k) if len(k[0])]
    for number, i in enumerate(layers):
        k, v = pack_kv(tensors[number], tensors[len(layers) + number])
        cache.k[i].copy_(k), cache.v[i].copy_(v)
    for state, tensor in zip(_states(cache), tensors[2 * len(layers) :], strict=True):
        state.copy_(tensor)


@torch.inference_mode()
def logits_of(model: CausalModel, tokens: Sequence[int]) -> Tensor:
    """Logits [T, V] of one forward pass over a text, in a cache of its own."""
    return model.forward(torch.tensor([tokens]), model.new_cache(1, len(tokens)))[0]


def placed(
    params: Sequence[SamplingParams],
    vocab_size: int,
    prompts: Sequence[Sequence[int]] | None = None,
    *,
    first_index: int = 0,
    replayed: bool = False,
) -> tuple[SamplingKind, RowSampling]:
    """A row for each of these requests, and what a round over them must be able to do."""
    rows = RowSampling(batch=len(params), vocab_size=vocab_size, device=torch.get_default_device(), replayed=replayed)
    for row, (one, prompt) in enumerate(zip(params, prompts or [()] * len(params), strict=True)):
        rows.assign(row, one, first_index + row, prompt)
    return rows.kind(range(len(params))), rows


@torch.inference_mode()
def continue_plainly(model: CausalModel, prompt: Sequence[int], params: SamplingParams, index: int = 0) -> list[int]:
    """`match` decoding without an engine: the whole text is read anew for every token. Knows no end tokens.

    `index` is the prompt's place in a call.
    """
    tokens, V = list(prompt), model.vocab_size
    for _ in range(params.max_new_tokens):
        kind, rows = placed([params], V, [prompt], first_index=index)
        if params.uses_penalties:
            rows.counts.update(torch.tensor([[*tokens[len(prompt) :], 0]]), torch.tensor([len(tokens) - len(prompt)]))
        logits_11V = sampling.process(logits_of(model, tokens)[None, -1:], kind, rows)
        noise = sampling.gumbel(rows.seeds_B, torch.tensor([[len(tokens)]]), V)
        tokens.append(int(sampling.choose(logits_11V, None if params.greedy else noise)))
    return tokens[len(prompt) :]


class OracleDrafter(Drafter):
    """Knows how each prompt goes on and guesses right at a given accuracy, by a fixed pattern of positions."""

    name = "oracle"
    trees = False
    supports_async = True

    def __init__(self, futures: Mapping[tuple[int, ...], Sequence[int]], *, num_draft: int, accuracy: float) -> None:
        """`futures` maps prompts to their tokens to come; beyond those (and for idle rows) the guess is 0."""
        self.futures, self.shapes, self.accuracy = futures, chains(num_draft), accuracy
        self._futures: dict[int, Sequence[int]] = {}
        self._starts: dict[int, int] = {}

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        self._futures[row], self._starts[row] = self.futures.get(tuple(tokens), ()), len(tokens)

    def catch_up(self, texts: Mapping[int, list[int]], *_: Any, **__: Any) -> None:
        self._at = {row: len(text) - self._starts[row] for row, text in texts.items()}

    def draft(self, context: DraftContext, shape: DraftShape) -> DraftTree:
        self._vocab = context.sampler.vocab_size
        rows = range(context.first, context.end)
        tokens = [[self._guess(row, self._at.get(row, 0) + i) for i in range(shape.depth)] for row in rows]
        return DraftTree(torch.tensor(tokens), depth=shape.depth, record=DraftRecord(self.name, shape.depth))

    def _guess(self, row: int, at: int) -> int:
        future = self._futures.get(row, ())
        token = future[at] if at < len(future) else 0
        right = (37 * at + 11 * row) % 64 < 64 * self.accuracy
        return token if right else (token + 1) % self._vocab
