"""Syntaxes of calls as they are learned from short templates in the style of well-known families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgespec.text.answer_format import AnswerFormat
from edgespec.text.calls.syntax import CallSyntax
from edgespec.text.template_worker import make_renderer
from tests.unit import templates

# Texts of tokens that end an answer.
ENDS = ("<|im_end|>", "<|end|>", "<|eot|>", "<|call|>", "<turn|>", "</s>")

_render = make_renderer()


def rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    begin_answer: bool = False,
) -> str:
    """A conversation as a template shows it."""
    return _render(
        {
            **{"source": template, "bos": "<s>", "eos": "</s>", "messages": messages},
            **{"add_generation_prompt": begin_answer, "variables": variables, "max_chars": 1 << 20},
        }
    )


def format_of(template: str) -> AnswerFormat:
    """The format of answers, learned in this process."""

    def show(
        messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], begin_answer: bool
    ) -> str | None:
        try:
            return rendered(template, messages, variables, begin_answer=begin_answer)
        except Exception:  # whatever a template raises
            return None

    return AnswerFormat(template, show, lambda mark: mark in ENDS)


def learned(name: str, template: str) -> CallSyntax:
    """A syntax, with a name for the reports of tests."""
    return replace(format_of(template).calls, name=name)


# Those that only templates tell.
LEARNED = {
    name: getattr(templates, name)
    for name in (
        *("APERTUS", "COMMAND_R", "MINIMAX_1", "NEMO", "MISTRAL_IDS", "KIMI", "SOLAR", "DEEPSEEK"),
        *("FUNCTIONARY", "ACTIONS", "MINIMAX_2", "MINIMAX_3", "DSML", "SEED_CALLS", "NAMED_TAGS", "PYTHONIC"),
    )
}
HERMES = learned("Hermes", templates.QWEN)
HERMES_OR_FENCES = learned("Hermes or fences", templates.QWEN_25)
LLAMA = learned("Llama 3", templates.LLAMA)
MISTRAL = learned("Mistral", templates.MISTRAL)
MISTRAL_NAMED = learned("Mistral with [ARGS]", templates.MAGISTRAL)
QWEN_CODER = learned("Qwen3-Coder", templates.QWEN_CODER)
GLM = learned("GLM", templates.GLM)
