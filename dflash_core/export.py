"""The folder that serving engines read: config.json and model.safetensors, written whole, read strictly."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from dflash_core.configuration import UserError
from dflash_core.drafter import ContextCache, Drafter, DrafterConfig
from dflash_core.export_config import (
    CONFIG_FILE,
    LONGEST_TEXT,
    PROVENANCE_KEY,
    WEIGHTS_FILE,
    config_of,
    drafter_config_of,
    read_config,
)
from dflash_core.records import TargetSpec
from dflash_core.target_identity import other_form_hint


def export_drafter(
    drafter: Drafter, folder: Path, target: TargetSpec, *, max_position_embeddings: int = LONGEST_TEXT
) -> Path:
    """Write `drafter` as a `DFlashDraftModel` folder in bf16 and return the folder.

    It appears whole or not at all, and only after it has been read back and gives the drafter's own states;
    an older drafter in its place is replaced. `max_position_embeddings` is the longest text that engines will
    draft for: at least the target's own. Raises UserError when the drafter is not for `target`, a weight is
    not finite, or something else than a drafter is in the way.
    """
    _check_belongs(drafter.config, target)
    tensors = {
        name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in drafter.named_parameters()
    }
    if bad := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise UserError(f"the drafter has values that are not finite in {', '.join(bad)}; it is not exported")
    if folder.exists() and not _is_drafter_folder(folder):
        raise UserError(f"{folder} exists and is not an exported drafter; choose another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        config = config_of(drafter.config, target, max_position_embeddings)
        (scratch / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, scratch / WEIGHTS_FILE, metadata={"format": "pt"})
        _check_round_trip(drafter.config, tensors, scratch)
        scratch.chmod(0o755)
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def load_exported(
    folder: Path,
    *,
    target: TargetSpec | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Drafter:
    """Read an exported folder, ours or another trainer's, and return the drafter computing in `dtype`.

    Nothing is guessed: UserError names at once every missing, unknown or misshapen tensor, every setting that
    our arithmetic does not have, another tap convention, and a `target` that the drafter was not trained for.
    """
    raw = read_config(folder)
    config = drafter_config_of(raw, folder)
    recorded = (raw.get(PROVENANCE_KEY) or {}).get("target")
    if target is not None:
        _check_belongs(config, target)
        if recorded is not None and (wrong := _other_target(TargetSpec(**recorded), target)):
            hint = other_form_hint(TargetSpec(**recorded), target)
            raise UserError(f"{folder} was trained for another target: {'; '.join(wrong)}{hint}")
    with torch.device("meta"):
        drafter = Drafter(config, compute_dtype=dtype)
    weights = folder / WEIGHTS_FILE
    if problems := tensor_problems(drafter, weights):
        raise UserError(f"{weights} is not the drafter that {CONFIG_FILE} describes: {'; '.join(problems)}")
    state = {name: tensor.to(dtype) for name, tensor in load_file(weights, device=str(device)).items()}
    drafter.load_state_dict(state, strict=True, assign=True)
    return drafter.eval().requires_grad_(False)


def check_shape(folder: Path, config: DrafterConfig) -> None:
    """Raise UserError unless an exported folder holds a drafter that training with `config` can start from;
    reads its configuration alone."""
    exported = drafter_config_of(read_config(folder), folder)
    differing = [
        f"{name}: {there} there, {here} here"
        for name in [*DrafterConfig.model_fields, "types"]
        if (there := getattr(exported, name)) != (here := getattr(config, name))
        and name != "layer_types"  # may be left out; "types" has the default filled in
    ]
    if differing:
        raise UserError(f"{folder} is a drafter of another shape: {'; '.join(differing)}")


def tensor_problems(drafter: Drafter, weights: Path) -> list[str]:
    """Compare a safetensors file with what `drafter` needs: one phrase a problem, none when it fits."""
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    try:
        with safe_open(weights, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            found = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        return [f"it cannot be read ({error})"]
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        shape, dtype = found[name]
        if shape != wanted[name]:
            problems.append(f"{name} has shape {list(shape)} instead of {list(wanted[name])}")
        if dtype not in ("BF16", "F32", "F16"):
            problems.append(f"{name} has type {dtype}")
    return problems


def _check_belongs(config: DrafterConfig, target: TargetSpec) -> None:
    pairs = {
        "hidden_size": (config.hidden_size, target.hidden_size),
        "vocab_size": (config.vocab_size, target.vocab_size),
        "number of layers": (config.target_num_layers, target.num_layers),
        "rope_theta": (config.rope_theta, target.rope_theta),
    }
    if wrong := [f"{name} {ours} against {its}" for name, (ours, its) in pairs.items() if ours != its]:
        raise UserError(f"the drafter is not for the target {target.name}: {', '.join(wrong)}")


def _other_target(recorded: TargetSpec, given: TargetSpec) -> list[str]:
    fields = ("weights_sha256", "tokenizer_sha256", "model_type")
    return [
        f"{field} {getattr(recorded, field)} ({recorded.name}) is not {getattr(given, field)} ({given.name})"
        for field in fields
        if getattr(recorded, field) != getattr(given, field)
    ]


def _check_round_trip(config: DrafterConfig, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Read the folder back and draft a block: its states must be bit for bit those of the weights kept."""
    with torch.device("meta"):
        kept = Drafter(config, compute_dtype=torch.bfloat16)
    kept.load_state_dict(dict(tensors), strict=True, assign=True)
    if not torch.equal(_drafted_states(kept), _drafted_states(load_exported(folder))):
        raise UserError(f"{folder} does not read back as the drafter that was written; is the disk sound?")


def _drafted_states(drafter: Drafter) -> torch.Tensor:
    """States [K, D] of one block after 12 made-up context tokens; any head gives its logits from them."""
    config = drafter.config
    chance = torch.Generator().manual_seed(0)
    taps_CE = torch.randn(12, config.hidden_size * len(config.tap_layer_ids), generator=chance)
    input_KD = torch.randn(config.block_size, config.hidden_size, generator=chance)
    cache = ContextCache()
    drafter.extend(cache, taps_CE.bfloat16())
    return drafter.draft(cache, input_KD.bfloat16())


def _is_drafter_folder(folder: Path) -> bool:
    try:
        read_config(folder)
    except UserError:
        return False
    return True


def _put_in_place(scratch: Path, folder: Path) -> None:
    """Make everything durable, then rename; an older drafter is moved aside first and removed last."""
    for path in (*scratch.iterdir(), scratch):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    aside = scratch.with_name(f"{scratch.name}-old")
    if folder.exists():
        folder.rename(aside)
    try:
        scratch.rename(folder)
    except OSError:
        if aside.exists():
            aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)
