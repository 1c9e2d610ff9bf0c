"""`edgespec models`: fetch models, see what they are, pair and remove them."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.base.progress import no_progress
from edgespec.base.units import readable_rate
from edgespec.cli.options.common import Yes, confirm_removal
from edgespec.cli.options.declaration import Json, Quiet, command_group, option
from edgespec.cli.screen.formatting import in_columns, table
from edgespec.cli.screen.plan_tables import repository_table
from edgespec.cli.screen.results import results
from edgespec.cli.screen.terminal import Terminal, is_terminal
from edgespec.config import Config
from edgespec.errors import HubError, UsageError
from edgespec.files.user_folders import expanded, holds

if TYPE_CHECKING:
    from edgespec.models.hub.catalog import CatalogEntry
    from edgespec.planning.report.repository import RepositoryPlan

app = command_group("models", "Download, inspect, pair and remove models.")

Model = Annotated[str, typer.Argument(help="Path, catalog name or org/repo[:quant].", metavar="MODEL")]


@app.command(epilog="Example:\n\nedgespec models pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M")
def pull(
    model: Model,
    refresh: Annotated[
        bool, option(None, "--refresh", "Check for a newer version even if the model is here.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Download a model into the Hub's cache; print its path."""
    from edgespec.models.gguf.header import read_header
    from edgespec.models.hub import catalog
    from edgespec.models.hub import pull as pulling
    from edgespec.models.hub.projectors import projector_beside

    terminal = Terminal(quiet=quiet)
    if (files := _unchosen(model, terminal, refresh=refresh)) is not None:
        for line in repository_table(files).splitlines():
            terminal.note(line)
        raise UsageError(
            f"{files.repo} has {len(files.files)} models.",
            f"Choose one: edgespec models pull {files.repo}:{(files.fastest or files.files[0]).name}",
        )
    with terminal.working() as progress:
        name = catalog.hub_name_of(model)
        if name is None:
            found = catalog.resolve(model, progress)
            read_header(found.path)  # the path may not exist
        else:
            found = pulling.pull(name, progress, refresh=refresh)
    for note in found.notes:
        terminal.note(note)
    projector = projector_beside(found.path)
    if as_json:
        record: dict[str, Any] = {"model": model, "path": str(found.path), "notes": list(found.notes)}
        record["projector"] = None if projector is None else str(projector)
        results().record(record)
        return
    results().text(f"{found.path}\n")
    if projector is not None:
        terminal.note(f"It sees images, by {projector.name} beside it.")


@app.command("list", epilog="Examples:\n\nedgespec models list\n\nedgespec models list --all")
def list_models(
    everything: Annotated[bool, option(None, "--all", "Also list the catalog: models you can pull.")] = False,
    as_json: Json = False,
) -> None:
    """List the models on this machine."""
    from edgespec.base.units import readable
    from edgespec.models.hub import catalog
    from edgespec.models.hub.inventory import local_models
    from edgespec.models.hub.repository import Hub
    from edgespec.offload.packing.index import packed_files

    here, packed = local_models(Hub.without_token()), packed_files()
    entries = list(catalog.entries().values()) if everything else []
    if as_json:
        record: dict[str, Any] = {"models": [model.to_json() for model in here]}
        record["packed_files"] = [file.to_json() for file in packed]
        if everything:
            record["catalog"] = [entry.to_json() for entry in entries]
        results().record(record)
        return
    out = results()
    if here or packed:
        sees = {m: ", sees images" if m.projector else "" for m in here}
        rows = [(m.name, readable(m.n_bytes), f"{m.source}{sees[m]}", str(m.path)) for m in here]
        rows += [(str(file.path), readable(file.n_bytes), "packed", str(file.path)) for file in packed]
        out.table(table(("NAME", "SIZE", "FROM", "PATH"), rows))
    elif not everything:
        Terminal().note("No models installed. 'edgespec models list --all' lists models to download.")
    if everything:
        names = {(m.name.partition(":")[0]) for m in here}
        lines = [
            (
                entry.name,
                readable(entry.n_bytes),
                entry.family,
                "here" if entry.repo in names or entry.name in names else "",
                ", ".join(entry.drafters) or "edgespec draft make",
            )
            for entry in entries
        ]
        out.text(("\n" if here else "") + table(("CATALOG", "SIZE", "FAMILY", "", "DRAFTERS"), lines))


