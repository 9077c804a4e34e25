"""`dflash cache`: look at the compile caches of a store, compare, check, pin, prune and build them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dflash_core.compile_fingerprint import Fingerprint, GraphSet, differences, environment_here, graph_set
from dflash_core.compile_watch import FIXED_VARIABLES
from dflash_core.configuration import UserError
from storage import compile_cache, compile_retention
from storage.compile_archive import RejectedArtifact
from storage.compile_cache import Version
from storage.compile_session import CompileCacheConfig
from storage.objects import Store, open_store

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Versions of the compile cache. URI: folder or bucket of the compile caches, or of the data sets.",
)

Uri = Annotated[str, typer.Argument(metavar="URI", help="Folder, file:///folder or s3://bucket/prefix.")]
Name = Annotated[str, typer.Argument(metavar="VERSION", help="As `list` prints it; a beginning is enough.")]
MIB = 1 << 20


def open_caches(uri: str) -> Store:
    """Open the compile caches at an address, or those beside the data sets there. Raises UserError."""
    store = open_store(uri)
    for place in (store, store.child("compile-cache")):
        if any(next(place.list(f"{kept}/"), None) for kept in (compile_cache.VERSIONS, compile_cache.PINS)):
            return place
    raise UserError(f"no compile cache in {uri}: name the folder or bucket of one, or that of the data sets")


@app.command("list")
def list_(uri: Uri, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List all versions, newest first; `*` marks the one that a start restores."""
    versions, rejected = compile_cache.list_versions(open_caches(uri))
    if as_json:
        typer.echo(json.dumps([describe(version) for version in versions], indent=1))
        return
    for version in versions:
        manifest, place = version.manifest, version.manifest.fingerprint
        pins = f"  pinned by {', '.join(version.pins)}" if version.pins else ""
        typer.echo(
            f"{'*' if version.current else ' '} {version.name}  {manifest.created[:16]}  "
            f"{manifest.archive_bytes / MIB:7.1f} MiB  {place.graphs.name}  {place.environment.hardware}  "
            f"{place.environment.software}{pins}"
        )
    for key, reason in rejected.items():
        typer.echo(f"! {key}: {reason}")


@app.command()
def show(
    uri: Uri,
    version: Name,
    members: Annotated[bool, typer.Option(help="Also list every file of it.")] = False,
) -> None:
    """Show one version as JSON: what it was made with and what is in it."""
    found = compile_cache.find_version(open_caches(uri), version)
    values = describe(found) | {"fingerprint": found.manifest.fingerprint.model_dump(mode="json")}
    if members:
        values["members"] = [member.model_dump(mode="json") for member in found.manifest.members]
    typer.echo(json.dumps(values, indent=1))


@app.command()
def verify(uri: Uri, version: Annotated[str | None, typer.Argument(metavar="[VERSION]")] = None) -> None:
    """Download versions (all by default) and check every digest, and signatures where a key is set."""
    store = open_caches(uri)
    versions, rejected = compile_cache.list_versions(store)
    if version is not None:
        versions, rejected = [compile_cache.find_version(store, version)], {}
    key = CompileCacheConfig().signing_key
    for found in versions:
        try:
            compile_cache.verify(store, found, key)
        except RejectedArtifact as error:
            rejected[found.name] = str(error)
        else:
            signed = "digests and signature" if key else "digests"
            typer.echo(f"{found.name}: {len(found.manifest.members)} files, {signed} are right")
    for name, reason in rejected.items():
        typer.echo(f"{name}: rejected: {reason}")
    if rejected:
        raise typer.Exit(1)


@app.command()
def diff(
    uri: Uri,
    version: Name,
    other: Annotated[str | None, typer.Argument(metavar="[OTHER]")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="YAML file of the run that is to start here.", metavar="FILE"),
    ] = None,
) -> None:
    """Say in words how a version differs from another one, or from what a run on this machine would need.

    Without --config: a run on the GPUs here, else on one CPU rank, that sets no local_root.
    """
    if other is not None and config is not None:
        raise UserError("give either a second version or --config: two versions are compared as they are")
    store = open_caches(uri)
    theirs = compile_cache.find_version(store, version).manifest.fingerprint
    if other is None:
        ours = fingerprint_here(theirs.graphs, config)
    else:
        ours = compile_cache.find_version(store, other).manifest.fingerprint
    words = differences(theirs, ours)
    for line in words:
        typer.echo(line)
    if not words:
        typer.echo("no difference: it fits")


