"""Eight fake CPU devices for every test, set before jax starts. Layouts are compared with one device in the same process."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("MPLBACKEND", "Agg")

import jax

jax.config.update("jax_num_cpu_devices", 8)
