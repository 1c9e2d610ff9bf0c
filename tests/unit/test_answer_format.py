"""Recognition in chat templates: how models think, and how they call tools."""

from __future__ import annotations

import pytest

from edgespec.text.answer_format import AnswerFormat
from edgespec.text.template import ChatTemplate
from tests.unit import templates
from tests.unit.syntaxes import format_of


@pytest.mark.parametrize(
    ("template", "marks", "switch"),
    [
        (templates.QWEN, ("<think>", "</think>"), "enable_thinking"),
        (templates.R1, ("<think>", "</think>"), ""),
        (templates.DEEPSEEK_HYBRID, ("<think>", "</think>"), "thinking"),
        (templates.MAGISTRAL, ("[THINK]", "[/THINK]"), ""),
        (templates.SEED, ("<seed:think>", "</seed:think>"), ""),
        # `message.thinking` is an attribute, and not a switch.
        (templates.HARMONY, ("<|channel|>analysis<|message|>", "<|end|>"), ""),
        (templates.GPT_OSS, ("<|channel|>analysis<|message|>", "<|end|>"), ""),
        (templates.GLM, ("<think>", "</think>"), "enable_thinking"),
        (templates.QWEN_38, ("<think>", "</think>"), "enable_thinking"),
        (templates.GEMMA_4, ("<|channel>thought", "<channel|>"), "enable_thinking"),
    ],
)
def test_thoughts_are_recognized(template: str, marks: tuple[str, str], switch: str) -> None:
    thought = format_of(template).thought
    assert thought is not None
    assert (thought.opens, thought.closes) == marks
    assert thought.switch == switch
    assert thought.knows_effort == (template in (templates.HARMONY, templates.GPT_OSS, templates.QWEN_38))
    assert thought.high == ("xhigh" if template is templates.QWEN_38 else "high")
    assert thought.between == ("" if template is templates.GEMMA_4 else thought.between)
    assert thought.knows_budget == (template is templates.SEED)


@pytest.mark.parametrize("template", [templates.PLAIN, templates.LLAMA, templates.MISTRAL])
def test_most_models_do_not_think(template: str) -> None:
    assert format_of(template).thought is None


@pytest.mark.parametrize(
    ("template", "trigger", "name"),
    [
        (templates.QWEN, "<tool_call>", ""),
        (templates.QWEN_25, "<tool_call>", ""),
        (templates.LLAMA, '{"name":', ""),
        (templates.MISTRAL, "[TOOL_CALLS]", ""),
        (templates.MAGISTRAL, "[TOOL_CALLS]", ""),
        (templates.QWEN_CODER, "<tool_call>", ""),
        (templates.GLM, "<tool_call>", ""),
        (templates.QWEN_38, "<tool_call>", ""),
        (templates.GPT_OSS, "<|channel|>commentary to", "gpt-oss"),
        (templates.GEMMA_4, "<|tool_call>", "Gemma 4"),
        (templates.HARMONY, "<tool_call>", "generic"),
        (templates.PLAIN, "<tool_call>", "generic"),
        (templates.R1, "<tool_call>", "generic"),
    ],
)
def test_call_syntaxes_are_recognized(template: str, trigger: str, name: str) -> None:
    calls = format_of(template).calls
    assert (calls.trigger, calls.name) == (trigger, name)
    assert calls.in_fences == (template is templates.QWEN_25)
    assert calls.results_in_calls == (template is templates.GEMMA_4)
    assert calls.single == (template in (templates.LLAMA, templates.GPT_OSS))
    assert calls.first_only == (template is templates.LLAMA)


def test_a_template_that_finds_results_itself_gets_them_as_messages() -> None:
    later = templates.GEMMA_4 + "{#- by tool_call_id -#}"
    assert not format_of(later).calls.results_in_calls


@pytest.mark.parametrize("part", ["{{", "{%", "{{ '", '{{ "\\', "{% x %}{{ 'a' }}", "<think></think>"])
def test_a_hostile_template_takes_no_time(part: str) -> None:
    """Quadratic time would take hours."""
    found = AnswerFormat(part * 400_000)
    assert (found.thought is not None) == ("think" in part)


@pytest.mark.parametrize(
    "template",
    [value for name, value in vars(templates).items() if name.isupper() and name[0] != "_" and name != "R1"],
)
def test_the_templates_render(template: str) -> None:
    with ChatTemplate(template, "", "") as chat:
        assert "Hello" in chat.render([{"role": "user", "content": "Hello"}])
