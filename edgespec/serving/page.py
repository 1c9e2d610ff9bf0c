"""The page: a chat in the browser, in one file that asks for nothing but the API."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

PAGE = "/"
_FILE = Path(__file__).with_name("page.html")


class Page:
    """Answers with the page. Its headers let it run its own script, and nothing else."""

    def __init__(self) -> None:
        self._content = _FILE.read_text(encoding="utf-8")
        self._headers = {
            "content-security-policy": "; ".join(
                [
                    "default-src 'none'",
                    f"script-src {_hashes(self._content, 'script')}",
                    f"style-src {_hashes(self._content, 'style')}",
                    "connect-src 'self'",
                    "img-src data:",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                ]
            ),
            "cache-control": "no-cache",
            "cross-origin-opener-policy": "same-origin",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def answer(self, _http: HTTPRequest) -> Response:
        """The page."""
        return Response(self._content, media_type="text/html", headers=self._headers)


def _hashes(content: str, tag: str) -> str:
    """The sources of a policy that allow the elements of that name, and no others (CSP level 2)."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in found)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
