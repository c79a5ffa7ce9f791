"""The lists of keys of .gguf files in docs/reference/models.md against the code."""

from __future__ import annotations

import re
from pathlib import Path

from sharesd.models.gguf import reader as keys
from sharesd.models.gguf.tokenizer import PATTERNS

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")


def test_all_known_keys_and_pre_tokenizers_are_listed() -> None:
    table = re.search(r"<!-- gguf keys.*?-->\n(.*?)<!-- /gguf keys -->", PAGE, re.DOTALL)
    assert table is not None
    known = {*keys.WITHOUT_EFFECT, *keys.NEUTRAL, *keys.TOKENIZER_USED, *keys.TOKENIZER_WITHOUT_EFFECT}
    known |= {*keys.TOKENIZER_NEUTRAL, "tokenizer.chat_template.NAME"}
    assert set(re.findall(r"`([^`]+)`", table[1])) == known
    splits = re.search(r"a pre-tokenizer that is not one of these:\n(.*?)\n\n", PAGE, re.DOTALL)
    assert splits is not None and set(re.findall(r"`([^`]+)`", splits[1])) == PATTERNS.keys()
