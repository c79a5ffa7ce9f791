"""KV of finished texts on disk, which later starts read back.

A file holds the tokens of one text and their KV in the layout of the cache. Files whose identity differs, and damaged
files, are never read; they count towards the limit and are removed as others are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sharesd.kvcache.recurrent import PLACES
from sharesd.kvcache.static import StaticKVCache, common_length
from sharesd.models.checkpoint import write_tensors
from sharesd.models.prefill import whole_chunks
from sharesd_files import atomic_path, remove_left_overs

log = logging.getLogger(__name__)

ENDING = ".kv.safetensors"
MIN_TOKENS = 16
"""Minimum tokens of a file: prefilling fewer takes no longer than reading them."""
IDENTITY, CHECKSUM, TOKENS = "identity", "checksum", "tokens"
DAMAGED = (SafetensorError, OSError, ValueError, LookupError, TypeError, RuntimeError)
"""Errors of reading a damaged file."""


@dataclass
class _File:
    nbytes: int
    tokens: list[int] = field(default_factory=list)
    """Tokens whose KV the file holds; [] if it is ignored."""
    places: list[int] | None = None
    """Numbers of tokens after which the file has the state of recurrent layers; None: the model has none."""


def make_folder(folder: str) -> None:
    """Make a prompt cache's folder; ValueError if it cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with atomic_path(Path(folder) / "probe"):
            pass
    except OSError as error:
        raise ValueError(f"prompt_cache {folder} cannot be written ({error.strerror}); give another folder") from error


