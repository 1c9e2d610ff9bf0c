"""What becomes of weights that no card holds: a machine is given by its figures, and a model by its sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.costs.layer_assignment import curve_over_machines
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.sending import NEVER, HostProducts
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.gguf.types import GGUFHeader, TensorInfo
from edgespec.planning import host_products as module
from edgespec.planning.devices.assignment import LayerAssignment
from edgespec.planning.devices.cards import Card, Cards
from edgespec.planning.host_products import describe_host_products, host_products
from edgespec.profiles.figures import DeviceProfile

LAYERS, LAYER = 10, 100_000_000
# Seconds for a byte with 1, 8 and 32 rows: one third of a ns for a row, of which 0.1 are the memory's.
PLAIN = (0.1e-9, 0.8e-9, 3.2e-9)
REARRANGED = (0.1e-9, 0.2e-9, 0.8e-9)
CARD = (0.005e-9, 0.005e-9, 0.01e-9)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_be_set", lambda: True)
    monkeypatch.setattr(module, "measured_products", lambda _type: (REARRANGED, PLAIN))


def files() -> ModelFiles:
    tensors = tuple(TensorInfo(f"blk.{n}.ffn_up.weight", (64, 64), 0, 0, LAYER) for n in range(LAYERS))
    metadata = {"general.architecture": "llama", "llama.block_count": LAYERS, "llama.embedding_length": 4096}
    return ModelFiles((GGUFHeader(Path("m.gguf"), 3, metadata, tensors, 32, 0, 0, "f"),))


def cards(link: float, *, shared: bool = False) -> Cards:
    """A card behind a link of so many bytes per second."""
    way = Curve.through([(n, 2 * n / link) for n in (1 << 14, 1 << 24)])
    profile = DeviceProfile(CARD, PLAIN, way)
    return Cards.of([Card("CUDA0", "a card", 1 << 30, 1 << 30, shared, profile)], 0)


def chosen(
    link: float,
    on_card: int = 5,
    *,
    shared: bool = False,
    holding: PlannedWeights | None = None,
    read_rate: float = 0.0,
    **options: Any,
) -> HostProducts | None:
    asked = Config.of(model="m", **({"draft": "lookup", "context": 512} | options))
    assignment = LayerAssignment.of(files(), LAYERS - on_card, [on_card])
    found = cards(link, shared=shared)
    streamed: dict[str, Any] = {"holding": holding, "read_rate": read_rate}
    return host_products(assignment, found, files(), None, asked, drafter_elsewhere=False, **streamed)


def test_a_fast_link_is_sent_weights_for_trees() -> None:
    """A GB takes 0.02 s over the link and 0.005 on the card: less than the 0.1 s of a single row here."""
    found = chosen(50e9)
    assert found is not None
    assert (found.rearranged, found.sent_from) == (False, 1)
    assert found.seconds.at(8) == pytest.approx(0.025e-9)


def test_weights_are_sent_from_the_row_on_that_takes_longer_than_the_link() -> None:
    """A GB takes 1/3 s over the link and 0.005 on the card; 3 rows take 0.3 s here, and 4 take 0.4 s."""
    found = chosen(3e9, draft="none")  # a question of 128 tokens takes longer here than its answer saves
    assert found is not None
    assert (found.rearranged, found.sent_from) == (False, 4)


def test_a_slow_link_leaves_rearranged_weights_to_the_processor() -> None:
    found = chosen(1e9)
    assert found is not None
    assert (found.rearranged, found.sent_from) == (True, NEVER)


@pytest.mark.parametrize(
    "case", [{"exact": True}, {"on_card": LAYERS}, {"shared": True}], ids=["exact", "all there", "shared"]
)
def test_nothing_is_chosen_where_there_is_no_choice(case: dict[str, Any]) -> None:
    assert chosen(50e9, **case) is None


def test_nothing_is_chosen_where_ggml_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_be_set", lambda: False)
    assert chosen(50e9) is None


def test_passes_are_as_fast_as_the_weights_are_sent() -> None:
    """Of 1 GB, half is sent: 0.5 GB takes 0.0125 s whatever the rows, instead of 0.05 s for one of them."""
    found = chosen(50e9)
    assert found is not None
    here = Curve.through([(1, 0.1), (8, 0.2), (32, 0.8)])  # of the whole model, rearranged
    part = found.part(0.5)
    assert [part.seconds(rows, here.at(rows)) for rows in (1, 8, 32)] == pytest.approx(
        [0.0125, 0.0125, 0.015]
    )
    other = replace(part, slowness={1: 0.05, 8: 0.025, 32: 0.0125})  # the card's half
    assert curve_over_machines(here, [part, other]).at(1) == pytest.approx(0.0125 + 0.0025)


DISK: dict[str, Any] = {"holding": PlannedWeights(0, 0, 0, streamed_bytes=LAYER), "read_rate": 1e9}


@pytest.mark.parametrize(
    ("link", "rearranged"),
    [
        # The disk takes 0.1 s in every pass, and 8 rows no longer. 128 rows of a question take 1.6 s here,
        # and 0.1 s if they are sent.
        (50e9, False),
        (5e9, False),  # 0.1 s
        (2e8, True),  # 2.5 s
    ],
)
def test_weights_from_disk_are_sent_where_reading_hides_it(link: float, rearranged: bool) -> None:
    found = chosen(link, **DISK)
    assert found is not None
    assert found.rearranged == rearranged


@pytest.mark.parametrize("case", [{"pack": "always"}, {"read_rate": 0.0}], ids=["packed", "unknown disk"])
def test_nothing_is_chosen_for_weights_from_disk_where_there_is_no_choice(case: dict[str, Any]) -> None:
    assert chosen(50e9, **(DISK | case)) is None


def test_the_choice_is_said() -> None:
    assert [describe_host_products(found) for found in (chosen(50e9), chosen(1e9)) if found] == [
        "Weights in memory are sent to the card in every pass.",
        "The processor computes with the weights in memory, which are rearranged for it.",
    ]
    streamed = chosen(3e9, **DISK)
    assert streamed is not None
    assert describe_host_products(streamed, streams=True) == (
        "Weights in memory and from disk are sent to the card for passes of 4 rows or more."
    )
