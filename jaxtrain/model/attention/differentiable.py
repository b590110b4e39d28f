"""Attention to the whole row with gradients, made of a backend's `forward` and `backward`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from jaxtrain.model.attention.mask import Mask, Settings
from jaxtrain.model.attention.merge import Saved, given_lse, row_sums, saved_lse
from jaxtrain.remat.policy import name


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """Attention with arguments and results of `reference.attend`; both results have gradients."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, settings: Settings) -> tuple[jax.Array, jax.Array]:
        return first(q, k, v, mask, settings)[0]

    def first(q, k, v, mask, settings):
        out, lse = forward(q, k, v, mask, settings, q.dtype)
        out, lse = name((out, saved_lse(lse)), "attention")
        return (out, given_lse(lse)), (q, k, v, mask, out, lse)

    def second(settings, residuals, gradients):
        (q, k, v, mask, out, lse), (g, g_lse) = residuals, gradients
        dq, dk, dv = backward(q, k, v, mask, settings, Saved(out, lse, row_sums(g, g_lse, out), g), q.dtype)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype), None

    attend.defvjp(first, second)
    return attend
