"""`edgespec worker`: lend this machine's memory and devices to a model that runs on another one."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Annotated

import typer

from edgespec.base.units import readable
from edgespec.cli.listening import listening
from edgespec.cli.options.common import OutputOptions
from edgespec.cli.options.declaration import config_option, option, with_options
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import Config
from edgespec.errors import UsageError

_PANEL = "Worker"


@dataclass(frozen=True)
class LendingOptions:
    """Options for lending: devices, memory and address."""

    listen: Annotated[
        str, option(_PANEL, "--listen", "Address and port to listen on.", metavar="ADDRESS")
    ] = "127.0.0.1:50052"
    memory: Annotated[
        str | None,
        config_option("memory", panel=_PANEL, help_text="Memory to lend. Default: all available memory."),
    ] = None
    threads: Annotated[
        int | None,
        config_option("threads", panel=_PANEL, help_text="CPU threads. Default: one per physical core."),
    ] = None
    public: Annotated[
        bool,
        option(
            _PANEL,
            "--public",
            "Allow an address that is reachable from outside the private network.",
            variable=False,
        ),
    ] = False


@partial(with_options, leave_out=())
def worker(*, lending: LendingOptions, output: OutputOptions) -> None:
    """Lend this machine's memory and devices to a model on another machine.

    On that machine, name this worker with --workers. Connections are neither authenticated nor encrypted:
    anyone who can reach the address can use this machine and read the traffic.
    """
    from edgespec.machine.cores import default_threads
    from edgespec.workers.address import WorkerAddress, is_guarded
    from edgespec.workers.lending import LendingOffer, LendingServer

    terminal = Terminal(quiet=output.quiet, verbose=output.verbose)
    address = WorkerAddress.parse(lending.listen)
    asked = Config.of(memory=lending.memory, threads=lending.threads)
    threads = asked.devices.threads or default_threads()
    try:
        host = address.resolved()
    except OSError as error:
        raise UsageError(
            f"{address.host} is not an address of this machine: {error.strerror}.", "Give an IPv4 address."
        ) from error
    if not is_guarded(host) and not lending.public:
        raise UsageError(
            f"{host} may be reachable from outside the private network, and a worker has no password.",
            "Listen at 127.0.0.1 and use an ssh tunnel, or listen at a private address. --public allows it "
            "anyway.",
        )
    port = _free_port(host, address.port)
    ended_by = signal.SIGINT

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal ended_by
        ended_by = signal.Signals(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    with LendingServer(LendingOffer(host, port, threads, asked.memory.limit), terminal.note) as server:
        if output.as_json:
            results().record({"address": f"{host}:{port}", "devices": server.devices})
        for device in server.devices:
            about = f"{device['name']} ({device['description']})" if device["description"] else device["name"]
            terminal.note(f"Lending {about}: {readable(device['free'])} of memory.")
        terminal.note(f"Listening at {host}:{port}, for --workers {host}:{port}. Ctrl-C ends it.")
        if not host.startswith("127."):
            terminal.warn(
                f"There is no password: anyone who reaches {host}:{port} can use this machine and read what "
                "others send."
            )
        try:
            server.serve()
        except KeyboardInterrupt:
            raise typer.Exit(128 + ended_by) from None


def _free_port(host: str, port: int) -> int:
    """The port, or a free one for 0."""
    hint = "Choose another address with --listen; port 0 takes a free one."
    with listening([host], port, hint) as [listener]:
        return int(listener.getsockname()[1])
