"""The feed-forward layer of a block: gated (SwiGLU, GeGLU; Shazeer 2020) or plain GELU."""

from __future__ import annotations

import functools

import jax
import ml_collections
from flax import nnx

from jaxtrain.model.layers import Linear, add_bias, project
from jaxtrain.sharding import Layout

ACTIVATIONS = {
    "swiglu": jax.nn.silu,
    "geglu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}
GATED = ("swiglu", "geglu")


class Mlp(nnx.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))): column-parallel, then row-parallel over `tensor`."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, layout: Layout, out_stddev: float):
        d, f = model.embed_dim, model.mlp_dim
        hidden_bias = ((f,), ("mlp",)) if model.mlp_bias else None
        into = functools.partial(Linear, rngs, (d, f), ("embed", "mlp"), model.init_stddev, hidden_bias)
        self.gate = into() if model.mlp in GATED else None
        self.up = into()
        self.down = Linear(rngs, (f, d), ("mlp", "embed"), out_stddev, ((d,), ("vector",)) if model.mlp_bias else None)
        self.activation, self.layout = model.mlp, layout

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        act = ACTIVATIONS[self.activation]
        if self.gate is None:
            hidden = act(self._into(self.up, x))
        else:
            hidden = act(self._into(self.gate, x)) * self._into(self.up, x)
        y = project("BTF,FD->BTD", hidden, self.down.kernel[...], self.layout, ("mlp", "embed"))
        return add_bias(y, None if self.down.bias is None else self.down.bias[...])

    def _into(self, linear, x):
        y = project("BTD,DF->BTF", x, linear.kernel[...], self.layout, ("embed", "mlp"))
        y = add_bias(y, None if linear.bias is None else linear.bias[...])
        return self.layout.constrain(y, ("batch", "length", "mlp"))
