"""python -m jaxtrain.generate: prompts, stops, chat, runs and Hugging Face folders; greedy text is transformers'."""

from __future__ import annotations

import json
import logging
import re

import jax
import numpy as np
import pytest
from hf import GOLDEN, NAMES, expected, load, program_of
from test_hf_reading import copy

import jaxtrain
from jaxtrain import generate
from jaxtrain.command_line import command
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.train.sampling import Sampling, sample

FLOAT32 = "--config.precision.compute_dtype=float32"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A tiny folder with a tokenizer of whole bytes, special tokens, and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = copy(tmp_path_factory.mktemp("chatty"), "llama")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: number for number, letter in enumerate(sorted(alphabet))}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(["<s>", "<|end|>", "<|user|>"])  # ids 256 to 258: as many as the model has
    model.save(str(folder / "tokenizer.json"))
    facts = {"bos_token": "<s>", "eos_token": "<|end|>", "add_bos_token": False, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 7]}))
    return folder


pytestmark = pytest.mark.slow  # its light tests share what the others compile


def run(capsys, *arguments):
    generate.main([*arguments, FLOAT32])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3", "gemma3", "gpt_oss_mxfp4"])
def test_greedy_tokens_equal_transformers(name):
    program = program_of(GOLDEN / name)
    prompt = expected(name)["tokens"][:, :16]
    drawn = sample(program, load(program, GOLDEN / name), prompt, _key(), Sampling(8, temperature=0.0))
    np.testing.assert_array_equal(drawn.tokens, expected(name)["greedy"])


def _key():
    return jax.random.key(0)


def test_every_family_is_known():
    assert set(NAMES) >= {"llama", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3"}


def test_a_batch_of_prompts_from_a_file(capsys, chatty, tmp_path, caplog):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo is longer\n")
    options = ("--max-tokens=20", "--temperature=0", f"--hf={chatty}")
    with caplog.at_level(logging.INFO):
        together = run(capsys, f"--prompts={prompts}", *options)
    assert re.search(r"16 tokens of prompts, \d+ drawn in 2 rows", caplog.text)
    alone = [run(capsys, f"--prompt={text}", *options).removesuffix("\n") for text in ("one", "two is longer")]
    assert together == "\n\n".join(alone) + "\n"
    output = tmp_path / "out.jsonl"
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"prompt": "one"}) + "\n" + json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n")
    run(capsys, f"--prompts={lines}", f"--output={output}", *options)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert "one" + found[0]["text"] == alone[0] and found[1]["prompt"] == [{"role": "user", "content": "x"}]


def test_every_flag_reaches_the_draw(capsys, chatty, monkeypatch):
    """What the command is told is what is drawn with; what each of these does is tested with the draw itself."""
    from jaxtrain.train import sampling

    seen, tokenizer = [], pytest.importorskip("tokenizers").Tokenizer.from_file(str(chatty / "tokenizer.json"))
    stop = 5 * tokenizer.decode([97])

    def recorded(program, params, rows, key, how, ended):
        seen.append((rows, int(jax.random.key_data(key)[-1]), how, program.layout.size("tensor")))
        return sampling.Drawn(np.full((len(rows), how.max_tokens), 97, np.int32), 12.5)

    monkeypatch.setattr(sampling, "sample", recorded)
    flags = ("--max-tokens=7", "--temperature=0.5", "--top-k=9", "--top-p=0.75", "--min-p=0.125", "--seed=11", "--tensor=2")
    out = run(
        capsys, f"--hf={chatty}", "--prompt=hi", *flags, "--num-samples=2", "--chat", "--system=be kind", f"--stop={stop}"
    )
    [(rows, seed, how, tensor)] = seen
    assert how == Sampling(7, temperature=0.5, top_k=9, top_p=0.75, min_p=0.125) and (seed, tensor) == (11, 2)
    assert len(rows) == 2 and rows[0] == rows[1] and "be kind" in tokenizer.decode(rows[0])
    assert out == "\n\n\n"  # each stopped at its first text


def test_over_tensor_and_how_fast(capsys, chatty, caplog):
    """The same text from two devices; the speed is that of chunks after the first, which compiles."""
    options = (f"--hf={chatty}", "--prompt=abc", "--max-tokens=40", "--temperature=0.7", "--seed=5")
    with caplog.at_level(logging.INFO):
        one = run(capsys, *options)
    rate = re.search(r"3 tokens of prompts, 40 drawn in 1 rows, ([\d,.]+) tokens/s", caplog.text)
    assert float(rate[1].replace(",", "")) > 0
    assert run(capsys, *options, "--tensor=2") == one


def test_stop_strings_and_end_tokens(chatty):
    options = dict(max_tokens=24, temperature=0.0, overrides=[("precision.compute_dtype", "float32")])
    [whole] = generate.generate(chatty, ["abc"], **options)
    mark = whole[3:5]
    [cut] = generate.generate(chatty, ["abc"], stop=["never there", mark], **options)
    assert mark not in cut and cut == whole[: whole.find(mark)]


def test_generation_config_says_where_to_end(chatty):
    from jaxtrain.train.weights import end_ids

    assert end_ids(chatty) == [257, 7]
    stated = json.loads((GOLDEN / "llama" / "generation_config.json").read_text())["eos_token_id"]
    assert end_ids(GOLDEN / "llama") == [stated]


def test_chat_goes_through_the_template(chatty, monkeypatch):
    seen = []
    from jaxtrain.train import sampling

    real = sampling.sample
    monkeypatch.setattr(sampling, "sample", lambda *a, **k: seen.append(a[2]) or real(*a, **k))
    messages = [{"role": "user", "content": "hi <|end|>"}]
    generate.generate(chatty, [messages], max_tokens=2, overrides=[("precision.compute_dtype", "float32")])
    [ids] = seen[0]
    assert ids[0] == 256 and ids[1] == 258 and ids.count(257) == 1  # what users write never becomes a special token
    with pytest.raises(UserError, match="has no chat template"):
        generate.generate(GOLDEN / "llama", [messages], max_tokens=2)


def test_seeds_and_samples(chatty):
    def draw(seed, count=2):
        options = dict(max_tokens=12, temperature=1.0, min_p=0.01)
        return jaxtrain.generate(chatty, "abc", count, seed=seed, **options)

    assert draw(1) == draw(1) and len(set(draw(1) + draw(2))) == 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt=a", "--prompts=x"], "--prompts: give it or --prompt"),
        (["--system=a"], "--system: means nothing without --chat"),
        (["--min-p=1.5"], "--min-p: must be at least 0.0 and at most 1.0"),
        (["--max-tokens=100"], "exceed model.max_len_tokens=64"),
        (["--config.model.what=1"], "model.what: unknown key"),
        (["--wat"], "--wat: unknown argument"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ConfigError, match=message):
        generate.main([f"--hf={GOLDEN / 'llama'}", "--prompt=a" if "--prompt=a" not in arguments else "--seed=0", *arguments])


@pytest.mark.parametrize(
    "content, message", [("", "holds no prompt"), ('{"text": 1}\n', "line 1 has neither"), ("[]", "line 1")]
)
def test_damaged_prompt_files(tmp_path, content, message, capsys):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(SystemExit) as ended:
        command(generate.main, [f"--hf={GOLDEN / 'llama'}", f"--prompts={tmp_path / 'p.jsonl'}"])
    assert ended.value.code == 1 and message in capsys.readouterr().err
