"""MaxText's own train step (0.2.5, Python 3.12) on the problem's model; batch, rates and initial weights come from the problem.

MaxText trains queries' weights divided by sqrt(head_dim), and the initial ones are put so. The first loss is that of the
others; later ones differ a little: Adam's steps do not shrink with a weight.
"""

from __future__ import annotations

import os
import tempfile

import jax
import jax.numpy as jnp
import maxtext
import measure
import numpy as np
from flax import nnx
from flax.linen import partitioning
from maxtext.common import train_state_nnx
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils, sharding

REMAT = {"full": "full", "mlp": "save_dot_except_mlpwi"}  # of memory.remat; any other: minimal, which keeps all products


def settings(c: dict, facts: dict, shape: tuple[int, int], steps: int, folder: str) -> dict:
    """MaxText's keys for the same model and batch."""
    o, gpu = facts["optimizer"], facts["platform"] == "gpu"
    return {
        "run_name": "bench", "base_output_directory": folder, "hardware": facts["platform"], "steps": 1 + steps,
        "model_name": "default", "decoder_block": "llama2", "base_emb_dim": c["hidden_size"],
        "base_num_query_heads": c["num_attention_heads"], "base_num_kv_heads": c["num_key_value_heads"],
        "head_dim": c["head_dim"], "base_mlp_dim": c["intermediate_size"], "base_num_decoder_layers": c["num_hidden_layers"],
        "vocab_size": c["vocab_size"], "normalization_layer_epsilon": c["rms_norm_eps"],
        "rope_max_timescale": int(c.get("rope_theta") or c["rope_parameters"]["rope_theta"]),
        "logits_via_embedding": c["tie_word_embeddings"], "normalize_embedding_logits": False,
        "max_target_length": shape[1], "per_device_batch_size": shape[0] / facts["devices"],
        "dtype": facts["compute_dtype"], "weight_dtype": "float32",
        "attention": "cudnn_flash_te" if gpu and facts["compute_dtype"] == "bfloat16" else "dot_product",
        "remat_policy": REMAT.get(facts["remat"], "minimal"), "ici_fsdp_parallelism": -1,
        "opt_type": "adamw", "adam_b1": o["b1"], "adam_b2": o["b2"], "adam_eps": o["eps"],
        "adam_weight_decay": o["weight_decay"], "adamw_mask": "['.*norm.*']",
        "gradient_clipping_threshold": o["clip_norm"], "learning_rate": o["learning_rate"],
        "dataset_type": "synthetic", "enable_checkpointing": False, "skip_jax_distributed_system": True, "packing": False,
        "log_config": False,
    }  # fmt: skip


def loaded(weights: dict[str, np.ndarray], c: dict) -> dict[tuple[str, ...], np.ndarray]:
    """The problem's weights by MaxText's paths, layers at axis 1."""
    h, layers = c["head_dim"], range(c["num_hidden_layers"])

    def stack(name, change):
        return np.stack([change(weights[f"model.layers.{i}.{name}.weight"]) for i in layers], 1)

    def heads(w):
        return w.T.reshape(w.shape[1], -1, h)

    attention, matrix, vector = "self_attention", lambda w: w.T, lambda w: w
    of = {
        ("pre_self_attention_layer_norm", "scale"): stack("input_layernorm", vector),
        ("post_self_attention_layer_norm", "scale"): stack("post_attention_layernorm", vector),
        (attention, "query", "kernel"): stack("self_attn.q_proj", lambda w: heads(w) * np.float32(h**-0.5)),
        (attention, "key", "kernel"): stack("self_attn.k_proj", heads),
        (attention, "value", "kernel"): stack("self_attn.v_proj", heads),
        (attention, "out", "kernel"): stack("self_attn.o_proj", lambda w: w.T.reshape(-1, h, w.shape[0])),
        ("mlp", "wi_0", "kernel"): stack("mlp.gate_proj", matrix),
        ("mlp", "wi_1", "kernel"): stack("mlp.up_proj", matrix),
        ("mlp", "wo", "kernel"): stack("mlp.down_proj", matrix),
    }
    found = {("decoder", "layers", *path): array for path, array in of.items()}
    found[("token_embedder", "embedding")] = weights["model.embed_tokens.weight"]
    found[("decoder", "decoder_norm", "scale")] = weights["model.norm.weight"]
    if not c["tie_word_embeddings"]:
        found[("decoder", "logits_dense", "kernel")] = weights["lm_head.weight"].T
    return found


def main() -> None:
    """Measures; see measure.py."""
    args = measure.arguments(__doc__)
    c, facts, rows = args.problem.model, args.problem.facts, args.problem.rows
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    with tempfile.TemporaryDirectory() as folder:
        keys = settings(c, facts, rows.shape, args.steps, folder)
        config = pyconfig.initialize(["", base, *(f"{key}={value}" for key, value in keys.items())])
    mesh, rates = maxtext_utils.get_mesh_from_config(config), jnp.asarray(facts["rates"])
    create, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    tx = optimizers.get_optimizer(config, lambda count: rates[count], model, mesh=mesh)

    def init():
        model = create()
        return train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, tx, wrt=nnx.Param))

    rules = partitioning.axis_rules(config.logical_axis_rules)
    with jax.set_mesh(mesh), rules:
        state, _, where, _, _ = maxtext_utils.setup_training_state(None, config, mesh, None, init)
        graph = nnx.graphdef(nnx.eval_shape(init))
        params = nnx.to_flat_state(nnx.split(state.model, nnx.Param, ...)[1])
        if weights := args.problem.weights:
            new = loaded(weights, c)
            for path, variable in params:
                array = new.pop(path)
                assert array.shape == variable.shape, (path, array.shape, variable.shape)
                variable.set_value(jax.device_put(array, variable.get_value().sharding))
            assert not new, new.keys()
            nnx.update(state.model, nnx.from_flat_state(params))
        params_where, where = sharding.maybe_update_params_sharding_with_opt(config, where)
        batch_where = sharding.get_input_data_sharding(config, mesh)
        function, ins, outs, _, donated = maxtext_utils.get_functional_train_with_signature(
            train.train_step, batch_where, where, graph, config, params_where
        )
        train_step = jax.jit(function, in_shardings=ins, out_shardings=outs, donate_argnums=donated)
        last = np.arange(rows.shape[1]) == rows.shape[1] - 1
        ones, places = np.ones_like(rows), np.broadcast_to(np.arange(rows.shape[1], dtype=np.int32), rows.shape)
        batch = {"inputs": rows, "inputs_position": places, "inputs_segmentation": ones, "targets": np.roll(rows, -1, 1),
                 "targets_position": places, "targets_segmentation": np.where(last, 0, ones)}  # fmt: skip
        batch = {key: jax.device_put(array, batch_where) for key, array in batch.items()}

        def step(_):
            nonlocal state
            state, metrics = jax.block_until_ready(train_step(state, batch))
            return metrics["scalar"]["learning/loss"]

        figures = measure.timed(step, args.steps, rows.size)
    figures["parameters"] = sum(variable.get_value().size for _, variable in params)
    measure.finish(args.json, figures | measure.jax_memory(), ("maxtext", "jax", "jaxlib", "flax"))


if __name__ == "__main__":
    main()
