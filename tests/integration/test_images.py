"""Images in prompts, with tiny models that see: what they become, and that drafts change no answer."""

from __future__ import annotations

import ctypes
import io
import json
import random
import re
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp
import PIL.Image
import pytest

import edgespec
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.engine import Engine
from edgespec.engine.requests import Request, RequestQueue
from edgespec.engine.sequence import TextSequence
from edgespec.engine.target import Target
from edgespec.errors import EdgeSpecError
from edgespec.generation.result import Generation
from edgespec.images.facts import TYPICAL, ProjectorFacts
from edgespec.images.parts import image_of
from edgespec.images.projector import find_projector
from edgespec.images.reader import ImageReader, UnreadImage, without_reading
from edgespec.llama.cache.tree_cache import BranchingCache
from edgespec.llama.projector import NoImageLibrary, load_library
from edgespec.llama.quantize import make_drafter
from edgespec.llama.runtime.batch import EmbeddedBatch, TokenBatch
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.models.gguf.header import read_header
from edgespec.processes.trial import Verdict, attempt_in_child
from tests.least_memory import load_in_least_memory, weights_of
from tests.links import put
from tests.program import run_here
from tests.tiers import slow_except
from tests.tiny_heads import tiny_head
from tests.tiny_images import PROJECTORS, ROWS, SIDE, png, png_of, write_projector, write_seeing
from tests.wine import needs_limits

pytestmark = pytest.mark.usefixtures("images_read_once")

FAMILIES = ("idefics3", "gemma3", "qwen3vl")
PARTS = {"idefics3": 3, "gemma3": 1, "qwen2vl": 1, "qwen3vl": 1}  # that the picture is divided into
CONFIG = edgespec.GenerationConfig(max_tokens=20)
PICTURE, ANOTHER = png(), png(seed=2)


@pytest.fixture(scope="module")
def library() -> Any:
    """llama.cpp's library for images, which older builds lack."""
    try:
        return load_library()
    except NoImageLibrary as missing:
        pytest.skip(f"llama.cpp was compiled without images: {missing}")


@pytest.fixture(scope="module", params=FAMILIES[:1])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


each_family = pytest.mark.parametrize("family", FAMILIES, indirect=True, scope="module")
each_family_at_length = pytest.mark.parametrize(
    "family", slow_except(["qwen3vl"], FAMILIES), indirect=True, scope="module"
)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, smol_path: Path, family: str, library: Any) -> Path:
    """A target of each family, whose next token depends on the last ones most."""
    del library
    return write_seeing(tmp_path_factory.mktemp("seeing"), family, smol_path, damped=0.3)


