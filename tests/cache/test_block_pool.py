"""Blocks as numbers: who holds which, who finds which, and books that balance whatever happens."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache import ROOT, BlockPool
from kvlab.errors import CacheFull, ConfigError, KvlabError


def published(pool: BlockPool, *contents: object) -> list[int]:
    """Blocks of a sequence with these contents, held and findable."""
    blocks, before = pool.allocate(len(contents)), ROOT
    for block, each in zip(blocks, contents, strict=True):
        before = pool.publish(before, block, each)
    return blocks


@pytest.mark.parametrize(("n_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0), (4, -2)])
def test_a_pool_of_no_size_is_refused(n_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match=r"is (0|-1|-2); it must be 1 or more"):
        BlockPool(n_blocks, block_size)


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(4, 16)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_free_and_used_add_up_and_usage_is_their_part() -> None:
    pool = BlockPool(8, 4)
    table = pool.allocate(2)
    assert (pool.n_free, pool.n_used, pool.usage) == (6, 2, 0.25)
    pool.hold(table)
    assert (pool.n_free, pool.n_used) == (6, 2)
    assert [pool.holders(block) for block in table] == [2, 2]
    pool.release(table)
    assert pool.n_used == 2
    pool.release(table)
    assert (pool.n_free, pool.n_used, pool.usage) == (8, 0, 0.0)
    pool.check([])


def test_too_many_blocks_raise_with_the_numbers_and_take_none() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(1)
    with pytest.raises(CacheFull, match=r"3 blocks of 4 tokens were asked for and 2 of 3 are free"):
        pool.allocate(3)
    assert pool.n_free == 2
    assert len(pool.allocate(2)) == 2


def test_the_block_freed_first_is_taken_first_and_the_end_of_a_sequence_is_freed_before_its_beginning() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(4) == [second[1], second[0], first[1], first[0]]


def test_what_is_found_and_held_again_becomes_the_most_recently_used() -> None:
    pool = BlockPool(3, 4)
    blocks = [published(pool, name)[0] for name in "abc"]
    for block in blocks:
        pool.release([block])
    found, _ = pool.match("a")
    pool.hold(found)
    pool.release(found)
    assert pool.allocate(3) == [blocks[1], blocks[2], blocks[0]]


def test_a_sequence_released_twice_is_an_error_and_nothing_is_released() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    pool.release(table[:1])
    with pytest.raises(KvlabError, match="released twice"):
        pool.release(table)
    pool.check([table[1:]])
    with pytest.raises(KvlabError, match="released twice"):
        pool.release([table[1], table[1]])
    pool.check([table[1:]])


# Prefixes.


def test_the_longest_run_that_begins_a_sequence_is_found() -> None:
    pool = BlockPool(8, 4)
    blocks = published(pool, "a", "b", "c")
    assert pool.match("abc")[0] == blocks
    assert pool.match("abx")[0] == blocks[:2]
    assert pool.match("abcd")[0] == blocks
    for other in ("b", "ba", "xbc", ""):
        assert pool.match(other) == ([], [])


def test_equal_contents_after_different_ones_are_different_blocks() -> None:
    pool = BlockPool(8, 4)
    one, other = published(pool, "a", "same"), published(pool, "b", "same")
    assert pool.match(["a", "same"])[0] == one
    assert pool.match(["b", "same"])[0] == other


def test_numbers_that_are_found_continue_the_chain() -> None:
    pool = BlockPool(8, 4)
    blocks = published(pool, "a", "b")
    _, numbers = pool.match("ab")
    more = pool.allocate(1)
    pool.publish(numbers[-1], more[0], "c")
    assert pool.match("abc")[0] == [*blocks, *more]


@dataclass(frozen=True)
class Colliding:
    """Contents that all hash alike."""

    tokens: tuple[int, ...]

    def __hash__(self) -> int:
        return 7


def test_contents_whose_hashes_collide_are_told_apart() -> None:
    pool = BlockPool(8, 4)
    one, other = (published(pool, Colliding((n,)), Colliding((n, n))) for n in (1, 2))
    assert pool.match([Colliding((1,)), Colliding((1, 1))])[0] == one
    assert pool.match([Colliding((2,)), Colliding((2, 2))])[0] == other
    assert pool.match([Colliding((1,)), Colliding((2, 2))])[0] == one[:1]
    assert pool.match([Colliding((3,))])[0] == []


def test_the_same_contents_twice_have_one_number_and_the_first_block_serves() -> None:
    pool = BlockPool(8, 4)
    first, second = pool.allocate(2)
    number = pool.publish(ROOT, first, "a")
    assert pool.publish(ROOT, second, "a") == number
    assert pool.match("a") == ([first], [number])
    pool.release([second])
    assert pool.match("a") == ([first], [number])
    assert pool.allocate(7)[-1] == second
    assert pool.match("a") == ([first], [number])


def test_what_was_freed_is_found_until_its_block_is_taken() -> None:
    pool = BlockPool(3, 4)
    blocks = published(pool, "a", "b", "c")
    pool.release(blocks)
    assert pool.match("abc")[0] == blocks
    assert pool.free_among(blocks) == 3
    pool.allocate(1)
    assert pool.match("abc")[0] == blocks[:2]  # the end went first
    pool.hold(blocks[:1])
    assert pool.free_among(blocks[:2]) == 1
    pool.allocate(1)
    assert pool.match("abc")[0] == blocks[:1]
    assert pool.n_free == 0


def test_what_follows_a_lost_block_is_not_found_even_when_its_beginning_comes_back() -> None:
    """It might be: the tokens are the same. What must not happen is a wrong block."""
    pool = BlockPool(4, 4)
    head, tail = published(pool, "a", "b")
    pool.release([head])
    others = pool.allocate(3)
    assert head in others
    assert pool.match("ab")[0] == []
    pool.publish(ROOT, others[0], "a")
    assert pool.match("ab")[0] == others[:1]
    pool.check([[tail], others])


# Tables that grow.


def test_a_table_grows_by_what_is_missing() -> None:
    pool, table = BlockPool(8, 4), list[int]()
    for seen, new, blocks in ((0, 3, 1), (3, 1, 1), (4, 1, 2), (5, 11, 4)):
        assert pool.blocks_needed(table, seen, new) == blocks - len(table)
        assert pool.extend(table, seen, new) == []
        assert len(table) == blocks
    pool.check([table])


def test_the_partly_filled_block_of_a_fork_is_copied_and_nothing_else() -> None:
    pool, table = BlockPool(8, 4), list[int]()
    pool.extend(table, 0, 6)
    twin = list(table)
    pool.hold(twin)
    assert pool.blocks_needed(twin, 6, 3) == 2  # the copy, and one more
    copies = pool.extend(twin, 6, 3)
    assert copies == [(table[1], twin[1])]
    assert twin[0] == table[0]
    assert twin[1] not in table
    assert pool.extend(table, 6, 1) == []  # the last holder keeps the block
    pool.check([table, twin])


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    pool, table = BlockPool(8, 4), list[int]()
    pool.extend(table, 0, 8)
    twin = list(table)
    pool.hold(twin)
    assert pool.extend(twin, 8, 1) == []
    assert twin[:2] == table


def test_shared_blocks_that_hold_no_tokens_yet_are_replaced_without_a_copy() -> None:
    """Room that was taken ahead, for a draft that was rejected, say, and then shared by a fork."""
    pool, table = BlockPool(8, 4), list[int]()
    pool.extend(table, 0, 12)
    twin = list(table)
    pool.hold(twin)
    assert pool.extend(twin, 6, 1) == [(table[1], twin[1])]
    assert table[2] == twin[2]
    assert pool.extend(table, 6, 3) == []  # block 1 is its own by now, and block 2 is empty
    assert table[2] != twin[2]
    pool.check([table, twin])


def test_a_table_that_cannot_grow_is_left_as_it_was() -> None:
    pool, table = BlockPool(3, 4), list[int]()
    pool.extend(table, 0, 6)
    twin = list(table)
    pool.hold(twin)
    with pytest.raises(CacheFull, match="2 blocks of 4 tokens were asked for and 1 of 3 are free"):
        pool.extend(twin, 6, 3)
    assert twin == table
    pool.check([table, twin])


# Books.


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[0]], "block 1 counts 1 holders, 0 sequences have it"),
        ([[0, 1], [1]], "block 1 counts 1 holders, 2 sequences have it"),
        ([[0, 1, 2]], "block 2 counts 0 holders, 1 sequences have it"),
    ],
)
def test_check_finds_what_leaked_or_is_counted_wrongly(tables: list[list[int]], message: str) -> None:
    pool = BlockPool(3, 4)
    assert pool.allocate(2) == [0, 1]
    pool.check([[0, 1]])
    with pytest.raises(KvlabError, match=message):
        pool.check(tables)


def test_check_finds_a_block_that_is_free_and_held() -> None:
    pool = BlockPool(3, 4)
    table = pool.allocate(1)
    pool._free[table[0]] = None
    with pytest.raises(KvlabError, match="block 0 has 1 holders and is free"):
        pool.check([table])
    del pool._free[table[0]], pool._free[1]
    with pytest.raises(KvlabError, match="block 1 has 0 holders and is not free"):
        pool.check([table])


def test_check_finds_contents_that_a_block_does_not_hold() -> None:
    pool = BlockPool(3, 4)
    table = published(pool, "a")
    pool._published.clear()
    with pytest.raises(KvlabError, match="block 0 is found under contents that it does not hold"):
        pool.check([table])


# Everything at once, against books that are kept in the plainest way.


@dataclass
class Holder:
    """Tokens, and where they lie."""

    tokens: list[int]
    table: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


class Walk:
    """Sequences in a pool whose slots hold tokens; lists and linear searches say what must be so."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.pool, self.size = BlockPool(n_blocks, block_size), block_size
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(n_blocks)]
        self.free = list(range(n_blocks))
        #: What each findable block holds from the first token of its sequence on, and the number it was given.
        self.findable: dict[int, tuple[list[int], int]] = {}
        self.sequences: list[Holder] = []

    def keys(self, tokens: list[int]) -> list[tuple[int, ...]]:
        whole = len(tokens) // self.size
        return [tuple(tokens[i * self.size : (i + 1) * self.size]) for i in range(whole)]

    def begin(self, tokens: list[int]) -> None:
        blocks, numbers = self.pool.match(self.keys(tokens))
        assert blocks == self.found(tokens)
        sequence = Holder(tokens[: len(blocks) * self.size], blocks, numbers)
        self.pool.hold(blocks)
        self.free = [block for block in self.free if block not in blocks]
        self.sequences.append(sequence)
        self.grow(sequence, tokens[len(blocks) * self.size :])

    def found(self, tokens: list[int]) -> list[int]:
        """By linear search: the blocks that hold each beginning of these tokens, as far as there are any."""
        blocks = list[int]()
        for index in range(len(tokens) // self.size):
            beginning = tokens[: (index + 1) * self.size]
            holding = [block for block, (held, _) in self.findable.items() if held == beginning]
            if not holding:
                break
            blocks += holding
        return blocks

    def grow(self, sequence: Holder, tokens: list[int]) -> None:
        seen, before = len(sequence.tokens), (list(sequence.table), list(self.free))
        needed = self.pool.blocks_needed(sequence.table, seen, len(tokens))
        if needed > len(self.free):
            with pytest.raises(CacheFull):
                self.pool.extend(sequence.table, seen, len(tokens))
            assert (sequence.table, self.free) == before
            return
        copies = self.pool.extend(sequence.table, seen, len(tokens))
        fresh = [block for block in sequence.table if block not in before[0]]
        assert fresh == self.free[:needed]  # the least recently used, in order
        self.free = self.free[needed:]
        for block in fresh:
            self.forget(block)
        for source, target in copies:
            self.slots[target] = list(self.slots[source])
        sequence.tokens += tokens
        for position in range(seen, len(sequence.tokens)):
            block = sequence.table[position // self.size]
            assert self.holding(block) == 1, "a block that somebody else holds is written"
            self.slots[block][position % self.size] = sequence.tokens[position]
        self.publish(sequence)

    def forget(self, block: int) -> None:
        """Its contents are gone, and what came after them cannot be reached."""
        self.slots[block] = [None] * self.size
        if block in self.findable:
            gone, _ = self.findable.pop(block)
            for other, (held, _) in list(self.findable.items()):
                if held[: len(gone)] == gone:
                    del self.findable[other]

    def publish(self, sequence: Holder) -> None:
        for index, key in enumerate(self.keys(sequence.tokens)):
            if index < len(sequence.numbers):
                continue
            before = sequence.numbers[-1] if index else ROOT
            number = self.pool.publish(before, sequence.table[index], key)
            sequence.numbers.append(number)
            beginning = sequence.tokens[: (index + 1) * self.size]
            reachable = {ROOT, *(known for _, known in self.findable.values())}
            if before in reachable and number not in reachable:
                self.findable[sequence.table[index]] = (beginning, number)

    def fork(self, sequence: Holder) -> None:
        self.pool.hold(sequence.table)
        self.sequences.append(Holder(list(sequence.tokens), list(sequence.table), list(sequence.numbers)))

    def end(self, sequence: Holder) -> None:
        self.sequences.remove(sequence)
        self.pool.release(sequence.table)
        self.free += [block for block in reversed(sequence.table) if not self.holding(block)]

    def holding(self, block: int) -> int:
        return sum(block in sequence.table for sequence in self.sequences)

    def check(self) -> None:
        self.pool.check([sequence.table for sequence in self.sequences])
        assert self.pool.n_free == len(self.free)
        for sequence in self.sequences:
            lie = [self.slots[block][offset] for block in sequence.table for offset in range(self.size)]
            assert lie[: len(sequence.tokens)] == sequence.tokens


@settings(max_examples=300)
@given(st.data())
def test_whatever_happens_sequences_keep_their_tokens_and_the_books_balance(data: st.DataObject) -> None:
    walk = Walk(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3)))
    tokens = st.lists(st.integers(0, 1), max_size=8)
    for _ in range(data.draw(st.integers(1, 25))):
        kinds = ["begin", "begin", *(["grow", "grow", "fork", "end"] if walk.sequences else [])]
        kind = data.draw(st.sampled_from(kinds))
        if kind == "begin":
            walk.begin(data.draw(tokens))
        else:
            sequence = walk.sequences[data.draw(st.integers(0, len(walk.sequences) - 1))]
            if kind == "grow":
                walk.grow(sequence, data.draw(tokens))
            elif kind == "fork":
                walk.fork(sequence)
            else:
                walk.end(sequence)
        walk.check()
