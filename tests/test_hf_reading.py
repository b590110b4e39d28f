"""Reading Hugging Face folders: logits of each family, any mesh, and every fault told before a tensor is read."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from hf import GOLDEN, NAMES, batch_of, config_of, expected, load, program_of
from tiny import host

from jaxtrain.checkpoint.hf import reading, tensor_files
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.model.batch import Batch


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_at_64_positions_equal_transformers(name):
    program = program_of(GOLDEN / name)
    params = load(program, GOLDEN / name)
    logits = program.logits(params, Batch(**batch_of(expected(name)["tokens"])))
    np.testing.assert_allclose(logits, expected(name)["logits"], rtol=0, atol=1e-4)


MESHES = {
    "llama": ({"fsdp": 4, "tensor": 2}, {"pipeline": 2, "tensor": 2, "data": 2}),
    "llama_tied": ({"tensor": 4, "data": 2},),  # two key/value heads over four: stored whole
    "deepseek_v3": ({"expert": 2, "tensor": 2},),
    "gpt2": ({"fsdp": 8},),
    "gemma2": ({"sequence": 2, "fsdp": 4},),
    "gemma3": ({"pipeline": 2, "tensor": 2, "data": 2},),
    "gpt_oss": ({"expert": 2, "tensor": 2, "fsdp": 2}, {"fsdp": 8}),
}


@pytest.mark.parametrize("name, axes", [(name, axes) for name, all_axes in MESHES.items() for axes in all_axes])
def test_any_mesh_gets_the_same_weights(name, axes):
    """Nothing is compiled: shards are read as they lie."""
    changes = {"train__accumulation_steps": 2, "data__global_batch_rows": 4} if "pipeline" in axes else {}
    whole, parted = program_of(GOLDEN / name), program_of(GOLDEN / name, axes, **changes)
    found = load(parted, GOLDEN / name)
    for leaf, abstract in zip(jax.tree.leaves(found), jax.tree.leaves(parted.abstract_state.params), strict=True):
        assert leaf.sharding == abstract.sharding and leaf.dtype == np.float32
    jax.tree.map(np.testing.assert_array_equal, host(found), host(load(whole, GOLDEN / name)))


def test_virtual_stages_get_their_layers(tmp_path):
    copy(tmp_path, "llama")
    edit_config(tmp_path, num_hidden_layers=2)
    changes = {"train__accumulation_steps": 2, "data__global_batch_rows": 2, "pipeline__schedule": "interleaved"}
    deep = grown(tmp_path, 4)
    program = program_of(deep, {"pipeline": 2}, pipeline__virtual_stages=2, **changes)
    assert program.layer_order == [0, 2, 1, 3]
    plain = host(load(program_of(deep), deep)["blocks"])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[[0, 2, 1, 3]]), host(load(program, deep)["blocks"]), plain)


def copy(folder, name):
    for path in (GOLDEN / name).iterdir():
        shutil.copy(path, folder)
    return folder


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def tensors_of(folder):
    """Name: (dtype, array) of a folder, by this program's own reader."""
    entries = {name: e for header in tensor_files.open_folder(folder).values() for name, e in header.entries.items()}
    bits = np.dtype(np.uint8)
    return {name: (e.dtype, np.array(tensor_files.read(e, bits if e.dtype == "U8" else None))) for name, e in entries.items()}


def write(path, tensors):
    """A safetensors file of name: (dtype, array), without this program's writer."""
    found, end = {}, 0
    for name, (dtype, array) in tensors.items():
        found[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    header = json.dumps(found).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(a.tobytes() for _, a in tensors.values()))


def rewritten(folder, change):
    """The folder as one file of its tensors, changed by `change`."""
    tensors = tensors_of(folder)
    change(tensors)
    for path in folder.glob("model*"):
        path.unlink()
    write(folder / "model.safetensors", tensors)
    return folder


