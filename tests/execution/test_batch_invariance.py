"""The check at start: whether a row has the same bits at any width, and what follows where it has not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compile.attention import attend
from compile.linear import PackedLinear, pack_linears
from sharesd.config import EngineConfig
from sharesd.execution.batch_invariance import RowBits, check_rows, choose_step_widths, first_block_view, fixed_width
from sharesd.models.decoder import Decoder
from sharesd.runtime import Runtime
from tests.helpers.compiled import wide_decoder
from tests.helpers.in_mode import in_mode

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")


@pytest.fixture
def model() -> Decoder:
    model = wide_decoder()
    pack_linears(model)
    return model


def spoil(patch: pytest.MonkeyPatch, where: Callable[[torch.Size], bool]) -> None:
    """Linears compute something else for inputs of such shapes."""
    plain = PackedLinear.forward

    def sloppy(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) * (1 + 2**-6 * where(x.shape))

    patch.setattr(PackedLinear, "forward", sloppy)


def config_of(checkpoint: Callable[..., Path], **options: Any) -> EngineConfig:
    return EngineConfig(target=str(checkpoint()), device="cpu", compile="off", max_context=128, **options)


def rows_of(model: Decoder, widths: Sequence[int] = (1, 2, 5, 8)) -> tuple[bool, bool]:
    """Verdicts on rows of chains and of trees: do they have the same bits?"""
    first = first_block_view(model)
    return check_rows(first, first.new_cache(2, 256), widths, trees=True)[:2]


def test_the_self_check_tells_whether_rows_depend_on_the_width(
    model: Decoder, checkpoint: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert rows_of(model) == (True, True), "packed linears and attention are row-invariant"
    spoil(monkeypatch, lambda shape: shape[1] == 5)
    assert rows_of(model) == (False, False) and rows_of(model, (1, 8)) == (True, True)
    for num_draft, width in ((3, 9), (8, 9), (12, 16)):
        config = config_of(checkpoint, num_draft=num_draft)
        runtime = Runtime(config, ("naive", "share"))
        assert [in_mode(runtime, mode).options.widths for mode in ("naive", "share")] == [(width,), (width,)]
    assert "texts" not in caplog.text
    assert in_mode(Runtime(replace(config, exact=False), ("share",)), "share").options.widths is None


@pytest.mark.parametrize("sloppy_in", [(), (3, 1), (1, 8), (2, 8)], ids=str)
def test_the_self_check_looks_at_numbers_of_rows(sloppy_in: tuple[int, ...], model: Decoder, monkeypatch: Any) -> None:
    spoil(monkeypatch, lambda shape: shape[:2] == sloppy_in)
    first = first_block_view(model)
    for batches in ([1, 2], []):
        bits = check_rows(first, first.new_cache(3, 256), (1, 8), trees=True, batches=batches)
        assert bits == (sloppy_in != (3, 1), sloppy_in != (3, 1), sloppy_in == () and bool(batches)), batches


def test_where_rows_depend_on_the_width_there_are_no_buckets_and_drafts_do_not_decide_it(model: Decoder) -> None:
    assert {fixed_width("cuda", max_width) for max_width in range(16)} == {16} and fixed_width("cuda", 40) == 41
    assert {fixed_width("cpu", max_width) for max_width in range(9)} == {9}, "the default"
    for chains, asked in ((True, True), (False, True), (False, False)):

        def bits_of(step: Any, widths: Sequence[int], chains: bool = chains) -> RowBits:
            agree = chains or len(widths) == 1
            return RowBits(agree, False, agree)

        wanted: dict[str, Any] = {"fixed": 16, "max_width": 5, "exact": asked, "wants_trees": False, "compiles": True}
        rows = choose_step_widths(model, **wanted, step_of=lambda widths: model, bits_of=bits_of)
        assert rows.buckets == chains and rows.depends_on_width == (not chains and asked)


@pytest.mark.parametrize("place", ["compiled blocks", "far slots", "the last norm", "the head"])
def test_the_self_check_looks_at_what_runs(place: str, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that differ somewhere only."""

    def wrong(x: torch.Tensor, *, here: bool = True) -> torch.Tensor:
        return x * (1 + 2**-6) if x.shape[1] == 8 and here else x

    if place == "compiled blocks":
        model.run_block = lambda block, *tensors, recent: wrong(block(*tensors, recent=recent))
    elif place == "far slots":

        def far(*tensors: Any, **options: Any) -> torch.Tensor:
            return wrong(attend(*tensors, **options), here=bool(tensors[5].min() > 200))

        monkeypatch.setattr("sharesd.models.decoder.attend", far)
    else:
        part: Any = model.norm if place == "the last norm" else model.head
        forward = part.forward
        monkeypatch.setattr(part, "forward", lambda x: wrong(forward(x)))
    assert rows_of(model) == (False, False)


def test_trees_whose_rows_differ_are_not_drafted(checkpoint: Callable[..., Path], monkeypatch: Any) -> None:
    def scattered(*tensors: Any, tree_mask: Any = None, **options: Any) -> torch.Tensor:
        out = attend(*tensors, tree_mask=tree_mask, **options)
        return out if tree_mask is None else out * (1 + 2**-6)

    monkeypatch.setattr("sharesd.models.decoder.attend", scattered)
    assert rows_of(wide_decoder()) == (True, False)
    config = config_of(checkpoint, num_draft=4)
    engine = in_mode(Runtime(config, ("hybrid",)), "hybrid")
    assert engine.options.widths is None and engine.drafter is not None and not engine.drafter.trees
    grown = replace(config, tree=(2, 2, 4))
    with pytest.raises(ValueError, match="rows of draft trees are not bit-exact here; drop --tree, or add --no-batch"):
        Runtime(grown, ("share",))
    loose = in_mode(Runtime(replace(grown, exact=False), ("share",)), "share")
    assert loose.drafter is not None and loose.drafter.trees
