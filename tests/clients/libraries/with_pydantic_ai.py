"""pydantic-ai through both APIs of OpenAI: python with_pydantic_ai.py URL QUESTION; prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput  # type: ignore[import-not-found]
from pydantic_ai.models.openai import (  # type: ignore[import-not-found]
    OpenAIChatModel,
    OpenAIResponsesModel,
)
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]

URL, QUESTION = sys.argv[1:]


class Match(BaseModel):
    """A form that a model of any size can fill in."""

    team: Literal["red", "blue"]


def tried(model: Any) -> dict[str, Any]:
    """What each kind of run gives."""
    called = []
    agent = Agent(model)

    @agent.tool_plain
    def read_file(path: str) -> str:
        """Reads a file."""
        called.append(path)
        return Path(path).read_text()

    told = agent.run_sync(QUESTION).output
    with_stream = agent.run_stream_sync(QUESTION)
    streamed = "".join(with_stream.stream_text(delta=True))
    by_tool = Agent(model, output_type=Match).run_sync("Who won?").output
    by_form = Agent(model, output_type=NativeOutput(Match)).run_sync("Who won?").output
    return {
        "told": told,
        "streamed": streamed,
        "called": len(called),
        "by tool": by_tool.team,
        "by form": by_form.team,
    }


provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
models = (OpenAIChatModel("scripted", provider=provider), OpenAIResponsesModel("scripted", provider=provider))
print(json.dumps({type(model).__name__: tried(model) for model in models}))
