"""Tables against brute force: what they find, how their trees look, what they learn, what they store."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sharesd.drafters.ngram.table import NgramTable
from sharesd.drafters.recycle.table import DEPTHS, RecycleTable
from sharesd.drafters.suffix.datastore import SAMPLES, Datastore, build_datastore, open_datastore
from sharesd.drafters.suffix.table import SuffixAutomaton, SuffixTable
from sharesd.drafters.tables.base import HitRates, Table, grow, outcomes
from sharesd.drafters.tables.proposal import Proposal

VOCAB = 512
MAKERS: dict[str, Callable[[], Table]] = {
    "ngram": lambda: NgramTable(8, 1, 4),
    "recent": lambda: NgramTable(8, 2, 3, most_recent=True),
    "suffix": SuffixTable,
    "recycling": lambda: RecycleTable(VOCAB, 4),
}
every_table = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def random_text(seed: int, length: int, alphabet: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, alphabet, length).tolist()


def natural_text(seed: int, length: int) -> list[int]:
    """Phrases that come back, in between new tokens; ids below 500."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, 400, rng.integers(2, 12)).tolist() for _ in range(40)]
    text: list[int] = []
    while len(text) < length:
        text += phrases[int(rng.zipf(1.5)) % 40] if rng.random() < 0.8 else [int(rng.integers(400, 500))]
    return text[:length]


