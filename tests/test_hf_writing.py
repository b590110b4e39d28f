"""Writing Hugging Face folders: what was read is written to the byte, from any mesh; dtypes, file sizes, config.json."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from hf import ALIKE, GOLDEN, load, program_of
from test_hf_reading import tensors_of
from tiny import host

from jaxtrain.checkpoint import arrays
from jaxtrain.checkpoint.hf import carried, config_json, reading, tensor_files, writing
from jaxtrain.checkpoint.manager import Checkpointer, restore_params, saved_steps
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.train.program import LAYER_ORDER


def export(program, params, folder, workdir, **options):
    """Saves a checkpoint of the weights as they lie on their mesh, and makes a folder of it."""
    step = max(saved_steps(workdir), default=-1) + 1
    with Checkpointer(workdir, save_every_steps=1, keep=Keep(last=100)) as checkpointer:
        checkpointer.save(step, {"params": params}, {LAYER_ORDER: program.layer_order})
    stored, facts, _ = restore_params(workdir, program.abstract_state.params, step, reader=arrays.opened)
    leaves, run = arrays.named_leaves(stored), pathlib.Path(workdir)
    writing.write(writing.prepare(leaves, program.model, facts[LAYER_ORDER], run, **options), pathlib.Path(folder), run)
    return pathlib.Path(folder)


def imported(name, workdir, axes={"fsdp": 1}, **changes):  # noqa: B006
    program = program_of(GOLDEN / name, axes, **changes)
    carried.keep(reading.open_source(GOLDEN / name), workdir)
    return program, load(program, GOLDEN / name)


def same_files(folder, other):
    ours = {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith("model")}
    theirs = {path.name: path.read_bytes() for path in other.iterdir() if path.name.startswith("model")}
    assert ours == theirs
    assert (folder / "generation_config.json").read_bytes() == (other / "generation_config.json").read_bytes()


@pytest.mark.parametrize("name", ALIKE)
def test_read_then_written_is_the_same_to_the_byte(name, tmp_path):
    program, params = imported(name, tmp_path / "run")
    folder = export(program, params, tmp_path / "out", tmp_path / "run")
    same_files(folder, GOLDEN / name)
    before, after = config_json.read(GOLDEN / name), config_json.read(folder)
    assert config_json.model_section(before) == config_json.model_section(after)
    for key, value in before.items():
        assert after.get(key) == value, key
    assert after["dtype"] == after["torch_dtype"] == before["dtype"]


@pytest.mark.slow
def test_quantized_experts_are_written_as_what_they_stand_for(tmp_path):
    """MXFP4 becomes bfloat16, without losing a bit: read again, every number is the same."""
    source = GOLDEN / "gpt_oss_mxfp4"
    program, params = imported("gpt_oss_mxfp4", tmp_path / "run", {"expert": 2, "tensor": 2, "fsdp": 2})
    jax.tree.map(np.testing.assert_array_equal, host(params), host(load(program_of(source), source)))
    folder = export(program, params, tmp_path / "out", tmp_path / "run")
    assert "quantization_config" not in config_json.read(folder) and config_json.read(folder)["dtype"] == "bfloat16"
    assert {dtype for dtype, _ in tensors_of(folder).values()} == {"BF16"}
    name = "model.layers.1.mlp.experts.down_proj"
    entries = {n: e for header in tensor_files.open_folder(source).values() for n, e in header.entries.items()}
    blocks, scales = (
        np.array(tensor_files.read(entries[f"{name}_{part}"], np.dtype(np.uint8))) for part in ("blocks", "scales")
    )
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    byte, power = int(blocks[3, 5, 0, 7]), int(scales[3, 5, 0])  # numbers 14 and 15 of row 5 of expert 3
    for place, bits in ((14, byte & 15), (15, byte >> 4)):
        stands_for = values[bits & 7] * (-1 if bits & 8 else 1) * 2.0 ** (power - 127)
        assert float(tensors_of(folder)[name][1][3, place, 5]) == stands_for
    jax.tree.map(np.testing.assert_array_equal, host(load(program_of(folder), folder)), host(load(program_of(source), source)))


def test_damaged_quantized_tensors_are_named(tmp_path):
    from test_hf_reading import copy, refused, rewritten

    copy(tmp_path, "gpt_oss_mxfp4")
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    path = tmp_path / "model.safetensors"
    entry, content = tensor_files.read_header(path).entries[name], bytearray(path.read_bytes())
    content[entry.start] = 255
    path.write_bytes(content)
    assert f"{name}: holds a scale that is none" in refused(tmp_path)
    assert f"{name[:-7]} [6, 64, 32]: is missing" in refused(rewritten(tmp_path, lambda tensors: tensors.pop(name)))


def test_the_text_of_a_model_of_images_is_written_as_a_model_of_text(tmp_path):
    program, params = imported("gemma3_images", tmp_path / "run")
    folder = export(program, params, tmp_path / "out", tmp_path / "run")
    config = config_json.read(folder)
    assert (config["architectures"], config["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    ours, theirs = tensors_of(folder), tensors_of(GOLDEN / "gemma3_images")
    named = {name.removeprefix("language_model."): of for name, of in theirs.items() if name.startswith("language_model.")}
    assert set(ours) == set(named)
    for name, (dtype, array) in named.items():
        assert ours[name][0] == dtype == "BF16"
        np.testing.assert_array_equal(ours[name][1], array, name)
    jax.tree.map(np.testing.assert_array_equal, host(load(program_of(folder), folder)), host(params))


@pytest.mark.parametrize("axes", [{"fsdp": 1}, {"fsdp": 2, "tensor": 2}], ids=["one", "four"])
def test_no_more_is_read_than_asked_for(axes, tmp_path, monkeypatch):
    """A layer of an array is read by its bytes, in however few pieces it was saved; what does not follow each other, whole."""
    program, params = imported("llama", tmp_path / "run", axes)
    export(program, params, tmp_path / "out", tmp_path / "run")
    stored, *_ = restore_params(tmp_path / "run", program.abstract_state.params, reader=arrays.opened)
    whole, leaves = arrays.named_leaves(host(params)), arrays.named_leaves(stored)

    class Never:
        """A store that cannot read whole pieces."""

        def __init__(self, array):
            self.shape, self.dtype, self.spec, self.kvstore = array.shape, array.dtype, array.spec, array.kvstore

    for name, leaf in leaves.items():
        narrow, full = arrays.Stored(Never(leaf.array)), tuple(slice(0, n) for n in leaf.shape)
        for rows in (slice(0, 1), slice(1, 2), slice(0, leaf.shape[0])):
            index = (rows, *full[1:])
            if leaf.array.chunk_layout.read_chunk.shape[1:] == leaf.shape[1:] or rows.stop - rows.start == 1:
                np.testing.assert_array_equal(narrow.read(index), whole[name][index], name)
            np.testing.assert_array_equal(leaf.read(index), whole[name][index], name)
        odd = tuple(slice(n // 3, max(n - 1, n // 3 + 1)) for n in leaf.shape)
        np.testing.assert_array_equal(leaf.read(odd), whole[name][odd], name)


MESHES = {
    "llama": {"pipeline": 2, "tensor": 2, "data": 2},
    "gpt2": {"fsdp": 8},
    "llama_tied": {"tensor": 4, "fsdp": 2},
    "deepseek_v3": {"expert": 2, "tensor": 2, "data": 2},
    "gemma3": {"sequence": 2, "fsdp": 4},
    "gpt_oss": {"expert": 2, "tensor": 2, "fsdp": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_writes_the_same_bytes(name, tmp_path):
    changes = {"train__accumulation_steps": 2, "data__global_batch_rows": 4} if "pipeline" in MESHES[name] else {}
    program, params = imported(name, tmp_path / "run", MESHES[name], **changes)
    same_files(export(program, params, tmp_path / "out", tmp_path / "run"), GOLDEN / name)


def test_layers_of_virtual_stages_are_written_in_order(tmp_path):
    from test_hf_reading import copy, grown

    deep = grown(copy(tmp_path, "llama"), 4)
    changes = {"train__accumulation_steps": 2, "data__global_batch_rows": 2, "pipeline__schedule": "interleaved"}
    program = program_of(deep, {"pipeline": 2}, pipeline__virtual_stages=2, **changes)
    folder = export(program, load(program, deep), tmp_path / "out", tmp_path / "run")
    ours, theirs = tensors_of(folder), tensors_of(deep)
    assert set(ours) == set(theirs)
    for name, (_, array) in theirs.items():
        np.testing.assert_array_equal(ours[name][1], array, name)


def test_files_of_a_given_size(tmp_path):
    program, params = imported("llama_tied", tmp_path / "run")
    folder = export(program, params, tmp_path / "out", tmp_path / "run", max_bytes=6000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    theirs, ours = tensors_of(GOLDEN / "llama_tied"), tensors_of(folder)
    sizes = {file: sum(ours[n][1].nbytes for n, f in index["weight_map"].items() if f == file) for file in files}
    table = ours["model.embed_tokens.weight"][1].nbytes
    assert sorted(sizes.values())[-2] <= 6000 < table == max(sizes.values())  # a larger tensor has a file of its own
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert {name: dtype for name, (dtype, _) in ours.items()} == {name: dtype for name, (dtype, _) in theirs.items()}
    for name, (_, array) in theirs.items():
        np.testing.assert_array_equal(ours[name][1].view(np.uint16), array.view(np.uint16), name)


def test_nothing_is_narrowed_unless_asked(tmp_path):
    program, params = imported("qwen3", tmp_path / "run")
    params["final_norm"]["scale"] = params["final_norm"]["scale"].at[0].set(1 + 2**-12)  # more than bfloat16 holds
    exact = export(program, params, tmp_path / "exact", tmp_path / "run")
    assert {dtype for dtype, _ in tensors_of(exact).values()} == {"F32"}
    assert config_json.read(exact)["dtype"] == "float32"
    jax.tree.map(np.testing.assert_array_equal, host(load(program, exact)), host(params))
    asked = export(program, params, tmp_path / "asked", tmp_path / "run", dtype="bfloat16")
    assert {dtype for dtype, _ in tensors_of(asked).values()} == {"BF16"}
    assert config_json.read(asked)["torch_dtype"] == "bfloat16"
    half = export(program, params, tmp_path / "half", tmp_path / "run", dtype="float16")
    assert {dtype for dtype, _ in tensors_of(half).values()} == {"F16"}
    params["final_norm"]["scale"] = params["final_norm"]["scale"].at[0].set(1e6)
    with pytest.raises(UserError, match="float16 cannot hold values of final_norm.scale"):
        export(program, params, tmp_path / "over", tmp_path / "run", dtype="float16")


def test_padding_of_the_vocabulary_never_leaves(tmp_path):
    program, params = imported("llama", tmp_path / "run", {"tensor": 2}, model__vocab_pad_multiple=64)
    assert params["embedder"]["table"].shape[0] == 320
    params["embedder"]["table"] = params["embedder"]["table"].at[259:].set(1.0)
    same_files(export(program, params, tmp_path / "out", tmp_path / "run"), GOLDEN / "llama")


def test_tokenizer_and_templates_are_carried(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in (GOLDEN / "llama").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json")
    for name in files:
        (source / name).write_text(f'{{"content of": "{name}"}}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (source / "README.md").write_text("not carried")
    program = program_of(source)
    carried.keep(reading.open_source(source), tmp_path / "run")
    folder = export(program, load(program, source), tmp_path / "out", tmp_path / "run")
    for name in (*files, "additional_chat_templates/tools.jinja"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert not (folder / "README.md").exists()


def test_weights_from_no_folder(tmp_path):
    program = program_of(GOLDEN / "qwen2")
    params = load(program, GOLDEN / "qwen2")
    folder = export(program, params, tmp_path / "out", tmp_path / "run")  # nothing was kept there
    assert config_json.read(folder)["architectures"] == ["Qwen2ForCausalLM"]
    assert {dtype for dtype, _ in tensors_of(folder).values()} == {"F32"}
    jax.tree.map(np.testing.assert_array_equal, host(load(program_of(folder), folder)), host(params))


def test_refusals(tmp_path):
    program, params = imported("llama", tmp_path / "run")
    export(program, params, tmp_path / "out", tmp_path / "run")
    with pytest.raises(UserError, match="holds weights already"):
        export(program, params, tmp_path / "out", tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        export(program, params, tmp_path / "file" / "below", tmp_path / "run")
    odd = program_of(GOLDEN / "llama", model__logit_softcap=3.0)
    with pytest.raises(ConfigError, match="model.logit_softcap=3.0"):
        export(odd, params, tmp_path / "odd", tmp_path / "run")
