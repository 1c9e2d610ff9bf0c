"""Draw docs/page-light.png and docs/page-dark.png, the page of `edgespec serve` in a real browser:

    python scripts/page_pictures.py [MODEL] [--draft D]

Everything in the pictures was on the screen of the machine that ran this, figures included.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT = 1200, 800
QUESTION = "Explain what a hash table is, with a short Python example."


def main() -> None:
    """Serve, ask, and take pictures."""
    sys.path.insert(0, str(ROOT))
    from tests.browser import browsing
    from tests.serving import started

    with started(*sys.argv[1:], "--max-tokens", "160") as (server, _program):
        for theme in ("light", "dark"):
            with browsing(WIDTH, HEIGHT, dark=theme == "dark") as browser:
                browser.go(f"http://127.0.0.1:{server.port}/")
                browser.wait_for("document.querySelector('#model').textContent")
                browser.type(QUESTION)
                browser.press("Enter")
                browser.wait_for("!running && passes.length")
                # The pass that shows most: the one with the longest accepted path among the larger trees.
                browser.run(
                    "pick(passes.indexOf(passes.toSorted((a, b) => Math.min(b.accepted, 6) * b.nodes - "
                    "Math.min(a.accepted, 6) * a.nodes)[0]))"
                )
                path = ROOT / "docs" / f"page-{theme}.png"
                browser.screenshot(path)
                print(path, browser.troubles or "without complaints")


if __name__ == "__main__":
    main()
