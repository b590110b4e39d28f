"""How a model runs on devices: what its modules are built with beside the `model` section of the config."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from jaxtrain.hardware import dtypes
from jaxtrain.model import matmul_precision
from jaxtrain.model.attention.backend import block, choose
from jaxtrain.model.matmul_precision import Matmul
from jaxtrain.model.moe.limits import choose as choose_experts
from jaxtrain.parallel.sharding import Layout
from jaxtrain.remat.policy import Remat, remat


@dataclasses.dataclass(frozen=True)
class Execution:
    """Static. Nothing of it changes what the model computes, except for rounding.

    Attributes:
      dtype: of activations, and in which matrices are used.
      attention_backend, attention_block: see `attention.backend.choose` and `block`.
      matmul: the matrix product of the blocks, but for those that `fp8_exclude` names; `of` one of them knows its own.
      product: name of the products that it is of, of `config.precision.FP8_PRODUCTS`.
      prefetch: `overlap.prefetch`.
      exchange_factor, exchange_rounds: of tokens with their experts' devices; see `moe.dispatch.sizes`.
      experts: how experts' products are computed; see `moe.limits.choose`.
      interpret: kernels written in Pallas run as plain programs, as on a CPU.
    """

    layout: Layout
    dtype: Any = jnp.float32
    attention_backend: str = "reference"
    attention_block: int = 128
    matmul: Matmul = matmul_precision.plain
    remat: Remat = Remat()
    prefetch: str = "off"
    exchange_factor: float = 1.0
    exchange_rounds: int = 1
    experts: str = "loop"
    interpret: bool = False
    fp8_exclude: tuple[str, ...] = ()
    product: str = ""

    def of(self, product: str) -> Execution:
        """That of the products with a name, of `config.precision.FP8_PRODUCTS`."""
        matmul = matmul_precision.plain if product in self.fp8_exclude else self.matmul
        return dataclasses.replace(self, matmul=matmul, product=product)


def of_config(config: ml_collections.ConfigDict, layout: Layout, device: jax.Device) -> Execution:
    """The execution of a validated config on such devices.

    Raises ConfigError for an attention backend, or kernels of experts, that cannot honour the settings.
    """
    return Execution(
        layout,
        dtypes.compute_dtype(config),
        choose(config, device.platform, getattr(device, "compute_capability", None)),
        block(device.platform),
        matmul_precision.make(config.precision.products),
        remat(config.memory),
        config.overlap.prefetch,
        config.memory.expert_buffer_factor,
        config.overlap.expert_rounds,
        choose_experts(config, device.platform, getattr(device, "compute_capability", None)),
        device.platform == "cpu",
        tuple(config.precision.fp8_exclude),
    )
