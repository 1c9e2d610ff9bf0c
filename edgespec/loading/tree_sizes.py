"""How many nodes trees may have, which decides for how many rows of a pass there is room for logits.

In memory every row of a large pass costs time, so that no tree beyond the usual size pays. While weights are
read from disk, rows are free as long as their arithmetic takes less time than reading. Where exact passes may
have any number of rows, larger trees are then allowed, if their logits take little of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import read_seconds
from edgespec.kernels.layouts import own_in_use
from edgespec.loading.state import LoadState
from edgespec.measure.threads import known_threads
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.footprint import LARGE_NODES, USUAL_NODES
from edgespec.models.gguf.layers import ModelFiles
from edgespec.offload.planning.budget import memory_room
from edgespec.profiles.store import ProfileStore

_LARGEST_NODES = 256  # where passes of LARGE_NODES were measured, and wait for the disk
_SHARE = 1 / 64  # of the budget, for the logits of nodes beyond the usual
_LOGIT_BYTES = 2 * 4  # in the graph and in the output buffer


def usual_nodes(files: ModelFiles, state: LoadState, store: ProfileStore | None = None) -> int:
    """Nodes that trees may have if no other number is asked for.

    Args:
        store: what passes take, if it was measured; None is that of this machine.
    """
    config, header = state.config, files.headers[0]
    room = memory_room(config.memory.limit)
    offload = config.memory.offload
    streams = offload == "stream" or (offload == "auto" and files.tensor_bytes > room)
    drafts = config.speculation.drafts and config.speculation.tree_budget is None
    if not (streams and drafts) or header.keeps_running_state or config.speculation.exact is False:
        return USUAL_NODES
    if not own_in_use() or state.crew is not None or layer_weights(files).experts:
        return USUAL_NODES
    threads = config.devices.threads or known_threads(header.fingerprint, store)
    profile = (store or ProfileStore()).preferred_passes(header.fingerprint, threads, streams=True)
    read_s = 0.0
    if profile is not None and profile.read_rate:
        read_s = read_seconds(max(files.tensor_bytes - room, 0), profile.read_rate)
    affordable = USUAL_NODES + int(room * _SHARE) // (_LOGIT_BYTES * header.n_vocab)
    return _allowed(affordable, profile.compute if profile is not None and read_s else None, read_s)


def _allowed(affordable: int, compute: Curve | None, read_s: float) -> int:
    """The largest size that memory allows, and that passes were not measured to be too slow for.

    Args:
        affordable: nodes whose logits there is memory for.
        compute: seconds of arithmetic, by rows; None if that was not measured.
        read_s: seconds that a pass reads.
    """
    allowed = USUAL_NODES
    for size in _sizes(measured=compute is not None):
        if size > affordable or (compute is not None and compute.at(allowed) >= read_s):
            break
        allowed = size
    return allowed


def _sizes(*, measured: bool) -> Iterable[int]:
    return (LARGE_NODES, _LARGEST_NODES) if measured else (LARGE_NODES,)
