"""The tables that draft, as the config names them."""

from __future__ import annotations

from pathlib import Path

from sharesd.config import EngineConfig
from sharesd.drafters.ngram.table import NgramTable
from sharesd.drafters.recycle.table import RecycleTable
from sharesd.drafters.suffix.table import Datastore, SuffixTable, open_datastore
from sharesd.drafters.tables.base import Table


def table_of(name: str, config: EngineConfig, vocab_size: int) -> Table:
    """A table, with what its file holds. Raises ValueError for a file of another vocabulary."""
    if name == "suffix":
        return SuffixTable(_corpus(config.corpus_file, vocab_size) if config.corpus_file is not None else None)
    if name == "recycle":
        table = RecycleTable(vocab_size)
        if config.table_file is not None:
            table.load(config.table_file)
        return table
    return NgramTable(config.most_draft, config.ngram_min, config.ngram_max, most_recent=config.ngram_recent)


def _corpus(path: Path, vocab_size: int) -> Datastore:
    corpus = open_datastore(path)
    if corpus.largest >= vocab_size:
        raise ValueError(
            f"{path} holds token id {corpus.largest} and the target knows {vocab_size}; build it with the target's "
            "tokenizer"
        )
    return corpus
