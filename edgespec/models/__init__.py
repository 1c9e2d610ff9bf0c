"""GGUF files and the llama.cpp runtime."""

from __future__ import annotations

import os

# llama.cpp's threads meet at a barrier a thousand times per pass, where OpenMP lets early threads spin for a
# millisecond. If another program occupies the core of a late thread, both waste their time slices: decoding
# beside a busy program ran at a third or a tenth of its speed. Spinning a thousand times is enough when the
# cores are free, and costs nothing then. OpenMP reads this variable when it is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