def ends_of(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where `part` ends in `text`, each as the index behind it."""
    return [i for i in range(len(part), len(text) + 1) if list(text[i - len(part) : i]) == list(part)]


def longest_earlier(text: Sequence[int], shortest: int, longest: int) -> tuple[int, list[int]]:
    """Length of the longest suffix that occurs earlier, and where those occurrences end."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        if ends := ends_of(text[:-1], text[len(text) - n :]):
            return n, ends
    return 0, []


def check(proposal: Proposal, budget: int) -> None:
    """A tree whose first n nodes are a tree, too, for all n."""
    tokens, parents, scores = proposal
    assert len(tokens) == len(parents) == len(scores) <= budget
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "siblings with the same token"
    assert all(a >= b for a, b in zip([1.0, *scores], scores, strict=False))
    assert all(0 < score <= [*scores, 1.0][parent] for score, parent in zip(scores, parents, strict=True))


def paths(proposal: Proposal) -> list[list[int]]:
    """Tokens down to each node."""
    found: list[list[int]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def play(table: Table, text: Sequence[int], prompt: int, budget: int, row: int = 0) -> float:
    """Replay a text as if the target emitted it; mean tokens per round."""
    table.begin(row, text[:prompt])
    at, rounds = prompt, 0
    while at < len(text):
        proposal = table.propose(row, budget)
        check(proposal, budget)
        accepted = sum(hit for _, hit in outcomes(proposal, text[at:]))
        emitted = text[at : at + accepted + 1]
        table.extend(row, emitted)
        at, rounds = at + len(emitted), rounds + 1
    return (len(text) - prompt) / rounds


def test_outcomes_are_told_of_decided_nodes_only() -> None:
    proposal = Proposal([5, 6, 7, 8, 9], [-1, -1, 0, 2, 1], [0.5, 0.4, 0.3, 0.2, 0.1])
    assert list(outcomes(proposal, [5, 7, 1])) == [(0, True), (1, False), (2, True), (3, False)]
    assert list(outcomes(proposal, [6])) == [(0, False), (1, True)]
    assert list(outcomes(proposal, [1, 5])) == [(0, False), (1, False)]
    assert list(outcomes(proposal, [])) == list(outcomes(Proposal([], [], []), [1, 2])) == []


def test_grow_takes_the_most_probable_nodes() -> None:
    chances = {(): [0.6, 0.3], (0,): [0.4, 0.4], (0, 0): [0.9], (1,): [0.95]}

    def children(path: tuple[int, ...], least: float) -> list[tuple[float, int, tuple[int, ...]]]:
        return [(p, i, (*path, i)) for i, p in enumerate(chances.get(path, []))]

    proposal, states = grow(5, (), children)
    assert states == [(0,), (1,), (1, 0), (0, 0), (0, 1)]
    assert proposal.scores == pytest.approx([0.6, 0.3, 0.285, 0.24, 0.24])
    assert proposal.parents == [-1, -1, 1, 0, 0]
    assert len(grow(99, (), children)[0].tokens) == 6
    assert grow(0, (), children)[0] == Proposal([], [], [])
    rng = np.random.default_rng(0)
    by_state = {i: rng.dirichlet([0.3] * 5).tolist() for i in range(7)}

    def likely(state: int, least: float) -> list[tuple[float, int, int]]:
        """Children without a chance may be left out."""
        return [(p, i, (state * 5 + i) % 7) for i, p in enumerate(by_state[state]) if p > least]

    for budget in (1, 2, 5, 20):
        assert grow(budget, 3, likely) == grow(budget, 3, lambda state, _: likely(state, 0.0))
        assert grow(budget, 3, likely)[0].scores == grow(40, 3, likely)[0].scores[:budget]


def test_hit_rates_follow_what_happens() -> None:
    rates = HitRates([0.5, 0.2], weight=2.0)
    assert (rates[0], rates[1]) == (0.5, 0.2)
    rates.learn(0, True)
    assert rates[0] == pytest.approx(2 / 3, abs=0.01)
    for i in range(4000):
        rates.learn(0, i % 4 == 0)
    assert rates[0] == pytest.approx(0.25, abs=0.05)
    for _ in range(1500):
        rates.learn(0, True)
    assert rates[0] > 0.95 and rates[1] == 0.2
    never = HitRates([0.5])
    for _ in range(300_000):
        never.learn(0, False)
    assert never[0] > 0
    factor = HitRates([1.0])
    for i in range(2000):
        factor.learn(0, i % 10 < 4, expected=0.8)  # expectations twice too high
    assert factor[0] == pytest.approx(0.5, abs=0.05)


@every_table
@pytest.mark.parametrize("budget", [1, 3, 16])
def test_every_guess_is_a_sorted_tree(make: Callable[[], Table], budget: int) -> None:
    for seed in range(4):
        play(make(), random_text(seed, 120, 3), 1, budget)
    assert play(make(), natural_text(0, 600), 50, budget) > 1.1


@every_table
def test_nothing_known_means_no_guess(make: Callable[[], Table]) -> None:
    table = make()
    for tokens in ([], [3], [1, 2, 3, 4]):
        table.begin(0, tokens)
        assert table.propose(0, 8) == Proposal([], [], [])
    assert table.propose(0, 0) == Proposal([], [], [])
    table.extend(0, [])
    table.extend(0, [1])
    assert table.propose(0, 1).tokens == ([2] if not (isinstance(table, NgramTable) and table.ngram_min > 1) else [])
    assert table.propose(0, 0) == Proposal([], [], [])


@every_table
def test_texts_of_rows_do_not_mix_and_may_come_in_pieces(make: Callable[[], Table]) -> None:
    table, alone = make(), make()
    texts = [random_text(7, 60, 4), [t + 100 for t in random_text(8, 60, 4)]]
    for row in (0, 1):
        table.begin(row, texts[row])
        table.propose(0, 8)
    alone.begin(1, texts[1])
    assert table.propose(1, 8) == alone.propose(1, 8)
    assert set(table.propose(0, 16).tokens) <= set(texts[0])
    table.begin(0, [7])
    assert table.propose(1, 8) == alone.propose(1, 8)
    text, table, whole = natural_text(2, 300), make(), make()
    whole.begin(0, text)
    table.begin(0, text[:100])
    table.extend(0, text[100:130])
    table.begin(0, text[:200])  # the next turn of a chat
    for token in text[200:]:
        table.extend(0, [token])
    assert table.propose(0, 16) == whole.propose(0, 16)
    whole.begin(0, [900 % VOCAB, *text[1:]])  # another beginning
    table.begin(0, [900 % VOCAB, *text[1:]])
    assert table.propose(0, 16) == whole.propose(0, 16)


@every_table
def test_hits_raise_scores_and_misses_lower_them(make: Callable[[], Table]) -> None:
    loop = [1, 2, 3] * 5
    table = make()
    table.begin(0, loop)
    fresh = table.propose(0, 3).scores[0]
    for i in range(60):
        table.propose(0, 3)
        table.extend(0, [loop[i % 3]])
    table.begin(0, loop)
    assert fresh < table.propose(0, 3).scores[0] <= 1
    for i in range(200):
        table.begin(0, [1, 2, 3, 1, 2, 3])
        table.propose(0, 3)
        table.extend(0, [100 + i])
    table.begin(0, [1, 2, 3, 1, 2, 3])
    assert table.propose(0, 3).scores[0] < 0.3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NgramTable(0, 1, 2), "num_draft is 0; it must be at least 1"),
        (lambda: NgramTable(4, 0, 2), "ngram_min is 0"),
        (lambda: NgramTable(4, 3, 2), "ngram_max is 2"),
        (lambda: RecycleTable(0, 4), "vocab_size is 0"),
        (lambda: RecycleTable(9, 0), "num_successors is 0; it must be"),
    ],
)
def test_wrong_sizes_are_refused(make: Callable[[], Table], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_example_of_vllm() -> None:
    table = NgramTable(4, 2, 3)
    table.begin(0, [1, 2, 3, 4, 2, 3])
    proposal = table.propose(0, 4)
    assert proposal.tokens == [4, 2, 3] and proposal.parents == [-1, 0, 1]
    assert proposal.scores == pytest.approx([0.5, 0.25, 0.125])
    assert table.propose(0, 2).tokens == [4, 2]


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 4), (2, 3), (3, 6)])
def test_ngrams_match_brute_force(low: int, high: int, most_recent: bool) -> None:
    for seed in range(8):
        text = random_text(seed, 70, 2 + seed % 3)
        table = NgramTable(5, low, high, most_recent)
        table.begin(0, text[:1])
        for end in range(1, len(text)):
            _, ends = longest_earlier(text[:end], low, high)
            start = (max(ends) if most_recent else min(ends)) if ends else end
            assert table.propose(0, 16).tokens == text[start : min(start + 5, end)]
            table.extend(0, [text[end]])