class PromptCache:
    """Folder with KV of texts, for the rows of one KV cache."""

    def __init__(
        self,
        folder: Path,
        cache: StaticKVCache,
        *,
        identity: Mapping[str, str],
        max_bytes: int,
        recompute_decoded_kv: bool = False,
    ) -> None:
        """Read the tokens of all files.

        `identity`: everything that KV depends on, by name. `recompute_decoded_kv`: only whole prefill chunks are kept.
        """
        self._folder, self._cache, self._identity = folder, cache, dict(identity)
        self._max_bytes, self._recompute_decoded_kv = max_bytes, recompute_decoded_kv
        self._is_writable = True
        self._files: dict[Path, _File] = {}
        """Files, the least recently used first."""
        self._scan()

    def restore(self, row: int, prompt: Sequence[int], num_cached: int) -> int:
        """Extend a row's cached tokens of a prompt; return their number.

        The prompt's last token is never cached. The row keeps `num_cached` tokens if no file has more.
        """
        while True:
            lengths = {path: self._usable(file, prompt) for path, file in self._files.items() if file.tokens}
            path = max(lengths, key=lambda path: lengths[path], default=None)
            if path is None or lengths[path] < num_cached + MIN_TOKENS:
                return num_cached
            if self._copy(path, row, lengths[path]):
                self._cache.begin_row(row, prompt[: lengths[path]], row, self._num_prefilled(lengths[path]))
                return lengths[path]

    def save(self, row: int) -> bool:
        """Write a row's text; return False if a file has it.

        Short texts are not written. After an error, which is logged once, nothing is written. A file that has only the
        beginning of the text is removed.
        """
        tokens = self._kept_tokens(row)
        is_known = any(file.tokens[: len(tokens)] == tokens for file in self._files.values())
        if len(tokens) < MIN_TOKENS or is_known or not self._is_writable:
            return False
        tensors = self._cache.copy_kv_of(row, len(tokens))
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if nbytes > self._max_bytes:
            return False
        for path, file in list(self._files.items()):
            if file.tokens and file.tokens == tokens[: len(file.tokens)]:
                self._remove(path)
        self._make_room(nbytes)
        try:
            self._write(tokens, tensors)
        except (OSError, SafetensorError) as error:
            self._is_writable = False
            log.warning(
                "%s cannot be written (%s): the prompt cache is not written until the next start; free some space",
                *(self._folder, getattr(error, "strerror", None) or error),
            )
            return False
        return True

    def _kept_tokens(self, row: int) -> list[int]:
        tokens = self._cache.cached_ids[row]
        return tokens[: self._num_prefilled(self._cache.num_prefilled[row])] if self._recompute_decoded_kv else tokens

    def _num_prefilled(self, num_tokens: int) -> int:
        return whole_chunks(num_tokens) if self._recompute_decoded_kv else 0

    def _usable(self, file: _File, prompt: Sequence[int]) -> int:
        num = min(common_length(file.tokens, prompt), len(prompt) - 1)
        num = whole_chunks(num) if self._recompute_decoded_kv else num
        if file.places is None:
            return num
        known = (place for place in file.places if place <= num)
        return max((num for num in known if not self._recompute_decoded_kv or num == whole_chunks(num)), default=0)

    def _scan(self) -> None:
        """Read the tokens of all files, the oldest first.

        Logs one warning for all files with another identity, and one for all damaged files.
        """
        damaged: list[str] = []
        others: dict[str, int] = {}
        remove_left_overs(self._folder)
        found = []
        for path in self._folder.glob(f"*{ENDING}"):
            with suppress(OSError):  # another process has removed it
                status = path.stat()
                found.append((status.st_mtime_ns, path, status.st_size))
        for _, path, nbytes in sorted(found):
            file = self._files[path] = _File(nbytes)
            try:
                with safe_open(path, framework="pt") as content:
                    identity = json.loads(content.metadata()[IDENTITY])
                    differing = [name for name, value in self._identity.items() if identity.get(name) != value]
                    if differing:
                        names = ", ".join(differing)
                        others[names] = others.get(names, 0) + 1
                    else:
                        file.tokens = content.get_tensor(TOKENS).tolist()
                        if self._cache.recurrent is not None:
                            file.places = content.get_tensor(PLACES).tolist()
            except DAMAGED as error:
                damaged.append(f"{path.name}: {' '.join(str(error).split())}")
        if others:
            named = "; ".join(f"{num} with another {names}" for names, num in others.items())
            log.warning("texts of the prompt cache %s are ignored: %s", self._folder, named)
        if damaged:
            log.warning("prompt cache %s: %d damaged and ignored (%s)", self._folder, len(damaged), damaged[0])
        self._make_room(0)

    def _copy(self, path: Path, row: int, num_tokens: int) -> bool:
        """Copy the first tokens' KV into a row; return False if damaged."""
        file = self._files.pop(path)
        try:
            with safe_open(path, framework="pt") as content:
                tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
                if content.metadata()[CHECKSUM] != _checksum(tensors):
                    raise ValueError("its checksum is wrong")
            del tensors[TOKENS]
            self._cache.write_kv_of(row, num_tokens, tensors)
        except FileNotFoundError:
            return False
        except DAMAGED as error:
            log.warning("%s is damaged and ignored (%s)", path, " ".join(str(error).split()))
            self._files = {path: _File(file.nbytes), **self._files}
            return False
        self._files[path] = file  # the most recently used
        with suppress(OSError):
            os.utime(path)
        return True

    def _write(self, tokens: list[int], tensors: dict[str, Tensor]) -> None:
        tensors[TOKENS] = torch.tensor(tokens, dtype=torch.int32)
        identity = json.dumps(self._identity)
        digest = hashlib.sha256(repr((identity, tokens)).encode()).hexdigest()[:32]
        path = self._folder / f"{digest}{ENDING}"
        with atomic_path(path) as fresh:
            write_tensors(tensors, fresh, {IDENTITY: identity, CHECKSUM: _checksum(tensors)})
            fresh.chmod(0o600)  # texts of users
            nbytes = fresh.stat().st_size
        self._files[path] = _File(nbytes, tokens, tensors[PLACES].tolist() if PLACES in tensors else None)

    def _make_room(self, nbytes: int) -> None:
        """Remove the least recently used files until `nbytes` more fit."""
        total = sum(file.nbytes for file in self._files.values())
        for path, file in list(self._files.items()):
            if total + nbytes <= self._max_bytes:
                break
            total -= file.nbytes
            self._remove(path)

    def _remove(self, path: Path) -> None:
        del self._files[path]
        with suppress(OSError):
            path.unlink()


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
