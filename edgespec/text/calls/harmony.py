"""The marks of gpt-oss (the Harmony format): an answer is several messages, each with a header and a channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

A call has its function's name in the header, before the channel or behind it, and JSON as its message:

    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

from edgespec.text.structured_output.steps import ChoiceStep, GrammarStep

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ASSISTANT = f"{START}assistant"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END)

# Each ends where a token does: what follows, "=functions", is one.
TRIGGER = f"{CHANNEL}commentary to"
MORE_TRIGGERS = (f"{ASSISTANT} to", f"{CHANNEL}analysis to")
# What models were seen to write between the name and the arguments, by where the name stands.
_BEHIND_CHANNEL = (f" {CONSTRAIN}json", " json", " code", "")
_BEFORE_CHANNEL = tuple(f"{CHANNEL}commentary{kind}" for kind in _BEHIND_CHANNEL)


def is_harmony(template: str) -> bool:
    """True if a chat template (Jinja source) writes messages in channels."""
    return CHANNEL in template and MESSAGE in template and "analysis" in template


def step_of(tools: dict[str, str], trigger: str) -> ChoiceStep:
    """Return the step that has to follow a trigger.

    Args:
        tools: the schema of the arguments (as text) by the name of the tool.
    """
    kinds = _BEFORE_CHANNEL if trigger.startswith(START) else _BEHIND_CHANNEL
    return ChoiceStep(
        tuple(
            (f"=functions.{name}{kind}{MESSAGE}", GrammarStep(schema))
            for name, schema in tools.items()
            for kind in kinds
        )
    )
