"""Open WebUI without a browser: python webui_page.py [--continue] QUESTION; prints what its page shows.

Starts Open WebUI's own server with the settings of the environment, and sends it what its page sends: the
user signs in, sees that the connection works, chooses the model, adds a tool that reads files, and asks. The
answer, the chat's title and tags, and what may be asked next come as events, and from the chat as it was
saved. It runs with the Python of Open WebUI's environment, and imports nothing but what is there.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp  # type: ignore[import-not-found]
import socketio  # type: ignore[import-not-found]

HOME = Path.home()
TOOL_ID = "files"
TOOL = '''\
class Tools:
    def read_file(self, path: str) -> str:
        """
        Reads a text file.

        :param path: where the file is
        """
        with open(path, encoding="utf-8") as file:
            return file.read()
'''
_START_S, _ANSWER_S, _ASIDES_S = 300.0, 500.0, 120.0
_PAUSE_S = 0.2


class Refused(Exception):
    """Open WebUI did not do what its page expects."""


class Page:
    """What the page knows: its session, and the events that it was sent.

    Attributes:
        events: the kinds and the data of those of the latest message.
    """

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._socket = socketio.AsyncClient()
        self._socket.on("events", self._on_event)
        self.events: list[tuple[str, Any]] = []

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """What a request is answered."""
        async with self._http.request(method, path, json=body) as response:
            if response.status != 200:
                raise Refused(f"{method} {path}: {response.status} {(await response.text())[:500]}")
            return await response.json()

    async def sign_in(self, url: str) -> None:
        """Sign in as the only user, and listen for events."""
        user = await self.ask("POST", "/api/v1/auths/signin", {"email": "", "password": ""})
        self._http.headers["Authorization"] = f"Bearer {user['token']}"
        await self._socket.connect(
            url, socketio_path="/ws/socket.io", transports=["websocket"], auth={"token": user["token"]}
        )
        await self._socket.emit("user-join", {"auth": {"token": user["token"]}})

    async def model(self) -> dict[str, Any]:
        """The model that is offered, after the connections were found to work."""
        config = await self.ask("GET", "/openai/config")
        if config["ENABLE_OPENAI_API"]:
            for address, key in zip(config["OPENAI_API_BASE_URLS"], config["OPENAI_API_KEYS"], strict=True):
                await self.ask("POST", "/openai/verify", {"url": address, "key": key})
        config = await self.ask("GET", "/ollama/config")
        if config["ENABLE_OLLAMA_API"]:
            for address in config["OLLAMA_BASE_URLS"]:
                await self.ask("POST", "/ollama/verify", {"url": address, "key": ""})
            await self.ask("GET", "/ollama/api/version")
            await self.ask("GET", "/ollama/api/ps")
        models = (await self.ask("GET", "/api/models"))["data"]
        if len(models) != 1:
            raise Refused(f"The models are {[model['id'] for model in models]}.")
        return dict(models[0])

    async def add_tool(self) -> None:
        """Add the tool that reads files, as the page's workspace does."""
        if TOOL_ID not in [tool["id"] for tool in await self.ask("GET", "/api/v1/tools/")]:
            about = {"id": TOOL_ID, "name": "Files", "content": TOOL, "meta": {"description": "Reads files."}}
            await self.ask("POST", "/api/v1/tools/create", about)

    async def answer(self, model: dict[str, Any], question: str, *, continues: bool) -> str:
        """Ask a question in the newest chat or a new one, and wait for everything that comes of it."""
        chat, history = None, []
        if continues:
            chat = await self.ask(
                "GET", f"/api/v1/chats/{(await self.ask('GET', '/api/v1/chats/'))[0]['id']}"
            )
            history = _branch(chat)
        asked, told = str(uuid.uuid4()), str(uuid.uuid4())
        parent = history[-1]["id"] if history else None
        message = {
            "id": asked,
            "parentId": parent,
            "childrenIds": [told],
            "role": "user",
            "content": question,
            "timestamp": int(time.time()),
            "models": [model["id"]],
        }
        tasks = {"follow_up_generation": True}
        if not continues:
            tasks |= {"title_generation": True, "tags_generation": True}
        self.events.clear()
        begun = await self.ask(
            "POST",
            "/api/chat/completions",
            {
                "stream": True,
                "model": model["id"],
                "messages": [
                    *({"role": each["role"], "content": each["content"]} for each in history),
                    {"role": "user", "content": question},
                ],
                "params": {"function_calling": "native"},
                "tool_ids": [TOOL_ID],
                "tool_servers": [],
                "filter_ids": [],
                "features": {"image_generation": False, "code_interpreter": False, "web_search": False},
                "variables": {"{{USER_NAME}}": "User", "{{USER_LANGUAGE}}": "en-US"},
                "model_item": model,
                "session_id": self._socket.get_sid("/"),
                "chat_id": chat["id"] if chat else None,
                "id": told,
                "message_ids": [{"model_id": model["id"], "message_id": told}],
                "parent_id": parent,
                "user_message": message,
                "background_tasks": tasks,
            },
        )
        await self._until("the answer", _ANSWER_S, lambda: any(_ends(*event) for event in self.events))
        kinds = {"follow_up_generation": "chat:message:follow_ups", "tags_generation": "chat:tags"}
        expected = {kinds.get(task, "chat:title") for task in tasks}
        await self._until(
            "title, tags and follow-ups", _ASIDES_S, lambda: expected <= {kind for kind, _ in self.events}
        )
        saved = _branch(await self.ask("GET", f"/api/v1/chats/{begun['chat_id']}"))[-1]
        return re.sub(r"<details\b.*?</details>", "", saved["content"], flags=re.DOTALL).strip()

    async def close(self) -> None:
        """Close the page."""
        await self._socket.disconnect()

    async def _on_event(self, event: dict[str, Any], *_: Any) -> None:
        kind, data = event["data"]["type"], event["data"].get("data")
        self.events.append((kind, data))

    async def _until(self, what: str, limit_s: float, came: Any) -> None:
        deadline = time.monotonic() + limit_s
        while not came():
            errors = [data for kind, data in self.events if kind == "chat:message:error"]
            if errors or time.monotonic() > deadline:
                kinds = sorted({kind for kind, _ in self.events})
                raise Refused(f"{what} did not come: {errors or kinds}")
            await asyncio.sleep(_PAUSE_S)


