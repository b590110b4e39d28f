"""Eight fake CPU devices for every test, set before jax starts. Layouts are compared with one device in the same process."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("MPLBACKEND", "Agg")
# Compilation is most of the suite's time; LLVM's optimizations change neither results' meaning nor XLA's own passes.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax

jax.config.update("jax_num_cpu_devices", 8)
