"""Blocks of a KV cache as numbers: who holds which, which may be shared, which may be taken back.

A block is a page of ``block_size`` tokens in every layer (PagedAttention, arXiv:2309.06180). No tensors here; a
simulator uses the same pool. A full block whose contents were published can serve any later request that begins with
the same tokens; it stays findable after its last holder let go, until the room is needed (automatic prefix caching).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from kvlab.errors import CacheFull, KvlabError, at_least

#: What stands before the first block of every sequence.
ROOT = 0


class BlockPool:
    """Ref-counted blocks with prefix reuse. Freed blocks are taken in the order in which they were freed.

    Args:
        n_blocks: in the pool.
        block_size: tokens of a block.

    Raises:
        ConfigError: a number is below 1.
    """

    def __init__(self, n_blocks: int, block_size: int = 16) -> None:
        self.n_blocks, self.block_size = at_least(1, "n_blocks", n_blocks), at_least(1, "block_size", block_size)
        self._holders = [0] * n_blocks
        # Free blocks, the one that was freed first in front: it is the least recently used.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))
        # A chain of contents: (number of the content before, own contents) -> (own number, block that holds it).
        # The contents themselves are the key, so two that hash alike are still told apart.
        self._known: dict[tuple[int, Hashable], tuple[int, int]] = {}
        self._published: dict[int, tuple[int, Hashable]] = {}
        self._next_number = ROOT + 1

    @property
    def n_free(self) -> int:
        """Blocks that nobody holds; some of them may still serve as a prefix."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Blocks that somebody holds."""
        return self.n_blocks - len(self._free)

    @property
    def usage(self) -> float:
        """Part of the pool that somebody holds, 0 to 1."""
        return self.n_used / self.n_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens need; the last one may be partly empty.

        Args:
            tokens: of one sequence.
        """
        return -(-tokens // self.block_size)

    def holders(self, block: int) -> int:
        """How many sequences hold a block.

        Args:
            block: its number.
        """
        return self._holders[block]

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds: to hold them takes as much from what is free.

        Args:
            blocks: their numbers.
        """
        return sum(self._holders[block] == 0 for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Take free blocks; what they held before can no longer be found.

        Args:
            count: how many.

        Raises:
            CacheFull: fewer are free; none was taken.
        """
        if count > len(self._free):
            raise CacheFull(
                f"{count} blocks of {self.block_size} tokens were asked for and {len(self._free)} of {self.n_blocks} "
                "are free; release a sequence, or make the pool larger"
            )
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self._holders[block] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these blocks: a fork, or a prefix that was found.

        Args:
            blocks: held by somebody, or free and still findable.
        """
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each of these blocks; those that nobody holds any more are free.

        The last block of the sequence is freed first: a prefix is worth more than what comes after it.

        Args:
            blocks: of a sequence, in order.

        Raises:
            KvlabError: nobody holds one of them; none was released.
        """
        if any(self._holders[block] < times for block, times in Counter(blocks).items()):
            raise KvlabError(f"blocks {list(blocks)} are not all held; a sequence was released twice")
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None

    def extend(self, table: list[int], seen: int, new: int) -> list[tuple[int, int]]:
        """Make a block table ready for more tokens: allocate what is missing, and replace a shared block first.

        A block that is written must have one holder (copy-on-write): where a fork shares the partly filled last block,
        the table gets one of its own, and its contents have to be copied.

        Args:
            table: blocks of the sequence, changed in place.
            seen: tokens that the sequence holds.
            new: tokens that come after them.

        Returns:
            Copies to make before anything is written, as (from, to): none or one.

        Raises:
            CacheFull: there are not enough free blocks; nothing was changed.
        """
        shared = self._shared(table, seen, new)
        missing = max(self.blocks_for(seen + new) - len(table), 0)
        fresh = self.allocate(len(shared) + missing)
        copies = []
        for index, block in zip(shared, fresh, strict=False):
            if index * self.block_size < seen:  # the blocks after it hold no tokens yet
                copies.append((table[index], block))
            self.release([table[index]])
            table[index] = block
        table += fresh[len(shared) :]
        return copies

    def blocks_needed(self, table: Sequence[int], seen: int, new: int) -> int:
        """Free blocks that :meth:`extend` would take.

        Args:
            table: blocks of the sequence.
            seen: tokens that it holds.
            new: tokens that come after them.
        """
        return len(self._shared(table, seen, new)) + max(self.blocks_for(seen + new) - len(table), 0)

    def _shared(self, table: Sequence[int], seen: int, new: int) -> list[int]:
        """Indices of the blocks that new tokens are written to and that others hold too."""
        first = seen // self.block_size
        written = table[first : self.blocks_for(seen + new)]
        return [index for index, block in enumerate(written, first) if self._holders[block] > 1]

    def publish(self, before: int, block: int, contents: Hashable) -> int:
        """Make a full block findable by what it holds.

        Args:
            before: number of the contents before it, ``ROOT`` for the first block of a sequence.
            block: held by the caller, full, and never written again.
            contents: what is in it, such as its tokens; compared by equality, never by hash alone.

        Returns:
            The number of the contents, for the block that comes after. Where another block holds the same already, its
            number: the caller's block then serves nobody else.
        """
        key = (before, contents)
        if key in self._known:
            return self._known[key][0]
        number, self._next_number = self._next_number, self._next_number + 1
        self._known[key] = (number, block)
        self._published[block] = key
        return number

    def match(self, contents: Iterable[Hashable]) -> tuple[list[int], list[int]]:
        """The longest run of published blocks that begins a sequence; nobody holds them on the caller's behalf yet.

        Args:
            contents: of the sequence's full blocks, in order.

        Returns:
            The blocks, and the numbers of their contents.
        """
        blocks, numbers, before = list[int](), list[int](), ROOT
        for each in contents:
            found = self._known.get((before, each))
            if found is None:
                break
            before, block = found
            blocks.append(block)
            numbers.append(before)
        return blocks, numbers

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Whether the books are right: free and used add up, and every holder is one of these sequences.

        Args:
            tables: the blocks of every sequence that there is.

        Raises:
            KvlabError: a block leaked, is counted wrongly, or is free and held at once.
        """
        held = Counter(block for table in tables for block in table)
        for block in range(self.n_blocks):
            if self._holders[block] != held[block]:
                raise KvlabError(
                    f"block {block} counts {self._holders[block]} holders, {held[block]} sequences have it"
                )
            if (block in self._free) != (held[block] == 0):
                raise KvlabError(f"block {block} has {held[block]} holders and is {'' if held[block] else 'not '}free")
        for key, (_, block) in self._known.items():
            if self._published.get(block) != key:
                raise KvlabError(f"block {block} is found under contents that it does not hold")

    def _forget(self, block: int) -> None:
        key = self._published.pop(block, None)
        if key is not None:
            del self._known[key]
