"""Float32 is float32 on GPUs: products of programs that compute in it are not rounded to TF32. bfloat16 stays as it is."""

import re

import jax
import pytest

from jaxtrain.config import default_config
from jaxtrain.model import matmul_precision
from jaxtrain.parallel import mesh
from jaxtrain.plan import compile
from jaxtrain.train.program import build_program

pytestmark = pytest.mark.slow  # its light tests share what the others compile


def config(dtype):
    c = default_config()
    c.model.update(num_layers=2, embed_dim=64, num_heads=2, num_kv_heads=1, head_dim=32, mlp_dim=128)
    c.data.update(seq_len_tokens=32, global_batch_rows=2)
    c.memory.loss_chunk_tokens = 64
    c.precision.compute_dtype = dtype
    return c


def products(dtype):
    """The lines of the lowered step, forward and backward, that multiply matrices; and the whole text."""
    program = build_program(config(dtype), mesh.build(config(dtype), jax.devices()[:1]))
    text = program.train_step.lower(*program.abstract_step_arguments()).as_text()
    return [line for line in text.splitlines() if "dot_general" in line], text


def test_only_float32_programs_ask_for_full_precision(monkeypatch):
    lines, _ = products("float32")
    assert len(lines) > 20 and all("precision = [HIGHEST, HIGHEST]" in line for line in lines)
    lines, text = products("bfloat16")
    assert len(lines) > 20 and "HIGHEST" not in text
    monkeypatch.setattr(matmul_precision, "products_in", lambda dtype: lambda function: function)
    assert products("bfloat16")[1] == text and "HIGHEST" not in products("float32")[1]


@pytest.mark.plan
def test_no_product_of_float32_is_tf32_on_an_h200():
    text = compile.compile_step(config("float32"), "h200:1x1").text
    kernels = [line for line in text.splitlines() if "__cublas$" in line or re.search(r" dot\(", line)]
    assert len(kernels) > 10
    for line in kernels:
        assert '"operand_precision":["HIGHEST","HIGHEST"]' in line or "operand_precision={highest,highest}" in line, line
    assert "TF32" not in text  # as in ALG_DOT_TF32_TF32_F32