def asked(data: bytes, text: str = "one two one two one two one") -> list[dict[str, Any]]:
    parts = [{"type": "image", "data": data}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def opened(path: Path, draft: str, **options: Any) -> Engine:
    return edgespec.load(path, draft=draft, context=512, threads=1, exact=True, **options)


@pytest.fixture
def plain(seeing: Path) -> Iterator[Engine]:
    with opened(seeing, "none") as engine:
        yield engine


# What an image becomes.


def context_of(model: Model) -> Context:
    return Context(model, n_cells=512, n_rows=256, n_outputs=8, n_sequences=4, n_threads=1)


@llama_cpp.llama_log_callback
def silent(_level: int, _text: bytes, _data: object) -> None:
    """Print nothing of the log."""


def read_by_llama_cpp(library: Any, model: Model, projector: Path, context: Context) -> list[Any]:
    """Have llama.cpp's own helper read a prompt with a picture; returns its tokens, None for each image."""
    library.mtmd_helper_log_set(silent, None)
    params = library.mtmd_context_params_default()
    params.use_gpu = params.print_timings = params.warmup = False
    params.n_threads = 1
    encoder = library.mtmd_init_from_file(str(projector).encode(), model.handle, params)
    data = (ctypes.c_uint8 * len(PICTURE)).from_buffer_copy(PICTURE)
    bitmap = library.mtmd_helper_bitmap_init_from_buf(encoder, data, len(PICTURE), False)
    chunks = library.mtmd_input_chunks_init()
    text = b"a b c " + library.mtmd_default_marker() + b" d e f"
    asked_for = library.mtmd_input_text(text, len(text), False, True)
    assert (
        library.mtmd_tokenize(encoder, chunks, ctypes.byref(asked_for), (ctypes.c_void_p * 1)(bitmap), 1) == 0
    )
    at = ctypes.c_int32()
    code = library.mtmd_helper_eval_chunks(
        encoder, context.handle, chunks, 0, 0, context.n_rows, False, ctypes.byref(at)
    )
    assert code == 0
    found: list[Any] = []
    for number in range(library.mtmd_input_chunks_size(chunks)):
        chunk = library.mtmd_input_chunks_get(chunks, number)
        if library.mtmd_input_chunk_get_type(chunk) == library.MTMD_INPUT_CHUNK_TYPE_TEXT:
            count = ctypes.c_size_t()
            tokens = library.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
            found += tokens[: count.value]
        else:
            found.append(None)
    library.mtmd_input_chunks_free(chunks)
    library.mtmd_bitmap_free(bitmap)
    library.mtmd_free(encoder)
    return found


@each_family
def test_the_cache_holds_the_bits_that_llama_cpps_own_helper_leaves(
    library: Any, seeing: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")  # the helper knows no others
    projector = seeing.parent / f"mmproj-{family}.gguf"
    assert_same_state(library, seeing, projector, images=PARTS[family])


def test_older_families_leave_the_same_bits(
    library: Any, smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")
    path = write_seeing(tmp_path, "qwen2vl", smol_path, damped=0.3)
    assert_same_state(library, path, tmp_path / "mmproj-qwen2vl.gguf", images=PARTS["qwen2vl"])


def assert_same_state(library: Any, path: Path, projector: Path, images: int) -> None:
    """Have a target and llama.cpp's own helper read a prompt with a picture, and compare their caches.

    Args:
        images: that the picture is divided into.
    """
    reader = ImageReader(path, None, threads=1, context=512)
    parts = iter(reader.placed(reader.read(PICTURE, "it")))
    with Model(path, repack=False) as model:
        theirs, ours = context_of(model), context_of(model)
        expected = read_by_llama_cpp(library, model, projector, theirs)
        tokens: list[int] = []
        for token in expected:
            tokens += next(parts).rows.ids if token is None else [token]
        target = Target(model, ours, None)
        sequence = TextSequence(tokens, images=reader.placed(tokens))
        target.prefill(sequence, len(tokens))
        assert next(parts, None) is None
        assert len(sequence.images) == images
        same = bytes(ours.save(0)) == bytes(theirs.save(0))  # pytest would compare megabytes at length
        assert same


@each_family
def test_rows_of_an_image_see_those_behind_them_where_the_model_wants_that(seeing: Path, family: str) -> None:
    reader = ImageReader(seeing, None, threads=1, context=512)
    tokens = [*reader.read(PICTURE, "it"), 5]
    assert {image.rows.causal for image in reader.placed(tokens)} == {family != "gemma3"}


def test_photographs_are_turned(seeing: Path) -> None:
    reader = ImageReader(seeing, None, threads=1, context=512)
    turned = image_of(PIL.Image.open(io.BytesIO(PICTURE)).transpose(PIL.Image.Transpose.ROTATE_270))
    assert reader.read(png(orientation=6), "it") == reader.read(turned.data, "it")


def test_an_image_is_read_once(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ImageReader(seeing, None, threads=1, context=512)
    first = reader.read(PICTURE, "it")
    monkeypatch.setattr("edgespec.images.reader.attempt_in_child", None)
    assert reader.read(PICTURE, "it again") == first


def test_threads_read_an_image_once(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ImageReader(seeing, None, threads=1, context=512)
    begun: list[str] = []

    def counted(module: str, *arguments: Any, **more: Any) -> Verdict:
        begun.append(module)
        return attempt_in_child(module, *arguments, **more)

    monkeypatch.setattr("edgespec.images.reader.attempt_in_child", counted)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(reader.read, [PICTURE] * 3, ["it"] * 3))
    assert found[0] == found[1] == found[2]
    assert len(begun) == 1


def test_images_are_not_read_where_nobody_may_wait(seeing: Path) -> None:
    reader = ImageReader(seeing, None, threads=1, context=512)
    with without_reading(), pytest.raises(UnreadImage):
        reader.read(PICTURE, "it")
    tokens = reader.read(PICTURE, "it")
    with without_reading():
        assert reader.read(PICTURE, "it") == tokens


def test_rows_are_known_for_as_long_as_somebody_holds_them(
    seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.images.reader._MAX_KEPT", 0)  # the latest image is kept in any case
    reader = ImageReader(seeing, None, threads=1, context=512)
    tokens = reader.read(PICTURE, "it")
    held = reader.placed(tokens)
    reader.read(ANOTHER, "it")
    assert reader.placed(tokens) == held
    reader.read(PICTURE, "it")
    reader.read(ANOTHER, "it")
    assert reader.placed(tokens) == held
    del held
    assert not reader.knows(tokens)


@each_family
def test_headers_tell_the_tokens_of_a_picture(seeing: Path, family: str, tmp_path: Path) -> None:
    projector = write_projector(tmp_path / "mmproj-other.gguf", family, longest_edge=2 * SIDE)
    reader = ImageReader(seeing, projector, threads=1, context=512)
    expected = ProjectorFacts.of(find_projector(seeing, projector)).tokens
    if family == "qwen3vl":  # too many to compute here
        assert expected is not None
        with pytest.raises(EdgeSpecError, match=f"takes {expected + 2} tokens"):  # with the marks around it
            reader.read(png(*TYPICAL), "it")
        return
    tokens = reader.read(png(*TYPICAL), "it")
    assert sum(token < 0 for token in tokens) == expected


@each_family
def test_a_large_image_is_divided(seeing: Path, family: str, tmp_path: Path) -> None:
    if family == "qwen3vl":  # takes images of any size
        reader = ImageReader(seeing, None, threads=1, context=512)
        small, large = (reader.placed(reader.read(png(*size), "it"))[0].rows for size in ((48, 32), (96, 64)))
        assert len(large) == 4 * len(small)
        assert (small.positions, large.positions) == (6, 12)
        return
    projector = write_projector(tmp_path / "mmproj-other.gguf", family, longest_edge=2 * SIDE)
    reader = ImageReader(seeing, projector, threads=1, context=512)
    tokens = reader.read(PICTURE, "it")
    images = reader.placed(tokens)
    assert len(images) == (1 if family == "gemma3" else 5)  # the whole picture, and its parts
    assert sum(len(image.rows) for image in images) == len(images) * ROWS
    assert len({image.rows.ids for image in images}) == len(images)


# Answers.


@pytest.mark.parametrize(
    "family", slow_except(["gemma3", "qwen3vl"], FAMILIES), indirect=True, scope="module"
)
def test_drafts_change_no_token(plain: Engine, seeing: Path, family: str) -> None:
    questions = [asked(PICTURE), asked(ANOTHER), asked(PICTURE, "x y z")]
    config = CONFIG.with_(max_tokens=32) if family == "gemma3" else CONFIG  # so that answers differ
    settings = [config, config.with_(temperature=1.0, seed=7), config.with_(repeat_penalty=1.3)]
    expected = [[plain.generate(q, s).tokens for s in settings] for q in questions]
    assert expected[0] != expected[1]  # it sees
    for draft in (str(seeing), "lookup"):
        with opened(seeing, draft, tree_budget=8) as engine:
            answers = [[engine.generate(q, s) for s in settings] for q in questions]
        assert [[answer.tokens for answer in row] for row in answers] == expected
        every = [answer for row in answers for answer in row]
        passes, tokens = (
            sum(map(len, found)) for found in zip(*((a.passes, a.tokens) for a in every), strict=True)
        )
        assert passes < tokens  # drafts were accepted


def test_trees_that_outgrow_a_sliding_window_change_no_token(
    library: Any, smol_path: Path, tmp_path: Path
) -> None:
    del library
    path = write_seeing(tmp_path, "gemma3", smol_path, damped=0.3)
    draw, questions, config = random.Random(60), [], CONFIG.with_(max_tokens=32)
    for seed in range(6):
        text = " ".join(draw.choices(["one", "two", "three"], k=draw.randrange(1, 40)))
        questions.append(asked(png(seed=seed), text) if seed % 2 else [{"role": "user", "content": text}])
    with opened(path, "none") as engine:
        expected = [engine.generate(question, config).tokens for question in questions]
    with opened(path, str(path), tree_budget=60, parallel=3) as engine:
        answers = [engine.generate(question, config) for question in questions]
        together = engine.generate_many(questions, config)
        assert isinstance(engine.drafter, ModelDrafter)
        window = engine.drafter._context.window
    assert [answer.tokens for answer in answers] == expected
    assert [answer.tokens for answer in together] == expected
    assert max(record.accepted for answer in answers for record in answer.passes) > window > 0


@each_family_at_length
def test_streamed_weights_change_no_token(plain: Engine, seeing: Path) -> None:
    expected = plain.generate(asked(PICTURE), CONFIG).tokens
    options = {"draft": str(seeing), "context": 512, "threads": 1, "exact": True, "tree_budget": 8}
    with load_in_least_memory(seeing, **options) as engine:
        assert weights_of(engine).streamed_bytes
        assert engine.generate(asked(PICTURE), CONFIG).tokens == expected


@pytest.mark.parametrize("seen_by", slow_except(["idefics3"], ["idefics3", "qwen3vl"]))
def test_streamed_weights_are_read_once_for_texts_and_images(
    seen_by: str, library: Any, smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del library
    whole = write_seeing(tmp_path / "whole", seen_by, smol_path, damped=0.3)
    path = make_drafter(whole, tmp_path / "quantized.gguf", quantization="q4_0")
    question = [*asked(PICTURE), {"role": "assistant", "content": "x"}, *asked(ANOTHER)]
    chunks: list[int] = []
    sweeps: list[int] = []
    read = Target.read_chunk

    def counted(target: Target, *arguments: Any, **more: Any) -> int:
        chunks.append(read(target, *arguments, **more))
        return chunks[-1]

    monkeypatch.setattr(Target, "read_chunk", counted)

    others = [asked(ANOTHER, "x y z"), [{"role": "user", "content": "one two one"}], asked(PICTURE)]

    def answer() -> tuple[list[int], bytes, list[list[int]]]:
        """The tokens, the last logits, which depend on all keys and values, and tokens of shared passes."""
        with load_in_least_memory(path, spare=1 << 20, **options) as engine:
            if not engine.target.max_unread:
                pytest.skip("passes are padded here")
            chunks.clear()
            tokens = engine.generate(question, CONFIG).tokens
            sweeps.append(len(chunks))
            logits = engine.target.context.logits().tobytes()
            return tokens, logits, [found.tokens for found in engine.generate_many(others, CONFIG)]

    mmproj = whole.parent / f"mmproj-{seen_by}.gguf"
    options: dict[str, Any] = {"mmproj": mmproj, "context": 512, "threads": 1, "exact": True, "parallel": 3}
    together = answer()
    monkeypatch.setattr(Target, "readable_together", lambda *_: 0)
    assert answer() == together
    few, many = sweeps
    assert many >= 2 * few


@each_family_at_length
def test_what_was_read_of_an_image_is_used_again(plain: Engine, seeing: Path, family: str) -> None:
    def fresh(question: list[dict[str, Any]]) -> Generation:
        with opened(seeing, "none") as engine:
            return engine.generate(question, CONFIG)

    first, second, third = asked(PICTURE), asked(PICTURE, "x y z"), asked(ANOTHER, "x y z")
    plain.generate(first, CONFIG)
    again = plain.generate(second, CONFIG)
    assert plain.target.recalled > ROWS
    other = plain.generate(third, CONFIG)
    assert plain.target.recalled < ROWS
    assert again.tokens == fresh(second).tokens
    assert other.tokens == fresh(third).tokens


@each_family_at_length
def test_states_on_disk_never_end_within_an_image(seeing: Path, family: str) -> None:
    filling = "word " * 20  # a block of saved states ends within the image then
    question = asked(PICTURE)
    question.insert(0, {"role": "system", "content": filling * 5})
    with opened(seeing, "none", prompt_cache=True) as engine:
        expected = engine.generate(question, CONFIG).tokens
    with opened(seeing, "none", prompt_cache=True) as engine:
        assert engine.generate(question, CONFIG).tokens == expected
        assert engine.target.recalled
        tokens = engine.encoder.encode(question)
        assert engine.encoder.images is not None
        for image in engine.encoder.images.placed(tokens):
            assert not image.start < engine.target.recalled < image.end


def test_a_prompt_with_an_image_may_be_encoded_before(plain: Engine, seeing: Path) -> None:
    del seeing
    assert plain.sees_images
    expected = plain.generate(asked(PICTURE), CONFIG)
    tokens = plain.encoder.encode(asked(PICTURE))
    assert plain.generate(tokens, CONFIG).tokens == expected.tokens
    assert "ends with an image" in refused(plain, tokens[: max(n for n, t in enumerate(tokens) if t < 0) + 1])
    unknown = [token if token >= 0 else token - 1 for token in tokens]
    assert "The prompt has the token -" in refused(plain, unknown)


@pytest.mark.parametrize(
    ("seen_by", "hybrid"), slow_except([("qwen3vl", "qwen35")], [("idefics3", "lfm2"), ("qwen3vl", "qwen35")])
)
def test_models_with_a_running_state_see(
    seen_by: str, hybrid: str, library: Any, smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_seeing(tmp_path, seen_by, smol_path, damped=0.3, hybrid=hybrid)
    questions = [asked(PICTURE), asked(ANOTHER), asked(PICTURE, "x y z")]
    fresh = []
    for question in questions:
        with opened(path, "none") as engine:
            fresh.append(engine.generate(question, CONFIG).tokens)
    assert fresh[0] != fresh[1]
    for draft in ("none", str(path), "lookup"):
        with opened(path, draft, **({} if draft == "none" else {"tree_budget": 8})) as engine:
            answers = [engine.generate(question, CONFIG) for question in questions]
            together = engine.generate_many(questions, CONFIG)
        assert [answer.tokens for answer in answers] == fresh
        assert [answer.tokens for answer in together] == fresh
        if draft != "none":
            assert any(record.nodes > 1 for answer in answers for record in answer.passes)
    options = {"draft": str(path), "context": 512, "threads": 1, "exact": True, "tree_budget": 8}
    with load_in_least_memory(path, **options) as engine:
        assert engine.generate(questions[0], CONFIG).tokens == fresh[0]
    monkeypatch.setenv("EDGESPEC_KERNELS", "plain")
    assert_same_state(library, path, tmp_path / f"mmproj-{seen_by}.gguf", images=PARTS[seen_by])


def test_heads_draft_for_texts_beside_images(library: Any, smol_path: Path, tmp_path: Path) -> None:
    del library
    path = write_seeing(tmp_path, "idefics3", smol_path, damped=0.001)
    head = tiny_head(tmp_path / "head.gguf", path)
    text = [{"role": "user", "content": "one two one two one two one"}]
    questions = [text, asked(PICTURE), asked(ANOTHER), text]
    with opened(path, "none") as engine:
        expected = [engine.generate(question, CONFIG).tokens for question in questions]
    with opened(path, str(head), tree_budget=8) as engine:
        answers = [engine.generate(question, CONFIG) for question in questions]
        together = engine.generate_many(questions, CONFIG)
    assert [answer.tokens for answer in answers] == expected
    assert [answer.tokens for answer in together] == expected
    for answer in (answers[0], answers[3]):
        assert any(record.nodes > 1 for record in answer.passes)


# Beside other sequences.


@each_family_at_length
def test_shared_passes_change_no_token(plain: Engine, seeing: Path, family: str) -> None:
    questions = [
        asked(PICTURE),
        [{"role": "user", "content": "one two one two one"}],
        asked(ANOTHER, "x y z"),
        asked(PICTURE, "x y z"),
        [{"role": "user", "content": "x y z " * 30}],
        [*asked(PICTURE), {"role": "assistant", "content": "x"}, *asked(ANOTHER)],
    ]
    expected = [plain.generate(question, CONFIG).tokens for question in questions]
    assert [answer.tokens for answer in plain.generate_many(questions, CONFIG)] == expected
    for draft in (str(seeing), "lookup"):
        with opened(seeing, draft, tree_budget=8, parallel=3) as engine:
            answers = engine.generate_many(questions, CONFIG)
            again = engine.generate_many(questions, CONFIG)
        assert [answer.tokens for answer in answers] == expected
        assert [answer.tokens for answer in again] == expected
        assert sum(len(answer.passes) for answer in answers) < sum(len(answer.tokens) for answer in answers)


@each_family_at_length
def test_a_full_cache_sets_sequences_with_images_aside(seeing: Path, family: str, plain: Engine) -> None:
    questions = [asked(data, f"{text} {n}") for n in range(3) for data in (PICTURE, ANOTHER) for text in "xy"]
    expected = [plain.generate(question, CONFIG).tokens for question in questions]
    with edgespec.load(seeing, draft="none", context=256, threads=1, exact=True, parallel=4) as engine:
        assert [answer.tokens for answer in engine.generate_many(questions, CONFIG)] == expected


def test_an_answer_has_every_second_pass_while_images_are_read(seeing: Path) -> None:
    passes: list[str] = []
    running = Request([{"role": "user", "content": "one two"}], CONFIG, key="running")
    source = RequestQueue()
    source.put(running)
    with opened(seeing, "none", parallel=4) as engine:
        for event in engine.stream_many(source):
            if event.request is running and len(passes) == 1:
                for n in range(3):
                    source.put(Request(asked(png(seed=10 + n)), CONFIG.with_(max_tokens=2), key=n))
                source.close()
            assert event.error is None
            passes.append(event.request.key)
    others = [place for place, key in enumerate(passes) if key != "running"]
    assert passes[1 : others[0]].count("running") >= 3  # as many as there are images


@pytest.fixture(scope="module", params=slow_except(["idefics3", "gemma3"], FAMILIES))
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smol_path: Path) -> Path:
    """A target whose images have more rows than a pass has for texts beside answers."""
    path = write_seeing(tmp_path_factory.mktemp("large"), request.param, smol_path, damped=0.3)
    write_projector(path.with_name(f"mmproj-{request.param}.gguf"), request.param, side=4 * SIDE)
    return path


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_goes_on_between_the_parts_of_a_large_image(large: Path, streamed: bool) -> None:
    picture = png(4 * SIDE, 4 * SIDE)
    config = CONFIG.with_(max_tokens=40)
    if streamed and "gemma3" in large.name:
        pytest.skip("all rows of such an image must fit into one pass")
    running = Request([{"role": "user", "content": "one two"}], config, key="running")
    looking = Request(asked(picture), config.with_(max_tokens=8), key="looking")
    options: dict[str, Any] = {"context": 1024, "threads": 1, "exact": True, "parallel": 4, "draft": "none"}

    def loaded() -> Engine:
        if streamed:
            return load_in_least_memory(large, spare=1 << 20, **options)
        return edgespec.load(large, **options)

    with loaded() as engine:
        expected = [engine.generate(request.prompt, request.config).tokens for request in (running, looking)]
    source = RequestQueue()
    source.put(running)
    got: dict[str, list[int]] = {"running": [], "looking": []}
    meanwhile = 0
    with loaded() as engine:
        for event in engine.stream_many(source):
            assert event.error is None
            assert event.chunk is not None
            got[event.request.key] += event.chunk.tokens
            if event.request is running and len(got["running"]) == 2:
                source.put(looking)
                source.close()
            elif event.request is running and not got["looking"]:
                meanwhile += 1
        images = engine.encoder.images
        assert images is not None
        placed = images.placed(images.read(picture, "it"))
        limit = engine.target.divides_images(TextSequence([0], images=placed))
    assert [got["running"], got["looking"]] == expected, "exact, whatever is between the parts"
    rows = max(len(image.rows) for image in placed)
    assert rows >= 256
    assert not limit or meanwhile >= rows / 128, "one token at least for each part"


@pytest.mark.usefixtures("library")
def test_cells_are_moved_between_the_parts_of_an_image(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sequence ends after each part, and its cells are taken back."""
    picture = png(4 * SIDE, 4 * SIDE)
    running = Request([{"role": "user", "content": "one two"}], CONFIG.with_(max_tokens=40), key="running")
    looking = Request(asked(picture), CONFIG.with_(max_tokens=8), key="looking")
    options: dict[str, Any] = {"context": 1024, "threads": 1, "exact": True, "parallel": 4, "draft": "none"}
    with edgespec.load(large, **options) as engine:
        expected = {r.key: engine.generate(r.prompt, r.config).tokens for r in (running, looking)}
    read, moves = Target.read_chunk, []

    def compacting(target: Target, sequence: TextSequence, *arguments: Any, **more: Any) -> int:
        if not sequence.images:
            return read(target, sequence, *arguments, **more)
        cache = sequence.kv_cache
        assert isinstance(cache, BranchingCache)
        other, before = cache.another(), cache.compactions
        other.append(TokenBatch.run([1, 2, 3], 0, n_sequences=1))
        found = read(target, sequence, *arguments, **more)
        other.close()
        cache.compact()
        moves.append(cache.compactions - before)
        return found

    monkeypatch.setattr(Target, "read_chunk", compacting)
    source, waiting = RequestQueue(), [looking]
    source.put(running)
    got: dict[Any, list[int]] = {}
    with edgespec.load(large, **options) as engine:
        for event in engine.stream_many(source):
            assert event.error is None
            assert event.chunk is not None
            got.setdefault(event.request.key, []).extend(event.chunk.tokens)
            if waiting and len(got["running"]) >= 2:
                source.put(waiting.pop())
                source.close()
    assert got == expected
    assert all(moves)


@pytest.mark.usefixtures("library")
def test_an_answer_that_is_cancelled_within_an_image_leaves_nothing_of_it(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = png(4 * SIDE, 4 * SIDE)
    running = Request([{"role": "user", "content": "one two"}], CONFIG, key="running")
    looking = [Request(asked(picture), CONFIG.with_(max_tokens=8), key=n) for n in range(2)]
    read, parts = Target.read_chunk, []

    def cancelling(target: Target, sequence: TextSequence, *arguments: Any, **more: Any) -> int:
        found = read(target, sequence, *arguments, **more)
        if sequence.images and sequence.is_at_image and sequence.request is looking[0]:
            parts.append(found)
            looking[0].cancelled = True
        return found

    monkeypatch.setattr(Target, "read_chunk", cancelling)
    options: dict[str, Any] = {"context": 1024, "threads": 1, "exact": True, "parallel": 4, "draft": "none"}
    with edgespec.load(large, **options) as engine:
        expected = engine.generate(asked(picture), looking[1].config).tokens
    source, waiting = RequestQueue(), looking
    source.put(running)
    answers: dict[Any, Generation] = {}
    with edgespec.load(large, **options) as engine:
        for event in engine.stream_many(source):
            assert event.error is None
            assert event.chunk is not None
            if event.chunk.generation is not None:
                answers[event.request.key] = event.chunk.generation
            if waiting:
                for request in waiting:
                    source.put(request)
                waiting = []
                source.close()
    assert answers[1].tokens == expected
    assert answers[0].finish_reason == ("cancelled" if parts else answers[1].finish_reason)


@pytest.mark.parametrize("seen_by", slow_except(["gemma3", "qwen3vl"], PARTS))
def test_a_pass_that_is_stopped_within_an_image_changes_no_later_answer(
    seen_by: str, library: Any, smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del library
    path = write_seeing(tmp_path, seen_by, smol_path, damped=0.3)
    write_projector(tmp_path / f"mmproj-{seen_by}.gguf", seen_by, side=4 * SIDE)
    question, config = asked(png(4 * SIDE, 4 * SIDE)), CONFIG.with_(max_tokens=8)
    decode = Context.decode
    waiting: list[int] = []  # passes over rows of images until one is stopped

    with edgespec.load(path, draft="none", context=1024, threads=1, exact=True, parallel=4) as engine:

        def stopping(context: Context, batch: TokenBatch) -> None:
            if waiting and isinstance(batch, EmbeddedBatch) and context is engine.target.context:
                waiting[0] -= 1
                if waiting[0] < 0:
                    waiting.clear()
                    engine.cancel()
            decode(context, batch)

        expected = engine.generate(question, config).tokens
        monkeypatch.setattr(Context, "decode", stopping)
        for answer in (
            lambda: engine.generate(question, config),
            lambda: engine.generate_many([question], config)[0],
        ):
            for earlier in range(2):
                engine.target.rewind(0)
                waiting[:] = [earlier]
                stopped = answer()
                assert stopped.finish_reason == "cancelled" or waiting, "there are fewer passes"
                waiting.clear()
                assert engine.generate(question, config).tokens == expected


# What cannot be read.


def refused(engine: Engine, question: Any) -> str:
    with pytest.raises(EdgeSpecError) as error:
        engine.generate(question, CONFIG)
    return str(error.value)


def test_a_model_without_a_projector_says_so(
    seeing: Path, family: str, tmp_path: Path, smol_path: Path
) -> None:
    blind = tmp_path / "blind.gguf"
    put(seeing, blind)
    with opened(blind, "none") as engine:
        assert not engine.sees_images
        assert "has no projector beside it" in refused(engine, asked(PICTURE))
        assert engine.generate("hello", CONFIG).tokens  # and goes on


def test_damaged_images_end_in_a_message(plain: Engine) -> None:
    assert "is damaged or incomplete" in refused(plain, asked(PICTURE[:100]))
    assert "is not an image that can be read" in refused(plain, asked(b"%PDF"))
    claimed = png_of((b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)), (b"IEND", b""))
    assert "has 30000 x 30000 pixels" in refused(plain, asked(claimed))


@needs_limits
def test_decoding_has_a_budget_of_processor_time(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of a JPEG covers all pixels with a few bytes, and there may be any number of scans."""
    file = io.BytesIO()
    PIL.Image.new("L", (4096, 4096), 100).save(file, "JPEG", progressive=True)
    picture, end = file.getvalue()[:-2], file.getvalue()[-2:]
    scan = picture[picture.rindex(b"\xff\xda") :]
    monkeypatch.setattr("edgespec.images.reader._DECODING_S", 1.0)
    reader = ImageReader(seeing, None, threads=1, context=512)
    with pytest.raises(EdgeSpecError, match=r"it cannot be read with .*: it takes too long"):
        reader.read(picture + scan * 50_000 + end, "it")


def test_another_file_of_the_projector_is_used(seeing: Path, family: str, tmp_path: Path) -> None:
    projector = write_projector(tmp_path / "mmproj.gguf", family)
    reader = ImageReader(seeing, projector, threads=1, context=512)
    first = reader.read(PICTURE, "it")
    header = read_header(projector).fingerprint
    write_projector(tmp_path / "other.gguf", family, seed=9).replace(projector)
    assert read_header(projector).fingerprint == header
    other = reader.read(PICTURE, "it")
    assert other != first
    assert other == ImageReader(seeing, projector, threads=1, context=512).read(PICTURE, "it")


def test_a_damaged_projector_ends_in_a_message(seeing: Path, family: str, tmp_path: Path) -> None:
    data = (seeing.parent / f"mmproj-{family}.gguf").read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data.replace(b"v.blk.1.attn_out.weight", b"v.blk.1.attn_owt.weight"))
    reader = ImageReader(seeing, broken, threads=1, context=512)
    with pytest.raises(EdgeSpecError) as error:
        reader.read(PICTURE, "it")
    assert "broken.gguf" in str(error.value)


def test_an_image_beyond_the_context_is_not_computed(seeing: Path, family: str) -> None:
    with pytest.raises(EdgeSpecError, match="but the context holds 8"):
        ImageReader(seeing, None, threads=1, context=8).read(PICTURE, "it")


def test_prompts_with_images_cannot_be_scored(plain: Engine) -> None:
    with pytest.raises(EdgeSpecError, match="cannot be scored"):
        plain.score([asked(PICTURE)])


# The command line.


@each_family_at_length
def test_plans_say_that_a_model_sees(seeing: Path, family: str, tmp_path: Path) -> None:
    done = run_here("plan", str(seeing), "--draft", "none", "--context", "512", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["projector"]
    assert (told["name"], told["type"]) == (f"mmproj-{family}.gguf", PROJECTORS[family])
    notes = " ".join(json.loads(done.stdout)["notes"])
    assert ("the context holds 512: raise --context" in notes) == ((told["tokens"] or 0) >= 512)
    assert json.loads(done.stdout)["image_bytes"] == 0
    arguments = ["--draft", "none", "--context", "512", "--json"]
    done = run_here("plan", str(seeing), "--mmproj", str(seeing.parent / told["name"]), *arguments)
    reserved = json.loads(done.stdout)
    assert reserved["image_bytes"] == told["reading_bytes"]
    assert reserved["memory"]["reading of an image"] == told["reading_bytes"]
    blind = tmp_path / "blind.gguf"
    put(seeing, blind)
    done = run_here("plan", str(blind), "--draft", "none", "--context", "512", "--json")
    assert json.loads(done.stdout)["projector"] is None


def test_batches_show_images(plain: Engine, seeing: Path, tmp_path: Path) -> None:
    for name, data in (("a.png", PICTURE), ("b.png", ANOTHER), ("broken.png", PICTURE[:100])):
        (tmp_path / name).write_bytes(data)
    text = "one two one two one two one"
    lines = [{"prompt": text, "images": [name]} for name in ("a.png", "b.png", "broken.png")]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"prompt": text}]))
    options = ["--context", "512", "--threads", "1", "--exact", "--max-tokens", "20", "--draft", str(seeing)]
    done = run_here("generate", str(seeing), "--input", str(source), *options)
    assert done.returncode == 1, done.stderr
    first, second, broken, without = map(json.loads, done.stdout.splitlines())
    expected = [
        plain.generate(question, CONFIG).tokens for question in (asked(PICTURE), asked(ANOTHER), text)
    ]
    assert [record["tokens"] for record in (first, second, without)] == expected
    assert first["images"] == ["a.png"]
    assert "is damaged or incomplete" in broken["error"]


def test_generate_shows_an_image(plain: Engine, seeing: Path, tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(PICTURE)
    text = "one two one two one two one"
    expected = plain.generate(asked(PICTURE, text), CONFIG)
    options = ["--context", "512", "--threads", "1", "--exact", "--max-tokens", "20", "--json"]
    for draft in ("none", str(seeing)):
        command = ["generate", str(seeing), "--image", str(picture), "-p", text, "--draft", draft]
        done = run_here(*command, *options)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["tokens"] == expected.tokens
        assert answer["prompt"] == text
        assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens


def test_an_image_that_the_memory_has_no_room_for_names_a_size_that_suffices(
    seeing: Path, family: str, tmp_path: Path
) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(PICTURE)
    lines = tmp_path / "in.jsonl"
    lines.write_text(json.dumps({"prompt": "What?", "images": ["cat.png"]}) + "\n")
    options = ["--draft", "none", "--context", "512", "--threads", "1", "--max-tokens", "2"]
    for asking in (["--image", str(picture), "-p", "What?"], ["--input", str(lines)]):
        done = run_here("generate", str(seeing), *asking, *options, "--memory", "150MiB")
        assert done.returncode == 1
        assert f"tiny-{family}.gguf with the projector mmproj-{family}.gguf and a context of" in done.stderr
        size = re.search(r"needs ([\d.]+) MiB", done.stderr)
        assert size
        done = run_here("generate", str(seeing), *asking, *options, "--memory", f"{size[1]}MiB")
        assert done.returncode == 0, done.stderr
    text = run_here("generate", str(seeing), "-p", "What?", *options, "--memory", "150MiB")
    assert text.returncode == 0, "texts need no memory for images"


def test_a_projector_of_another_model_is_doubted(short_path: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    put(short_path, model)
    projector = write_projector(tmp_path / "mmproj-model.gguf", "idefics3", of_model="LLaVA\n1.5")
    doubt = "mmproj-model.gguf names LLaVA 1.5 as its model, and model.gguf is another"
    metadata = read_header(model).metadata
    assert "general.basename" in metadata
    with opened(model, "none") as engine:
        assert [doubt in warning for warning in engine.warnings] == [True]
    done = run_here("plan", str(model), "--draft", "none", "--context", "512", "--json")
    assert [doubt in note for note in json.loads(done.stdout)["notes"]].count(True) == 1
    write_projector(projector, "idefics3", of_model=str(metadata["general.basename"]))
    with opened(model, "none") as engine:
        assert not engine.warnings
