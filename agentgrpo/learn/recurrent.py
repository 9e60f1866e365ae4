"""Prefix trees through recurrent layers: gated delta nets, short convolutions, Mamba 2.

(Qwen3.5, LFM2, Granite 4.) The layer processes a tree run by run, each run from the state of its
parent at the branch; autograd sums the gradients of that state over the branches. So a shared
prefix is computed once, and a branch gets exactly the values that it would get in a row of its own.

The layers are transformers' own and unchanged: a run is processed like the next chunk of a prompt
in generation, with a State in place of the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentgrpo.learn.attention import Tree

LAYER_TYPES = {"linear_attention", "conv"}
"""Recurrent entries of transformers' layer_types."""
MIXERS = {
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
    "Lfm2ShortConv",
    "Lfm2MoeShortConv",
    "GraniteMoeHybridMambaLayer",
    "BambaMixer",
}
"""Classes that accept a state. All except those of MoE models are tested against unpacked rows."""


def mixers_in(layer: nn.Module) -> list[nn.Module]:
    """The recurrent parts of a decoder layer."""
    return [module for module in layer.children() if type(module).__name__ in MIXERS]


@dataclass
class State:
    """A layer's state after a prefix, with the interface of a transformers Cache of one layer.

    Never modified in place: several branches start from it, and the backward pass reads it.
    """

    conv: Tensor | None = None
    """[1, channels, tokens]: the last inputs of the convolution, at least its kernel size."""
    recurrent: Tensor | None = None

    record_past = True
    """Tells the layer not to update the convolution's inputs in place."""

    @property
    def layers(self) -> State:
        return self

    def __getitem__(self, layer_idx: int) -> State:
        return self

    @property
    def conv_states(self) -> tuple[Tensor | None]:
        return (self.conv,)

    @property
    def recurrent_states(self) -> tuple[Tensor | None]:
        return (self.recurrent,)

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return self.conv is not None

    def update_conv_state(self, new: Tensor, layer_idx: int, *, conv_kernel_size: int) -> Tensor:
        """Previous and new inputs, concatenated; the layer drops the excess."""
        inputs = new if self.conv is None else torch.cat([self.conv, new], dim=-1)
        self.conv = inputs[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(self, new: Tensor, layer_idx: int) -> Tensor:
        self.recurrent = new
        return new


def take_trees(mixer: nn.Module) -> None:
    """Let a mixer accept a Tree in place of its padding mask."""
    original: Callable[..., Tensor] = mixer.forward
    parameters = inspect.signature(original).parameters
    state_argument = "cache_params" if "cache_params" in parameters else "past_key_values"

    def forward(hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        if not isinstance(attention_mask, Tree):
            return original(hidden_states, attention_mask=attention_mask, **kwargs)
        return _by_run(
            lambda part, state: original(part, **{state_argument: state}),
            hidden_states,
            attention_mask,
        )

    mixer.forward = forward


def _by_run(mix: Callable[[Tensor, State], Tensor], hidden: Tensor, tree: Tree) -> Tensor:
    """[1, T, H] from [1, T, H], each run after its parent."""
    states: dict[int, tuple[State, int]] = {0: (State(), 0)}
    """By the end of a run: its state, and how many of its last tokens the state lacks."""
    outputs = []
    for run in tree.runs:
        parent_end = run.path[-1][1] if run.path else 0
        state, unseen = states[parent_end]
        state = State(state.conv, state.recurrent)
        part = torch.cat(
            [hidden[:, parent_end - unseen : parent_end], hidden[:, run.start : run.end]], 1
        )
        count = part.shape[1]
        if count == 1 and state.conv is not None:
            # transformers treats one token after a state as decoding, which updates in place. So
            # the token is repeated, its output is the first, and its children process it again
            states[run.end] = (State(state.conv, state.recurrent), 1)
            part = part.expand(-1, 2, -1)
        else:
            states[run.end] = (state, 0)
        outputs.append(mix(part, state)[:, unseen:count])
    return torch.cat(outputs, dim=1)
