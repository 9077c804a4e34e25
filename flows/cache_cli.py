"""`dflash cache`: look at the compile caches of a store, compare, check, pin, prune and build them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dflash_core.compile_fingerprint import Fingerprint, differences, environment_here
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
    """Open the compile caches at an address, or those beside the data sets there."""
    store = open_store(uri)
    if next(store.list(f"{compile_cache.VERSIONS}/"), None) is None:
        child = store.child("compile-cache")
        if next(child.list(f"{compile_cache.VERSIONS}/"), None) is not None:
            return child
    return store


@app.command("list")
def list_(uri: Uri, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List all versions, newest first; `*` marks the one that a start restores."""
    versions, rejected = compile_cache.list_versions(open_caches(uri))
    if as_json:
        typer.echo(json.dumps([describe(version) for version in versions], indent=1))
        return
    if not versions:
        typer.echo(f"no compile cache in {uri}")
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
    uri: Uri, version: Name, other: Annotated[str | None, typer.Argument(metavar="[OTHER]")] = None
) -> None:
    """Say in words how a version differs from another one, or from what this machine would need."""
    store = open_caches(uri)
    theirs = compile_cache.find_version(store, version).manifest.fingerprint
    if other is None:
        ours = Fingerprint(
            environment=environment_here(), graphs=theirs.graphs, local_root=CompileCacheConfig().root
        )
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
