"""Text to token ids and back.

A tokenizer has `name`, `vocab_size`, `bos_id`, `eos_id`, `encode` and `decode`; `encode` adds no BOS or EOS, packing does.
`TOKENIZERS` maps the values of data.tokenizer to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxtrain.errors import UserError


class Tokenizer(Protocol):
    """What packing and sampling need of a tokenizer."""

    name: str
    vocab_size: int
    bos_id: int
    eos_id: int

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def count_bytes(self, ids: np.ndarray) -> int: ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 is BOS, 257 is EOS."""

    name = "byte"
    vocab_size = 258
    bos_id = 256
    eos_id = 257

    def encode(self, text: str) -> np.ndarray:
        """Ids as uint8 [bytes of text]. Raises UserError on a lone surrogate, which no UTF-8 text holds."""
        try:
            return np.frombuffer(text.encode("utf-8"), np.uint8)
        except UnicodeEncodeError as error:
            raise UserError(
                f"character {error.start} of the text, {text[error.start]!r}, cannot be written as UTF-8"
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; BOS and EOS are dropped, broken byte sequences become U+FFFD."""
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")

    def count_bytes(self, ids: np.ndarray) -> int:
        """Bytes of text that ids stand for: one each, none for BOS and EOS."""
        return int(np.count_nonzero(ids < 256))


TOKENIZERS: dict[str, type[Tokenizer]] = {"byte": ByteTokenizer}


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of data.tokenizer."""
    return TOKENIZERS[name]()


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds the ids 0..vocab_size-1 (uint16 would wrap larger ones silently)."""
    return np.dtype(np.uint16 if vocab_size - 1 <= np.iinfo(np.uint16).max else np.uint32)


def check_ids(tokens: np.ndarray, offsets: np.ndarray, names: Sequence[str], vocab_size: int) -> None:
    """Raises UserError if an id is not below model.vocab_size: the embedding lookup would clamp it without a word.

    Args:
      tokens: ids of all documents, [tokens].
      offsets: where each document begins, and the end: [documents + 1].
      names: of the documents.
      vocab_size: of the model.
    """
    if tokens.size == 0 or int(tokens.max()) < vocab_size:
        return
    first = int(np.argmax(tokens >= vocab_size))
    name = names[int(np.searchsorted(offsets, first, side="right")) - 1]
    raise UserError(
        f"token id {int(tokens[first])} in {name} is not below model.vocab_size={vocab_size}; "
        f"the corpus needs model.vocab_size of at least {int(tokens.max()) + 1}"
    )