def test_suffixes_match_brute_force() -> None:
    """The automaton's, and what a table guesses, which is only what followed."""
    for seed in range(8):
        text, automaton = random_text(seed, 48, 2 + seed % 3), SuffixAutomaton()
        for end, token in enumerate(text, 1):
            automaton.append(token)
            match = max(0, automaton.link[automaton.last])
            assert automaton.length[match] == longest_earlier(text[:end], 1, end)[0]
        for start in range(len(text)):  # every substring is there, and its count is exact: 48 tokens need no cut
            state = 0
            for end in range(start, len(text)):
                state = automaton.next[state][text[end]]
                assert automaton.count[state] == len(ends_of(text, text[start : end + 1]))
        text, table = random_text(seed, 60, 4), SuffixTable()
        table.begin(0, text)
        found = paths(table.propose(0, 16))
        _, ends = longest_earlier(text, 1, len(text))
        assert {text[end] for end in ends if end < len(text)} <= {path[0] for path in found if len(path) == 1}
        for path in found:  # each node follows the last token and the path before it somewhere in the text
            assert ends_of(text, [text[-1], *path][:2]) and ends_of(text, path[-2:])


def test_frequent_continuations_come_first_and_long_matches_go_deeper() -> None:
    table = SuffixTable()
    table.begin(0, [1, 2, 1, 3, 1, 2, 1, 2, 9, 1])
    proposal = table.propose(0, 2)
    assert proposal.tokens[0] == 2
    phrase = list(range(10, 30))
    long, short = SuffixTable(), SuffixTable()
    long.begin(0, [*phrase, 1, *phrase[:10]])
    short.begin(0, [*phrase, 1, phrase[9]])
    assert long.propose(0, 10).tokens == phrase[10:20]
    assert long.propose(0, 1).scores[0] >= short.propose(0, 1).scores[0]


