"""Prefix trees through layers that carry a state from token to token.

Gated delta nets (Qwen3.5), short convolutions (LFM2), Mamba 2 (Granite 4). The layer computes a
tree run by run, each from the state that its parent left at the branch; autograd sums what the
branches ask of that state. So a shared prefix goes through such a layer once, and what a branch
computes is what it would compute in a row of its own.

The layers are transformers' own and unchanged: a run goes through one as the next part of a prompt
does in generation, with a state instead of its cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentgrpo.learn.attention import Tree

KINDS = {"linear_attention", "conv"}
"""Of layers with a state, in transformers' layer_types."""
MIXERS = {
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
    "Lfm2ShortConv",
    "Lfm2MoeShortConv",
    "GraniteMoeHybridMambaLayer",
    "BambaMixer",
}
"""The classes that can be given a state; all but those of MoE models are tested against rows."""


def mixers_in(layer: nn.Module) -> list[nn.Module]:
    """The parts of a decoder layer that a state goes through."""
    return [module for module in layer.children() if type(module).__name__ in MIXERS]


@dataclass
class State:
    """What a layer knows of the tokens before, instead of a transformers Cache of one layer.

    Never written to in place: several branches start from it, and the backward pass reads it.
    """

    conv: Tensor | None = None
    """[1, channels, tokens]: the last inputs of the convolution, at least as many as it reads."""
    recurrent: Tensor | None = None

    record_past = True
    """The layer must not update the convolution's inputs in place."""

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
        """The inputs before and the new ones; the layer drops what is too much."""
        whole = new if self.conv is None else torch.cat([self.conv, new], dim=-1)
        self.conv = whole[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, new: Tensor, layer_idx: int) -> Tensor:
        self.recurrent = new
        return new


def take_trees(mixer: nn.Module) -> None:
    """Let a mixer take a Tree where it takes a mask of padding."""
    plain: Callable[..., Tensor] = mixer.forward
    names = inspect.signature(plain).parameters
    cache = "cache_params" if "cache_params" in names else "past_key_values"

    def forward(hidden_states: Tensor, attention_mask: Any = None, **more: Any) -> Tensor:
        if not isinstance(attention_mask, Tree):
            return plain(hidden_states, attention_mask=attention_mask, **more)
        return _by_run(
            lambda part, state: plain(part, **{cache: state}), hidden_states, attention_mask
        )

    mixer.forward = forward


def _by_run(mix: Callable[[Tensor, State], Tensor], hidden: Tensor, tree: Tree) -> Tensor:
    """[1, T, H] from [1, T, H], each run after its parent."""
    left: dict[int, tuple[State, int]] = {0: (State(), 0)}
    """By where a run ends: the state, and how many of its last tokens the state has not seen."""
    outputs = []
    for run in tree.runs:
        before = run.path[-1][1] if run.path else 0
        state, unseen = left[before]
        state = State(state.conv, state.recurrent)
        part = torch.cat([hidden[:, before - unseen : before], hidden[:, run.start : run.end]], 1)
        count = part.shape[1]
        if count == 1 and state.conv is not None:
            # a lone token after a state is decoding to transformers, which writes in place: it
            # goes through twice, its output is the first, and its children begin with it
            left[run.end] = (State(state.conv, state.recurrent), 1)
            part = part.expand(-1, 2, -1)
        else:
            left[run.end] = (state, 0)
        outputs.append(mix(part, state)[:, unseen:count])
    return torch.cat(outputs, dim=1)
