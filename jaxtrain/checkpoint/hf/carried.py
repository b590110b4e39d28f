"""WORKDIR/hf: what a run keeps of the Hugging Face folder its weights came from, for the folder that is made of them later.

config.json, generation_config.json, tokenizer files, chat templates    as they were
tensors.json    which file had which tensors, in what order and dtype; the index; whether files are written alike
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

from jaxtrain.checkpoint.hf import config_json, mxfp4
from jaxtrain.checkpoint.hf.reading import Source, is_folder, open_source
from jaxtrain.checkpoint.hf.tensor_files import INDEX
from jaxtrain.errors import UserError

FOLDER, TENSORS = "hf", "tensors.json"
PATTERNS = (
    *("generation_config.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "*.tiktoken", "tekken.json"),
    *("chat_template*", "additional_chat_templates/*"),
)


def keep(source: Source, workdir: str | pathlib.Path) -> None:
    """Writes WORKDIR/hf; process 0 alone calls it. Raises UserError when it cannot."""
    target = pathlib.Path(workdir) / FOLDER
    index = source.folder / INDEX
    text = index.read_text() if index.is_file() else None
    found = {"files": _files(source), "index": text, "written_alike": not source.is_other}
    try:
        target.mkdir(parents=True, exist_ok=True)
        copy(source.folder, target)
        shutil.copyfile(source.folder / config_json.NAME, target / config_json.NAME)
        (target / TENSORS).write_text(json.dumps(found))
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from error


def _files(source: Source) -> dict[str, dict]:
    """The tensors of each file; of a folder that is not written as it is, those that are written, as if in one file."""
    if not source.is_other:
        return {
            file: {"metadata": header.metadata, "tensors": [[n, e.dtype, list(e.shape)] for n, e in header.entries.items()]}
            for file, header in source.headers.items()
        }
    tensors = []
    for name, entry in source.entries.items():
        dtype, shape = entry.dtype, list(entry.shape)
        if dtype == mxfp4.DTYPE:  # bfloat16 holds it exactly; unquantized, the last two dimensions lie the other way
            dtype, shape = "BF16", [*shape[:-2], shape[-1], shape[-2]]
        tensors.append([name.removeprefix(source.prefix), dtype, shape])
    return {"": {"metadata": {}, "tensors": tensors}}


def take_over(source: pathlib.Path, workdir: pathlib.Path) -> None:
    """`keep`, of a Hugging Face folder or of a run that keeps such a folder itself; else nothing."""
    if is_folder(source):
        keep(open_source(source), workdir)
    elif (source / FOLDER).is_dir() and not (workdir / FOLDER).exists():
        shutil.copytree(source / FOLDER, workdir / FOLDER)


def copy(source: pathlib.Path, target: pathlib.Path) -> list[str]:
    """Copies tokenizer files, chat templates and generation settings; returns their names."""
    names = sorted(
        {path.relative_to(source).as_posix() for pattern in PATTERNS for path in source.glob(pattern) if path.is_file()}
    )
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return names


def read(workdir: str | pathlib.Path) -> tuple[dict, dict[str, Any]]:
    """config.json and tensors.json of WORKDIR/hf; empty for weights that came from no folder."""
    folder = pathlib.Path(workdir) / FOLDER
    if not folder.is_dir():
        return {}, {}
    config = config_json.read(folder)
    try:
        return config, json.loads((folder / TENSORS).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / TENSORS}: cannot be read: {error}") from error