def _ends(kind: str, data: Any) -> bool:
    return kind == "chat:completion" and bool(data.get("done"))


def _branch(chat: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat from its first to the one that is shown."""
    history = chat["chat"]["history"]
    found, at = [], history.get("currentId")
    while at:
        found.append(history["messages"][at])
        at = found[-1].get("parentId")
    return found[::-1]


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    """Open WebUI's server, from its start to its end; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", HOME / "open-webui.log"
    environment = {**os.environ, "DATA_DIR": str(HOME / "data"), "CORS_ALLOW_ORIGIN": url}
    with log.open("a") as output:
        program = await asyncio.create_subprocess_exec(
            *(
                Path(sys.executable).parent / "open-webui",
                "serve",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ),
            cwd=HOME,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + _START_S
        while not await _answers(f"{url}/health"):
            if program.returncode is not None or time.monotonic() > deadline:
                raise Refused(f"Open WebUI did not start: {log.read_text()[-2000:]}")
            await asyncio.sleep(_PAUSE_S)
        yield url
    finally:
        if program.returncode is None:
            program.kill()
        await program.wait()


async def _answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return bool(response.status == 200)
    except aiohttp.ClientError:
        return False


async def main(question: str, *, continues: bool) -> None:
    """Ask a question, and print the answer."""
    async with served() as url, aiohttp.ClientSession(url) as http:
        page = Page(http)
        try:
            await page.sign_in(url)
            model = await page.model()
            await page.add_tool()
            print(await page.answer(model, question, continues=continues))
        finally:
            await page.close()


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[-1], continues="--continue" in sys.argv[1:-1]))
    except Refused as refused:
        sys.exit(str(refused))
