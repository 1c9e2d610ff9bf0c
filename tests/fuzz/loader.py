"""The child process of a fuzz run: reads files as EdgeSpec does, tries out those that pass, and loads them.

    python -m tests.fuzz.loader

Says "ready"; takes a path a line, and answers each with "start", with "tried" if the file has got as far as
`runtime.vetting`, with "survived" after what its child process does, and then with "refused WHY" (by the
reader), "error WHY" (by llama.cpp, cleanly) or "loaded", each after the process's peak of memory in KiB.

The work is done in a fork, which is made anew when it has died: then the line is "died SIGNAL". Death after
"tried" and before "survived" is what a child process is for; any other is a crash of EdgeSpec. A fork that
computes for too long is ended by the system.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from edgespec.errors import EdgeSpecError, ModelFileError
from edgespec.models.gguf.header import read_header

_MOST_S = 20  # of processor time, as in `runtime.vetting`


def main() -> None:
    from edgespec.models.llama.runtime.backend import start_backend
    from edgespec.models.llama.trials import load_trial  # noqa: F401 (imported before forks are made)

    start_backend()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say("ready")
    while True:
        child = os.fork()
        if not child:
            for line in iter(_next_path, ""):
                _load(Path(line))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return
        _say(f"died {signal.Signals(os.WTERMSIG(status)).name}")


def _next_path() -> str:
    """The next line, read no further: what follows is for the next fork if this one dies."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return ""
        line += byte
    return line[:-1].decode()


def _load(path: Path) -> None:
    from edgespec.models.llama.trials.load_trial import attempt

    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + _MOST_S, resource.RLIM_INFINITY)
    )
    _say("start")
    try:
        read_header(path)
    except ModelFileError as error:
        _say(f"refused {error.what.replace(str(path), 'FILE')}")
        return
    except Exception as error:
        _say(f"broke {type(error).__name__}: {error}")
        return
    _say("tried")
    attempt({"path": str(path)})
    _say("survived")
    try:
        compute(path)
        _say("loaded")
    except EdgeSpecError as error:
        _say(f"error {error.what.replace(str(path), 'FILE')}")
    except Exception as error:
        _say(f"broke {type(error).__name__}: {error}")


def compute(path: Path) -> None:
    """Load a file that was vetted, and compute the logits of some tokens.

    Raises:
        EdgeSpecError: llama.cpp cannot.
    """
    from edgespec.models.llama.runtime.batch import Batch
    from edgespec.models.llama.runtime.context import Context
    from edgespec.models.llama.runtime.model import Model

    with Model(path, memory_map=True, repack=False, vetted=False) as model:
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


def _say(text: str) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    os.write(1, f"{peak} {' '.join(text.split())}\n".encode())


if __name__ == "__main__":
    main()
