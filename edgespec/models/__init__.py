"""GGUF files and the llama.cpp runtime."""

from __future__ import annotations

import os

# llama.cpp's threads meet at a barrier a thousand times a pass, and OpenMP lets the first one spin there
# for a millisecond. When another program has taken the core of the one awaited, both lose their time
# slices that way: decoding beside a busy program ran at a third of the speed, or a tenth. A thousand turns
# are enough where the cores are free, and cost nothing there. OpenMP reads this when it is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
