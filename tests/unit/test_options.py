"""The options of loading are declared once, and every view of them agrees."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.base.option import named, naming_flags
from edgespec.cli.main import LLAMA_CPPS, main
from edgespec.config import OPTIONS, TREES, Config
from edgespec.errors import ContradictionError, UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.loading.arguments import LoadArguments
from edgespec.loading.drafter import DRAFTER_KINDS, NO_DRAFTER
from edgespec.models.gguf.footprint import CACHE_TYPES
from edgespec.speculation.policies import NAMES
from tests.printed import strings
from tests.unit.command_tree import leaf_commands

FLAGS = {flag for option in OPTIONS.values() for flag in re.split("[ /]", option.flags) if flag}
RECORD = Path(__file__).parent / "data" / "options.json"
"""Flags that scripts use, each with the commands that have it: they must stay."""


def flags() -> dict[str, list[str]]:
    """Each form of an option with its metavar, its variables and whether it repeats, and its commands."""
    found: dict[str, list[str]] = {}
    for words, command in leaf_commands():
        for one in command.params:
            variables = [one.envvar] if isinstance(one.envvar, str) else one.envvar or []
            kind = "..." if getattr(one, "multiple", False) or one.nargs == -1 else ""
            parts = [*one.opts, *one.secondary_opts, f"{one.metavar or ''}{kind}", *variables]
            found.setdefault(" ".join(filter(None, parts)), []).append(" ".join(words))
    return found


def test_flags_and_variables_are_those_that_scripts_use() -> None:
    recorded = {form: words.split(", ") for form, words in json.loads(RECORD.read_text("utf-8")).items()}
    assert flags() == recorded


def test_options_of_llama_cpp_are_refused_by_naming_an_own_one(capsys: pytest.CaptureFixture[str]) -> None:
    own = {name for _, command in leaf_commands() for one in command.params for name in one.opts}
    assert own.isdisjoint(name for names in LLAMA_CPPS.values() for name in names)
    assert own >= {name.split()[0] for name in LLAMA_CPPS if name.startswith("--")}
    assert main(["generate", "-ctk", "q8_0", "-p", "Hi"]) == 2
    assert capsys.readouterr().err == "Error: -ctk is an option of llama.cpp.\nUse --kv.\n"


def test_the_library_takes_every_option() -> None:
    of_load = {name for name, option in OPTIONS.items() if option.of_load}
    assert {"model", *LoadArguments.__annotations__} == of_load
    assert [*LoadArguments.__annotations__] == [n for n in OPTIONS if n in LoadArguments.__annotations__]
    parameters = inspect.signature(edgespec.load).parameters
    assert parameters.keys() - {"on_progress"} == of_load
    documented = inspect.getdoc(edgespec.load) or ""
    assert all(f"\n    {name}: " in documented for name in parameters)
    assert "--" not in documented


def test_words_are_those_of_the_packages_that_understand_them() -> None:
    words = {name: tuple(option.values.words) for name, option in OPTIONS.items()}
    assert words["kv"] == tuple(CACHE_TYPES)
    assert words["tree"] == TREES == NAMES
    assert {*words["drafter"], NO_DRAFTER} == DRAFTER_KINDS.keys()


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("memory", "1.5GiB", 3 * 2**29),
        ("context", " 99 ", 99),
        ("tree_budget", "AUTO", None),
        ("tree_budget", "12", 12),
        ("gpu_layers", "-1", "all"),
        ("gpu_layers", -1, "all"),
        ("gpu_layers", "12", 12),
        ("gpu_layers", "ALL", "all"),
        ("gpu_layers", "0", 0),
        ("parallel", "7", 7),
        ("device", "CUDA0, CUDA1,", ("CUDA0", "CUDA1")),
        ("device", ["CUDA0"], ("CUDA0",)),
        ("lora", ["a,b:1"], ("a,b:1",)),
        ("draft_from", Path("notes"), "notes"),
        ("threads", None, None),
    ],
)
def test_values_are_read(name: str, given: Any, read: Any) -> None:
    config = Config.of(**{name: given})
    kept = list(read) if isinstance(read, tuple) else read
    assert config.arguments() == ({} if read is None else {name: kept})
    assert Config.of(**json.loads(json.dumps(config.arguments()))) == config


@pytest.mark.parametrize(
    ("name", "given", "what"),
    [
        ("context", 15, "context must be from 16 to 10000000, not 15."),
        ("context", "١٦", "context must be from 16 to 10000000, not '١٦'."),
        ("context", True, "context must be from 16 to 10000000, not True."),
        ("context", None, "context must be from 16 to 10000000, not None."),
        ("threads", 1025, "threads must be from 1 to 1024, not 1025."),
        ("memory", 0, "memory must be a size above 0 and below 8 EiB, not 0."),
        ("memory", "lots", "memory must be a size such as 12GiB, 800MB or 4000000000, not 'lots'."),
        *(
            (
                "gpu_layers",
                given,
                f"gpu_layers must be from 0 to 999999, auto, all or attention, not {given!r}.",
            )
            for given in ("", "-2", "some", "1.5")
        ),
        ("offload", "gpu", "offload must be auto, stream, mmap or none, not 'gpu'."),
        ("kv", "q4_0", "kv must be f16 or q8_0, not 'q4_0'."),
        ("exact", "yes", "exact must be true or false, not 'yes'."),
        ("lora", 3, "lora must be a list of strings, not 3."),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(name: str, given: Any, what: str) -> None:
    with pytest.raises(UsageError) as refused:
        Config.of(**{name: given})
    assert str(refused.value) == what


@pytest.mark.parametrize("other", [{"offload": "stream"}, {"gpu_layers": 3}, {"draft_device": "CUDA0"}])
def test_options_that_contradict_each_other_are_refused(other: dict[str, Any]) -> None:
    Config.of(**other)
    with pytest.raises(UsageError, match="exclude each other"):
        Config.of(workers=["localhost:1"]).with_(**other)


@pytest.mark.parametrize(
    "given",
    [
        {"draft": "none", "drafter": "lookup"},
        {"draft": "none", "draft_device": "CUDA0"},
        {"draft": "none", "draft_from": "notes"},
        {"draft": "none", "tree_budget": 8},
        {"draft": "lookup", "draft_window": 512},
        {"drafter": "lookup", "draft_window": 512},
        {"drafter": "lookup", "draft_device": "CUDA0"},
        {"offload": "mmap", "pack": "always"},
        {"offload": "mmap", "pack_dir": ["packs"]},
        {"offload": "none", "slots": 4},
        {"offload": "none", "experts": "never"},
        {"pack": "never", "pack_dir": ["packs"]},
        {"prompt_cache_size": "1GiB"},
        {"device": "CUDA0", "workers": ["localhost:1"]},
        {"device": "CUDA0", "gpu_layers": 0, "draft_device": "none"},
    ],
)
def test_options_that_would_be_ignored_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ContradictionError) as refused:
        Config.of(**given).check()
    assert all(name in str(refused.value) for name in refused.value.options)


def test_options_that_say_the_same_are_no_contradiction() -> None:
    for given in (
        {"offload": "mmap", "pack": "never"},
        {"offload": "stream", "slots": 4, "pack": "always", "experts": "never"},
        {"draft": "lookup", "drafter": "lookup", "draft_device": "none", "draft_from": "notes"},
        {"prompt_cache": True, "prompt_cache_size": "1GiB"},
    ):
        Config.of(**given).check()


def test_messages_name_options_as_their_reader_does() -> None:
    """Arguments for callers of the library, flags for those who type them."""
    assert [named("draft"), named("draft", "none"), named("exact", False), named("context", 8192)] == [
        "draft",
        "draft='none'",
        "exact=False",
        "context=8192",
    ]
    config = Config.of(exact=True, tree_budget=64)
    with pytest.raises(UsageError) as refused:
        config.speculation.require_exact_budget(60)
    assert "--" not in str(refused.value)
    with naming_flags():
        assert [named("draft", "none"), named("exact", False)] == ["--draft none", "--no-exact"]
        with pytest.raises(UsageError, match=r"Use --tree-budget 60 or less, or --no-exact\."):
            config.speculation.require_exact_budget(60)


def test_options_in_messages_exist() -> None:
    """Every name that a message of the library gives is an option or a setting, with that flag."""
    sources = "".join(path.read_text("utf-8") for path in Path(edgespec.__file__).parent.rglob("*.py"))
    names = set(re.findall(r"""\bnamed\(["'](\w+)["']""", sources))
    settings = {field.name for field in dataclasses.fields(GenerationConfig)} | {"raw"}
    assert len(names) > 10
    assert names <= OPTIONS.keys() | settings
    with naming_flags():
        for option in OPTIONS.values():
            assert not option.flags or named(option.name) in re.split("[ /]", option.flags)


def test_library_messages_name_no_flags() -> None:
    """What `edgespec.load` and an engine say is for callers of Python too."""
    folder = Path(edgespec.__file__).parent
    found = []
    for package in ("loading", "engine", "drafters", "offload", "llama", "text", "speculation"):
        for path in (folder / package).rglob("*.py"):
            found += [
                f"{path.name}: {text}"
                for text in strings(path)
                if FLAGS & set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
            ]
    assert found == []