def grown(folder, layers):
    def deeper(tensors):
        for name, (dtype, array) in list(tensors.items()):
            for layer in range(2, layers):
                if ".layers.1." in name:
                    tensors[name.replace(".layers.1.", f".layers.{layer}.")] = (dtype, array + layer)

    edit_config(folder, num_hidden_layers=layers)
    return rewritten(folder, deeper)


def refused(folder, error=UserError):
    with pytest.raises(error) as caught:
        load(program_of(folder), folder)
    return str(caught.value)


def test_every_tensor_is_accounted_for_at_once(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.extra.weight"] = ("F32", np.zeros((2, 3), np.float32))
        tensors["model.norm.weight"] = ("F32", np.zeros(25, np.float32))
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", np.zeros(4, np.float32))  # holds no parameter

    text = refused(rewritten(copy(tmp_path, "llama"), change))
    assert "1 missing, 1 unexpected, 1 of another shape" in text
    assert "model.layers.1.mlp.up_proj.weight [40, 24]: is missing" in text
    assert "model.layers.0.extra.weight [2, 3]: the model has no such tensor" in text
    assert "model.norm.weight: [25] in the folder, [24] by config.json" in text
    assert "inv_freq" not in text


def test_more_or_fewer_layers_are_refused_by_name(tmp_path):
    edit_config(copy(tmp_path, "llama"), num_hidden_layers=3)
    assert "model.layers.2." in refused(tmp_path)
    edit_config(tmp_path, num_hidden_layers=1)
    assert "model.layers.1.input_layernorm.weight [24]: the model has no such tensor" in refused(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"intermediate_size": 48}, "up_proj.weight: [40, 24] in the folder, [48, 24] by config.json"),
        ({"vocab_size": 300}, "model.embed_tokens.weight: [259, 24] in the folder, [300, 24] by config.json"),
        ({"head_dim": 12}, "q_proj.weight: [32, 24] in the folder, [48, 24] by config.json"),
        ({"num_key_value_heads": 4}, "k_proj.weight: [16, 24] in the folder, [32, 24] by config.json"),
        ({"attention_bias": True}, "q_proj.bias [32]: is missing"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_config_that_contradicts_the_tensors(change, message, tmp_path):
    edit_config(copy(tmp_path, "llama"), **change)
    assert message in refused(tmp_path)


def test_untied_head_of_a_family_with_a_prefix(tmp_path):
    """GPT-2's head, where it has one of its own, stands outside of what "transformer." names."""
    name = next(n for n in tensors_of(GOLDEN / "gpt2") if n.endswith("wte.weight"))
    edit_config(copy(tmp_path, "gpt2"), tie_word_embeddings=False)
    assert "lm_head.weight [259, 24]: is missing" in refused(tmp_path)
    folder = rewritten(tmp_path, lambda tensors: tensors.update({"lm_head.weight": (tensors[name][0], tensors[name][1] + 1)}))
    params = host(load(program_of(folder), folder))
    np.testing.assert_array_equal(params["head"]["kernel"][:, :259], params["embedder"]["table"][:259].T + 1)


def test_tied_models(tmp_path):  # C19
    table = tensors_of(GOLDEN / "llama_tied")["model.embed_tokens.weight"]
    assert "lm_head.weight" not in tensors_of(GOLDEN / "llama_tied")
    with_head = rewritten(copy(tmp_path, "llama_tied"), lambda tensors: tensors.update({"lm_head.weight": table}))
    assert "head" not in load(program_of(with_head), with_head)  # a copy of the table is no other head
    other = (table[0], table[1] + 1)
    rewritten(tmp_path, lambda tensors: tensors.update({"lm_head.weight": other}))
    assert "the embeddings are tied (tie_word_embeddings), but lm_head.weight differs" in refused(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    assert "head" in load(program_of(tmp_path), tmp_path)
    rewritten(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight [259, 24]: is missing (tie_word_embeddings is false" in refused(tmp_path)


def test_padding_of_the_vocabulary_is_zero():
    program = program_of(GOLDEN / "llama", {"tensor": 2, "fsdp": 2}, model__vocab_pad_multiple=16)
    params = host(load(program, GOLDEN / "llama"))
    assert params["embedder"]["table"].shape == (272, 24) and params["head"]["kernel"].shape == (24, 272)
    assert not params["embedder"]["table"][259:].any() and not params["head"]["kernel"][:, 259:].any()
    assert params["embedder"]["table"][258].all()


def test_narrowing_must_be_asked_for(tmp_path):
    def widen(tensors):
        tensors["model.norm.weight"] = ("F64", tensors["model.norm.weight"][1].astype(np.float64))

    folder = rewritten(copy(tmp_path, "llama"), widen)
    assert "model.norm.weight is float64, of 1 such tensors" in refused(folder)
    jax.tree.map(
        np.testing.assert_array_equal,
        host(load(program_of(folder), folder, narrow=True)),
        host(load(program_of(folder), GOLDEN / "llama")),
    )


def test_quantized_tensors_are_refused(tmp_path):
    def quantize(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = ("F8_E4M3", np.zeros((40, 24), np.int8))

    assert "model.layers.0.mlp.up_proj.weight: F8_E4M3 is no dtype" in refused(rewritten(copy(tmp_path, "llama"), quantize))


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: (f / "model-00001-of-00002.safetensors").unlink(), "model-00001-of-00002.safetensors is named by"),
        (lambda f: _cut(f / "model-00002-of-00002.safetensors", -5), "promises .* truncated"),
        (lambda f: _cut(f / "model-00002-of-00002.safetensors", 5), "cannot hold a header"),
        (lambda f: _put(f / "model-00001-of-00002.safetensors", 0, b"\xff" * 8), "cannot hold a header of"),
        (lambda f: _put(f / "model-00001-of-00002.safetensors", 10, b"}}"), "header is damaged"),
        (lambda f: _reindex(f, {"model.norm.weight": "model-00001-of-00002.safetensors"}), "model.norm.weight is not in"),
        (lambda f: _reindex(f, {"model.norm.weight": None}), "is not named there by model.safetensors.index.json"),
        (lambda f: _reindex(f, {"model.norm.weight": "../x.safetensors"}), "names files outside of the folder"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json: is damaged"),
        (lambda f: shutil.copy(f / "model-00001-of-00002.safetensors", f / "model.safetensors"), "holds both"),
        (lambda f: [p.unlink() for p in f.glob("model*")], "neither model.safetensors nor"),
    ],
)
def test_damaged_folders_are_one_message(tmp_path, damage, message):
    damage(copy(tmp_path, "llama"))
    with pytest.raises(UserError, match=message):
        reading.open_source(tmp_path)


def _cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def _put(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def _reindex(folder, changes):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, file in changes.items():
        index["weight_map"].pop(name)
        if file:
            index["weight_map"][name] = file
    path.write_text(json.dumps(index))


def test_another_model_than_config_json_says_is_refused():
    capped = program_of(GOLDEN / "llama", model__logit_softcap=3.0)  # changes no shape, and config.json is silent of it
    with pytest.raises(ConfigError, match="model.logit_softcap: 3.0 in this run, 0.0 by"):
        load(capped, GOLDEN / "llama")
    program = program_of(GOLDEN / "llama", model__rope_theta=200.0, model__mlp_dim=48)
    with pytest.raises(
        ConfigError, match=r"(?s)model.mlp_dim: 48 in this run, 40 by .*model.rope_theta: 200.0.*configs/hf.py:"
    ):
        load(program, GOLDEN / "llama")


def test_runs_and_folders_are_told_apart(tmp_path):
    assert reading.is_folder(GOLDEN / "llama") and not reading.is_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(GOLDEN / "llama").to_dict()))
    assert not reading.is_folder(tmp_path)
