"""The branches of a drafter's tree: which nodes were read, where they are cached, and what follows each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.llama.cache.kv_cache import KVCache
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.tree import TokenTree


class DraftBranches:
    """The nodes below a sequence that a drafter has read, and their places among the cache's paths.

    Nodes are numbered as they were read, the root first, whose cells belong to the sequence. A search numbers
    its nodes in its own way, and may come upon nodes that were read in the search before.

    Attributes:
        found: node -> its candidates.
        used_paths: paths 0 .. used_paths - 1 may hold branches.
    """

    def __init__(self) -> None:
        self.found: dict[int, Children] = {}
        self.used_paths = 0
        self._tokens, self._parents = [-1], [-1]
        self._children: dict[tuple[int, int], int] = {}
        self._paths: dict[int, int] = {}  # node -> the path of the branch that ends there or continues below
        self._extended: set[int] = set()  # nodes whose path a child has taken over
        self._free: list[int] = []  # paths below `used_paths` that hold the sequence alone
        self._numbers = {0: 0}  # of the search's nodes
        self._found_before = False  # whether there may be nodes that the search has not come upon

    def __len__(self) -> int:
        """Nodes that were read, without the root."""
        return len(self._paths)

    def number(self, node: int, parent: int, token: int) -> int | None:
        """The number of a search's node; None if it was not read."""
        known = self._numbers.get(node)
        if known is None:
            above = self._numbers.get(parent)
            known = None if above is None else self._children.get((above, token))
            if known is not None:
                self._numbers[node] = known
        return known

    def known(self, frontier: Frontier) -> NDArray[np.bool_]:
        """(nodes,) whether a node was read before the search came upon it: its candidates are known."""
        if not self._found_before:
            return np.asarray(frontier.nodes == 0) & (0 in self.found)
        return np.array([n is not None and n in self.found for n in self.numbers(frontier)], dtype=np.bool_)

    def numbers(self, frontier: Frontier) -> list[int | None]:
        """The numbers of a frontier's nodes."""
        steps = zip(frontier.nodes.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        return [self.number(node, parent, token) for node, parent, token in steps]

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The nodes from the root along a sequence, as far as it was read."""
        path = [0]
        for token in tokens:
            child = self._children.get((path[-1], token))
            if child is None:
                break
            path.append(child)
        return path

    def path_of(self, node: int) -> int:
        """The path that a node is cached in; the first one for the root."""
        return self._paths.get(node, 0)

    @property
    def held_paths(self) -> frozenset[int]:
        """The paths that hold branches."""
        return frozenset(self._paths.values())

    def add(self, node: int, parent: int, token: int, depth: int, cache: KVCache) -> int | None:
        """Note that a search's node is going to be read, or one that it has not come upon yet.

        Args:
            node: its number in the search; below 0 for a node that is read ahead.
            depth: edges from the root.

        Returns:
            The path to read it into: the parent's own for its first child, then copies. None if the node
            cannot be read, because all paths are taken or its parent was not read.
        """
        above = self._numbers.get(parent)
        if above is None:
            return None
        path = self._path_below(above, depth, cache)
        if path is None:
            return None
        number = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(above)
        self._children[above, token] = number
        self._paths[number] = path
        self._numbers[node] = number
        self._found_before |= node < 0
        return path

    def _path_below(self, parent: int, depth: int, cache: KVCache) -> int | None:
        if parent in self._paths and parent not in self._extended:
            self._extended.add(parent)
            return self._paths[parent]
        if self._free:
            path = self._free.pop()
        elif self.used_paths < cache.max_paths:
            path = self.used_paths
            self.used_paths += 1
        else:
            return None
        cache.open(path + 1)
        if parent in self._paths:
            cache.fork(self._paths[parent], path, cache.length + depth - 1)
        return path

    def rerooted(self, node: int) -> DraftBranches:
        """The branches below a node, which becomes the root; see `TokenTree.rerooted`."""
        tree = TokenTree.build(self._tokens, self._parents, [0.0] * len(self._tokens))
        kept = {old: new for new, old in enumerate(tree.below(node).tolist())}
        part = tree.rerooted(node)
        rest = DraftBranches()
        rest._tokens, rest._parents = part.tokens.tolist(), part.parents.tolist()
        rest._children = {
            (above, token): number
            for number, (above, token) in enumerate(zip(rest._parents, rest._tokens, strict=True))
            if number
        }
        rest._paths = {new: self._paths[old] for old, new in kept.items() if new}
        rest._extended = {new for old, new in kept.items() if old in self._extended}
        rest.found = {new: self.found[old] for old, new in kept.items() if old in self.found}
        rest._found_before = bool(rest._paths)
        rest.used_paths = max(rest._paths.values(), default=-1) + 1
        rest._free = sorted(set(range(rest.used_paths)) - rest.held_paths)
        return rest

    def root_only(self) -> DraftBranches:
        """The root's candidates, without any branch."""
        rest = DraftBranches()
        rest.found = {0: self.found[0]} if 0 in self.found else {}
        return rest
