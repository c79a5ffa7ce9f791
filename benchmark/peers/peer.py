"""Interface of a measured runtime; imports no runtime."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sharesd.config import EngineConfig

PEERS = {
    "sharesd": "benchmark.peers.sharesd_peer:ShareSD",
    "transformers": "benchmark.peers.transformers_peer:Transformers",
    "openvino": "benchmark.peers.openvino_peer:OpenVino",
    "llamacpp": "benchmark.peers.llamacpp_peer:LlamaCpp",
}
"""Class of each runtime, in the order of the table."""
Deliver = Callable[[Sequence[int]], None]  # takes tokens as they come out


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSettings:
    config: EngineConfig
    num_tokens: int  # tokens per answer, whatever end tokens come up
    num_threads: int
    modes: tuple[str, ...] = ()  # ours that are measured; () = all
    gguf: str | None = None  # file with the model's weights for runtimes that read GGUF

    @property
    def dtype(self) -> str:
        """Dtype in full, `auto` resolved as ShareSD does."""
        return "bfloat16" if self.config.dtype == "auto" else self.config.dtype

    def require_gguf(self, name: str) -> str:
        """Return the GGUF file; ValueError without one or on a GPU."""
        if self.config.device.startswith("cuda"):
            raise ValueError(f"{name} is measured on CPU only; compare it with --device cpu")
        if self.gguf is None:
            raise ValueError(f"{name} needs a GGUF file; pass these weights with --gguf FILE")
        return self.gguf


class Peer:
    """Runtime with variants of greedy decoding; constructors of subclasses import its libraries."""

    package: ClassVar[str]
    pip: ClassVar[str]  # name for pip install
    variants: ClassVar[dict[str, str]]  # name -> way of decoding; the first is plain decoding

    def __init__(self, settings: PeerSettings) -> None:
        """Load the model; ValueError for settings that the runtime does not support."""
        self.settings = settings

    def prepare(self, variant: str) -> None:
        """Load a variant; any error becomes the reason for its missing figures."""

    def answer(self, variant: str, prompt: list[int], deliver: Deliver) -> None:
        """Deliver `num_tokens` tokens without reuse of earlier prompts."""
        raise NotImplementedError

    @classmethod
    def missing(cls) -> str | None:
        """Return the pip command for a missing runtime, else None."""
        found = importlib.util.find_spec(cls.package) is not None
        return None if found else f"not installed: pip install {cls.pip}"


def peer_class(name: str) -> type[Peer]:
    module, _, attribute = PEERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