def test_long_and_periodic_texts_take_no_more_than_others() -> None:
    text, table, lookup = natural_text(1, 30_000), SuffixTable(), NgramTable(8, 2, 4)
    table.begin(0, text)
    automaton = table._rows[0].automaton
    assert len(automaton.next) <= 2 * len(text) and sum(map(len, automaton.next)) <= 3 * len(text)
    check(table.propose(0, 16), 16)
    lookup.begin(0, text)
    assert len(lookup._rows[0].after) <= 3 * len(text)
    check(lookup.propose(0, 16), 16)
    table.begin(0, [5] * 50_000)  # the chain of links is as long as the text; an uncut walk would never end
    assert table.propose(0, 4).tokens == [5] * 4
    table.begin(0, [1, 2, 3] * 5_000)
    assert table.propose(0, 6).tokens == [1, 2, 3] * 2


def stored(tmp_path: Path, tokens: Sequence[int]) -> Datastore:
    build_datastore(tokens, tmp_path / "corpus.npy")
    return open_datastore(tmp_path / "corpus.npy")


@pytest.mark.kernels
def test_corpus_look_ups_match_brute_force(tmp_path: Path) -> None:
    for seed, alphabet in enumerate((2, 3, 6)):
        corpus = random_text(seed, 25 if alphabet < 6 else 400, alphabet)
        datastore = stored(tmp_path, corpus)
        assert datastore.num_tokens == len(corpus) and datastore.largest == max(corpus)
        for probe in range(30):
            text = random_text(100 + probe, 1 + probe, alphabet + 1)
            places, matched = datastore.places(text)
            n = next((n for n in range(min(len(text), 16), 0, -1) if ends_of(corpus, text[len(text) - n :])), 0)
            assert matched == n
            expected = [corpus[end] for end in ends_of(corpus, text[len(text) - n :]) if end < len(corpus)] if n else []
            got = datastore.after(places)
            if len(expected) < SAMPLES:
                assert set(got) == set(expected) and sum(map(len, got.values())) == len(expected)
            else:
                assert set(got) <= set(expected)


