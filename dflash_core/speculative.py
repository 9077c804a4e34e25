"""Speculative decoding: a drafter proposes, the target verifies a block a call; the text is the target's."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from dflash_core.cached_target import CachedTarget
from dflash_core.configuration import UserError
from dflash_core.drafter import ContextCache, Drafter

DraftChoice = Literal["argmax", "sample"]


class BlockProposer(Protocol):
    """What speculative decoding needs of a drafter; `DrafterProposer` wraps the real one."""

    block_size: int
    """K: the last committed token and K-1 drafts."""

    def start(self) -> None:
        """Forget the conversation."""

    def observe(self, taps_TC: torch.Tensor) -> None:
        """Take in the concatenated taps [T, L*D] of the next T committed tokens."""

    def propose(self, anchor_id: torch.Tensor) -> torch.Tensor:
        """Draft after `anchor_id` (int64 scalar), the committed token not yet observed: logits [K-1, V]."""


class DrafterProposer:
    """A trained drafter beside its target: keeps the context's keys and values, borrows embedding, head."""

    def __init__(self, drafter: Drafter, target: CachedTarget) -> None:
        """Raises UserError when `target` is tapped at other layers or has another width or vocabulary."""
        config = drafter.config
        vocab_size, hidden_size = target.model.get_input_embeddings().weight.shape
        if target.tap_layer_ids != config.tap_layer_ids:
            raise UserError(f"the drafter reads taps {config.tap_layer_ids}, not {target.tap_layer_ids}")
        if (vocab_size, hidden_size) != (config.vocab_size, config.hidden_size):
            raise UserError(
                f"the drafter is for a target with {config.vocab_size} embeddings of width "
                f"{config.hidden_size}, but this one has {vocab_size} of width {hidden_size}"
            )
        self.drafter, self.target, self.block_size = drafter, target, config.block_size
        mask_ids_K = torch.full((config.block_size - 1,), config.mask_token_id, device=target.device)
        self._mask_KD = target.embed(mask_ids_K).detach()
        self.start()

    def start(self) -> None:
        """Forget the conversation."""
        self._cache = ContextCache()

    @torch.inference_mode()
    def observe(self, taps_TC: torch.Tensor) -> None:
        """Take in the concatenated taps [T, L*D] of the next T committed tokens."""
        self.drafter.extend(self._cache, taps_TC)

    @torch.inference_mode()
    def propose(self, anchor_id: torch.Tensor) -> torch.Tensor:
        """Draft after `anchor_id` (int64 scalar), the committed token not yet observed: logits [K-1, V]."""
        input_KD = torch.cat([self.target.embed(anchor_id[None]), self._mask_KD])
        hidden_KD = self.drafter.draft(self._cache, input_KD)[1:]
        return self.target.head(hidden_KD.to(input_KD.dtype))


CANDIDATES = 4
"""So many are kept for each token: where floating point leaves two equal, a third one is often near."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The tokens that the target ranked highest for one place, best first."""

    tokens: tuple[int, ...]
    logits: tuple[float, ...]

    def logit(self, token: int | None) -> float | None:
        """Logit of a token, None when it is not among the candidates."""
        return dict(zip(self.tokens, self.logits, strict=True)).get(token) if token is not None else None


@dataclass(kw_only=True)
class Generation:
    """What was generated for one prompt, and what it took."""

    token_ids: list[int] = field(default_factory=list)
    """New tokens only; ends with the stop token if one was met."""
    accepted_per_call: list[int] = field(default_factory=list)
    """Drafts accepted by each verifying call, 0 to block_size-1; drafts after a stop token do not count."""
    committed_per_call: list[int] = field(default_factory=list)
    """Tokens each verifying call brought: accepted + 1, or accepted when the last of them is a stop token."""
    target_calls: int = 0
    """Forward passes of the target after the prompt's own."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    """From the first new token on, the drafter's time included."""
    candidates: list[Candidates] = field(default_factory=list)
    """One entry a new token when decoding greedily: what shows ties of floating point."""


def greedy_generate(
    target: CachedTarget, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int] = ()
) -> Generation:
    """Decode one token a call with argmax: the text that speculative decoding must reproduce."""
    out = Generation()
    logits_V, _ = _prefill(target, prompt_ids, out)
    started = _clock(target.device)
    next_id = _take_greedy(logits_V[None], out, count=1)
    while not _finished(out, max_new_tokens, stop_ids):
        logits_TV, _ = target.extend(next_id)
        target.commit(1)
        out.target_calls += 1
        next_id = _take_greedy(logits_TV, out, count=1)
    out.decode_seconds = _clock(target.device) - started
    return out


