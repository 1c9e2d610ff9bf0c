"""Draw docs/page-light.png, page-dark.png and page-narrow.png, the page of `edgespec serve` in a browser:

    python scripts/page_pictures.py [MODEL] [--draft D]

Everything in the pictures was on the screen of the machine that ran this, figures included.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT, NARROW = 1200, 800, 400
QUESTION = "Explain what a hash table is, with a short Python example."


def main() -> None:
    """Serve, ask, and take pictures."""
    sys.path.insert(0, str(ROOT))
    from PIL import Image

    from tests.browser import browsing
    from tests.serving import started

    with (
        started(*sys.argv[1:], "--max-tokens", "160") as (server, _program),
        browsing(WIDTH, HEIGHT) as browser,
    ):
        browser.go(f"http://127.0.0.1:{server.port}/")
        browser.wait_for("document.querySelector('#model').textContent")
        browser.type(QUESTION)
        browser.press("Enter")
        browser.wait_for("!running && passes.length")
        # The pass that shows most: a long accepted path in a large tree.
        browser.run(
            "pick(passes.indexOf(passes.toSorted((a, b) => Math.min(b.accepted, 4) * b.nodes - "
            "Math.min(a.accepted, 4) * a.nodes)[0]))"
        )
        for theme in ("light", "dark"):
            browser.run(f"setTheme('{theme}')")
            browser.screenshot(ROOT / "docs" / f"page-{theme}.png")
        browser.resize(NARROW, HEIGHT)
        browser.run("setSide(false); setTree(true)")
        browser.screenshot(ROOT / "docs" / "page-narrow.png")
        for picture in (ROOT / "docs").glob("page-*.png"):
            with Image.open(picture) as image:
                image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)
        print(browser.troubles or "The browser had no complaints.")


if __name__ == "__main__":
    main()
