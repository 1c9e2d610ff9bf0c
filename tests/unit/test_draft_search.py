"""The search for a drafter, on models whose truth is known."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafting.agreement import Agreement
from edgespec.drafting.recipe_search import CostModel, Recipe, search

LAYERS = 8


class KnownModel:
    """Agreement falls by what each layer is worth, by the bits, and more if neighbours go together."""

    def __init__(self, worth: list[float], bits: dict[str, float] | None = None) -> None:
        self.worth = worth
        self.bits = bits or {"keep": 0.0}
        self.asked: list[Recipe] = []

    def agreement(self, recipe: Recipe) -> Agreement:
        self.asked.append(recipe)
        lost = sum(self.worth[layer] for layer in recipe.dropped) + self.bits[recipe.quantization]
        lost += 0.3 * sum(layer + 1 in recipe.dropped for layer in recipe.dropped)
        top1 = max(1 - lost, 0.0)
        return Agreement(top1, (1 + top1) / 2 if top1 else 0.0, 100)

    def step_s(self, recipe: Recipe) -> float:
        return self.n_bytes(recipe) / 1e9

    def n_bytes(self, recipe: Recipe) -> int:
        size = 1_000_000 if recipe.quantization == "keep" else 500_000
        return size * (LAYERS + 2 - len(recipe.dropped))


def test_layers_that_matter_stay_and_the_others_go() -> None:
    model = KnownModel([0.9, 0.0, 0.9, 0.0, 0.9, 0.0, 0.9, 0.9])
    found = search(model, ["keep"], LAYERS, CostModel(pass_s=0.02))
    assert found.recipe == Recipe("keep", (1, 3, 5))
    assert found.agreement.top1 == 1.0


def test_neighbours_that_hurt_together_are_not_left_out_together() -> None:
    model = KnownModel([0.9, 0.01, 0.0, 0.011, 0.9, 0.9, 0.9, 0.9])
    found = search(model, ["keep"], LAYERS, CostModel(pass_s=0.005))
    # Layer 2 is the least important by itself; 1 and 3 are the pair that works.
    assert not {(1, 2), (2, 3)} & set(zip(found.recipe.dropped, found.recipe.dropped[1:], strict=False))


def test_a_slow_target_wants_agreement_and_a_fast_one_speed() -> None:
    worth = [0.04] * LAYERS
    bits = {"q4_0": 0.0}
    slow = search(KnownModel(worth, bits), ["q4_0"], LAYERS, CostModel(pass_s=10.0))
    fast = search(KnownModel(worth, bits), ["q4_0"], LAYERS, CostModel(pass_s=0.001))
    assert slow.recipe.dropped == ()
    assert len(fast.recipe.dropped) > 1


def test_the_target_as_it_is_is_no_drafter() -> None:
    found = search(KnownModel([0.2] * LAYERS), ["keep"], LAYERS, CostModel(pass_s=10.0))
    assert len(found.recipe.dropped) == 1
    bits = {"keep": 0.0, "q4_0": 0.01}
    assert search(KnownModel([0.2] * LAYERS, bits), list(bits), LAYERS, CostModel(10.0)).recipe == Recipe(
        "q4_0"
    )


def test_bits_are_chosen_too() -> None:
    bits = {"keep": 0.0, "q4_0": 0.01, "q2_k": 0.6}
    found = search(KnownModel([0.9] * LAYERS, bits), list(bits), LAYERS, CostModel(pass_s=0.02))
    assert found.recipe == Recipe("q4_0")


def test_a_limit_is_met_if_it_can_be() -> None:
    limit = 5_000_000
    found = search(KnownModel([0.1] * LAYERS), ["keep"], LAYERS, CostModel(pass_s=10.0, limit=limit))
    assert found.n_bytes <= limit
    nothing = search(KnownModel([0.1] * LAYERS), ["keep"], LAYERS, CostModel(pass_s=10.0, limit=10))
    assert nothing.n_bytes > 10
    assert nothing.tokens_per_second == 0.0


def test_memory_that_is_read_anew_counts() -> None:
    agreement = Agreement(0.8, 0.95, 100)
    resident = CostModel(1.0).tokens_per_second(agreement, 0.01, 10**9)
    streamed = CostModel(1.0, read_rate=1e9).tokens_per_second(agreement, 0.01, 10**9)
    assert streamed < resident / 1.5


def test_no_layers_are_tried_where_they_are_to_stay() -> None:
    model = KnownModel([0.0] * LAYERS)
    assert search(model, ["keep"], 0, CostModel(pass_s=0.001)).recipe == Recipe("keep")
    assert model.asked == [Recipe("keep")]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 0.5), min_size=LAYERS, max_size=LAYERS), st.floats(0.001, 5))
def test_the_result_is_never_worse_than_any_single_layer_less(worth: list[float], pass_s: float) -> None:
    model, cost = KnownModel(worth), CostModel(pass_s)
    found = search(model, ["keep"], LAYERS, cost)
    for recipe in (Recipe("keep", (layer,)) for layer in range(LAYERS)):
        speed = cost.tokens_per_second(model.agreement(recipe), model.step_s(recipe), model.n_bytes(recipe))
        assert found.tokens_per_second >= speed


def test_recipes_in_words() -> None:
    assert str(Recipe("keep", (20,))) == "the target's own types without layer 20"
    assert str(Recipe("q4_0", (18, 21))) == "q4_0 without layers 18, 21"
    assert str(Recipe("q2_k")) == "q2_k"
