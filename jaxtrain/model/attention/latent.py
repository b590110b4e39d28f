"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): queries, keys and values from narrow projections.

Of a head's H, H - R are multiplied without rotation and R with rotary positions, whose keys all heads share. What is narrow is
computed once per position and gathered over `tensor`; heads come of it column-parallel. Values, narrower than keys, are filled
up with zeros for backends that know one width, which all do but `flash`, and for rings.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtrain.model.attention.block import Attention
from jaxtrain.model.layers import Linear, Norm, column_parallel, replicated_linear, shared_by_tensor
from jaxtrain.model.rope import rotate
from jaxtrain.remat.policy import name

NORM_EPS = 1e-6  # of the narrow projections, whatever model.norm_eps is: so it is in the reference


class LatentAttention(Attention):
    """Attention with as many key/value heads as query heads, which come of narrow projections."""

    @property
    def value_dim(self) -> int:
        """Width of a head's values and outputs."""
        return self.model.v_head_dim

    def _make_inputs(self, rngs, execution):
        model = self.model
        d, n, h, rotated = model.embed_dim, model.num_heads, model.head_dim, model.qk_rope_head_dim
        split = self.layout.sequence_parallel

        def narrow(width):
            return Linear(rngs, {"embed": d, "latent_out": width}, model.init_stddev, execution, split_inputs=split)

        def wide(rank, width, first="latent"):
            return Linear(rngs, {first: rank, "heads": n, "head_dim": width}, model.init_stddev, execution)

        def norm(width):
            return Norm(width, "rmsnorm", NORM_EPS, model.norm_unit_offset, split)

        if model.q_lora_rank:
            self.query_down, self.query_norm = narrow(model.q_lora_rank), norm(model.q_lora_rank)
        self.query = wide(model.q_lora_rank, h) if model.q_lora_rank else wide(d, h, "embed")
        self.key_value_down, self.key_value_norm = narrow(model.kv_lora_rank), norm(model.kv_lora_rank)
        self.rotated_key = narrow(rotated)
        self.key, self.value = wide(model.kv_lora_rank, h - rotated), wide(model.kv_lora_rank, model.v_head_dim)

    def _inputs(self, x, rows, layer):
        model, wide = self.model, "BTD,DNH->BTNH"
        narrow = "BtD,DR->BtR"
        queries = self.query_norm(replicated_linear(x, narrow, self.query_down)) if model.q_lora_rank else x
        [q] = column_parallel(queries, wide, self.query)
        k, v = column_parallel(
            self.key_value_norm(replicated_linear(x, narrow, self.key_value_down)), wide, self.key, self.value
        )
        rotated = shared_by_tensor(replicated_linear(x, narrow, self.rotated_key), self.layout)
        q, k, v, rotated = name((q, k, v, rotated), "qkv")
        plain, turned = jnp.split(q, [model.head_dim - model.qk_rope_head_dim], -1)
        angles = rows.angles(layer)
        rotated = rotate(rotated[:, :, None], *angles)
        q = jnp.concatenate([plain, rotate(turned, *angles)], -1)
        k = jnp.concatenate([k, jnp.broadcast_to(rotated, (*k.shape[:3], rotated.shape[-1]))], -1)
        in_ring = self.layout.context.devices > 1 and self.layout.context.method == "ring"
        return q, k, v if self.backend == "flash" and not in_ring else _fill(v, q.shape[-1])


def _fill(values: jax.Array, width: int) -> jax.Array:
    return jnp.pad(values, [(0, 0)] * 3 + [(0, width - values.shape[-1])])
