"""python -m jaxtrain.evaluate: the loss is that of the logits, on every mesh, of folders and runs; sets by name."""

from __future__ import annotations

import json
import logging

import jax
import numpy as np
import pytest
from hf import GOLDEN, load, program_of

from jaxtrain import evaluate
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.model.batch import Batch

pytestmark = pytest.mark.slow  # its light tests share what the others compile

TEXTS = (
    "A first document, of one row. " * 2,
    "And another one that is longer than a row of 64 positions, hence cut in two parts.",
)
FLOAT32 = ("--config.precision.compute_dtype=float32", "--config.data.seq_len_tokens=64", "--config.data.packing=pad")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


def figures(tmp_path, *arguments):
    evaluate.main([*arguments, *FLOAT32, f"--json={tmp_path / 'found.json'}"])
    return json.loads((tmp_path / "found.json").read_text())


def test_the_loss_is_that_of_the_logits_on_every_mesh(texts, tmp_path, caplog):
    program = program_of(GOLDEN / "llama")
    params, total, count = load(program, GOLDEN / "llama"), 0.0, 0
    for text in TEXTS:
        ids = [*text.encode(), 257]
        for start in range(0, len(ids), 64):
            row = np.zeros((1, 64), np.int32)
            part = ids[start : start + 64]
            row[0, : len(part)] = part
            inside = (np.arange(64) < len(part))[None].astype(np.int32)
            batch = Batch(tokens=row, targets=row, segment_ids=inside, positions=np.arange(64, dtype=np.int32)[None] * inside)
            logits = jax.nn.log_softmax(np.asarray(program.logits(params, batch))[0])
            targets = (
                part[1:] + ids[start + 64 : start + 65]
            )  # the label of a row's last position is the next row's first token
            total -= sum(float(logits[i, id]) for i, id in enumerate(targets))
            count += len(targets)
    for axes in (["--config.mesh.fsdp=1"], ["--config.mesh.fsdp=2", "--config.mesh.tensor=2", "--config.mesh.data=2"]):
        with caplog.at_level(logging.INFO):
            found = figures(tmp_path, f"--hf={GOLDEN / 'llama'}", f"--config.data.eval_paths={texts}", *axes)["eval"]
        assert found["eval_loss"] == pytest.approx(total / count, abs=2e-2) and found["eval_targets"] == pytest.approx(
            count, abs=2
        )
        assert found["eval_bits_per_byte"] > 0 and found["tokens_per_s"] > 0 and "tokens/s" in caplog.text


def test_several_sets_by_name(texts, tmp_path):
    sets = {"first": {"paths": (str(texts / "0.txt"),)}, "second": {"paths": (str(texts / "1.txt"),)}}
    overrides = [("data.eval_sources", sets), ("data.paths", (str(texts),)), ("data.seq_len_tokens", 64)]
    found = evaluate.evaluate(str(GOLDEN / "llama"), overrides)
    assert list(found) == ["first", "second"] and found["first"]["eval_loss"] != found["second"]["eval_loss"]


def test_refusals(texts, tmp_path):
    with pytest.raises(ConfigError, match="data.eval_paths: name the held-out text"):
        evaluate.main([f"--hf={GOLDEN / 'llama'}"])
    with pytest.raises(UserError, match="is a Hugging Face folder, which has no step 3"):
        evaluate.main([f"--hf={GOLDEN / 'llama'}", "--step=3", f"--config.data.eval_paths={texts}"])
    with pytest.raises(UserError, match="no config.json there"):
        evaluate.main([f"--workdir={tmp_path}", f"--config.data.eval_paths={texts}"])
