"""Permitted tokens: masks at every node of a tree, by the real grammar engine over a vocabulary of bytes."""

from __future__ import annotations

from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import GrammarError
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.constraint import ConstrainedRanking, Constraint
from edgespec.speculation.growth import Children, Frontier
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.policies import tree_policy
from edgespec.speculation.tree import TokenTree

END = 256
N_VOCAB = 257
PROMPT = [1, 2, 3]


class Bytes:
    eos_token_id = END
    bos_token_id = None
    special_token_ids = (END,)
    tokens = (*(bytes([i]) for i in range(256)), b"\xff<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def constraint(tokenizer: Any, regex: str, start: int = len(PROMPT)) -> Constraint:
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(regex))
    ends = np.zeros(N_VOCAB, dtype=np.bool_)
    ends[END] = True
    return Constraint(matcher, start, ends)


def after(permitted: np.ndarray[Any, Any]) -> str:
    return "".join("$" if token == END else chr(token) for token in np.flatnonzero(permitted))


def test_what_may_follow(tokenizer: Any) -> None:
    form = constraint(tokenizer, "ab*c|ad")
    assert after(form.permitted(PROMPT)) == "a"
    assert after(form.permitted(PROMPT, b"ab")) == "bc"
    assert after(form.permitted(PROMPT, b"ad")) == "$"
    assert after(form.permitted(PROMPT, b"a")) == "bcd"
    assert after(form.permitted([*PROMPT, *b"abb"], b"c")) == "$"
    assert after(form.permitted(PROMPT, [*b"ad", END])) == ""
    assert after(form.permitted(PROMPT)) == "a"


def test_the_only_text_that_may_follow_is_forced(tokenizer: Any) -> None:
    form = constraint(tokenizer, "foo(bar|baz)+!{3}")
    assert bytes(form.forced(PROMPT)) == b"fooba"
    assert bytes(form.forced(PROMPT, b"fo")) == b"oba"
    assert bytes(form.forced(PROMPT, b"fooba")) == b""
    assert bytes(form.forced(PROMPT, b"foobar")) == b""
    assert bytes(form.forced(PROMPT, b"foobar!")) == b"!!"
    assert bytes(form.forced(PROMPT, b"foobar!!!")) == b""
    assert bytes(form.forced(PROMPT, b"x")) == b""
    assert bytes(form.forced([*PROMPT, *b"foobaz"], b"b")) == b"a"


def test_forced_text_is_found_once_while_the_answer_takes_it(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = constraint(tokenizer, "x" * 50)
    found = []
    ahead = Constraint._fast_forward

    def counted(self: Constraint, tokens: list[int]) -> Any:
        found.append(tokens)
        return ahead(self, tokens)

    monkeypatch.setattr(Constraint, "_fast_forward", counted)
    for length in range(49):
        assert bytes(form.forced([*PROMPT, *b"x" * length])) == b"x" * (50 - length)
    assert len(found) == 1


@pytest.mark.parametrize("asked", [False, True])
def test_a_forced_token_is_a_candidate_where_no_model_was_asked(tokenizer: Any, asked: bool) -> None:
    ranking = ConstrainedRanking(
        tree_policy().ranking(GenerationConfig(), GumbelNoise(1, N_VOCAB)), constraint(tokenizer, "ab")
    )
    ranking.begin(PROMPT)
    root = Frontier(*(np.array([x], dtype=np.int32) for x in (0, PROMPT[-1], -1, 0)))
    known = np.array([[ord("a") if asked else ord("b")]], dtype=np.int32)
    scores = np.array([[-0.5 if asked else -np.inf]], dtype=np.float32)
    children = ranking.filtered(root, Children(known, scores), len(PROMPT))
    listed = children.tokens[np.isfinite(children.logprobs)].tolist()
    assert listed == [ord("a")]
    assert children.logprobs.max() == pytest.approx(-0.5 if asked else np.log(0.98))


def test_a_form_that_may_continue_may_also_end(tokenizer: Any) -> None:
    assert after(constraint(tokenizer, "ab*").permitted(PROMPT, b"ab")) == "b$"


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([*b"abcd", END])), max_size=30))
@settings(max_examples=60, deadline=None)
def test_pruned_trees_hold_every_permitted_path_and_no_other(
    tokenizer: Any, nodes: list[tuple[int, int]]
) -> None:
    tokens, parents = [PROMPT[-1]], [-1]
    for parent, token in nodes:
        tokens.append(token)
        parents.append(parent % len(parents))
    tree = TokenTree.build(tokens, parents, [0.0] * len(tokens)).merged()
    form = constraint(tokenizer, "(ab|b)*c?d")

    def paths(of: TokenTree) -> set[tuple[int, ...]]:
        return {tuple(of.tokens[of.path(node)].tolist()[1:]) for node in range(len(of))}

    def fits(path: tuple[int, ...]) -> bool:
        return all(form.permitted(PROMPT, path[:i])[path[i]] for i in range(len(path)))

    assert paths(form.pruned(tree, PROMPT)) == {path for path in paths(tree) if fits(path)}
    logits = np.zeros((len(tree), N_VOCAB), dtype=np.float32)
    masked = form.masked(logits, tree, PROMPT)
    assert not logits.any()
    for node in range(len(tree)):
        permitted = form.permitted(PROMPT, tuple(tree.tokens[tree.path(node)].tolist()[1:]))
        if permitted.any():
            assert (np.isfinite(masked[node]) == permitted).all()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_only_permitted_candidates_are_ranked(tokenizer: Any, temperature: float) -> None:
    form = constraint(tokenizer, "a[bc]d")
    text = list(PROMPT)
    config = GenerationConfig(temperature=temperature)
    ranking = ConstrainedRanking(tree_policy().ranking(config, GumbelNoise(1, N_VOCAB)), form)
    ranking.begin(text)
    logits = np.random.default_rng(0).standard_normal((1, N_VOCAB), dtype=np.float32)
    root = Frontier(*(np.array([x], dtype=np.int32) for x in (0, text[-1], -1, 0)))
    ranking.before_ranking(root, [0])
    best = ranking.best(logits, [3], 4)
    assert best.tokens[0][np.isfinite(best.logprobs[0])].tolist() == [ord("a")]
    below = Frontier(*(np.array([x], dtype=np.int32) for x in (1, ord("a"), 0, 1)))
    ranking.before_ranking(below, [0])
    best = ranking.best(logits, [4], 4)
    assert set(best.tokens[0][np.isfinite(best.logprobs[0])].tolist()) == set(b"bc")


