"""ShareSD as one of the measured runtimes."""

from __future__ import annotations

from benchmark.peers.peer import Deliver, Peer, PeerSettings
from sharesd.sampling_params import SamplingParams


class ShareSD(Peer):
    """ShareSD's modes on one loaded target."""

    package, pip = "sharesd", "sharesd"
    variants = {
        "naive": "plain decoding",
        "share": "drafts by the target's quantized linears",
        "classic": "drafts by a second model",
        "suffix": "drafts by a suffix automaton of the text",
        "hybrid": "per round the best of its drafters",
    }

    def __init__(self, settings: PeerSettings) -> None:
        import torch

        from sharesd.llm import LLM

        super().__init__(settings)
        torch.set_num_threads(settings.num_threads)
        self._llm = LLM.from_config(settings.config, settings.modes or tuple(self.variants), reuse=False)

    def prepare(self, variant: str) -> None:
        self._llm.runtime.warm_up(variant)

    def answer(self, variant: str, prompt: list[int], deliver: Deliver) -> None:
        params = SamplingParams(max_new_tokens=self.settings.num_tokens, ignore_eos=True)
        for chunk in self._llm.stream(prompt, params, mode=variant):
            deliver(chunk.token_ids)
