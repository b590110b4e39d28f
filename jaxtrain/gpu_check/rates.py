"""Section 3: what the devices reach, with the shapes of an 8B model, beside what plans assume (`hardware.rates`).

Products count the FLOPs of the mathematics, attention those of the scores that its mask leaves, copies the bytes read and
written, collectives what a device sends ("bus bandwidth").
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.gpu_check import fit
from jaxtrain.gpu_check.attention import Case, refusal, whole_row
from jaxtrain.gpu_check.groups import group_layout, group_sizes, on_each
from jaxtrain.gpu_check.records import MEASURED, Row, Setup, failed, rate
from jaxtrain.gpu_check.timing import Program, repeated, seconds
from jaxtrain.hardware.rates import RATES
from jaxtrain.model import matmul_precision
from jaxtrain.model.attention import ring
from jaxtrain.model.moe import grouped_matmul
from jaxtrain.parallel import collectives
from jaxtrain.plan.predict.products import Product
from jaxtrain.plan.read.collectives import ring_bytes

TOKENS, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD = 8192, 4096, 14_336, 32, 8, 128  # of an 8B model, a row of 8192 tokens
SMALLER = 32  # by which small setups divide sizes
CHAIN, TURNS = 64, 1000  # kernels one after another; turns of a loop


def _sized(setup: Setup, size: int) -> int:
    return max(8, size // SMALLER) if setup.small else size


def array(setup: Setup, *shape: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    """An array on the first device."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=jax.sharding.SingleDeviceSharding(setup.devices[0]))


def timed(programs: Callable[[Setup], Iterator[Program]], setup: Setup) -> Iterator[Row]:
    """The check that times programs; each is a row. `found["work"]` keeps seconds and work by function and by program."""
    for program in programs(setup):
        try:
            took = seconds(program, 0.02 if setup.small else 0.2)
            _keep(setup, programs.__name__, program.name, took, program.work)
        except Exception as error:  # of the compiler, a kernel or an allocator: the others go on
            yield failed(program.name, error)
            continue
        if program.unit == "us":  # less is better
            yield Row(program.name, program.in_unit(took), "us", expected=program.expected, verdict=MEASURED)
        else:
            yield rate(program.name, program.in_unit(took), program.unit, program.expected, f"{1e3 * took:.3g} ms")


def _keep(setup: Setup, function: str, name: str, took: float, work: float) -> None:
    setup.found.setdefault("work", {}).setdefault(function, {})[name] = took, work


def _peak(setup: Setup, share: float, name: str = "bf16_flops") -> float | None:
    """TFLOP/s or GB/s that a share of a data sheet's figure is."""
    peak = getattr(setup.gpu, name) if setup.gpu else None
    return share * peak / (1e12 if name.endswith("flops") else 1e9) if peak else None


