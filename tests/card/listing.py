"""The cards that llama.cpp finds, as JSON: python -m tests.card.listing"""

from __future__ import annotations

import json
from dataclasses import asdict

from edgespec.llama.build import current_build

if __name__ == "__main__":
    print(json.dumps([asdict(device) for device in current_build().gpus]))
