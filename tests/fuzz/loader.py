"""The child process of a fuzz run: reads files as EdgeSpec does, and lets llama.cpp load those that pass.

    python -m tests.fuzz.loader

Says "ready"; takes a path a line, and answers each with "start", and then "refused WHY" (by gguf.py), "error
WHY" (by llama.cpp, cleanly) or "loaded", each after the process's peak of memory in KiB. A line that never
comes is a crash or a hang, for the parent to notice.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from pathlib import Path

from edgespec.errors import EdgeSpecError, ModelFileError
from edgespec.models.gguf.header import read_header


def main() -> None:
    from edgespec.models.llama.runtime.backend import start_backend

    start_backend()
    with tempfile.TemporaryDirectory() as cache:  # of verdicts on files that are tried in a child process
        os.environ["XDG_CACHE_HOME"] = cache
        _say("ready")
        for line in sys.stdin:
            _load(Path(line.rstrip("\n")))


def _load(path: Path) -> None:
    from edgespec.models.llama.runtime.batch import Batch
    from edgespec.models.llama.runtime.context import Context
    from edgespec.models.llama.runtime.model import Model
    from edgespec.models.llama.trials.vetting import require_loadable

    _say("start")
    try:
        require_loadable([read_header(path)])
    except ModelFileError as error:
        _say(f"refused {error.what.replace(str(path), 'FILE')}")
        return
    except Exception as error:
        _say(f"broke {type(error).__name__}: {error}")
        return
    try:
        with Model(path, memory_map=True, repack=False) as model:
            context = Context(model, n_cells=64, n_rows=32, n_outputs=32, n_sequences=1, n_threads=1)
            try:
                tokens = model.vocabulary.tokenize("Hello, world <|im_start|>", control=True)
                tokens = [t for t in tokens if 0 <= t < model.vocabulary.n_tokens][:8] or [0]
                context.decode(Batch.run(tokens, 0, n_sequences=1, logits="last"))
                context.logits()
                for token in range(min(model.vocabulary.n_tokens, 400)):
                    model.vocabulary.piece(token)
                    model.vocabulary.is_end(token)
            finally:
                context.close()
        _say("loaded")
    except EdgeSpecError as error:
        _say(f"error {error.what.replace(str(path), 'FILE')}")
    except Exception as error:
        _say(f"broke {type(error).__name__}: {error}")


def _say(text: str) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{peak} {' '.join(text.split())}", flush=True)


if __name__ == "__main__":
    main()