@app.command()
def prune(
    uri: Uri,
    versions: Annotated[int, typer.Option(help="Versions to keep of each fingerprint.")] = 2,
    fingerprints: Annotated[int, typer.Option(help="Fingerprints to keep of each graph set and GPU.")] = 4,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
) -> None:
    """Remove old versions. Pinned ones stay, and what may belong to a publisher at work."""
    removed = compile_retention.prune(
        open_caches(uri), versions=versions, fingerprints=fingerprints, dry_run=dry_run
    )
    for key, reason in removed.items():
        typer.echo(f"{'would remove' if dry_run else 'removed'} {key}: {reason}")
    typer.echo(f"{len(removed)} objects {'would go' if dry_run else 'removed'}")


@app.command()
def pin(
    uri: Uri,
    version: Name,
    name: Annotated[str, typer.Option("--as", help="Name of the pin, such as that of a run.")],
) -> None:
    """Keep a version until it is unpinned."""
    compile_retention.check_pin_name(name)
    store = open_caches(uri)
    found = compile_cache.find_version(store, version)
    compile_retention.pin(store, found, name)
    typer.echo(f"{found.name} is pinned as {name}")


@app.command()
def unpin(uri: Uri, name: Annotated[str, typer.Option("--as", help="Name of the pin.")]) -> None:
    """Let a pinned version go."""
    compile_retention.unpin(open_caches(uri), name)
    typer.echo(f"no version is pinned as {name} any more")


@app.command()
def build(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file of training.", metavar="FILE")],
    dataset: Annotated[
        str | None, typer.Option(help="For this data set instead; it need not be sealed.", metavar="URI")
    ] = None,
) -> None:
    """Compile a training configuration's graphs once and publish them; or prove that a version fits."""
    from flows.build_cache import build_for_training
    from flows.config import TrainConfig, load_config

    settings = load_config(TrainConfig, config)
    if dataset is not None:
        settings = settings.model_copy(update={"dataset": dataset})
    summary = build_for_training(
        settings,
        lambda message: typer.echo(message["text"], err=True) if message["kind"] == "stderr" else None,
    )
    typer.echo(json.dumps(summary, indent=1))
    if not summary["nothing_compiled"] and summary["version"] is None:
        raise UserError("the artifact was built but could not be published; see the notes above")


def fingerprint_here(graphs: GraphSet, config: Path | None) -> Fingerprint:
    """Return what a run on this machine would look for that compiles graphs of these settings.

    `config` says which devices and which local root that run has. Raises UserError.
    """
    from dflash_core.compile_graphs import COMPILED_IN_EXTRACTION, COMPILED_IN_TRAINING, sources_of

    captures = graphs.name.startswith("capture-")
    variables, cache = (_capture_here if captures else _training_here)(config)
    if cache is None:
        raise UserError(f"{config} has cache: null, so its run looks for no version")
    sources = sources_of(COMPILED_IN_EXTRACTION if captures else COMPILED_IN_TRAINING)
    return Fingerprint(
        environment=environment_here({**FIXED_VARIABLES, **variables}),
        graphs=graph_set(graphs.name, graphs.settings, sources),
        local_root=cache.root,
    )


def _training_here(config: Path | None) -> tuple[dict[str, str], CompileCacheConfig | None]:
    """Return the variables of a training's ranks and the configuration of its compile cache."""
    from flows.config import TrainConfig, load_config
    from flows.extract_steps import worker_slots
    from flows.ranks import rank_environment

    settings = None if config is None else load_config(TrainConfig, config)
    gpus = [slot for slot in worker_slots(settings.gpus if settings else ()) if slot != "cpu"]
    ranks = len(gpus) or (settings.cpu_ranks if settings else 1)
    return rank_environment(gpus, ranks), settings.cache if settings else CompileCacheConfig()


def _capture_here(config: Path | None) -> tuple[dict[str, str], CompileCacheConfig | None]:
    """Return the variables of an extraction's workers and the configuration of its compile cache."""
    from flows.config import ExtractConfig, load_config
    from flows.devices import visible_gpus
    from flows.extract_steps import capture_slots, worker_slots

    settings = None if config is None else load_config(ExtractConfig, config)
    slots = worker_slots(()) if settings is None else capture_slots(settings)
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus(slots[0]))}
    return variables, settings.cache if settings else CompileCacheConfig()


def describe(version: Version) -> dict[str, object]:
    """Return what `list` and `show` say of a version."""
    manifest, place = version.manifest, version.manifest.fingerprint
    return {
        "version": version.name,
        "current": version.current,
        "pins": list(version.pins),
        "created": manifest.created,
        "created_by": manifest.created_by,
        "graph_set": place.graphs.name,
        "hardware": place.environment.hardware,
        "software": place.environment.software,
        "archive": f"{version.folder}/{manifest.archive_name}",
        "archive_bytes": manifest.archive_bytes,
        "unpacked_bytes": manifest.unpacked_bytes,
        "files": len(manifest.members),
        "cold_seconds": manifest.cold_seconds,
    }
