"""The child process of a worker: llama.cpp's RPC server.

    python -m edgespec.workers.server JSON

The JSON object has "host", "port", "threads" and "memory" (bytes that may be lent; null for what is
available). Prints a JSON line with the devices, and then what llama.cpp prints of connections. Ends when its
standard input is closed, so that it never outlives the program that started it. It serves clients that nobody
checked, and llama.cpp ends the process at some malformed requests: another reason for a process of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from edgespec.kernels.ggml import rpc
from edgespec.kernels.ggml.structs import UnsupportedBuild
from edgespec.machine.probe import available_memory

NO_ADDRESS, NO_RPC = 3, 4
"""Exit codes: the address cannot be listened on; this llama.cpp build has no RPC."""

_MARGIN = 0.05  # of available memory, left for other programs


def lendable_bytes(limit: int | None) -> int:
    """Memory of this machine that may be lent now."""
    free = int(available_memory() * (1 - _MARGIN))
    return free if limit is None else min(limit, free)


def main() -> None:
    """Serve until the parent ends."""
    order = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which ends this
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if not rpc.has_rpc():
        os._exit(NO_RPC)
    try:
        devices = rpc.own_devices()
        limit = rpc.LimitedMemory(
            devices[-1], lambda: lendable_bytes(order["memory"]), lambda: lendable_bytes(None)
        )
        facts = [rpc.describe(device) for device in devices]
        print(json.dumps({"devices": [vars(fact) for fact in facts]}), flush=True)
        rpc.lend(f"{order['host']}:{order['port']}", devices, order["threads"])
    except UnsupportedBuild as error:
        print(error, file=sys.stderr)
        os._exit(NO_RPC)
    del limit
    os._exit(NO_ADDRESS)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
