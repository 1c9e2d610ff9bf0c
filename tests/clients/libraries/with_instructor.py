"""instructor in those of its modes that bind the answer: python with_instructor.py URL; prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import instructor  # type: ignore[import-not-found]
import openai
from pydantic import BaseModel, Field

URL, *CHOSEN = sys.argv[1:]
MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")


class Match(BaseModel):
    """A form that a model of any size can fill in."""

    team: Literal["red", "blue"]
    points: int = Field(ge=0, le=9)


def tried(mode: str) -> dict[str, Any]:
    """A whole form, and one that comes in parts."""
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    settings: Any = {
        "model": "scripted",
        "response_model": Match,
        "messages": [{"role": "user", "content": "Who won?"}],
        "max_retries": 0,
    }
    whole = client.create(**settings)
    parts = list(client.create_partial(**settings)) if mode != "RESPONSES_TOOLS" else [whole]
    return {"whole": whole.model_dump(), "last": parts[-1].model_dump()}


print(json.dumps({mode: tried(mode) for mode in CHOSEN or MODES}))