def test_the_corpus_helps_where_the_text_is_new(tmp_path: Path) -> None:
    phrase = list(range(50, 80))
    datastore = stored(tmp_path, np.array([1, 2, *phrase, 3], dtype=np.int32))
    table = SuffixTable(datastore)
    table.begin(0, [200, 201, 50, 51, 52])
    proposal = table.propose(0, 12)
    check(proposal, 12)
    assert proposal.tokens == phrase[3:15]
    table.begin(0, [3])  # the corpus ends here
    assert table.propose(0, 4) == Proposal([], [], [])
    assert play(SuffixTable(datastore), [200, *phrase], 1, 8) > play(SuffixTable(), [200, *phrase], 1, 8) == 1
    play(SuffixTable(stored(tmp_path, natural_text(5, 3000))), natural_text(5, 300), 20, 16)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "give at least one token"), ([1, -2], "token id -2"), ([1, 2**31], f"token id {2**31}"), ([0.5], "float64")],
)
def test_wrong_corpora_are_refused(tokens: list, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build_datastore(tokens, tmp_path / "corpus.npy")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_corpus_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "corpus.npy"
    with pytest.raises(ValueError, match="corpus.npy does not exist; give a file"):
        open_datastore(file)
    assert stored(tmp_path, [1, 2, 3]).num_tokens == 3 and stored(tmp_path, random_text(0, 500, 9)).num_tokens == 500
    assert [*tmp_path.iterdir()] == [file], "building again replaces the file and leaves no other"
    whole = file.read_bytes()
    shuffled = np.load(file)
    shuffled[1, :-1] = shuffled[1, -2::-1]
    outside = np.load(file)
    outside[1, :-1] = 10_000
    wrong = [whole[:-100], whole[:40], b"", b"text", b"\0" * len(whole)]
    for array in (shuffled, outside, np.zeros((2, 1), ">i4"), np.zeros(5, ">i4"), np.zeros((2, 9))):
        np.save(file, array)
        wrong.append(file.read_bytes())
    for content in wrong:
        file.write_bytes(content)
        with pytest.raises(ValueError, match="corpus.npy is not a datastore, or it is damaged; build it again"):
            open_datastore(file)


def learnt() -> RecycleTable:
    table = RecycleTable(VOCAB, 3)
    table.learn(np.array([1, 2, 3]), np.array([[2, 3, 4], [3, 5, 6], [1, 7, 8]]))
    return table


def test_recycling_grows_trees_over_the_targets_own_candidates() -> None:
    table = learnt()
    table.begin(0, [9, 1])
    proposal = table.propose(0, 7)
    check(proposal, 7)
    first = [path[0] for path in paths(proposal) if len(path) == 1]
    assert first == [2, 3, 4][: len(first)] and [2, 3] in paths(proposal)
    table.learn(np.array([1]), np.array([[40, 41, 42]]))
    assert table.propose(0, 1).tokens == [40]
    table.begin(0, [40])
    assert table.propose(0, 7) == Proposal([], [], [])
    table = learnt()  # what the target emitted comes first
    table.begin(0, [2])
    table.extend(0, [6, 1])
    assert table.successors[2].tolist() == [6, 3, 5]
    assert table.successors[6].tolist() == [1, -1, -1]
    table.extend(0, [99])  # an unknown successor takes the place of the last
    assert table.successors[1].tolist() == [99, 2, 3]
    table.begin(1, [1, 5, 1, 6, 1, 5])  # prompts count, the newest pairs most
    assert table.successors[1].tolist() == [5, 6, 99]


def test_recycling_learns_by_level_and_rank() -> None:
    table = learnt()
    for _ in range(300):
        table.learn(np.array([1]), np.array([[2, 3, 4]]))
        table.begin(0, [1])
        table.propose(0, 3)
        table.extend(0, [4])  # always the third
    assert table.rates[2] > 0.8 > 0.2 > max(table.rates[0], table.rates[1])
    assert table.rates[3] > 0.3, "another level has learnt from this one"
    table.learn(np.array([1]), np.array([[2, 3, 4]]))
    table.begin(0, [1])
    assert table.propose(0, 1).tokens == [4]


def test_recycling_is_saved_and_loaded(tmp_path: Path) -> None:
    table, file = learnt(), tmp_path / "deep" / "table.npz"
    play(table, natural_text(3, 200), 10, 6)
    table.save(file)
    assert [entry.name for entry in file.parent.iterdir()] == ["table.npz"]
    loaded, filled = RecycleTable(VOCAB, 3), RecycleTable.filled(file)
    loaded.load(file)
    for other in (loaded, filled):
        assert np.array_equal(other.successors, table.successors)
        assert (other.rates.hits, other.rates.tries) == (table.rates.hits, table.rates.tries)
        for same in (table, other):
            same.begin(5, [1])
        assert other.propose(5, 9) == table.propose(5, 9)
    assert (filled.vocab_size, filled.num_successors, filled.nbytes) == (VOCAB, 3, VOCAB * 3 * 4)


def test_other_and_damaged_tables_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "table.npz"
    with pytest.raises(ValueError, match="table.npz does not exist"):
        RecycleTable.filled(file)
    table = learnt()
    table.save(file)
    for V, k in ((VOCAB + 1, 3), (VOCAB, 4)):
        with pytest.raises(ValueError, match=f"has {VOCAB} tokens with 3 successors each, not {V} with {k}; give"):
            RecycleTable(V, k).load(file)
    whole = file.read_bytes()
    good = {"format": np.array(1), "successors": table.successors, "rates": np.ones((2, DEPTHS * 3))}
    bad = [
        {"format": np.array(2)},
        {"successors": table.successors.astype(np.int64)},
        {"successors": np.full((VOCAB, 3), VOCAB, np.int32)},
        {"successors": np.full((VOCAB, 3), 7, np.int32)},
        {"rates": np.ones((2, 5))},
        {"rates": np.full((2, DEPTHS * 3), math.nan)},
    ]
    wrong = [whole[: len(whole) // 2], whole[:100] + b"\xff" * 40 + whole[140:], b"", b"text"]
    for change in bad:
        np.savez(file, **(good | change))  # type: ignore[arg-type]
        wrong.append(file.read_bytes())
    for content in wrong:
        file.write_bytes(content)
        with pytest.raises(ValueError, match="table.npz is not a token recycling table, or it is damaged; delete it"):
            table.load(file)
    assert table.successors[1].tolist() == [2, 3, 4]
