"""The routes under `/v1/responses/ID`: responses that are kept, and the items of their requests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import dropwhile
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgespec.api.refusals import Refusal
from edgespec.api.response_store import ResponseStore

_PATH = "/v1/responses/{id}"
_ITEMS = 20  # of a page, where a request does not say
_MAX_ITEMS = 100


def routes_of_responses(store: ResponseStore) -> list[Route]:
    """The routes to read and remove what a store keeps."""

    def shown(identifier: str, _http: Request) -> dict[str, Any]:
        return store.response(identifier)

    def removed(identifier: str, _http: Request) -> dict[str, Any]:
        store.remove(identifier)
        return {"id": identifier, "object": "response", "deleted": True}

    def items(identifier: str, http: Request) -> dict[str, Any]:
        return _page(store.input_items(identifier), http)

    return [
        Route(_PATH, _answering(shown), methods=["GET"]),
        Route(_PATH, _answering(removed), methods=["DELETE"]),
        Route(f"{_PATH}/input_items", _answering(items), methods=["GET"]),
    ]


def _answering(reply: Callable[[str, Request], dict[str, Any]]) -> Callable[[Request], Response]:
    """A handler, which Starlette calls in a thread: a long conversation takes time to read."""

    def handler(http: Request) -> Response:
        try:
            return JSONResponse(reply(http.path_params["id"], http))
        except Refusal as refusal:
            return refusal.response()

    return handler


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
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    return {"object": "list", "data": page, **ends, "has_more": len(page) < len(items)}