def lark(tokenizer: Any, text: str, **limits: int) -> llguidance.LLMatcher:
    source = llguidance.LLMatcher.grammar_from_lark(text)
    return llguidance.LLMatcher(tokenizer, source, log_level=0, limits=llguidance.LLParserLimits(**limits))


def end_mask() -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.arange(N_VOCAB) == END


def test_a_limit_that_is_met_ends_the_answer_with_an_error(tokenizer: Any) -> None:
    matcher = lark(tokenizer, "start: /(a|b)*a(a|b){12}c/", max_lexer_states=200)
    failures: list[str] = []
    form = Constraint(matcher, len(PROMPT), end_mask(), lambda: failures.append("told"))
    rng, text = np.random.default_rng(0), list(PROMPT)

    def replay() -> None:
        for _ in range(5000):
            assert form.permitted(text)[list(b"ab")].any(), "nothing but the form is permitted"
            text.append(int(rng.choice(list(b"ab"))))

    with pytest.raises(GrammarError, match=r"cannot continue in the requested form: .*too many states"):
        replay()
    assert failures == ["told"]


def test_a_form_that_no_token_fits_is_an_error() -> None:
    class NoC(Bytes):
        special_token_ids = (END, ord("c"))
        tokens = (*(bytes([i]) if i != ord("c") else b"\xff<c>" for i in range(256)), b"\xff<end>")

        def __call__(self, text: bytes | str) -> list[int]:
            return [token for token in super().__call__(text) if token not in self.special_token_ids]

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(NoC()))
    form = Constraint(lark(tokenizer, 'start: "a" ("c" | "cc")'), len(PROMPT), end_mask())
    assert after(form.permitted(PROMPT)) == "a"
    with pytest.raises(GrammarError, match="cannot continue in the requested form"):
        form.permitted([*PROMPT, *b"a"])


def test_branches_that_meet_a_limit_are_cut_and_the_others_stay(tokenizer: Any) -> None:
    # Behind "a" the parser has more items than it may; behind "b" it has hardly any.
    form = Constraint(
        lark(tokenizer, 'start: "b" "c" | "a" x{0,1000}\nx: "x" | "xx"', max_items_in_row=8),
        len(PROMPT),
        end_mask(),
    )
    tree = TokenTree.build([PROMPT[-1], *b"ab", *b"xc"], [-1, 0, 0, 1, 2], [0.0] * 5)
    with pytest.raises(GrammarError):
        form.permitted([*PROMPT, *b"a"])
    pruned = form.pruned(tree, PROMPT)
    assert pruned.tokens.tolist() == [PROMPT[-1], *b"bc"]
    masked = form.masked(np.zeros((len(pruned), N_VOCAB), dtype=np.float32), pruned, PROMPT)
    assert [after(row == 0) for row in masked] == ["ab", "c", "$"]


def test_a_text_that_has_left_the_form_is_an_error(tokenizer: Any) -> None:
    form = constraint(tokenizer, "ab")
    assert not form.permitted(PROMPT, b"ax").any()
    assert after(form.permitted(PROMPT, b"a")) == "b"
    with pytest.raises(GrammarError, match="has already left that form"):
        form.permitted([*PROMPT, *b"ax"])
    assert after(form.permitted([*PROMPT, *b"a"])) == "b"


def test_a_node_costs_as_much_however_long_the_answer_is(tokenizer: Any) -> None:
    looked_up = []

    class Ends(np.ndarray[Any, np.dtype[np.bool_]]):
        def __getitem__(self, token: Any) -> Any:
            looked_up.append(token)
            return super().__getitem__(token)

    form = Constraint(lark(tokenizer, "start: /[ab]*/"), len(PROMPT), end_mask().view(Ends))
    text = [*PROMPT, *b"ab" * 500]
    assert after(form.permitted(text)) == "ab$"
    looked_up.clear()
    assert after(form.permitted([*text, *b"b"], b"aa")) == "ab$"
    assert after(form.permitted([*text, *b"b"], b"bb")) == "ab$"
    assert looked_up == list(b"baabb")
