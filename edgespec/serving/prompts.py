"""The prompts of a request as tokens of the served model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgespec.api.completion_request import CompletionRequest, check_size, too_long
from edgespec.api.limits import Limits
from edgespec.api.text_logprobs import EchoedPrompt
from edgespec.api.warnings import Warnings
from edgespec.errors import UsageError
from edgespec.serving.served_model import ServedModel
from edgespec.text.replay import WrittenAnswer

if TYPE_CHECKING:
    from edgespec.text.encoding import Prompt


def encoded_prompts(
    served: ServedModel, request: CompletionRequest, limits: Limits, warnings: Warnings
) -> tuple[list[list[int]], WrittenAnswer | None]:
    """The tokens of each prompt; and the answer that is continued, if they end with the model's own tokens.

    Args:
        warnings: gets what the model cannot do.
    """
    engine = served.engine
    vocabulary, config = engine.target.model.vocabulary, request.config
    if any(token >= vocabulary.n_tokens for token, _ in config.logit_bias):
        warnings.ignored("logit_bias of some tokens", f"Tokens are 0 to {vocabulary.n_tokens - 1}.")
    for prompt in (*request.prompts, request.suffix):
        check_size(prompt, context=engine.context, n_vocab=vocabulary.n_tokens, limits=limits)
    begun: WrittenAnswer | None = None
    for warning in engine.not_enforced(config):
        warnings.add(warning)
    if request.chat:
        messages: Any = request.prompt
        found = served.written.find(messages)
        if request.continues:
            tokens, begun = engine.encoder.continued(messages, config=config, written=found)
        else:
            tokens = list(engine.encoder.conversation(messages, config=config, written=found).tokens)
        prompts = [tokens]
    else:
        prompts = [_text(served, prompt, request) for prompt in request.prompts]
    for tokens in prompts:
        if not tokens:
            raise UsageError("The prompt is empty.")
        if len(tokens) >= engine.context:
            raise too_long(f"{len(tokens)} tokens", engine.context)
    return prompts, begun


def echoed_prompts(
    served: ServedModel, request: CompletionRequest, prompts: Sequence[Sequence[int]]
) -> tuple[EchoedPrompt, ...]:
    """The prompts that are to stand in front of the answers.

    Args:
        prompts: the tokens of each.
    """
    vocabulary = served.engine.target.model.vocabulary
    echoed = []
    for prompt, tokens in zip(request.prompts, prompts, strict=True):
        is_bos = vocabulary.adds_bos and tokens[0] == vocabulary.bos
        text = prompt if isinstance(prompt, str) else vocabulary.spelled(tokens[is_bos:])
        echoed.append(EchoedPrompt(text, vocabulary.piece(tokens[0], control=True), is_bos))
    return tuple(echoed)


def _text(served: ServedModel, prompt: Prompt, request: CompletionRequest) -> list[int]:
    tokens = served.engine.encoder.encode(prompt, raw=True, config=request.config)
    if not request.suffix:
        return tokens
    framed = served.engine.target.model.vocabulary.filled_in(tokens, request.suffix)
    if framed is None:
        raise UsageError("This model cannot fill in the middle of a text.", "Leave out the text behind it.")
    return framed
