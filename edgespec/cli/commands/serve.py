"""`edgespec serve`: the model behind an OpenAI-compatible HTTP endpoint."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.base.units import parse_size
from edgespec.cli.listening import is_local, listening, split_hosts
from edgespec.cli.options.common import ModelFlag, OutputOptions, Preset, SystemFile, system_prompt
from edgespec.cli.options.declaration import config_option, is_given, option, with_options
from edgespec.cli.options.sampling import SamplingOptions
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import Config
from edgespec.errors import UsageError
from edgespec.files.user_folders import expanded

if TYPE_CHECKING:
    from edgespec.serving.completion_handler import CompletionHandler
    from edgespec.serving.embeddings import EmbeddingHandler
    from edgespec.serving.loaded_models import LoadedModels

_PANEL = "Server"
_NAMED = 4  # models in the line at the start


@dataclass(frozen=True)
class FurtherModels:
    """Models behind the first one."""

    more: Annotated[
        list[str] | None,
        typer.Argument(help="Further models; each is loaded when a request names it.", metavar="MORE"),
    ] = None


@partial(with_options, leave_out=("as_json",), defaults=Config.of(prompt_cache=True))
def serve(
    called: typer.Context,
    host: Annotated[
        str,
        option(
            _PANEL,
            "--host",
            "Address to listen on, or several with commas; the path of a Unix socket.",
            metavar="ADDRESS",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, option(_PANEL, "--port", "Port to listen on; 0 for any free port.", metavar="N")
    ] = 8080,
    api_key: Annotated[
        str | None,
        option(
            _PANEL,
            "--api-key",
            "Key that clients must send; required to listen beyond this machine.",
            metavar="KEY",
        ),
    ] = None,
    queue: Annotated[
        int,
        option(_PANEL, "--queue", "Maximum waiting requests; further ones get a 429.", metavar="N"),
    ] = 256,
    parallel: Annotated[
        int,
        config_option("parallel", panel=_PANEL, help_text="Requests to answer at once.", metavar="N"),
    ] = 8,
    name: Annotated[
        str | None,
        option(_PANEL, "--name", "Model name for clients. Default: the file name.", metavar="NAME"),
    ] = None,
    mmproj: Annotated[str | None, config_option("mmproj", panel=_PANEL)] = None,
    alias: Annotated[
        list[str] | None,
        option(
            _PANEL,
            "--alias",
            "Another name, or a pattern; NAME=MODEL for one of several; repeatable.",
            metavar="NAME",
        ),
    ] = None,
    keep_alive: Annotated[
        str,
        option(
            _PANEL,
            "--keep-alive",
            "Unload an idle model after this time, such as 5m, until a request needs it. -1: never.",
            metavar="TIME",
        ),
    ] = "-1",
    log: Annotated[
        str | None,
        option(
            _PANEL,
            "--log",
            "Append a JSON line of statistics for every request.",
            variable=False,
            metavar="FILE",
        ),
    ] = None,
    max_body: Annotated[
        str,
        option(_PANEL, "--max-body", "Maximum request size; larger ones get a 413.", metavar="SIZE"),
    ] = "32MiB",
    cors: Annotated[
        str | None,
        option(_PANEL, "--cors", "Origin whose web pages may use the API; * for any.", metavar="ORIGIN"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        option(
            _PANEL,
            "--allow-host",
            "Another name by which clients reach this server; repeatable.",
            metavar="NAME",
        ),
    ] = None,
    allow_pull: Annotated[
        bool, option(_PANEL, "--allow-pull", "Let clients download models, by Ollama's /api/pull.")
    ] = False,
    system: Annotated[
        str | None,
        option("Prompt", "--system", "System prompt for chats without one.", metavar="TEXT"),
    ] = None,
    system_file: SystemFile = None,
    preset: Preset = None,
    *,
    flag: ModelFlag,
    loading: Config,
    further: FurtherModels,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Serve the OpenAI, Anthropic and Ollama APIs over HTTP, with several requests in every pass."""
    loading = flag.on(loading, called).with_(parallel=parallel, mmproj=mmproj)
    sampling.config_for(loading)  # refuses what is wrong before the model is loaded
    terminal = Terminal(quiet=output.quiet, verbose=output.verbose)
    system = system_prompt(called, system, system_file)
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must be from 0 to 65535, not {port}.")
    if not 0 <= queue <= 10_000:
        raise UsageError(f"--queue must be from 0 to 10000, not {queue}.")
    limit = parse_size(max_body, "--max-body", least_bare=0)
    if not 1024 <= limit <= 1 << 30:
        raise UsageError(f"--max-body must be from 1KiB to 1GiB, not {max_body}.")
    addresses = split_hosts(host)
    public = [address for address in addresses if not is_local(address)]
    if api_key is not None and not (api_key := api_key.strip()):
        raise UsageError("--api-key is empty.", "Give a key, or omit --api-key to serve this machine alone.")
    if api_key is None and public:
        raise UsageError(
            f"Other machines can reach this server at {public[0]}, but it has no API key.",
            "Set one with --api-key or EDGESPEC_API_KEY, or leave out --host.",
        )
    try:
        from edgespec.api.limits import Limits
        from edgespec.api.response_store import ResponseStore
        from edgespec.cli.served_models import ServingOptions, find_models
        from edgespec.models.hub.catalog import DEFAULT
        from edgespec.serving.app import Application
        from edgespec.serving.keep_alive import parse_keep_alive
        from edgespec.serving.model_router import ModelRouter
        from edgespec.serving.origins import checked_origin
        from edgespec.serving.request_log import request_logger
        from edgespec.serving.server import Server, told_to_wait
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette", "prometheus_client"):
            raise
        raise UsageError(
            "The HTTP server is not installed.", "Install it: pip install 'edgespec[serve]'"
        ) from error
    cors = None if cors is None else checked_origin(cors)
    idle_s = parse_keep_alive(keep_alive, "--keep-alive")
    with ExitStack() as stack:
        listeners = stack.enter_context(listening(addresses, port))
        shown = terminal.note if terminal.verbose or terminal.is_watched else None
        on_request = request_logger(expanded(log) if log else None, shown).info
        limits = Limits(body=limit)
        options = ServingOptions(
            sampling,
            terminal,
            limits,
            queue,
            parallel,
            idle_s,
            on_request,
            system,
            chosen_context=is_given(called, "context"),
        )
        # A server for this machine is protected by names (see HostCheck), and others by their key.
        clients = ["localhost", "127.0.0.1", "::1", *addresses, *(allow_host or ())]
        hosts = clients if allow_host or not public else None
        address, *others = map(_url, listeners)
        named = [name for name in (loading.model.name, *(further.more or ())) if name is not None]
        app: Application | ModelRouter
        found = find_models(named) if allow_pull or len(named) != 1 else []
        if len(found) <= 1 and not allow_pull:
            aliases = tuple(dict.fromkeys(alias or ()))
            if paired := next((one for one in aliases if "=" in one), None):
                hint = f"Write --alias {paired.partition('=')[0]}."
                raise UsageError(f"--alias {paired} names a model, and only one is served.", hint)
            with told_to_wait(listeners):
                handler = options.handler(loading, name, aliases)
            app = Application(handler, api_key=api_key, hosts=hosts, cors=cors)
            stack.callback(app.close)
            _say_what_is_served(handler, address, terminal)
        else:
            if name or mmproj:
                raise UsageError(
                    "--name and --mmproj are for one model, and several are served.", "Leave them out."
                )
            responses = ResponseStore()
            models = options.offered(loading, found or find_models([DEFAULT]), responses, alias or ())
            app = ModelRouter(
                models,
                limits,
                responses,
                api_key=api_key,
                hosts=hosts,
                cors=cors,
                pull=options.puller(loading, models, responses) if allow_pull else None,
            )
            stack.callback(app.close)
            terminal.note(f"Serving {_several(models)} at {address}/v1; chat at {address}. Ctrl-C ends it.")
            terminal.note(f"Base URLs: OpenAI {address}/v1, Anthropic {address}, Ollama {address}.")
        server = Server(app, limits, verbose=output.verbose)
        if others:
            terminal.note(f"Also at {', '.join(others)}.")
        server.run(sockets=listeners)
    if server.interrupted:
        raise typer.Exit(130)


