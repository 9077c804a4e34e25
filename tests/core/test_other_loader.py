"""z-lab's own package loads our exported folder and drafts the same tokens (skipped where it is missing).

The package's console script has our name, so it is not installed beside ours but into a folder of its own:
`pip install --no-deps --target .venv/zlab dflash==0.1.0`, or name another folder in DFLASH_ZLAB.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.cached_target import CachedTarget
from dflash_core.drafter import Drafter
from dflash_core.export import export_drafter, load_exported
from dflash_core.speculative import DrafterProposer, speculative_generate
from tests.core.test_acceptance import PROMPT, overfitted
from tests.core.test_speculative import build
from tests.core.tiny_drafter import SPEC, tiny_drafter

FOLDER = Path(os.environ.get("DFLASH_ZLAB", Path(__file__).parents[2] / ".venv" / "zlab"))
SPEC_4 = SPEC.model_copy(update={"num_layers": 4})


@pytest.fixture
def zlab(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not (FOLDER / "dflash" / "model.py").is_file():
        pytest.skip(f"z-lab's dflash package is not in {FOLDER}")
    monkeypatch.syspath_prepend(str(FOLDER))
    import dflash.model as module

    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "dflash"]:
        del sys.modules[name]


class Recording(DrafterProposer):
    """Remembers what was drafted."""

    def start(self) -> None:
        super().start()
        self.drafts: list[list[int]] = []

    def propose(self, anchor_id: torch.Tensor) -> torch.Tensor:
        logits_KV = super().propose(anchor_id)
        self.drafts.append(logits_KV.argmax(-1).tolist())
        return logits_KV


def drafters() -> list[tuple[str, Drafter]]:
    sliding = tiny_drafter(target_num_layers=4, tap_layer_ids=(0, 2))
    full = tiny_drafter(target_num_layers=4, tap_layer_ids=(0, 2), layer_types=None, sliding_window=None)
    trained = overfitted("qwen3")[1]
    return [("sliding", sliding), ("full", full), ("trained", trained)]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_zlab_drafts_the_same_tokens(zlab: Any, tmp_path: Path, which: int) -> None:
    name, drafter = drafters()[which]
    folder = export_drafter(drafter, tmp_path / name, SPEC_4)
    theirs, info = zlab.DFlashDraftModel.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), f"z-lab's loader complains: {info}"
    config = drafter.config
    assert (theirs.block_size, theirs.mask_token_id) == (config.block_size, config.mask_token_id)
    assert tuple(theirs.target_layer_ids) == config.tap_layer_ids

    their_drafts: list[list[int]] = []
    usual = theirs.compute_logits

    def recorded(hidden: torch.Tensor, head: Any) -> torch.Tensor:
        logits = usual(hidden, head)
        their_drafts.append(logits[0].argmax(-1).tolist())
        return logits

    theirs.compute_logits = recorded
    model = build("qwen3")
    text = zlab.dflash_generate(
        theirs.eval(), model, torch.tensor([PROMPT]), max_new_tokens=40, stop_token_ids=None
    )

    ours = load_exported(folder, target=SPEC_4, dtype=torch.float32)
    target = CachedTarget(model, config.tap_layer_ids)
    proposer = Recording(ours, target)
    drafted = speculative_generate(target, proposer, PROMPT, max_new_tokens=40)
    assert PROMPT + drafted.token_ids == text[0].tolist()
    # At the very end z-lab shortens the block and we do not; the blocks before it must agree draft for draft.
    whole = [draft for draft in their_drafts if len(draft) == config.block_size - 1]
    assert len(whole) >= 5
    assert proposer.drafts[: len(whole)] == whole
    if name == "trained":
        assert drafted.accepted_per_call[:4] == [4] * 4
