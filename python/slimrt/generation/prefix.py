"""Prefix cache: the rows of finished sequences are kept, so that texts with a common prefix need not compute it again.

A radix tree over token ids whose leaves hold forked sequences, as RadixAttention (SGLang; Zheng et al., "SGLang:
Efficient Execution of Structured Language Model Programs", 2024, arXiv:2312.07104).
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slimrt import core
from slimrt.errors import ContextOverflowError, UnsupportedError
from slimrt.generation.store import BLOCK, PrefixStore
from slimrt.runtime.runtime import Runtime
from slimrt.runtime.session import Session

Ids = NDArray[np.int32]


@dataclass(eq=False)
class Node:
    """An edge of the tree: tokens [begin, end) that all texts below share. Each leaf has a sequence with all tokens up
    to its end. So has an inner node if no sequence below can be truncated to its end (sliding windows)."""

    parent: Node | None
    begin: int
    ids: Ids
    used: int
    sequence: int | None = None
    children: dict[int, Node] = field(default_factory=dict)  # by their first token

    @property
    def end(self) -> int:
        return self.begin + len(self.ids)

    @property
    def blocks(self) -> int:
        """Blocks of the cache that its own tokens take: forks copy the block in which they begin to differ."""
        return (self.end // BLOCK if self.children else -(-self.end // BLOCK)) - self.begin // BLOCK

    def below(self, but: Node | None = None) -> Iterator[Node]:
        """This node and all below it, breadth first; without `but` and what lies below that."""
        layer = [self]
        while layer:
            yield from layer
            layer = [child for node in layer for child in node.children.values() if child is not but]

    def above(self) -> Iterator[Node]:
        """The ancestors, nearest first, without the root."""
        node = self.parent
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def path(self) -> Ids:
        """All tokens from the root to its end."""
        return np.concatenate([*reversed([node.ids for node in self.above()]), self.ids])


class PrefixTree:
    """The prefix cache of one model. Not thread-safe.

    Sequences with sliding windows, and with rows that age and are forgotten, can be truncated to some lengths only: a
    text is then continued from the longest possible one.

    Attributes:
        hits, misses: calls of take() that found a prefix, or none.
        reused: tokens that need not be computed again.
        evicted: blocks that eviction has freed.

    Raises:
        UnsupportedError: a model with an encoder, whose rows depend on more than the tokens.
    """

    def __init__(self, runtime: Runtime, store: PrefixStore | None = None):
        if runtime.info["encoder"]:
            raise UnsupportedError(f"{runtime.source.name} has an encoder: its sequences are not known by their tokens")
        self.hits = self.misses = self.reused = self.evicted = 0
        self._owner = weakref.ref(runtime)  # which owns the tree: a model that nobody holds is freed at once
        self._store = store
        self._roots: dict[str, Node] = {}
        self._time = 0

    @property
    def _runtime(self) -> Runtime:
        runtime = self._owner()
        assert runtime is not None
        return runtime

    def note_rate(self, tokens_per_second: float) -> None:
        """Set the measured speed of prefill: the store is read only where that is faster than computing."""
        if self._store is not None:
            self._store.prefill_rate = tokens_per_second

    def take(self, ids: Sequence[int], key: str = "") -> Session | None:
        """A session with the longest cached prefix of these tokens, without the last one, whose logits are needed; None
        if that is less than a block.

        Args:
            key: the owner; prefixes are shared only under the same key.
        """
        sequence, length = None, 0
        with self._runtime.use() as engine:
            if key in self._roots:
                sequence, length = self._fork(engine, *_walk(self._roots[key], np.array(ids[:-1], np.int32)))
            if self._store is not None:
                sequence, length = self._load(engine, self._store, sequence, length, ids[:-1], key)
        self.reused += length
        self.hits += sequence is not None
        self.misses += sequence is None
        return None if sequence is None else Session(self._runtime, sequence, list(ids[:length]))

    def give(self, session: Session, key: str = "") -> None:
        """Take over the rows of a session that is no longer needed; the session is closed."""
        with self._runtime.use() as engine:
            sequence, tokens = session.hand_over(engine)
            root = self._roots.setdefault(key, Node(None, 0, np.empty(0, np.int32), 0))
            if len(tokens) < BLOCK or not self._insert(engine, root, np.array(tokens, np.int32), sequence):
                engine.free_sequence(sequence)
            self._forget_roots()

    def evict(self, blocks: int) -> int:
        """Free up to `blocks` blocks that only this tree holds: least recently used sequences first, from their ends.
        Returns how many were freed."""
        with self._runtime.use() as engine:
            return self._evict(engine, blocks)

    def give_way(self, blocks: int) -> int:
        """As evict(), but if that frees nothing the whole tree is cleared: its blocks may be shared with running texts,
        or of another group than the one that is full. 0: nothing is left."""
        if freed := self.evict(blocks):
            return freed
        _, tokens = self.held
        self.clear()
        return tokens

    def write(self) -> None:
        """Write all sequences to the store, if there is one, in the order of their last use."""
        with self._runtime.use() as engine:
            if self._store is not None and self._store.keeps_whole and not engine.free_blocks():
                self._evict(engine, 1)  # room for the copies of the others
            for key, root in self._roots.items():
                for node in sorted(root.below(), key=lambda node: node.used):
                    self._save(engine, node, 0, key)

    def clear(self) -> None:
        """Free all rows."""
        with self._runtime.use() as engine:
            for node in self._nodes():
                if node.sequence is not None:
                    engine.free_sequence(node.sequence)
            self._roots = {}

    @property
    def held(self) -> tuple[int, int]:
        """(blocks, tokens) in the tree, shared ones counted once; blocks of the layers that keep all rows."""
        nodes = list(self._nodes())
        return sum(node.blocks for node in nodes), sum(len(node.ids) for node in nodes)

    def _nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from root.below()

    def _evict(self, engine: core.Engine, blocks: int) -> int:
        free, freed = engine.free_blocks(), 0
        nodes = ((node, key) for key, root in self._roots.items() for node in root.below())
        oldest = [(node.used, id(node), node, key) for node, key in nodes if node.sequence is not None]
        heapq.heapify(oldest)
        while freed < blocks and oldest:
            *_, node, key = heapq.heappop(oldest)
            if node.sequence is None or engine.blocks(node.sequence)[1] == 0:  # all its blocks are shared
                continue
            left = self._evict_from(engine, node, blocks - freed, key)
            if left is not None:
                heapq.heappush(oldest, (left.used, id(left), left, key))
            before, free = free, engine.free_blocks()
            freed += max(0, free - before)  # may fall: free_blocks() is of the group with the fewest left
        self._forget_roots()
        self.evicted += freed
        return freed

    def _forget_roots(self) -> None:
        self._roots = {key: root for key, root in self._roots.items() if root.children}

    def _touch(self, node: Node) -> None:
        self._time += 1
        node.used = self._time

    def _fork(self, engine: core.Engine, node: Node, length: int) -> tuple[int | None, int]:
        """A fork with the first `length` tokens, which end in this node, or fewer if need be; and its length."""
        searched = None
        while length >= BLOCK and node.parent is not None:
            holder = _holder(engine, node, length, searched)
            if holder is not None:
                sequence = engine.fork(holder)
                if not _try_truncate(engine, sequence, length):
                    engine.free_sequence(sequence)
                    break
                self._touch(_split(node, length))
                return sequence, length
            searched, node = node, node.parent
            length = node.end
        return None, 0

    def _load(
        self, engine: core.Engine, store: PrefixStore, sequence: int | None, length: int, ids: Sequence[int], key: str
    ) -> tuple[int | None, int]:
        """The sequence extended with rows from the store, if it has more and loading pays; and its length."""
        found = store.find(ids, length, key)
        if found is None:
            return sequence, length
        if (missing := found.blocks - engine.free_blocks()) > 0:
            self._evict(engine, missing)
        return store.load(engine, found, sequence, length)

    def _insert(self, engine: core.Engine, root: Node, ids: Ids, sequence: int) -> bool:
        """Insert a sequence of these tokens. False: the tree has all of it already."""
        node, length = _walk(root, ids)
        if length == len(ids):
            known = _holder(engine, node, length) is not None
            node = _split(node, length)
            self._touch(node)
            if known:
                return False
        else:
            node = _split(node, length)
            leaf = Node(node, length, ids[length:].copy(), 0)
            node.children[int(ids[length])] = node = leaf
            self._touch(node)
        node.sequence = sequence
        for other in list(node.above()):
            if other.sequence is not None and engine.can_truncate(sequence, other.end):
                engine.free_sequence(other.sequence)  # its rows are in the new sequence too, mostly in shared blocks
                other.sequence = None
            _join(other)
        _share(engine, node)
        return True

    def _evict_from(self, engine: core.Engine, node: Node, blocks: int, key: str) -> Node | None:
        """Drop up to `blocks` blocks from the end of a node. Returns the node to evict from next, if any."""
        sequence, parent = node.sequence, node.parent
        assert sequence is not None and parent is not None
        whole = self._store is not None and self._store.keeps_whole
        if whole and not node.children and not engine.free_blocks():  # no copy can be made to be cut to whole blocks
            _try_truncate(engine, sequence, node.end // BLOCK * BLOCK)
        length = 0 if node.children or whole else (-(-node.end // BLOCK) - blocks) * BLOCK
        self._save(engine, node, max(length, node.begin), key)
        if not node.children and length > node.begin and _try_truncate(engine, sequence, length):
            node.ids = node.ids[: length - node.begin].copy()
            return node
        node.sequence = None
        if node.children:
            engine.free_sequence(sequence)
            _join(node)
            return None
        del parent.children[int(node.ids[0])]
        wanted = parent.sequence is None and not parent.children and parent.end >= BLOCK
        if wanted and _try_truncate(engine, sequence, parent.end):
            parent.sequence, parent.used = sequence, max(parent.used, node.used)
            return parent
        engine.free_sequence(sequence)
        while parent.parent is not None and parent.sequence is None and not parent.children:
            del parent.parent.children[int(parent.ids[0])]
            parent = parent.parent
        _join(parent)
        return parent  # its own sequence may have shared all its blocks with this one, and can be evicted now

    def _save(self, engine: core.Engine, node: Node, begin: int, key: str) -> None:
        """Write the rows of a node's sequence from token `begin` on to the store."""
        if self._store is not None and node.sequence is not None:
            self._store.save(engine, node.sequence, node.path(), begin, key)


