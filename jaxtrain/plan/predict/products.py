"""How long a matrix product takes by its shape: tiles of the output, waves of them over the multiprocessors, the power limit.

A product's output is cut into tiles, each computed by one multiprocessor; they run in waves, of which the last may be partly
empty ("tile and wave quantization", NVIDIA's Matrix Multiplication Background User's Guide). A product with few tiles may split
its sum over more of them, and adds the parts afterwards. A large product keeps all multiprocessors busy for so long that the
power limit slows their clock: then `Rates.product` counts, else `Rates.product_ceiling`.
"""

from __future__ import annotations

import dataclasses
import math

from jaxtrain.hardware.gpus import Gpu
from jaxtrain.hardware.rates import Rates
from jaxtrain.plan.read.hlo import Instruction, Module

# Rows and columns of a tile. cuBLAS and CUTLASS take 128 x 256 for large products on Hopper. A tile of r x c loads r + c values
# for r c products, so smaller ones are bound by what the L2 cache gives: their rate is taken to fall with r c / (r + c).
TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64))
SPLITS = (1, 2, 4, 8, 16)  # of the sum
# Elements of the sum whose time filling and emptying the pipeline of a tile takes: two steps of 64, of bfloat16.
FILL = 128


@dataclasses.dataclass(frozen=True)
class Product:
    """`batch` products [rows, sum] x [sum, columns]."""

    batch: int
    rows: int
    columns: int
    sum: int
    dtype: str  # of the operands

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.sum

    def seconds(self, gpu: Gpu, rates: Rates) -> float:
        """Its time alone on a GPU, the launch and memory's bandwidth apart."""
        fp8 = self.dtype.startswith("f8") and gpu.fp8_flops
        peak = fp8 or gpu.bf16_flops / (2 if self.dtype == "f32" else 1)  # XLA's default for float32: TF32, half the rate
        sustained = self.flops / ((rates.product_fp8 if fp8 else rates.product) * peak)
        of_one = rates.product_ceiling * peak / gpu.sm_count
        return max(sustained, min(self._tiled(gpu, rates, of_one, tile, split) for tile in TILES for split in SPLITS))

    def _tiled(self, gpu, rates, of_one, tile, split) -> float:
        rows, columns = tile
        share = (rows * columns / (rows + columns)) / (128 * 256 / (128 + 256))
        waves = math.ceil(self.batch * math.ceil(self.rows / rows) * math.ceil(self.columns / columns) * split / gpu.sm_count)
        seconds = waves * 2 * rows * columns * (math.ceil(self.sum / split) + FILL) / (share * of_one)
        if split > 1:  # parts in float32 are written and read, by a kernel of its own
            parts = 2 * 4 * split * self.batch * self.rows * self.columns
            seconds += rates.kernel_s + parts / (rates.memory * gpu.memory_bytes_per_s)
        return seconds


def products(module: Module, instruction: Instruction) -> tuple[Product, ...]:
    """The matrix products in an instruction, those inside a fusion too."""
    if summed := instruction.contracting_dims:
        left = module.nodes[instruction.operands[0]].arrays[0]
        batch, total = (math.prod(left.dims[d] for d in dims) for dims in (instruction.batch_dims, summed))
        out, rows = math.prod(instruction.arrays[0].dims), math.prod(left.dims) // max(1, batch * total)
        return (Product(batch, rows, out // max(1, batch * rows), total, left.dtype),) if out and total else ()
    if instruction.opcode != "fusion":
        return ()
    inside = module.computations[instruction.called[0]].instructions
    return tuple(p for i in inside if i.opcode in ("dot", "fusion", "custom-call") for p in products(module, i))
