"""Small configs, batches and comparisons shared by tests of the whole program."""

from __future__ import annotations

import jax
import numpy as np

from jaxtrain.config import default_config
from jaxtrain.parallel import mesh
from jaxtrain.train.program import build_program

VOCAB, LENGTH, ROWS = 270, 16, 8


def config(**changes):
    """A tiny float32 config with uneven vocabulary and GQA, plain SGD at rate 1; changes as section__key=value."""
    c = default_config()
    c.model.update(num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=12, mlp_dim=48, vocab_size=VOCAB)
    c.model.update(vocab_pad_multiple=16, init_stddev=0.1)
    c.mesh.update(data=1)
    c.precision.compute_dtype = "float32"
    c.memory.loss_chunk_tokens = 24  # does not divide the tokens of a device
    c.data.update(seq_len_tokens=LENGTH, global_batch_rows=ROWS)
    c.optimizer.update(name="sgd", momentum=0.0, weight_decay=0.0, clip_norm=0.0, learning_rate=1.0)
    for name, value in changes.items():
        section, key = name.split("__")
        c[section][key] = value
    return c


def devices(c) -> int:
    """How many devices a config's mesh takes."""
    return int(np.prod(list(c.mesh.to_dict().values())))


def program(c):
    """The program on as many of the eight fake devices as the mesh takes."""
    return build_program(c, mesh.build(c, jax.devices()[: devices(c)]))


def batch(c, seed=0, vocab=VOCAB):
    """Packed rows [M, b, T]: two or three documents and padding in each, uneven numbers of targets."""
    rng = np.random.default_rng(seed)
    rows, length = c.data.global_batch_rows, c.data.seq_len_tokens
    tokens = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for row in range(rows):
        ends = np.sort(rng.choice(np.arange(1, length + 1), 3, replace=False))
        start = 0
        for number, end in enumerate(ends, 1):
            segments[row, start:end], positions[row, start:end] = number, np.arange(end - start)
            start = end
    same = np.concatenate([segments[:, 1:] == segments[:, :-1], np.zeros((rows, 1), bool)], 1) & (segments > 0)
    targets = np.where(same, np.roll(tokens, -1, 1), -1)
    count = c.train.accumulation_steps
    arrays = dict(tokens=tokens, targets=targets, segment_ids=segments, positions=positions)
    return {key: value.astype(np.int32).reshape(count, rows // count, length) for key, value in arrays.items()}


def host(tree):
    """The tree as numpy arrays."""
    return jax.tree.map(np.asarray, tree)


def assert_close(got, wanted, relative=1e-5):
    """Every leaf equal to `relative` of the leaf's largest entry; names the leaf that is not."""
    paths = jax.tree_util.tree_flatten_with_path(wanted)[0]
    for (path, b), a in zip(paths, jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)
        assert error < relative, f"{jax.tree_util.keystr(path)}: relative error {error:.2e}"