def _walk(root: Node, ids: Ids) -> tuple[Node, int]:
    """The longest prefix of ids in the tree: the node in which it ends, and its length."""
    node, length = root, 0
    while length < len(ids) and length == node.end:
        child = node.children.get(int(ids[length]))
        if child is None:
            break
        rest = ids[length : length + len(child.ids)]
        differs = np.flatnonzero(rest != child.ids[: len(rest)])
        node, length = child, length + (int(differs[0]) if len(differs) else len(rest))
    return node, length


def _split(node: Node, length: int) -> Node:
    """Split a node at a length; returns the part before it."""
    parent = node.parent
    if length == node.end or parent is None:
        return node
    head = Node(parent, node.begin, node.ids[: length - node.begin].copy(), node.used)
    parent.children[int(head.ids[0])] = head
    node.parent, node.begin, node.ids = head, length, node.ids[length - node.begin :].copy()
    head.children[int(node.ids[0])] = node
    return head


def _join(node: Node) -> None:
    """Merge a node with its only child, unless it has a sequence or was used later than the child."""
    if node.parent is None or node.sequence is not None or len(node.children) != 1:
        return
    (child,) = node.children.values()
    if child.used >= node.used:
        child.parent, child.begin, child.ids = node.parent, node.begin, np.concatenate([node.ids, child.ids])
        node.parent.children[int(child.ids[0])] = child


