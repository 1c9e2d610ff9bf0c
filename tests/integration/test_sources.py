"""Every source of drafts on a real model: the same text, bit for bit, in fewer passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec.base.progress import no_progress
from edgespec.bench.rows.shared_rows import measure_texts
from edgespec.cli.main import main
from edgespec.costs.yields import TreeYields
from edgespec.drafters.folder_index import open_corpus
from edgespec.engine.engine import Engine
from edgespec.engine.requests import Request
from edgespec.errors import UsageError
from edgespec.files.cache_kind import CacheKind
from edgespec.generation.config import GenerationConfig
from edgespec.profiles.store import ProfileStore
from edgespec.speculation.drafters.proposing import ProposingDrafter
from edgespec.speculation.policies import tree_policy
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.sources.corpus import FileSource
from edgespec.speculation.sources.recycling import RecycledSource
from edgespec.speculation.sources.text import TextSource

PROMPT = "Repeat this list three times: a red fox, a black crow, a tall tree, a red fox, a black crow."
CONFIGS = [GenerationConfig(max_tokens=32), GenerationConfig(max_tokens=32, temperature=0.8, seed=3)]


@pytest.fixture(scope="module")
def engine(smol_path: Path) -> Iterator[Engine]:
    with edgespec.load(
        smol_path, draft="lookup", exact=True, tree_budget=24, context=256, learn=False
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts(smol_path: Path) -> list[list[int]]:
    with edgespec.load(smol_path, draft="none", exact=True, context=256) as engine:
        return [engine.generate(PROMPT, config).tokens for config in CONFIGS]


@pytest.fixture(scope="module")
def quoted(tmp_path_factory: pytest.TempPathFactory, smol_path: Path, texts: list[list[int]]) -> Path:
    """A file that holds what the model will write, and other things."""
    with edgespec.load(smol_path, draft="none", exact=True, context=256) as engine:
        vocabulary = engine.target.model.vocabulary
        written = b"".join(vocabulary.piece(token) for token in texts[0])
    folder = tmp_path_factory.mktemp("files")
    (folder / "written.txt").write_bytes(written)
    (folder / "other.txt").write_text("Nothing of this will be written by anyone.\n" * 50)
    return folder


def _files(engine: Engine, folder: Path) -> Proposer:
    corpus, _ = open_corpus(folder, engine.target.model.vocabulary, "test", no_progress)
    return FileSource(corpus)


SOURCES: dict[str, Callable[[Engine, Path], list[Proposer]]] = {
    "text": lambda engine, folder: [TextSource()],
    "recycled": lambda engine, folder: [RecycledSource()],
    "files": lambda engine, folder: [_files(engine, folder)],
    "all": lambda engine, folder: [TextSource(), RecycledSource(), _files(engine, folder)],
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_text_does_not_depend_on_the_source(
    engine: Engine, texts: list[list[int]], quoted: Path, name: str
) -> None:
    engine.drafter = ProposingDrafter(SOURCES[name](engine, quoted))
    engine.forget_texts()
    answers = [engine.generate(PROMPT, config) for config in CONFIGS]
    assert [answer.tokens for answer in answers] == texts
    assert answers[0].tokens_per_pass > (3 if name in ("files", "all") else 1.2)
    assert all(answer.exact for answer in answers)


def test_they_join_a_models_tree(
    smol_path: Path, dropped_drafter_path: Path, texts: list[list[int]], quoted: Path
) -> None:
    with edgespec.load(
        smol_path,
        draft=dropped_drafter_path,
        draft_from=quoted,
        exact=True,
        tree_budget=24,
        context=256,
        learn=False,
    ) as engine:
        assert engine.drafter.name == f"{dropped_drafter_path.stem}, prompt lookup, token recycling, files"
        answers = [engine.generate(PROMPT, config) for config in CONFIGS]
    assert [answer.tokens for answer in answers] == texts
    assert answers[0].tokens_per_pass > 4


def test_many_texts_share_what_passes_said(engine: Engine, texts: list[list[int]]) -> None:
    """Texts that share passes are drafted for by their own sources, and are what they are alone."""
    engine.drafter = ProposingDrafter([TextSource(), RecycledSource()])
    answers = engine.generate_many([PROMPT, "Name a colour.", PROMPT], CONFIGS[0])
    assert [answers[0].tokens, answers[2].tokens] == [texts[0], texts[0]]
    assert engine.generate(PROMPT, CONFIGS[0]).tokens == texts[0]


def test_an_answer_that_was_given_before_is_forgotten_if_asked(engine: Engine) -> None:
    engine.drafter = ProposingDrafter([TextSource(), RecycledSource()])
    engine.forget_texts()
    first = len(engine.generate(PROMPT, CONFIGS[0]).passes)
    again = len(engine.generate(PROMPT, CONFIGS[0]).passes)
    engine.forget_texts()
    assert len(engine.generate(PROMPT, CONFIGS[0]).passes) == first > again


@pytest.mark.parametrize("config", CONFIGS)
def test_earlier_answers_are_drafted_from_for_their_owner_alone(
    engine: Engine, config: GenerationConfig
) -> None:
    """An owner's second answer takes fewer passes; another owner's takes as many as the first of all."""
    engine.drafter = ProposingDrafter([TextSource()])
    with edgespec.load(engine.target.model.path, draft="none", exact=True, context=256) as plain:
        expected = plain.generate(PROMPT, config).tokens
    engine.forget_texts()
    passes = []
    for owner, limit in (("a", 32), ("b", 32), ("a", 32), ("c", 16), ("c", 32)):
        engine.speculator.policy = tree_policy()  # what is learned of sources is everybody's
        request = Request(PROMPT, config.with_(max_tokens=limit), owner=owner)
        last = [event.chunk for event in engine.stream_many([request])][-1]
        assert last is not None
        assert last.generation is not None
        assert last.generation.tokens == expected[:limit]
        passes.append(len(last.generation.passes))
    first, other, again, _, behind_part = passes
    assert first == other > behind_part >= again


def test_a_benchmark_that_repeats_its_questions_forgets_them(engine: Engine) -> None:
    engine.drafter = ProposingDrafter([TextSource(), RecycledSource()])
    once, twice = (
        measure_texts(engine, CONFIGS[0], [PROMPT], 1, repetitions=count, seconds=1e6, report=no_progress)[
            "tokens_per_pass"
        ]
        for count in (1, 2)
    )
    assert once == twice > 1


@pytest.mark.parametrize("learn", [True, False])
def test_nothing_is_kept_of_a_text_unless_it_may_be(
    smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learn: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store, known = ProfileStore(), TreeYields(passes=4, tokens={1: 1.0, 8: 3.0}, steps={8: 4.0})
    with edgespec.load(smol_path, draft="lookup", tree_budget=8, context=128, learn=learn) as engine:
        assert engine.keys is not None
        key = engine.keys.yields(0.0)
        store.put(key, known)
        engine.generate("Name three colours.", GenerationConfig(max_tokens=12))
    assert (store.yields(key) == known) is not learn, "what trees yield depends on what was asked"
    kept = {kind: list(kind.folder.glob("*")) for kind in CacheKind}
    assert [bool(kept[kind]) for kind in (CacheKind.LEARNED, CacheKind.FILES, CacheKind.PROMPTS)] == [
        learn,
        False,
        False,
    ]


def test_files_are_drafted_from_on_the_command_line(
    smol_path: Path, quoted: Path, texts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    common = [str(smol_path), PROMPT, "--exact", "--max-tokens", "24", "--context", "256", "--no-learn"]
    assert main(["generate", *common, "--draft", "none"]) == 0
    plain = capsys.readouterr().out
    assert main(["generate", *common, "--draft", "lookup", "--draft-from", str(quoted)]) == 0
    assert capsys.readouterr().out == plain
    assert main(["generate", *common, "--draft", "lookup", "--draft-from", str(quoted / "missing")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"draft": "none"}, {"drafter": "model"}])
def test_files_need_a_drafter_that_uses_them(smol_path: Path, quoted: Path, options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        edgespec.load(smol_path, draft_from=quoted, context=128, **options)
