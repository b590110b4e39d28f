"""The feed-forward layer of a block: gated (SwiGLU, GeGLU; Shazeer 2020) or plain GELU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import ml_collections
from flax import nnx

from jaxtrain.model.layers import Linear, columns, row
from jaxtrain.model.products import Product
from jaxtrain.parallel.sharding import Layout
from jaxtrain.remat.policy import named

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}
GATED = ("swiglu", "geglu")


class Mlp(nnx.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))): column-parallel, then row-parallel over `tensor`."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        model: ml_collections.ConfigDict,
        layout: Layout,
        out_stddev: float,
        product: Product,
        width: int = 0,
    ):
        d, f = model.embed_dim, width or model.mlp_dim
        bias = ((f,), ("mlp",)) if model.mlp_bias else None
        into = functools.partial(Linear, rngs, (d, f), ("embed", "mlp"), model.init_stddev, layout, bias, product=product)
        self.gate = into() if model.mlp in GATED else None
        self.up = into()
        bias = ((d,), ("vector",)) if model.mlp_bias else None
        self.down = Linear(
            rngs, (d, f), ("embed", "mlp"), out_stddev, layout, bias, layout.sequence_parallel, product, row=True
        )
        self.activation = model.mlp

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, t, D] -> [B, t, D]."""
        act = ACTIVATIONS[self.activation]
        into = (self.up,) if self.gate is None else (self.gate, self.up)
        products = named("mlp_hidden", columns, x, "BTD,DF->BTF", *into)
        with jax.named_scope("mlp_activation"):
            hidden = act(products[0]) if self.gate is None else act(products[0]) * products[1]
        return named("mlp_out", row, hidden, "BTF,DF->BTD", self.down)
