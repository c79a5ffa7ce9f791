"""ShareSD as one of the measured runtimes."""

from __future__ import annotations

from benchmark.peers.peer import Deliver, Peer, PeerSettings


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

        from sharesd.runtime import Runtime

        super().__init__(settings)
        torch.set_num_threads(settings.num_threads)
        self._runtime = Runtime(settings.config, modes=settings.modes or tuple(self.variants))

    def prepare(self, variant: str) -> None:
        self._runtime.warm_up(variant)

    def answer(self, variant: str, prompt: list[int], deliver: Deliver) -> None:
        from sharesd.sampling_params import SamplingParams

        params = SamplingParams(max_new_tokens=self.settings.num_tokens, ignore_eos=True)
        for chunk in self._runtime.engine.stream([prompt], params, mode=variant):
            deliver(chunk.token_ids)
