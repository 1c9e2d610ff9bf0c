"""The routes to responses and conversations that are kept, and to their items."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import dropwhile
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgespec.api.conversations import no_such_item
from edgespec.api.fields import converted
from edgespec.api.limits import Limits
from edgespec.api.refusals import Refusal
from edgespec.api.response_store import ResponseStore
from edgespec.api.responses import checked_items
from edgespec.serving.request_bodies import BodyReceiver, RequestBody, parse
from edgespec.serving.request_handler import Reply, refusing

_RESPONSES = "/v1/responses/{id}"
_CONVERSATIONS = "/v1/conversations"
_CONVERSATION = f"{_CONVERSATIONS}/{{id}}"
_ITEM = f"{_CONVERSATION}/items/{{item}}"
_ITEMS = 20  # of a page, where a request does not say
_MAX_ITEMS = 100

_Answer = Callable[[Request, Any], Any]
"""Answers a request with its parsed body, which is empty where it sends none."""


class ConversationBody(Struct):
    """The body of a request that begins a conversation, or adds to one."""

    items: Annotated[list[dict[str, Any]], Meta(max_length=_MAX_ITEMS)] | None = None
    metadata: dict[str, str] | None = None


def routes_to_kept(store: ResponseStore, limits: Limits, bodies: BodyReceiver) -> list[Route]:
    """The routes to read, write and remove what a store keeps."""
    conversations = store.conversations

    def removed_response(http: Request, _body: Any) -> Any:
        store.remove(_id(http))
        return {"id": _id(http), "object": "response", "deleted": True}

    def begun(_http: Request, body: Any) -> Any:
        given = converted(body, ConversationBody, "body")
        return conversations.create(checked_items(given.items or [], store), given.metadata or {})

    def described(http: Request, body: Any) -> Any:
        given = converted(body, ConversationBody, "body")
        return conversations.describe(_id(http), given.metadata or {})

    def removed(http: Request, _body: Any) -> Any:
        conversations.remove(_id(http))
        return {"id": _id(http), "object": "conversation.deleted", "deleted": True}

    def added(http: Request, body: Any) -> Any:
        given = converted(body, ConversationBody, "body")
        items = checked_items(given.items or [], store)
        conversations.add(_id(http), items)
        return listed(items)

    def item(http: Request, _body: Any) -> Any:
        wanted = http.path_params["item"]
        found = [one for one in conversations.items(_id(http)) if one["id"] == wanted]
        if not found:
            raise no_such_item(wanted)
        return found[0]

    replies: list[tuple[str, str, _Answer]] = [
        ("GET", _RESPONSES, lambda http, _: store.response(_id(http))),
        ("DELETE", _RESPONSES, removed_response),
        ("GET", f"{_RESPONSES}/input_items", lambda http, _: _page(store.input_items(_id(http)), http)),
        ("POST", _CONVERSATIONS, begun),
        ("GET", _CONVERSATION, lambda http, _: conversations.about(_id(http))),
        ("POST", _CONVERSATION, described),
        ("DELETE", _CONVERSATION, removed),
        ("GET", f"{_CONVERSATION}/items", lambda http, _: _page(conversations.items(_id(http)), http)),
        ("POST", f"{_CONVERSATION}/items", added),
        ("GET", _ITEM, item),
        ("DELETE", _ITEM, lambda http, _: conversations.remove_item(_id(http), http.path_params["item"])),
    ]

    def answering(answer: _Answer) -> Reply:
        def answered(http: Request, body: RequestBody) -> Any:
            content = body.decoded(limits.body)
            return answer(http, parse(content, values=limits.values, depth=limits.depth) if content else {})

        async def reply(http: Request) -> Response:
            async with bodies.received(http) as body:
                return JSONResponse(await asyncio.to_thread(answered, http, body))

        return refusing(reply)

    return [Route(path, answering(answer), methods=[method]) for method, path, answer in replies]


def _id(http: Request) -> str:
    identifier: str = http.path_params["id"]
    return identifier


def _page(items: list[dict[str, Any]], http: Request) -> dict[str, Any]:
    """The items that a request asks for, the latest first unless it asks for the other order.

    Raises:
        Refusal: the number of items is none.
    """
    asked = http.query_params
    limit, after = asked.get("limit", str(_ITEMS)), asked.get("after")
    if not limit.isdecimal() or not 1 <= int(limit[:4]) <= _MAX_ITEMS:
        raise Refusal(400, f"limit must be from 1 to {_MAX_ITEMS}.")
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise Refusal(400, "order must be asc or desc.")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        items = list(dropwhile(lambda item: item["id"] != after, items))[1:]
    page = items[: int(limit[:4])]
    return listed(page, has_more=len(page) < len(items))


def listed(items: list[dict[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    """The body of a list, or of a page of one, whose items have ids."""
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
    return {"object": "list", "data": items, **ends, "has_more": has_more}
