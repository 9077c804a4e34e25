"""One conversation with the target: its cache, the taps of its tokens, a way back from rejected drafts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from dflash_core.configuration import UserError


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Find the text decoder's layers in one of transformers' models, whatever wraps it.

    Raises UserError when no module list named `layers` belongs to the language part.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] == "layers"
        and isinstance(module, nn.ModuleList)
        and not any(part in name for part in ("visual", "vision", "audio", "mtp"))
    ]
    if not found:
        raise UserError(
            f"{type(model).__name__} has no decoder layers that could be tapped; is it a text model?"
        )
    return min(found, key=lambda item: item[0].count("."))[1]


@dataclass
class _LinearState:
    """Copy of one recurrent layer's states; transformers overwrites the originals in place."""

    attributes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: Any) -> _LinearState:
        def copied(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.clone()
            return {key: copied(item) for key, item in value.items()} if isinstance(value, dict) else value

        return cls(
            {name: copied(value) for name, value in vars(layer).items() if name not in ("keys", "values")}
        )

    def restore(self, layer: Any) -> None:
        vars(layer).update(self.attributes)


class CachedTarget:
    """A causal language model with its cache and taps, for one sequence of tokens at a time.

    `extend` runs new tokens and keeps their state provisional; `commit` keeps the first of them and forgets
    the rest. Full-attention layers are rewound by cropping keys and values; layers with a recurrent state
    (gated delta net) by restoring the state from before `extend` and running the kept tokens again, so that
    the state is the one that plain decoding would have.
    """

    def __init__(self, model: nn.Module, tap_layer_ids: Sequence[int] = ()) -> None:
        """Hook the outputs of decoder layers `tap_layer_ids` (counted from 0) of transformers' causal
        `model`.

        Raises UserError for a layer id that the model does not have.
        """
        self.model: Any = model
        self.tap_layer_ids = tuple(tap_layer_ids)
        layers = decoder_layers(model)
        if wrong := [i for i in self.tap_layer_ids if not 0 <= i < len(layers)]:
            raise UserError(
                f"tap layer ids {wrong} do not exist: the target has layers 0 to {len(layers) - 1}"
            )
        self._taps: dict[int, torch.Tensor] = {}
        self._hooks = [layers[i].register_forward_hook(self._keeper(i)) for i in self.tap_layer_ids]
        model_config: Any = model.config
        text_config = model_config.get_text_config()
        self.hybrid = "linear_attention" in (getattr(text_config, "layer_types", None) or ())
        self._text_config = text_config
        # transformers renames this argument of every model; both names are in use.
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "past_key_values" if "past_key_values" in names else "cache"
        self.calls = 0
        """Forward passes of the target so far (those that replay kept tokens are counted in `replays`)."""
        self.replays = 0
        self.start()

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    def close(self) -> None:
        """Take the hooks off the model; the object is of no use afterwards."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> CachedTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Forget the conversation: an empty cache."""
        # Without a configuration every layer keeps all keys, so that sliding layers can be cropped as well;
        # the window is in the mask. Recurrent layers need the configuration to get a place for their state.
        self._cache = DynamicCache(config=self._text_config) if self.hybrid else DynamicCache()
        self._provisional: torch.Tensor | None = None
        self._states: list[_LinearState | None] = []
        self.length = 0
        """Committed tokens."""

    @torch.inference_mode()
    def extend(
        self, token_ids_T: torch.Tensor, *, logits_to_keep: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `token_ids_T` (int64 [T]) after the committed tokens.

        Returns logits [T, V] (only the last `logits_to_keep` rows if that is not 0) and the concatenated taps
        [T, L*D] in the order of the ids (an empty [T, 0] without taps). Raises RuntimeError when the tokens
        of the last `extend` have not been committed.
        """
        if self._provisional is not None:
            raise RuntimeError("extend was called twice without commit")
        if self.hybrid:
            self._states = [_LinearState.of(x) if self._linear(x) else None for x in self._cache.layers]
        logits_TV = self._forward(token_ids_T, logits_to_keep)
        self._provisional = token_ids_T
        taps = [self._taps.pop(i)[0] for i in self.tap_layer_ids]
        taps_TC = torch.cat(taps, dim=-1) if taps else logits_TV.new_empty(len(token_ids_T), 0)
        self.calls += 1
        return logits_TV, taps_TC

    @torch.inference_mode()
    def commit(self, count: int) -> None:
        """Keep the first `count` tokens of the last `extend`; the rest might as well never have been run."""
        if self._provisional is None or not 0 <= count <= len(self._provisional):
            raise RuntimeError(f"cannot commit {count} tokens of the last extend")
        kept, rejected = self._provisional[:count], len(self._provisional) - count
        self._provisional = None
        if rejected and self.hybrid:
            self._rewind_hybrid(kept, rejected)
        elif rejected:
            self._cache.crop(-rejected)
        self.length += count
        self._states = []

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's input embeddings, any shape [...] -> [..., D]."""
        return self.model.get_input_embeddings()(token_ids)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's output head, [..., D] -> [..., V]."""
        return self.model.get_output_embeddings()(hidden)

    def _forward(self, token_ids_T: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
        output = self.model(
            input_ids=token_ids_T[None],
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{self._cache_argument: self._cache},
        )
        return output.logits[0]

    def _rewind_hybrid(self, kept_T: torch.Tensor, rejected: int) -> None:
        """Go back to before the last `extend`, then run the kept tokens again."""
        layers: list[Any] = self._cache.layers
        for layer, state in zip(layers, self._states, strict=True):
            if state is None:
                layer.crop(-(rejected + len(kept_T)))
            else:
                state.restore(layer)
        if len(kept_T):
            self._forward(kept_T, 1)
            self._taps.clear()
            self.replays += 1

    def _keeper(self, layer_id: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            self._taps[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep

    @staticmethod
    def _linear(cache_layer: Any) -> bool:
        return hasattr(cache_layer, "recurrent_states")