def speculative_generate(
    target: CachedTarget,
    proposer: BlockProposer,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    drafts: DraftChoice = "argmax",
    generator: torch.Generator | None = None,
) -> Generation:
    """Decode with drafted blocks, one target call a block.

    `temperature` 0 gives the target's greedy text. Above 0 every token has exactly the distribution
    softmax(logits / temperature) of the target, whatever the drafter proposes (see `accept_or_replace`);
    `drafts` says whether the drafter's argmax is proposed, a point mass, or a sample at the same temperature.
    Raises UserError for an empty prompt or a negative temperature.
    """
    if temperature < 0:
        raise UserError(f"temperature is {temperature}; it must be 0 (greedy) or more")
    out = Generation()
    logits_V, taps_TC = _prefill(target, prompt_ids, out)
    proposer.start()
    proposer.observe(taps_TC)
    started = _clock(target.device)
    if temperature == 0:
        anchor_id = _take_greedy(logits_V[None], out, count=1)
    else:
        anchor_id = _draw(_probabilities(logits_V[None], temperature), generator)
        out.token_ids.append(int(anchor_id))
    while not _finished(out, max_new_tokens, stop_ids):
        draft_logits_KV = proposer.propose(anchor_id[0])
        if temperature == 0:
            draft_K = draft_logits_KV.argmax(-1)
            logits_KV, taps_KC = target.extend(torch.cat([anchor_id, draft_K]))
            accepted = _leading_match(draft_K, logits_KV[:-1].argmax(-1))
            new_ids = _take_greedy(logits_KV[: accepted + 1], out, count=accepted + 1)
        else:
            draft_K, proposal_KV = _draw_drafts(draft_logits_KV, temperature, drafts, generator)
            logits_KV, taps_KC = target.extend(torch.cat([anchor_id, draft_K]))
            wanted_KV = _probabilities(logits_KV, temperature)
            accepted, own_id = accept_or_replace(draft_K, proposal_KV, wanted_KV, generator)
            new_ids = torch.cat([draft_K[:accepted], own_id])
            out.token_ids.extend(new_ids.tolist())
        target.commit(accepted + 1)
        proposer.observe(taps_KC[: accepted + 1])
        anchor_id = new_ids[-1:]
        _count(out, accepted, stop_ids)
    out.decode_seconds = _clock(target.device) - started
    del out.token_ids[max_new_tokens:], out.candidates[max_new_tokens:]
    return out


def accept_or_replace(
    draft_K: torch.Tensor,
    proposal_KV: torch.Tensor,
    wanted_KV: torch.Tensor,
    generator: torch.Generator | None = None,
) -> tuple[int, torch.Tensor]:
    """Accept a leading part of the drafts and draw one token after it; all follow the wanted distribution.

    `draft_K` [K-1] was drawn from the rows of `proposal_KV` [K-1, V]; `wanted_KV` [K, V] is the target's
    distribution. Returns the number of accepted drafts and the token after them (int64 [1]). Leviathan et al.
    2023 (arXiv 2211.17192), algorithm 1: accept x with probability min(1, p(x)/q(x)), else draw from max(0, p
    - q), normalised.
    """
    p_K = wanted_KV[:-1].gather(-1, draft_K[:, None])[:, 0]
    q_K = proposal_KV.gather(-1, draft_K[:, None])[:, 0]
    chance_K = torch.rand(q_K.shape, generator=generator, device=q_K.device, dtype=q_K.dtype)
    accepted = int((chance_K * q_K < p_K).int().cumprod(0).sum())
    if accepted == len(draft_K):
        return accepted, _draw(wanted_KV[-1:], generator)
    rest_V = (wanted_KV[accepted] - proposal_KV[accepted]).clamp_min(0)
    if not bool(rest_V.sum() > 0):  # p and q agree up to rounding, and the draft lost by an ulp
        rest_V = wanted_KV[accepted]
    return accepted, _draw(rest_V[None], generator)


def _prefill(
    target: CachedTarget, prompt_ids: Sequence[int], out: Generation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the prompt: logits [V] for the first new token, taps [T, L*D] of the prompt."""
    if len(prompt_ids) == 0:
        raise UserError("the prompt is empty: there is no token to continue")
    started = _clock(target.device)
    target.start()
    ids_T = torch.as_tensor(prompt_ids, dtype=torch.int64, device=target.device)
    logits_TV, taps_TC = target.extend(ids_T, logits_to_keep=1)
    target.commit(len(ids_T))
    out.prefill_seconds = _clock(target.device) - started
    return logits_TV[-1], taps_TC


def _take_greedy(logits_TV: torch.Tensor, out: Generation, *, count: int) -> torch.Tensor:
    """Append the argmax of each row to `out`; returns them (int64 [T])."""
    ids_T = logits_TV[:count].argmax(-1)
    values, indices = logits_TV[:count].float().topk(min(CANDIDATES, logits_TV.shape[-1]), dim=-1)
    out.token_ids.extend(ids_T.tolist())
    for tokens, logits in zip(indices.tolist(), values.tolist(), strict=True):
        out.candidates.append(Candidates(tokens=tuple(tokens), logits=tuple(logits)))
    return ids_T


def _leading_match(draft_K: torch.Tensor, target_K: torch.Tensor) -> int:
    return int((draft_K == target_K).int().cumprod(0).sum())


def _count(out: Generation, accepted: int, stop_ids: Collection[int]) -> None:
    """Note one verified block, cutting off what follows a stop token."""
    out.target_calls += 1
    block = out.token_ids[-(accepted + 1) :]
    stop = next((i for i, token in enumerate(block) if token in stop_ids), None)
    if stop is not None and stop < accepted:
        excess = accepted - stop
        del out.token_ids[-excess:], out.candidates[-excess:]
        out.accepted_per_call.append(stop + 1)
        out.committed_per_call.append(stop + 1)
    else:
        out.accepted_per_call.append(accepted)
        out.committed_per_call.append(accepted + 1)


def _finished(out: Generation, max_new_tokens: int, stop_ids: Collection[int]) -> bool:
    return len(out.token_ids) >= max_new_tokens or out.token_ids[-1] in stop_ids


def _draw_drafts(
    logits_KV: torch.Tensor, temperature: float, drafts: DraftChoice, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts [K-1] and the distribution [K-1, V] that they were drawn from (a point mass for "argmax")."""
    if drafts == "sample":
        proposal_KV = _probabilities(logits_KV, temperature)
        return _draw(proposal_KV, generator), proposal_KV
    draft_K = logits_KV.argmax(-1)
    return draft_K, torch.nn.functional.one_hot(draft_K, logits_KV.shape[-1]).float()


def _probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.softmax(logits.float() / temperature, dim=-1)


def _draw(probabilities_TV: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    return torch.multinomial(probabilities_TV, 1, generator=generator)[:, 0]


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