@app.command(epilog="Example:\n\nedgespec models show bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M")
def show(model: Model, as_json: Json = False, quiet: Quiet = False) -> None:
    """Describe a model and how it would run here; models on the Hub are not downloaded."""
    from edgespec.models.gguf.embedding import embedding_shape
    from edgespec.models.gguf.layers import ModelFiles
    from edgespec.models.hub.catalog import entry_for
    from edgespec.models.hub.inspection import drafters_of, inspect_model
    from edgespec.planning.embedder import plan_embedder
    from edgespec.planning.memory.fit import fit_report
    from edgespec.planning.report.sight import projector_facts
    from edgespec.planning.report.summary import as_lines, describe

    terminal = Terminal(quiet=quiet)
    if (files := _unchosen(model, terminal)) is not None:
        if as_json:
            results().record(files.to_json())
        else:
            results().text(repository_table(files))
        return
    with terminal.working() as progress:
        inspected = inspect_model(model, progress)
    for note in inspected.notes:
        terminal.note(note)
    headers = inspected.headers
    embeds = embedding_shape(headers[0])
    if embeds is None:
        memory = fit_report(headers)
    else:
        memory = plan_embedder(ModelFiles.of_headers(headers), embeds, Config(), measured=False).fit()
    sight = projector_facts(inspected)
    facts = {
        "name": model,
        "here": inspected.path is not None,
        "path": str(inspected.path) if inspected.path else None,
        **describe(headers, memory=memory, approximate=inspected.approximate),
        "projector": None if sight is None else sight.to_json(),
        "drafters": drafters_of(inspected),
        "plan": None if embeds else _plan(model, headers[0].fingerprint),
    }
    entry = entry_for(model)
    if entry is not None:
        facts["catalog"] = entry.to_json()
    if as_json:
        results().record(facts)
        return
    where = facts["path"] or f"on the Hub, not here; edgespec models pull {model}"
    rows = [("model", model), ("path", where), *as_lines(facts)]
    if entry is not None:
        rows += _catalog_rows(entry)
    for number, drafter in enumerate(facts["drafters"]):
        rows.append(("drafters" if number == 0 else "", f"{drafter['name']}: {drafter['why']}"))
    if not facts["drafters"] and not facts["pooling"]:
        own = (entry is not None and entry.mtp == "inside") or (facts["mtp_layers"] and not facts["mtp_file"])
        known = "the model's own MTP layer" if own and not facts["mtp_fault"] else "none known"
        rows.append(("drafters", f"{known}; edgespec draft make {model}"))
    if facts["plan"]:
        speed, drafter = facts["plan"]["tokens_per_second"], facts["plan"]["drafter"]
        how = "plain" if drafter == "none" else f"with {drafter}"
        rows.append(("speed", f"about {readable_rate(speed, digits=2)} {how}; more: edgespec plan {model}"))
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    results().text("".join(f"{line}\n" for line in in_columns(rows, width)))


def _unchosen(model: str, terminal: Terminal, *, refresh: bool = False) -> RepositoryPlan | None:
    """The files of a repository on the Hub of which none is chosen; None if there is no choice to make.

    A name of the catalog means its usual file, and a repository with a single file here means that one.
    """
    from edgespec.models.hub import catalog
    from edgespec.models.hub.pull import pull
    from edgespec.planning.report.repository import plan_repository, repository_of

    name = repository_of(model)
    if name is None or catalog.named(model) is not None:
        return None
    try:
        pull(name, fetch=False, refresh=refresh)
    except (HubError, UsageError):
        with terminal.working() as progress:
            return plan_repository(name, Config(), progress)
    return None


def _catalog_rows(entry: CatalogEntry) -> list[tuple[str, str]]:
    """The catalog's facts that are not in the model's file."""
    rows = [("licence", entry.licence)]
    if entry.repo:
        rows.append(("repository", f"https://huggingface.co/{entry.repo}"))
    if entry.mtp:
        inside = "in the model's file, if that was made with it"
        rows.append(("MTP layer", inside if entry.mtp == "inside" else "in a file of its own; not used yet"))
    if not entry.verified:
        rows.append(("facts from", f"{entry.source} (not all verified)"))
    return rows


def _plan(model: str, fingerprint: str) -> dict[str, Any] | None:
    """The plan for the model here, if its passes were measured."""
    from edgespec.errors import MemoryLimitError
    from edgespec.planning.report.model_report import plan_for
    from edgespec.profiles.store import ProfileStore

    store = ProfileStore()
    if not any(store.all_passes(model=fingerprint)):
        return None
    try:
        found = plan_for(Config.of(model=model), no_progress, store)
    except MemoryLimitError:
        return None
    return found.chosen.to_json()


@app.command(epilog="Example:\n\nedgespec models pair llama3.3-70b llama3.2-1b")
def pair(
    target: Annotated[str, typer.Argument(help="The large model.", metavar="TARGET")],
    drafter: Annotated[str, typer.Argument(help="The small model.", metavar="DRAFTER")],
    measure: Annotated[
        bool, option(None, "--measure/--no-measure", "Measure how often the two models agree.")
    ] = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a drafter fits a target, measure their agreement, and register the pair."""
    from edgespec.drafting.pair_check import examine_pair

    terminal = Terminal(quiet=quiet)
    with terminal.working(long=True) as progress:
        found = examine_pair(target, drafter, measure_agreement=measure, on_progress=progress)
    if as_json:
        results().record(found.to_json())
    else:
        rows = [(check.name, "same" if check.passed else "differ", check.detail) for check in found.checks]
        results().text(table((), rows))
        results().text(found.conclusion + "\n")
    if not found.fits:
        raise typer.Exit(1)


@app.command(epilog="Example:\n\nedgespec models remove llama3.2-3b")
def remove(
    model: Model,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove a model, its pairs, and the files EdgeSpec made for it."""
    from edgespec.base.units import readable
    from edgespec.cli.removal import plan_removal
    from edgespec.models.hub import catalog

    terminal = Terminal()
    # A folder with one model opens it, but whoever removes a folder may mean all of it.
    folder = expanded(model)
    path = folder if holds(folder.is_dir) else catalog.find(model, fetch=False)
    removal = plan_removal(path)
    if not as_json:
        for sentence in removal.kept:
            terminal.note(sentence)
        for pair in removal.pairs:
            terminal.note(f"{'pair':<12}{'':>11}  {pair.path.name} drafts for {pair.target_name}: forgotten")
    if (removal.files or removal.pairs) and not yes:
        for file in removal.files:
            if file.n_bytes:
                terminal.note(f"{file.kind:<12}{readable(file.n_bytes):>11}  {file.path}")
        confirm_removal(f"Remove {readable(removal.n_bytes)}?")
    freed = removal.carry_out()
    if as_json:
        results().record(
            {
                "freed_bytes": freed,
                "removed": [file.to_json() for file in removal.files],
                "forgotten": [pair.to_json() for pair in removal.pairs],
                "kept": removal.kept,
            }
        )
    else:
        nothing = not (removal.files or removal.pairs)
        results().text("Nothing removed.\n" if nothing else f"{freed} bytes freed ({readable(freed)}).\n")
