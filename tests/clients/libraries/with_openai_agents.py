"""openai-agents with a conversation that the server stores: [--continue] QUESTION; prints the answer."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from agents import (  # type: ignore[import-not-found]
    Agent,
    OpenAIConversationsSession,
    Runner,
    function_tool,
    set_tracing_disabled,
)

KEPT = Path.home() / "conversation"


@function_tool
def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text()


async def main(question: str, *, continues: bool) -> None:
    """Ask a question, and print the answer."""
    set_tracing_disabled(disabled=True)
    agent = Agent("Reader", model=os.environ["OPENAI_MODEL"], tools=[read_file])
    session = OpenAIConversationsSession(conversation_id=KEPT.read_text() if continues else None)
    done = await Runner.run(agent, question, session=session)
    KEPT.write_text(session.session_id)
    print(done.final_output)


asyncio.run(main(sys.argv[-1], continues="--continue" in sys.argv))
