"""The picture of a token tree."""

from __future__ import annotations

import numpy as np

from edgespec.cli.screen.tree_drawing import draw_tree
from edgespec.speculation.tree import Acceptance, TokenTree

PIECES = [b" the", b" cat", b" dog", b"\n", b" sat", b" ran", b"!", b" end"]


def drawn(tree: TokenTree, accepted: Acceptance, columns: int = 60) -> list[str]:
    return [line.plain for line in draw_tree(tree, accepted, lambda token: PIECES[token], columns)]


def test_the_accepted_path_runs_down_and_the_rest_hangs_off_it() -> None:
    chances = np.log([1, 0.5, 0.25, 0.001, 0.25, 0.2, 0.05])
    # the - cat(1) - sat(4); the - dog(2) - ran(5), !(6); the - newline(3)
    tree = TokenTree.build([0, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 0, 1, 2, 2], chances)
    assert drawn(tree, Acceptance((0, 1, 4), 7)) == [
        "6 drafted tokens, 2 accepted, and the next one:",
        "● the  the text so far ends here",
        "│ ├ dog 25%",
        "│ │ ├ ran 80%",
        "│ │ ╰ ! 20%",
        "│ ╰ ⏎ <1%",
        "● cat 50%",
        "● sat 50%",
        "◆ end  the target's own choice",
    ]


def test_runs_are_one_line_and_lines_are_cut() -> None:
    tree = TokenTree.chain([0, 1, 2, 4], list(np.log([1.0, 0.5, 0.5, 0.25])))
    lines = drawn(tree, Acceptance((0,), 7), columns=22)
    assert lines[2:] == ["│ ╰ cat 50% · dog 100…", "◆ end  the target's o…"]
    assert drawn(tree, Acceptance((0,), 7), columns=39)[0] == "3 drafted, 0 accepted, then:"


def test_many_branches_are_counted() -> None:
    tree = TokenTree.build([0, 1, 2, 3, 4, 5, 6], [-1] + [0] * 6, [0.0] + [-3.0 - i for i in range(6)])
    assert drawn(tree, Acceptance((0,), 7))[-2:] == ["│ ╰ 2 more", "◆ end  the target's own choice"]
