"""Prompts that begin alike share pages: a tree of 256-token pages, each known by the tokens from the start to its end.

A page of the tree holds compressed entries and index keys (or latent rows). To go on behind it, a model with a window
and compressors also needs what it carried there: the window page that ends there and the compressors' open rows. Such a
snapshot is kept at the last boundary of each prompt and where requests branch; a node with one is restorable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from thalweg.engine.pages import PageAllocator
from thalweg.layouts.sizes import LOGICAL_PAGE_TOKENS


@dataclass
class Snapshot:
    """What a request carried at the end of a page: a window page (shared) and the compressors' rows."""

    window_page: int
    carried: Any


@dataclass(eq=False)
class Node:
    """One page of the tree. `users`: requests that run behind it; it is not evicted while there are any."""

    parent: "Node | None"
    key: tuple[int, ...]
    page: int
    snapshot: Snapshot | None = None
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    users: int = 0
    last_used: int = 0


class PrefixTree:
    """Owns the pages of its nodes. needs_snapshot: whether the model can go on only where a snapshot is."""

    def __init__(self, pages: PageAllocator, window_pages: PageAllocator, needs_snapshot: bool) -> None:
        self._pages, self._window_pages, self._needs_snapshot = pages, window_pages, needs_snapshot
        self._root = Node(None, (), 0)
        self._clock = 0
        self._idle = 0  # nodes without users

    @property
    def evictable(self) -> int:
        """Pages that eviction could free now."""
        return self._idle

    def match(self, tokens: Sequence[int]) -> tuple[list[Node], int]:
        """(nodes to restore from, pages that match): the second may be more, where no snapshot is.

        At least one token is left to compute: its logits are not in the tree.
        """
        path, node = [], self._root
        for start in range(0, len(tokens) - LOGICAL_PAGE_TOKENS, LOGICAL_PAGE_TOKENS):
            child = node.children.get(tuple(tokens[start : start + LOGICAL_PAGE_TOKENS]))
            if child is None:
                break
            path.append(child)
            node = child
        restorable = len(path)
        while restorable and self._needs_snapshot and path[restorable - 1].snapshot is None:
            restorable -= 1
        return path[:restorable], len(path)

    def use(self, node: Node) -> None:
        """A request runs behind `node`."""
        self._clock += 1
        self._idle -= node.users == 0
        node.users += 1
        node.last_used = self._clock

    def leave(self, node: Node) -> None:
        """That request does no longer."""
        node.users -= 1
        self._idle += node.users == 0

    def child(self, parent: Node | None, key: tuple[int, ...]) -> Node | None:
        """The node of page `key` behind `parent` (None: at the start), if there is one."""
        return (parent or self._root).children.get(key)

    def insert(self, parent: Node | None, key: tuple[int, ...], page: int) -> Node:
        """A new node that takes over `page` from the request that computed it. It has no user yet."""
        node = Node(parent, key, page)
        (parent or self._root).children[key] = node
        self._idle += 1
        return node

    def evict(self) -> bool:
        """Frees the least recently used page that nobody runs behind and nothing continues; False if there is none."""
        leaves = [node for node in self._nodes() if node.users == 0 and not node.children]
        if not leaves:
            return False
        node = min(leaves, key=lambda leaf: leaf.last_used)
        del (node.parent or self._root).children[node.key]
        self._pages.give_back(node.page)
        if node.snapshot is not None:
            self._window_pages.give_back(node.snapshot.window_page)
        self._idle -= 1
        return True

    def drop_snapshot(self) -> bool:
        """Gives up the least recently used snapshot, in use or not (running requests have theirs); False if none is left."""
        holders = [node for node in self._nodes() if node.snapshot is not None]
        if not holders:
            return False
        node = min(holders, key=lambda holder: holder.last_used)
        assert node.snapshot is not None
        self._window_pages.give_back(node.snapshot.window_page)
        node.snapshot = None
        return True

    def clear(self) -> None:
        """Evicts everything that nobody runs behind."""
        while self.evict():
            pass

    def _nodes(self) -> list[Node]:
        found, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found
