"""The draft heads of MiMo-V2 a second time, in NumPy, on top of `tests/oracle.py`: no cache, no slots, no steps.

As the report tells it: head i at position t joins the trunk's hidden state of t, behind the final norm, with the token
i + 1 places ahead, and says what stands i + 2 places ahead. `chained` heads take their predecessor's state at t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.oracle import Array, Config, Tensors, attention_half, embed, feed_forward_half, gated_mlp, layers, norm


def trunk_hidden(config: Config, tensors: Tensors, token_ids: Sequence[int], *, normed: bool = True) -> Array:
    """[tokens, hidden]"""
    hidden = embed(config, tensors, token_ids)
    for layer in layers(config):
        hidden = hidden + attention_half(config, tensors, layer, hidden)
        hidden = hidden + feed_forward_half(config, tensors, layer, hidden)
    return norm(config, hidden, tensors["model.norm.weight"]) if normed else hidden


def head_states(config: Config, tensors: Tensors, index: int, hidden: Array, token_ids: Sequence[int]) -> Array:
    """States of head `index` [positions, hidden] from the hidden states [positions, hidden] that it is fed."""
    name = f"model.mtp.layers.{index}."
    ahead = embed(config, tensors, token_ids[index + 1 :])
    halves = [norm(config, ahead, tensors[name + "enorm.weight"])]
    halves.append(norm(config, hidden, tensors[name + "hnorm.weight"]))
    state = np.concatenate(halves, axis=-1) @ tensors[name + "eh_proj.weight"].T
    windowed = next(layer for layer in layers(config) if layer.window is not None)
    state = state + attention_half(config, tensors, replace(windowed, name=name), state)
    return state + gated_mlp(
        config, tensors, name + "mlp.", norm(config, state, tensors[name + "pre_mlp_layernorm.weight"])
    )


def drafts(
    config: Config,
    tensors: Tensors,
    token_ids: Sequence[int],
    heads: int,
    *,
    chained: bool = False,
    normed: bool = True,
) -> tuple[list[int], list[float]]:
    """What the heads guess behind `token_ids`, the last of which the trunk has not seen, and each guess's lead."""
    known = list(token_ids)
    fed = trunk_hidden(config, tensors, known[:-1], normed=normed)
    guesses, leads = [], []
    for index in range(heads):
        state = head_states(config, tensors, index, fed[: len(known) - 1 - index], known)
        last = norm(config, state[-1], tensors[f"model.mtp.layers.{index}.final_layernorm.weight"])
        logits = tensors["lm_head.weight"] @ last
        guesses.append(int(logits.argmax()))
        leads.append(float(np.diff(np.sort(logits)[-2:])[0]))
        known.append(guesses[-1])
        fed = state if chained else fed
    return guesses, leads
