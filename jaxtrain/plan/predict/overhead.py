"""Device memory that neither the compiler nor a formula of the model knows: estimates, until a device has been asked.

The CUDA context, NCCL's buffers and CUDA graphs lie beside XLA's heap; cuDNN's workspaces are in it, but a described GPU has no
cuDNN to say how large they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import ml_collections

from jaxtrain.model.attention.backend import choose
from jaxtrain.plan.predict.closed_form import ClosedForm
from jaxtrain.plan.predict.roofline import Links

# Rows in the order of the page.
ROWS = {
    "context": "CUDA context and libraries",
    "nccl": "NCCL's buffers",
    "graphs": "CUDA graphs",
    "cudnn": "cuDNN's workspaces",
}
MIB = 1 << 20
# What nvidia-smi shows for a process with cuBLAS and cuDNN on a Hopper GPU before it allocates: 500 to 700 MiB.
CONTEXT_BYTES = 640 * MIB
# Of one connection of a channel, a buffer for each of NCCL's protocols (src/include/device.h and src/init.cc): Simple 4 MiB
# (NCCL_BUFFSIZE), LL128 120 elements x 640 threads x 8 steps x 8 bytes, LL 8 lines x 512 threads x 8 steps x 16 bytes.
CONNECTION_BYTES = 4 * MIB + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
# Channels of a communicator as NCCL logs them on eight NVLink GPUs, and across nodes, where rings and trees are connected both
# ways. From Hopper on NVLink SHARP has two buffers in each of 16 channels.
NODE_CONNECTIONS, NETWORK_CONNECTIONS = 24, 16 * 4
SHARP_BYTES = 16 * 2 * 4 * MIB
GRAPH_BYTES_PER_KERNEL = 16 << 10  # captured graphs of inference servers take 10 to 20 KiB a kernel
KERNELS = 2000  # of a step, loops' bodies once, where nothing was compiled


def overhead(
    config: ml_collections.ConfigDict,
    closed: ClosedForm,
    links: Links,
    groups: Iterable[tuple[str, ...]] | None = None,
    kernels: int = KERNELS,
) -> dict[str, int]:
    """Bytes of one device by row of `ROWS`, without zeros.

    Args:
      groups: mesh axes over which collectives run, a communicator each. None: those of the closed form's traffic, and all axes
        together, over which losses are summed.
      kernels: that the program launches, loops' bodies once.
    """
    if groups is None:
        used = tuple(axis for axis, size in closed.mesh.items() if size > 1)
        groups = {used, *(tuple(axes.split("+")) for axes, _ in closed.traffic)}
    sizes = {
        "context": CONTEXT_BYTES,
        "nccl": sum(communicator_bytes(axes, links) for axes in set(groups)),
        "graphs": kernels * GRAPH_BYTES_PER_KERNEL,
        "cudnn": attention_workspace_bytes(config, links),
    }
    return {row: size for row, size in sizes.items() if size}


def communicator_bytes(axes: tuple[str, ...], links: Links) -> int:
    """NCCL's buffers of the communicator of the devices along mesh axes; 0 for a device alone."""
    if math.prod(links.mesh_shape[axis] for axis in axes) < 2:
        return 0
    if links.crosses(axes):
        return NETWORK_CONNECTIONS * CONNECTION_BYTES
    sharp = SHARP_BYTES if float(links.gpu.compute_capability) >= 9.0 else 0
    return NODE_CONNECTIONS * CONNECTION_BYTES + sharp


def attention_workspace_bytes(config: ml_collections.ConfigDict, links: Links) -> int:
    """cuDNN's workspace in attention's backward, 0 where another backend attends.

    Per query head and position of the device, in float32: the sums of the gradient of the query, of head_dim elements, and
    the product of output and its gradient (Dao 2023, "FlashAttention-2", algorithm 2).
    """
    if choose(config, "cuda", links.gpu.compute_capability) != "cudnn":
        return 0
    m, data, mesh = config.model, config.data, links.mesh_shape
    rows = data.global_batch_rows // config.train.accumulation_steps // (mesh["data"] * mesh["fsdp"] * mesh["expert"])
    heads = math.ceil(m.num_heads / mesh["tensor"])
    return 4 * rows * (data.seq_len_tokens // mesh["sequence"]) * heads * (m.head_dim + 1)