def _say_what_is_served(
    handler: CompletionHandler | EmbeddingHandler, address: str, terminal: Terminal
) -> None:
    """Say where clients find a model."""
    model, card = handler.names[0], handler.worker.card
    if not card.writes:
        terminal.note(f"Serving embeddings of {model} at {address}/v1. Ctrl-C ends it.")
        terminal.note(f"Base URLs: OpenAI {address}/v1, Ollama {address}.")
        return
    terminal.note(f"Serving {model} at {address}/v1; chat at {address}. Ctrl-C ends it.")
    context = f"Context: {card.context:,} tokens."
    terminal.note(f"Base URLs: OpenAI {address}/v1, Anthropic {address}, Ollama {address}. {context}")
    if not card.chats:
        terminal.warn(
            "The model has no chat template: /v1/completions is served, and /v1/chat/completions is "
            "refused. To chat, serve a GGUF file with a template."
        )


def _several(models: LoadedModels) -> str:
    """Name some of the models."""
    names = [model.names[0] for model in models.models]
    shown = ", ".join(names[:_NAMED])
    return f"{len(names)} model{'s' * (len(names) > 1)} ({shown}{', ...' if len(names) > _NAMED else ''})"


def _url(listener: socket.socket) -> str:
    """The address of a server for people, and for clients unless it is a Unix socket."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
