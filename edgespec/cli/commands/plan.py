"""`edgespec plan`: how a model would run here, or every file of a repository."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Annotated, Any

import typer

from edgespec.base.progress import Progress
from edgespec.cli.options.common import ModelFlag, OutputOptions
from edgespec.cli.options.declaration import config_option, with_options
from edgespec.cli.options.sampling import SamplingOptions
from edgespec.cli.screen.plan_tables import embedder_table, plan_table, repository_table
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal
from edgespec.config import OPTIONS, Config

_PLANNED = {"model", "draft", "draft_window", "memory", "context", "threads", "kv", "lora", "workers"}
_PLANNED |= {"gpu_layers", "device", "draft_device", "pack", "pack_dir", "temperature"}
_LEFT_OUT = {*OPTIONS, *(field.name for field in fields(SamplingOptions))} - _PLANNED


@partial(with_options, leave_out=_LEFT_OUT)
def plan(
    called: typer.Context,
    mmproj: Annotated[str | None, config_option("mmproj")] = None,
    *,
    flag: ModelFlag,
    loading: Config,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Predict how a model, or each file of a repository, would run here: memory and speed.

    Figures are measured where this machine has run the model, and derived from the speed of its processor
    and disk otherwise. Models on the Hub are not downloaded.
    """
    loading, temperature = flag.on(loading, called).with_(mmproj=mmproj), sampling.config().temperature
    with Terminal(quiet=output.quiet, verbose=output.verbose).working(long=True) as progress:
        progress("Planning", 0.0)
        record, text = _planned(loading, temperature, progress, verbose=output.verbose)
    if output.as_json:
        results().record(record)
    else:
        results().text(text)


def _planned(
    loading: Config, temperature: float, progress: Progress, *, verbose: bool
) -> tuple[dict[str, Any], str]:
    """The plan of a repository, an embedding model or a model that writes text, as JSON and as tables."""
    from edgespec.planning.report.model_report import embedder_plan_for, plan_for
    from edgespec.planning.report.repository import plan_repository, repository_of

    name = repository_of(loading.model.name) if loading.model.name else None
    files = None if name is None else plan_repository(name, loading, progress, temperature=temperature)
    if files is not None:
        return files.to_json(), repository_table(files)
    embedder = embedder_plan_for(loading, progress)
    if embedder is not None:
        return embedder.to_json(), embedder_table(embedder)
    found = plan_for(loading, progress, temperature=temperature)
    return found.to_json(), plan_table(found, verbose=verbose)
