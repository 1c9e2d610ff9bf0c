"""Names of models: what they mean, and which file of a repository is picked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import EdgeSpecError, ModelFileError, UsageError
from edgespec.models.hub import catalog
from edgespec.models.hub.model_choice import choose_model, listing
from edgespec.models.hub.names import (
    HubName,
    ModelVariant,
    bits_of,
    group_files,
    label_of,
    normal,
    parse_hub_name,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/repo", HubName("org/repo")),
        ("org/repo:Q4_K_M", HubName("org/repo", "Q4_K_M")),
        ("hf.co/org/repo:q8_0", HubName("org/repo", "q8_0")),
        ("https://huggingface.co/org/repo", HubName("org/repo")),
        ("hf://org/Repo-GGUF", HubName("org/Repo-GGUF")),
        ("org/repo:file-Q4_0.gguf", HubName("org/repo", "file-Q4_0.gguf")),
        (
            "https://huggingface.co/org/repo/blob/main/file%20Q4_0.gguf",
            HubName("org/repo", "file Q4_0.gguf"),
        ),
        (
            "https://hf.co/org/repo/resolve/main/Q8/m-00002-of-00003.gguf?download=true",
            HubName("org/repo", "Q8/m-00002-of-00003.gguf"),
        ),
        ("https://huggingface.co/org/repo/tree/main", HubName("org/repo")),
        ("org/repo/blob/main/file.gguf", None),
        ("folder/model.gguf", None),
        ("./org/repo", None),
        ("/abs/olute", None),
        ("a/b/c", None),
        ("../repo", None),
        ("plain", None),
        ("", None),
    ],
)
def test_names_on_the_hub(text: str, expected: HubName | None) -> None:
    assert parse_hub_name(text) == expected


def test_a_link_to_another_revision_is_refused() -> None:
    with pytest.raises(UsageError, match="is not of the main revision"):
        parse_hub_name("https://huggingface.co/org/repo/blob/v2/file.gguf")


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    found = parse_hub_name(text)
    assert found is None or found.repo.count("/") == 1


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Llama-3.3-70B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("gemma-3-27b-it-IQ2_XXS.gguf", "IQ2_XXS"),
        ("model.f16.gguf", "F16"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("BF16/Big-BF16-00001-of-00004.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("smol.gguf", ""),
        ("Q-star-7B.gguf", ""),
    ],
)
def test_quantizations_in_file_names(path: str, label: str) -> None:
    assert label_of(path) == label


def test_parts_go_together_and_other_files_are_left_out() -> None:
    files = [
        *((f"Q8_0/M-Q8_0-0000{n}-of-00002.gguf", 10) for n in (2, 1)),
        ("M-Q4_0.gguf", 5),
        ("M-Q2_K-00001-of-00002.gguf", 3),  # its second part is missing
        ("mmproj-F16.gguf", 1),
        ("README.md", 1),
    ]
    assert group_files(files) == (
        ModelVariant(("M-Q4_0.gguf",), 5, "Q4_0"),
        ModelVariant(("Q8_0/M-Q8_0-00001-of-00002.gguf", "Q8_0/M-Q8_0-00002-of-00002.gguf"), 20, "Q8_0"),
    )


def models(*labels: str) -> list[ModelVariant]:
    return [ModelVariant((f"M-{label}.gguf",), int(bits_of(label) * 1000), label) for label in labels]


NO_Q5 = "There is no Q5_K_M in org/repo; Q4_K_M is the nearest (4.7 KiB)."


@pytest.mark.parametrize(
    ("pick", "there", "picked", "note"),
    [
        ("q8_0", ("Q4_0", "Q8_0"), "Q8_0", ""),
        ("Q4-K-M", ("Q4_K_M", "Q8_0"), "Q4_K_M", ""),
        (None, ("Q4_0", "Q4_K_M", "Q8_0"), "Q4_K_M", ""),
        (None, ("Q8_0",), "Q8_0", ""),
        (None, ("Q3_K_M", "Q6_K"), "Q3_K_M", "org/repo has no Q4_K_M; Q3_K_M is the nearest (3.8 KiB)."),
        ("Q5_K_M", ("Q4_K_M", "Q8_0"), "Q4_K_M", NO_Q5),
        ("F16", ("BF16", "Q4_0"), "BF16", "There is no F16 in org/repo; BF16 is the nearest (15.6 KiB)."),
        ("fp16", ("F16", "Q4_0"), "F16", ""),
        ("q8", ("Q4_0", "Q8_0"), "Q8_0", "q8 is Q8_0 (8.3 KiB) here."),
        ("M-Q4_0.gguf", ("Q4_0", "Q8_0"), "Q4_0", ""),
    ],
)  # fmt: skip
def test_the_exact_quantization_or_the_nearest(
    pick: str | None, there: tuple[str, ...], picked: str, note: str
) -> None:
    choice = choose_model(HubName("org/repo", pick), models(*there))
    assert (choice.model.label, choice.note) == (picked, note)


def test_what_fits_several_is_listed_with_sizes() -> None:
    with pytest.raises(UsageError) as caught:
        choose_model(HubName("org/repo", "q4"), models("Q4_K_M", "Q4_0", "Q8_0"))
    assert (
        caught.value.what == "'q4' fits several quantizations of org/repo: Q4_0 (4.5 KiB), Q4_K_M (4.7 KiB)."
    )
    assert caught.value.hint == "Name one: org/repo:Q4_K_M"
    twice = [ModelVariant((f"{name}-Q4_0.gguf",), 2048, "Q4_0") for name in ("a", "b")]
    with pytest.raises(UsageError) as caught:
        choose_model(HubName("org/repo", "Q4_0"), twice)
    assert caught.value.what == (
        "org/repo has 2 files of quantization Q4_0: a-Q4_0.gguf (2.0 KiB), b-Q4_0.gguf (2.0 KiB)."
    )
    assert choose_model(HubName("org/repo", "b-Q4_0.gguf"), twice).model is twice[1]


@given(
    st.lists(st.sampled_from(["Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q6_K", "Q8_0"]), min_size=1, unique=True),
    st.sampled_from(["IQ2_M", "Q3_K_L", "Q4_1", "Q5_0", "Q6_K", "BF16"]),
)  # fmt: skip
def test_nothing_is_nearer_than_what_was_picked(there: list[str], wanted: str) -> None:
    picked = choose_model(HubName("org/repo", wanted), models(*there)).model
    distances = [abs(bits_of(label) - bits_of(wanted)) for label in there]
    assert abs(bits_of(picked.label) - bits_of(wanted)) == pytest.approx(min(distances), abs=1e-3)
    assert (picked.label == normal(wanted)) == (wanted in there)


def test_listing_is_by_size() -> None:
    assert listing(models("Q8_0", "Q4_0")) == "Q4_0 (4.5 KiB), Q8_0 (8.3 KiB)"


# --- the catalog ---------------------------------------------------------------------------------


def test_the_catalog_is_sound() -> None:
    entries = catalog.entries()
    assert catalog.DEFAULT in entries
    assert len({entry.name for entry in entries.values()}) == len(entries)
    families = {
        "Llama 3",
        "Qwen 2.5 Coder",
        "Qwen 3",
        "Qwen 3.5",
        "Qwen 3.6",
        "Qwen 3.8",
        "gpt-oss",
        "SmolLM2",
    }
    families |= {"Gemma 3", "Gemma 4", "Mistral", "Phi 4", "DeepSeek R1", "GLM"}
    assert families <= {entry.family for entry in entries.values()}
    for entry in entries.values():
        assert entry.name == entry.name.lower()
        assert bool(entry.repo) != bool(entry.package)
        assert not entry.repo or parse_hub_name(entry.repo) == HubName(entry.repo)
        # What a weight takes must be near what the quantization says: catches slips of a digit.
        assert entry.n_bytes * 8 / entry.parameters == pytest.approx(bits_of(entry.quant), rel=0.7)
        assert entry.licence
        assert entry.mtp in ("", "inside", "separate")
        assert entry.verified or entry.source, "what is not verified says where it is from"
        for name in entry.drafters:
            assert entries[name].family in (entry.family, "Llama 3")
            assert entries[name].parameters * 1.9 < entry.parameters


def test_every_target_over_six_billion_has_a_drafter_or_none_is_known() -> None:
    large = [e for e in catalog.entries().values() if e.parameters > 6e9]
    without = {e.name for e in large if not (e.drafters or e.mtp)}
    assert without == {
        *("gpt-oss-20b", "gpt-oss-120b", "qwen3.5-9b", "gemma4-e4b", "glm4.7-flash"),
        *("mistral-7b", "mistral-nemo-12b", "phi4-14b", "deepseek-r1-8b"),
    }


def test_names_lead_to_the_hub() -> None:
    assert catalog.hub_name_of("llama3.1-8b") == HubName(
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Q4_K_M"
    )
    assert catalog.hub_name_of("Llama3.1-8B:q8_0") == HubName(
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "q8_0"
    )
    assert catalog.hub_name_of("org/repo:Q4_0") == HubName("org/repo", "Q4_0")
    assert catalog.hub_name_of("smollm2-135m") is None
    assert catalog.hub_name_of("nothing") is None


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("qwen3:8b", "Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("Qwen3:8B", "Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("qwen3:8b-q8_0", "Qwen/Qwen3-8B-GGUF:q8_0"),
        ("qwen3:30b", "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M"),
        ("qwen3:30b-a3b-q4_K_M", "Qwen/Qwen3-30B-A3B-GGUF:q4_K_M"),
        ("qwen2.5:72b", "Qwen/Qwen2.5-72B-Instruct-GGUF:Q4_K_M"),
        ("qwen2.5:7b-instruct-q5_K_M", "Qwen/Qwen2.5-7B-Instruct-GGUF:q5_K_M"),
        ("gpt-oss:20b", "ggml-org/gpt-oss-20b-GGUF:MXFP4"),
        ("llama3.2:3b-instruct-fp16", "bartowski/Llama-3.2-3B-Instruct-GGUF:fp16"),
        ("gemma4:26b-a4b-it-q8_0", "unsloth/gemma-4-26B-A4B-it-GGUF:q8_0"),
        ("gemma3:4b", "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M"),
        ("deepseek-r1:7b", "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF:Q4_K_M"),
        ("mistral", "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M"),
        ("qwen2.5-coder:32b", "Qwen/Qwen2.5-Coder-32B-Instruct-GGUF:Q4_K_M"),
        ("qwen3:8b-thinking-2507", "None"),  # another model
        ("qwen3:9b", "None"),
        ("qwen3:8", "None"),
        ("qwen3", "Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("Llama3.2:latest", "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"),
        ("gpt-oss", "ggml-org/gpt-oss-20b-GGUF:MXFP4"),
        ("gpt", "None"),
        ("qwen3:", "None"),
        ("smollm2:135m", "None"),  # comes in a package
    ],
)
def test_ollamas_names_mean_those_of_the_catalog(name: str, meaning: str) -> None:
    assert str(catalog.hub_name_of(name)) == meaning


def test_a_packaged_model_has_ollamas_name_too() -> None:
    assert catalog.find("smollm2:135m", fetch=False) == catalog.find("smollm2-135m", fetch=False)


def test_unknown_names_suggest_the_nearest() -> None:
    for name, hint in {
        "lama3.1-8b": "Did you mean llama3.1-8b",
        "qwen3-8": "Did you mean qwen3-8b",
        "qwen3-8bb": "Did you mean qwen3-8b, qwen3.8-27b or qwen3-4b?",
        "llama-3.2-1b": "Did you mean llama3.2-1b",
        "gemma2": "Did you mean gemma",
        "gemma2:9b": "Did you mean gemma3-12b",
        "qwen3.5-8b": "Did you mean qwen3-8b",
        "codellama": "Give the path of a GGUF file",
        "xyz": "Give the path of a GGUF file, org/repo:quant, or a name from 'edgespec models list --all'.",
    }.items():
        with pytest.raises(ModelFileError) as caught:
            catalog.find(name)
        assert caught.value.what == f"There is no model '{name}'."
        assert caught.value.hint.startswith(hint)


@given(st.text(max_size=30))
def test_no_name_breaks_the_search(name: str) -> None:
    try:
        catalog.find(name, fetch=False)
    except EdgeSpecError as error:
        assert error.what  # noqa: PT017
