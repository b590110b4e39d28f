"""WORKDIR/hf: what a run keeps of the Hugging Face folder its weights came from, for the folder that is made of them later.

config.json, generation_config.json, tokenizer files, chat templates    as they were
tensors.json    which file had which tensors, in what order and dtype; the index
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

from jaxtrain.checkpoint.hf import config_json
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
    files = {
        file: {
            "metadata": header.metadata,
            "tensors": [[name, entry.dtype, list(entry.shape)] for name, entry in header.entries.items()],
        }
        for file, header in source.headers.items()
    }
    index = source.folder / INDEX
    found = {"files": files, "index": index.read_text() if index.is_file() else None}
    try:
        target.mkdir(parents=True, exist_ok=True)
        copy(source.folder, target)
        shutil.copyfile(source.folder / config_json.NAME, target / config_json.NAME)
        (target / TENSORS).write_text(json.dumps(found))
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from error


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
