"""The feed-forward layer of a block: gated (SwiGLU, GeGLU; Shazeer 2020; the clamped SwiGLU of gpt-oss) or plain GELU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from jaxtrain.model.execution import Execution
from jaxtrain.model.layers import Linear, column_parallel, row_parallel, vector
from jaxtrain.remat.policy import named

FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}
GATED = ("swiglu", "geglu", "swiglu_clamped")


@dataclasses.dataclass(frozen=True)
class Activation:
    """What an MLP does between its products. `kind`: `model.mlp`; limit: `model.swiglu_limit`."""

    kind: str
    limit: float

    def __call__(self, hidden: Sequence[jax.Array]) -> jax.Array:
        """Hidden activations [..., F] of gate and up, or of up alone, to the input of the down product."""
        if self.kind == "swiglu_clamped":  # gpt-oss (arXiv:2508.10925, section 2)
            gate, up = jnp.minimum(hidden[0], self.limit), jnp.clip(hidden[1], -self.limit, self.limit)
            return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
        act = FUNCTIONS[self.kind]
        return act(hidden[0]) * hidden[1] if self.kind in GATED else act(hidden[0])


class Mlp(nnx.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))): column-parallel, then row-parallel over `tensor`."""

    def __init__(
        self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, execution: Execution, out_stddev: float, width: int = 0
    ):
        d, f = model.embed_dim, width or model.mlp_dim

        def into():
            bias = vector({"mlp": f}) if model.mlp_bias else None
            return Linear(rngs, {"embed": d, "mlp": f}, model.init_stddev, execution.of("mlp_hidden"), bias)

        self.gate = into() if model.mlp in GATED else None
        self.up = into()
        bias = vector({"vector": d}, 0.0, execution.layout.sequence_parallel) if model.mlp_bias else None
        self.down = Linear(rngs, {"embed": d, "mlp": f}, out_stddev, execution.of("mlp_out"), bias, row_parallel=True)
        self.activation = Activation(model.mlp, model.swiglu_limit)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, t, D] -> [B, t, D]."""
        into = (self.up,) if self.gate is None else (self.gate, self.up)
        hidden = named("mlp_hidden", column_parallel, x, "BTD,DF->BTF", *into)
        with jax.named_scope("mlp_activation"):
            hidden = self.activation(hidden)
        return named("mlp_out", row_parallel, hidden, "BTF,DF->BTD", self.down)
