"""Which runtimes are measured, and in which ways each of them decodes."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

OURS = "sharesd"
NAIVE = "naive"


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """One runtime. The first of its variants is plain decoding; the others are its own ways to speculate."""

    module: str
    """Has `open_peer(settings)`."""
    package: str
    """What must be importable."""
    distribution: str
    """What pip calls it."""
    variants: dict[str, str] = field(default_factory=dict)
    """Name -> how it decodes."""

    @property
    def plain(self) -> str:
        """The variant without speculation."""
        return next(iter(self.variants))

    @property
    def missing(self) -> str | None:
        """Why it cannot run: how to install it, or None."""
        found = importlib.util.find_spec(self.package) is not None
        return None if found else f"not installed: pip install {self.distribution}"


RUNTIMES: dict[str, Runtime] = {
    OURS: Runtime(
        module="benchmark.peers.ours",
        package="sharesd",
        distribution="sharesd",
        variants={
            NAIVE: "plain decoding",
            "share": "drafts by the target's quantized linears",
            "classic": "drafts by a second model",
            "suffix": "drafts by a suffix automaton of the text",
            "hybrid": "per round the best of share and suffix",
        },
    ),
    "transformers": Runtime(
        module="benchmark.peers.transformers_peer",
        package="transformers",
        distribution="transformers",
        variants={
            "plain": "generate()",
            "assisted": "assistant_model: a quantized copy",
            "lookup": "prompt_lookup_num_tokens=10",
            "continuous": "init_continuous_batching()",
        },
    ),
    "openvino": Runtime(
        module="benchmark.peers.openvino_peer",
        package="openvino_genai",
        distribution="openvino-genai",
        variants={
            "plain": "ContinuousBatchingPipeline, weights as float16",
            "draft": "draft_model: an int4 copy",
            "lookup": "prompt_lookup: 5 tokens after 3-grams",
        },
    ),
    "llamacpp": Runtime(
        module="benchmark.peers.llamacpp_peer",
        package="llama_cpp",
        distribution="llama-cpp-python",
        variants={
            "plain": "Llama.generate",
            "lookup": "LlamaPromptLookupDecoding",
            "continuous": "llama_decode, a sequence per prompt",
            "f16": "the same, weights as F16",
            "q8_0": "the same, weights as Q8_0",
            "q4_0": "the same, weights as Q4_0",
        },
    ),
}
"""In the order of the table."""