def products(setup: Setup) -> Iterator[Program]:
    """Products of an 8B model in bfloat16, one of them alone, too; one in float32 and, where the GPU has it, in fp8.

    fp8 twice: of numbers that are fp8 already, and with quantization as the model does it.
    """
    d, f, qkv = _sized(setup, WIDTH), _sized(setup, HIDDEN), _sized(setup, WIDTH + 2 * KV_HEADS * HEAD)
    for tokens in (_sized(setup, TOKENS), _sized(setup, TOKENS // 8)):
        for what, inner, outer in (("qkv", d, qkv), ("out", d, d), ("up", d, f), ("down", f, d)):
            yield _product(setup, f"{what} {tokens}x{inner}x{outer}", ((tokens, inner), (inner, outer)))
    tokens = _sized(setup, TOKENS)
    yield _product(setup, f"gradient of up {d}x{tokens}x{f}", ((tokens, d), (tokens, f)), "BD,BF->DF")
    yield _product(setup, f"alone, up {tokens}x{d}x{f}", ((tokens, d), (d, f)), alone=True)
    yield _product(setup, f"up, float32 {tokens}x{d}x{f}", ((tokens, d), (d, f)), dtype="float32")
    if setup.small or (setup.gpu and setup.gpu.fp8_flops):
        shapes = (tokens, d), (d, f)
        yield _product(setup, f"fp8 numbers, up {tokens}x{d}x{f}", shapes, dtype="float8_e4m3fn")
        yield _product(setup, f"fp8 with its scales, up {tokens}x{d}x{f}", shapes, kind="fp8")


def _product(setup, name, shapes, equation="BD,DF->BF", kind="compute", dtype="bfloat16", alone=False):
    (left, inner), (_, outer) = shapes
    rows, total = (inner, left) if equation.startswith("BD,BF") else (left, inner)
    matmul, fp8, flops = matmul_precision.make(kind), kind == "fp8" or dtype.startswith("float8"), 2.0 * left * inner * outer
    expected = None
    if setup.gpu:
        rates = dataclasses.replace(RATES, product=RATES.product_ceiling) if alone else RATES
        planned = Product(1, rows, outer, total, "f8" if fp8 else "f32" if dtype == "float32" else "bf16")
        expected = flops / planned.seconds(setup.gpu, rates) / 1e12
    arguments, out = tuple(array(setup, *shape, dtype=dtype) for shape in shapes), "bfloat16" if fp8 else dtype
    run = functools.partial(matmul, equation, dtype=jnp.dtype(out))
    return Program(name, run, arguments, flops, "TFLOP/s", expected, alone)


def experts(setup: Setup) -> Iterator[Program]:
    """Grouped products by a kernel, of many small experts and of few large ones: rows by weights, and weights' gradients."""
    for count, each, d, f in ((16, 2048, 2048, 768), (2, 4096, 4096, 14_336)):
        each, d, f = (max(64, size // SMALLER) if setup.small else size for size in (each, d, f))
        block, name = min(128, each), f"{count} x {each}x{d}x{f}"
        expert = np.repeat(np.arange(count, dtype=np.int32), each // block)
        first = np.arange(count + 1, dtype=np.int32) * (each // block)
        x, y, w = (array(setup, *shape) for shape in ((count * each, d), (count * each, f), (count, d, f)))
        flops, expected = 2.0 * count * each * d * f, _peak(setup, RATES.grouped)
        interpret = not setup.on_gpu

        def rows(x, w, expert=expert, interpret=interpret):
            return grouped_matmul.product([x], [w], expert, interpret=interpret)

        def weights(x, y, first=first, block=block, interpret=interpret):
            return grouped_matmul.gradient(x, y, first, None, block, interpret)

        yield Program(f"rows by weights, {name}", rows, (x, w), flops, "TFLOP/s", expected)
        yield Program(f"gradient of weights, {name}", weights, (x, y), flops, "TFLOP/s", expected)


def attention(setup: Setup) -> Iterator[Program]:
    """A row of one document in each backend that takes it: forward, and forward with backward."""
    length, h = _sized(setup, TOKENS), HEAD
    k = max(1, KV_HEADS // (4 if setup.small else 1))
    q, kv = array(setup, 1, length, k, HEADS // KV_HEADS, h), array(setup, 1, length, k, h)
    ids = array(setup, 1, length, dtype="int32")
    flops = 2.0 * k * HEADS // KV_HEADS * length**2 * h  # two products, half of the scores
    for name in ring.BACKENDS:
        case = Case("timed", heads=(HEADS, KV_HEADS, h), length=(length, length))
        if refusal(setup, case, name, "bfloat16"):
            continue

        def forward(q, k, v, segments, name=name):
            return whole_row(setup, name, (q, k, v), segments, 0, 0.0)

        def both(q, k, v, segments, g, forward=forward):
            return jax.vjp(lambda *arrays: forward(*arrays, segments), q, k, v)[1](g)

        # Of nine products that flash computes, seven are mathematics.
        known = {"cudnn": (RATES.attention, _both_shares()), "flash": (RATES.flash, RATES.flash * 7 / 9)}
        first, second = (_peak(setup, share) for share in known[name]) if name in known else (None, None)
        yield Program(f"{name}, forward", forward, (q, kv, kv, ids), flops, "TFLOP/s", first)
        yield Program(f"{name}, forward and backward", both, (q, kv, kv, ids, q), 3.5 * flops, "TFLOP/s", second)


def _both_shares():
    """Of forward (2 products) and backward (5) together."""
    return 7 / (2 / RATES.attention + 5 / RATES.attention_backward)


def memory(setup: Setup) -> Iterator[Program]:
    """Elementwise kernels and sums over large arrays."""
    for size in (2**22, 2**26, 2**29):
        size = size // 2**10 if setup.small else size
        x = array(setup, size)
        yield Program(f"add 1 to {size:,} numbers", lambda x: x + 1, (x,), 4.0 * size, "GB/s", _memory(setup))
    x = array(setup, _sized(setup, 2**16), _sized(setup, 4096))
    bytes_ = 2.0 * x.size
    yield Program("sum of rows", lambda x: jnp.sum(x, -1, dtype=jnp.float32), (x,), bytes_, "GB/s", _memory(setup))


def _memory(setup):
    return _peak(setup, RATES.memory, "memory_bytes_per_s")


def launches(setup: Setup) -> Iterator[Program]:
    """Kernels that do next to nothing, one after another; the turn of a loop whose length depends on data; an empty program."""
    x, n = array(setup, 256, dtype="float32"), array(setup, dtype="int32")

    def chain(x):
        for _ in range(CHAIN):
            x = jax.lax.optimization_barrier(x + jnp.sum(x))
        return x

    def loop(x, n):
        end = n * TURNS
        return jax.lax.while_loop(lambda c: c[0] < end, lambda c: (c[0] + 1, c[1] * 0.5 + 1.0), (jnp.int32(0), x))[1]

    yield Program("kernel after kernel", chain, (x,), CHAIN, "us", 1e6 * RATES.kernel_s if setup.on_gpu else None)
    turn_s = RATES.host_loop_s + 2 * RATES.kernel_s  # with its body and its condition
    yield Program("turn of a loop that data end", loop, (x, n), TURNS, "us", 1e6 * turn_s if setup.on_gpu else None)
    yield Program("a program of one kernel", lambda x: x + 1, (x,), 1, "us")


def host_copies(setup: Setup) -> Iterator[Row]:
    """Copies between the device and pinned memory of the host: each way, and both at once."""
    device = setup.devices[0]
    here, there = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host"))
    size = 2**20 if setup.small else 2**30
    expected = _peak(setup, RATES.host, "host_bytes_per_s")
    try:
        on_device = jax.device_put(np.ones(size // 4, np.float32), here)
        on_host = jax.device_put(on_device, there)
        ways = {
            "to the host": lambda: jax.device_put(on_device, there),
            "from the host": lambda: jax.device_put(on_host, here),
            "both at once, each": lambda: (jax.device_put(on_device, there), jax.device_put(on_host, here)),
        }
        for name, run in ways.items():
            took = repeated(run)
            _keep(setup, "host_copies", name, took, size)
            yield rate(name, size / took / 1e9, "GB/s", expected)
    except Exception as error:
        yield failed("pinned copies", error)


COLLECTIVES = {  # by their names in HLO
    "all-gather": lambda layout, x: collectives.all_gather(layout, x, "data", 0),
    "reduce-scatter": lambda layout, x: collectives.reduce_scatter(layout, x, "data", 0),
    "all-reduce": lambda layout, x: collectives.psum(layout, x, "data"),
    "all-to-all": lambda layout, x: collectives.all_to_all(layout, x, "data", 0, 0),
    "collective-permute": lambda layout, x: collectives.permute(layout, x, "data", 1),
}


def collective_programs(setup: Setup) -> Iterator[Program]:
    """Every collective over 2 to 8 devices, from 64 KiB to 256 MiB of a device."""
    sizes = (2**12, 2**16) if setup.small else (2**16, 2**20, 2**24, 2**28)
    for ways in group_sizes(setup):
        layout = group_layout(setup, ways)
        for name, function in COLLECTIVES.items():
            run, sharding = on_each(layout, function)
            for size in sizes:
                size = size // ways if name == "all-gather" else size  # of its result
                x = jax.ShapeDtypeStruct((ways * size // 2,), jnp.bfloat16, sharding=sharding)
                sent = ring_bytes(name, size, ways)
                wanted = sent / fit.predicted(RATES, setup.gpu, name, ways, sent) / 1e9 if setup.gpu else None
                yield Program(f"{name}, {ways} devices, {size:,} bytes", run, (x,), sent, "GB/s", wanted)
