"""How many FLOPs a step of a model needs. Parameters are counted in `jaxtrain.model.inventory`.

Model FLOPs follow PaLM (Chowdhery et al. 2022, appendix B): 6 per matrix parameter and token plus attention. Tools differ in
two points: here the embedding lookup, being no product, is not counted, and causal attention counts half the scores. What is
computed twice (recomputation) or for nothing (padding, masked blocks) is not model FLOPs and never counted.

Mixtures of experts count what a token is multiplied with: the experts it is sent to, shared ones, and the router.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from jaxtrain.model.layer_spec import layer_specs

logger = logging.getLogger(__name__)


def attention_flops(model: Any, tokens: int, seq_len: int, causal: bool = True) -> float:
    """FLOPs of q.k and of the weighted sum of values, forward and backward: 12 * keys * heads * head_dim per token and layer.

    With latent attention, whose values are narrower, 6 * keys * heads * (head_dim + v_head_dim).

    A causal query sees seq_len / 2 keys on average; with a window of W < seq_len, W - W^2 / (2 * seq_len). Rows count as one
    document: packing several into a row makes the true work smaller, and the figure no longer comparable.
    """
    m = model
    keys = sum(_visible_keys(seq_len, spec.window or seq_len, causal) for spec in layer_specs(m))
    width = (m.head_dim + m.v_head_dim) / 2 if m.attention == "mla" else m.head_dim
    return 12.0 * tokens * keys * m.num_heads * width


def step_flops(inventory: Any, tokens: int, seq_len: int, *, causal: bool = True) -> float:
    """Model FLOPs, forward and backward, of a step of `tokens` tokens (over all devices) in rows of `seq_len`.

    Args:
      inventory: the model's `jaxtrain.model.inventory.Inventory`.
    """
    products = 4.0 * inventory.multiplied_count + 2.0 * inventory.trained_count  # frozen weights have no gradient
    return products * tokens + attention_flops(inventory.model, tokens, seq_len, causal)


def mfu(tokens_per_s: float, flops_per_token: float, num_devices: int, peak_flops: float | None) -> float | None:
    """Model FLOPs utilization as a fraction; None (shown as "n/a") when the peak is unknown.

    Args:
      tokens_per_s: over all devices.
      flops_per_token: `step_flops(...) / tokens`.
      peak_flops: of one device in FLOP/s, from `hardware.gpus.peak_flops`.
    """
    if not peak_flops:
        return None
    value = tokens_per_s * flops_per_token / (num_devices * peak_flops)
    if value > 1:
        _warn_above_peak(peak_flops)
    return value


@functools.cache  # once a run, not once a logged step
def _warn_above_peak(peak_flops: float) -> None:
    logger.warning(
        "MFU above 100%% of %.4g FLOP/s per device: a wrong time (steps not waited for?) or not the device it says to be",
        peak_flops,
    )


def _visible_keys(seq_len: int, window: int, causal: bool) -> float:
    window = min(window, seq_len)
    return window - window * window / (2 * seq_len) if causal else window
