"""Eight fake CPU devices for every test, set before jax starts. Layouts are compared with one device in the same process."""

import gc
import importlib.metadata
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("MPLBACKEND", "Agg")
# Tracing and compiling is most of the suite's time. LLVM's optimizations, code in several modules and the newer way of emitting
# CPU loops (which later versions always take) change neither results' meaning nor XLA's own passes; frequent collections of
# garbage find little in a program that is being traced. Together a third of the processor time of a layout's test.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

gc.set_threshold(100_000, 50, 1000)

import jax

jax.config.update("jax_num_cpu_devices", 8)
# Runs keep compiled programs in their workdirs. This process runs hundreds of them, and would keep all in the first's.
jax.config.update("jax_enable_compilation_cache", False)

# Files that take longest, longest first: begun last, one would keep a worker busy when the others are done.
LONGEST = (
    "layouts",
    "pipeline",
    "layouts_tensor",
    "main",
    "plan_llama",
    "gpu_program",
    "plan_report",
    "parity",
    "gpu_pipeline",
    "matmul_precision",
)


def pytest_collection_modifyitems(items):
    """Starts with the files of LONGEST. `scripts/test.sh` gives whole files to workers, in this order."""
    order = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
