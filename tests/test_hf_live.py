"""Folders that are written here, read by transformers there and then: logits and greedy generation of every family.

Runs where torch and transformers are: in this Python, or in the one that JAXTRAIN_TORCH_PYTHON names (a venv's bin/python).
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from hf import NAMES, batch_of, expected, load, program_of
from test_hf_writing import export, imported

from jaxtrain.model.batch import Batch
from jaxtrain.train.sampling import Sampling, sample

OTHER = os.environ.get("JAXTRAIN_TORCH_PYTHON", "")
HERE = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (OTHER or HERE), reason="needs torch and transformers; JAXTRAIN_TORCH_PYTHON names a Python with them"
    ),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, of weights that no library has written, and what transformers makes of it."""
    root, out = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp("live") / "found.npz"
    for name in NAMES:
        program, params = imported(name, root / f"run_{name}")
        params = jax.tree.map(lambda leaf: leaf * 1.0625 + 2.0**-9, params)
        params["embedder"]["table"] = params["embedder"]["table"].at[program.model.vocab_size :].set(0.0)
        export(program, params, root / name, root / f"run_{name}")
        np.save(root / name / "tokens.npy", expected(name)["tokens"])
    command = [OTHER or sys.executable, str(pathlib.Path(__file__).parent / "transformers_side.py"), str(out)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*command, *(str(root / n) for n in NAMES)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    with np.load(out) as file:
        return root, dict(file)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_generation_equal_transformers(name, folders):
    root, found = folders
    program = program_of(root / name)
    params, tokens = load(program, root / name), expected(name)["tokens"]
    logits = program.logits(params, Batch(**batch_of(tokens)))
    assert np.abs(found[f"{name}/logits"] - expected(name)["logits"]).max() > 1e-2  # they are other weights
    np.testing.assert_allclose(logits, found[f"{name}/logits"], rtol=0, atol=1e-4)
    drawn = sample(program, params, tokens[:, :16], jax.random.key(0), Sampling(8, temperature=0.0))
    np.testing.assert_array_equal(drawn.tokens, found[f"{name}/greedy"])
