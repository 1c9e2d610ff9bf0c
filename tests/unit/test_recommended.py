"""Sampling as the makers recommend it: which families are known, and who comes before whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.options.sampling import SamplingOptions
from edgespec.config import Config
from edgespec.errors import UsageError
from edgespec.generation.config import GenerationConfig
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub.recommended import FAMILIES, RecommendedSampling, recommended_sampling


def header(architecture: str, name: str = "", template: str = "", **sampling: Any) -> GGUFHeader:
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": name,
        "tokenizer.chat_template": template,
    }
    metadata |= {f"general.sampling.{key}": value for key, value in sampling.items()}
    return GGUFHeader(Path("model.gguf"), 3, metadata, (), 32, 0, 0, "0" * 32)


@pytest.mark.parametrize(
    ("architecture", "name", "template", "values"),
    [
        ("qwen3", "Qwen3 8B", "{% if enable_thinking %}", (0.6, 0.95, 20)),
        ("qwen3", "Qwen3 4B Thinking 2507", "<think>", (0.6, 0.95, 20)),
        ("qwen3moe", "Qwen3 30B A3B Instruct 2507", "", (0.7, 0.8, 20)),
        ("qwen2", "Qwen2.5 7B Instruct", "", (0.7, 0.8, 20)),
        ("qwen2", "DeepSeek R1 Distill Qwen 7B", "", (0.6, 0.95, 0)),
        ("llama", "DeepSeek R1 Distill Llama 8B", "", (0.6, 0.95, 0)),
        ("llama", "Meta Llama 3.1 8B Instruct", "", (0.6, 0.9, 0)),
        ("llama", "Llama-3.2-1B-Instruct", "", (0.6, 0.9, 0)),
        ("gemma3", "Gemma 3 4b It", "", (1.0, 0.95, 64)),
        ("gemma3n", "Gemma 3n E4B It", "", (1.0, 0.95, 64)),
        ("qwen35", "Qwen3.8 27B", "{% if enable_thinking %}", (1.0, 0.95, 20)),
        ("gemma4", "Gemma 4 31B It", "", (1.0, 0.95, 64)),
        ("glm4moe", "GLM 4.5 Air", "", (0.6, 0.95, 0)),
        ("glm4moe", "GLM 4.6", "", (1.0, 0.95, 0)),
        ("qwen3next", "Qwen3 Coder Next", "", (1.0, 0.95, 40)),
        ("llama", "Mistral Small 24B Instruct 2501", "", (0.15, 1.0, 0)),
        ("llama", "Mistral 7B Instruct v0.3", "", (0.7, 1.0, 0)),
        ("gpt-oss", "Gpt Oss 20b", "", (1.0, 1.0, 0)),
        ("llama", "Smollm2 135M", "", (0.2, 0.9, 0)),
    ],
)
def test_families(architecture: str, name: str, template: str, values: tuple[float, float, int]) -> None:
    found = recommended_sampling(header(architecture, name, template))
    assert tuple(found.values[key] for key in ("temperature", "top_p", "top_k")) == values
    assert found.sources["temperature"].startswith("recommended for ")


def test_a_model_that_is_told_not_to_think_is_sampled_otherwise() -> None:
    hybrid = header("qwen3", "Qwen3 8B", "{% if enable_thinking %}")
    for thinks, values in ((None, (0.6, 0.95)), (True, (0.6, 0.95)), (False, (0.7, 0.8))):
        found = recommended_sampling(hybrid, thinks=thinks).values
        assert (found["temperature"], found["top_p"]) == values
        assert found["presence_penalty"] == 1.5, "as its maker advises for quantized files"


def test_the_docs_have_the_figures_and_where_they_come_from() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    table = page.partition("| Family | Settings | Source |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    words = {"repeat_penalty": "repeat penalty", "presence_penalty": "presence penalty"}
    usual = {"top_p": 1.0, "top_k": 0}
    told = {
        family.name: ", ".join(
            f"{words.get(name, name)} {value:g}"
            for name, value in family.values.items()
            if value != usual.get(name)
        )
        for family in FAMILIES
    }
    assert {name: settings for name, settings, _ in rows} == told
    assert all(source for *_, source in rows)


@pytest.mark.parametrize("name", ["OpenLlama 3B v2", "Somebody's Merge", "Qwen3.5 4B", ""])
def test_what_is_not_known_is_left_alone(name: str) -> None:
    assert recommended_sampling(header("llama", name)) == RecommendedSampling()


def test_the_file_comes_before_the_family() -> None:
    found = recommended_sampling(header("qwen3", "Qwen3 8B", temp=0.30000001192092896, top_k=-1))
    assert found.values == {"temperature": 0.3, "top_p": 0.8, "top_k": 0}
    assert found.sources["temperature"] == found.sources["top_k"] == "from the model file"
    assert found.sources["top_p"] == "recommended for Qwen 3 Instruct"


def test_nonsense_in_the_file_is_passed_over() -> None:
    nonsense = {"temp": -1.0, "top_p": float("nan"), "top_k": True, "min_p": "much", "penalty_repeat": 0.0}
    assert recommended_sampling(header("llama", **nonsense)).values == {}


@pytest.fixture
def recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    found = RecommendedSampling(
        {"temperature": 0.6, "top_p": 0.95, "repeat_penalty": 1.05},
        dict.fromkeys(("temperature", "top_p", "repeat_penalty"), "recommended for X"),
    )
    monkeypatch.setattr("edgespec.cli.options.sampling._recommendation", lambda _model, _thinks: found)


@pytest.mark.usefixtures("recommended")
@pytest.mark.parametrize(
    ("options", "default", "config"),
    [
        ({}, "recommended", GenerationConfig(temperature=0.6, top_p=0.95, repeat_penalty=1.05)),
        ({}, "greedy", GenerationConfig()),
        (
            {"sampling": "recommended"},
            "greedy",
            GenerationConfig(temperature=0.6, top_p=0.95, repeat_penalty=1.05),
        ),
        ({"sampling": "greedy"}, "recommended", GenerationConfig()),
        (
            {"top_p": 1.0, "seed": 3},
            "recommended",
            GenerationConfig(temperature=0.6, repeat_penalty=1.05, seed=3),
        ),
        ({"temperature": 0.0}, "recommended", GenerationConfig()),
        ({"verify": "greedy"}, "recommended", GenerationConfig(verify="greedy")),
    ],
)
def test_what_is_given_comes_before_what_is_recommended(
    options: dict[str, Any], default: str, config: GenerationConfig
) -> None:
    chosen = SamplingOptions(**options).chosen_for(Config(), Path("x.gguf"), default=default)
    assert chosen.config == config
    for name in options:
        assert name in ("sampling",) or chosen.sources[name] == "given"


@pytest.mark.usefixtures("recommended")
def test_a_rule_that_exactness_excludes_is_refused_at_the_recommended_temperature() -> None:
    options, loading = SamplingOptions(verify="speculative"), Config.of(exact=True)
    options.config_for(loading)  # greedy
    with pytest.raises(UsageError, match="which --exact rules out"):
        options.chosen_for(loading, Path("x.gguf"), default="recommended")


def test_an_unknown_kind_of_sampling_is_refused() -> None:
    with pytest.raises(UsageError, match="--sampling must be recommended or greedy, not 'wild'"):
        SamplingOptions(sampling="wild").config()
