"""Public names of the package, and its objects in a debugger or a notebook."""

from __future__ import annotations

import subprocess
import sys

import edgespec
from edgespec import GenerationConfig
from edgespec.generation.result import Chunk, Generation, MemoryUse, PassRecord, Timings


def printed(program: str) -> str:
    """What a program in Python writes to standard output."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_dir_has_the_names_that_are_imported_on_first_use() -> None:
    program = (
        "import edgespec, sys; print(*dir(edgespec)); print('edgespec.errors' in sys.modules); "
        "edgespec.EdgeSpecError; print('llama_cpp.llama_cpp' in sys.modules)"
    )
    names, *imported = printed(program).splitlines()
    assert {n for n in names.split() if not n.startswith("_")} == {*edgespec.__all__} - {"__version__"}
    assert imported == ["False", "False"]
    assert all(hasattr(edgespec, name) for name in names.split())


MOST_MODULES = 300  # of the package, to open an engine


def test_opening_an_engine_imports_what_every_engine_needs() -> None:
    program = (
        "import edgespec.loading.load, sys; print(*(n for n in sys.modules if n.startswith('edgespec')))"
    )
    imported = [name for name in printed(program).split() if name.partition(".")[0] == "edgespec"]
    assert len(imported) <= MOST_MODULES
    seldom = ("workers.", "heads.eagle", "heads.head_context", "offload.weights", "text.calls.", "serving.")
    assert not [name for name in imported if name.startswith(tuple(f"edgespec.{part}" for part in seldom))]


def test_llama_cpp_pythons_classes_are_not_imported_and_left_to_others() -> None:
    program = (
        "import edgespec.loading.load, sys\n"
        "print('jinja2' in sys.modules, 'llama_cpp.llama' in sys.modules)\n"
        "from edgespec.kernels import bindings; import llama_cpp\n"
        "print(llama_cpp.llama_decode is bindings.llama_cpp.llama_decode, llama_cpp.Llama.__name__)"
    )
    assert printed(program).splitlines() == ["False False", "True Llama"]


def test_the_log_stays_edgespecs_own_when_others_import_llama_cpp_pythons_classes() -> None:
    program = (
        "from edgespec.llama.runtime.backend import log_lines, start_backend; start_backend()\n"
        "import llama_cpp\n"
        "with log_lines() as lines:\n"
        "    llama_cpp.llama_model_load_from_file(b'nosuch.gguf', llama_cpp.llama_model_default_params())\n"
        "print(len(lines.errors) > 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_settings_are_shown_where_they_differ_from_the_defaults() -> None:
    assert repr(GenerationConfig()) == "GenerationConfig()"
    config = GenerationConfig(max_tokens=32, temperature=0.8, stop=("END",))
    assert repr(config) == "GenerationConfig(max_tokens=32, temperature=0.8, stop=('END',))"
    assert eval(repr(config)) == config


def test_results_are_short() -> None:
    passes = [PassRecord(8, 2, 0.1, 0.4, 0.0), PassRecord(8, 1, 0.1, 1 / 3, 0.0)]
    assert repr(passes[1]) == ("PassRecord(nodes=8, accepted=1, draft_s=0.1, verify_s=0.3333, accept_s=0)")
    answer = Generation(
        text="Blue. " * 20, tokens=[1, 2, 3, 4, 5], passes=passes, timings=Timings(decode_s=2.0)
    )
    assert repr(answer) == (f"<Generation 5 tokens, 1.00/s, 2.50 a pass, stop: '{'Blue. ' * 9}Blue.…'>")
    assert repr(Generation(finish_reason="error")) == "<Generation 0 tokens, error: ''>"
    assert repr(Chunk("Blue", (7,))) == "Chunk(text='Blue', tokens=(7,))"
    assert repr(MemoryUse(budget_bytes=5)) == "MemoryUse(budget_bytes=5)"
