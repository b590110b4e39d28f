"""The feed-forward layer of a block as a mixture of experts: router, experts, and shared experts that every token sees.

Fedus et al. 2022 (arXiv:2101.03961), Jiang et al. 2024 (Mixtral, arXiv:2401.04088), DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

import jax
import ml_collections
from flax import nnx

from jaxtrain.model.execution import Execution
from jaxtrain.model.layers import shared_by_tensor, summed_over_tensor
from jaxtrain.model.mlp import Mlp
from jaxtrain.model.moe.experts import Experts
from jaxtrain.model.moe.router import Router, RouterSums
from jaxtrain.remat.policy import name


class Moe(nnx.Module):
    """The sum over the chosen experts of weight * expert(x), plus the shared experts of x, which are one MLP."""

    def __init__(self, rngs: nnx.Rngs, model: ml_collections.ConfigDict, execution: Execution, out_stddev: float):
        self.router = Router(rngs, model, execution.layout)
        self.experts = Experts(rngs, model, execution, out_stddev)
        width = model.num_shared_experts * model.expert_mlp_dim
        self.shared = Mlp(rngs, model, execution, out_stddev, width) if width else None
        self.layout = execution.layout

    def __call__(self, x: jax.Array, segments: jax.Array, index: jax.Array) -> tuple[jax.Array, RouterSums]:
        """[B, t, D], segments [B, T] and positions in the row [T] -> [B, t, D], and the router's sums of this layer."""
        row_length = segments.shape[1] * self.layout.size("sequence")
        assignments, sums = self.router(x, segments, index, row_length)
        y = summed_over_tensor(self.experts(shared_by_tensor(x, self.layout), assignments, row_length), self.layout)
        if self.shared is not None:
            y = y + self.shared(x)
        return name(y, "mlp_out"), sums