def _holder(engine: core.Engine, node: Node, length: int, but: Node | None = None) -> int | None:
    """A sequence at or below a node (not at or below `but`) that can be truncated to this length."""
    for one in node.below(but):
        if one.sequence is not None and engine.can_truncate(one.sequence, length):
            return one.sequence
    return None


def _share(engine: core.Engine, node: Node) -> None:
    """Move a sequence that computed a prefix anew to the tree's blocks of that prefix, and free its own, if more blocks
    are saved than the rows after the prefix take to copy."""
    below = node
    for branch in node.above():
        if len(branch.children) > 1:
            break
        below = branch
    else:
        return
    common = branch.end // BLOCK * BLOCK
    n_own = -(-node.end // BLOCK) - common // BLOCK
    assert node.sequence is not None
    if n_own > common // BLOCK or engine.blocks(node.sequence)[1] <= n_own:
        return
    if (holder := _holder(engine, branch, common, below)) is None:
        return
    twin = engine.fork(holder)
    try:
        engine.truncate(twin, common)
        engine.load_rows(twin, engine.save_rows(node.sequence, common))
        node.sequence, twin = twin, node.sequence
    except (ContextOverflowError, UnsupportedError):
        pass  # no room for the copy; or rows in a window, or aged, which depend on the length
    engine.free_sequence(twin)


def _try_truncate(engine: core.Engine, sequence: int, length: int) -> bool:
    """Truncate a sequence. False: it cannot be, or rows that the windows need again find no blocks."""
    if not engine.can_truncate(sequence, length):
        return False
    try:
        engine.truncate(sequence, length)
    except ContextOverflowError:
        return False
    return True
