"""The options that each node loads with: those of the command, as they are meant there."""

from __future__ import annotations

from edgespec.config import NO_MODEL, Config
from edgespec.files.user_folders import expanded
from edgespec.machine.cores import default_threads
from edgespec.machine.probe import available_memory


def options_for_nodes(loading: Config, engines: int) -> Config:
    """The options for each of the engines.

    Nodes run in folders of their own, so paths are made absolute. Names are left as they are: each node finds
    or fetches the model itself.

    Args:
        engines: how many share this machine; what is not asked for is divided among them. On nodes of their
            own, engines decide themselves.
    """
    model, speculation = loading.model, loading.speculation
    loading = loading.with_(
        model=_absolute(model.name),
        mmproj=_absolute(model.mmproj),
        draft=_absolute(speculation.draft),
        draft_from=_absolute(speculation.draft_from),
        lora=[_absolute_adapter(name) for name in model.lora],
    )
    if engines == 1:
        return loading
    threads = loading.devices.threads or max(default_threads() // engines, 1)
    memory = loading.memory.limit or available_memory() // engines
    return loading.with_(threads=threads, memory=memory)


def _absolute(name: str | None) -> str | None:
    """A path as seen from everywhere; anything else is a name."""
    if name is None or name in NO_MODEL or not (_is_here(name) or name.lower().endswith(".gguf")):
        return name
    return str(expanded(name).absolute())  # links stay, as they may lead elsewhere on other nodes


def _absolute_adapter(name: str) -> str:
    path, colon, scale = name.rpartition(":")
    if colon and not _is_here(name) and _is_here(path):
        return f"{_absolute(path)}:{scale}"
    return str(_absolute(name))


def _is_here(name: str) -> bool:
    try:
        return expanded(name).exists()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have
        return False
