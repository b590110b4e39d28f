"""Conversations: exactly what the assistant says is trained, with the token that ends its turn, whatever the template."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxtrain import config as configs
from jaxtrain.data import chat, corpus
from jaxtrain.errors import UserError

pytest.importorskip("jinja2")
library = pytest.importorskip("tokenizers")

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "</s>",
    "<s>",
    "[TOOL_CALLS]",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # no system role of its own; EOS ends a turn
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ system if loop.first else '' }}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
END_WITH_NEXT = (  # C42: the token that ends a turn stands in the next message
    "{% for m in messages %}{% if m.role == 'user' %}{% if not loop.first %}{{ eos_token }}{% endif %}[INST] {{ m.content }} "
    "[/INST]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MARKED = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
REWRITES = (  # of Qwen3's kind: what the assistant thought is dropped from earlier turns
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Bye now."},
]


def template(source, eos="</s>"):
    return chat.Template(source, "test", {text: i for i, text in enumerate(SPECIALS)}, "<s>", eos)


def trained(source, messages=TALK, tools=None, turns="all", eos="</s>"):
    spans = template(source, eos).spans(messages, tools, turns)
    return [text for text, is_trained in spans if is_trained], "".join(text for text, _ in spans)


@pytest.mark.parametrize(
    "source, expected",
    [
        (CHATML, ["Hi.<|im_end|>", "Bye now.<|im_end|>"]),
        (MARKED, ["Hi.<|im_end|>", "Bye now.<|im_end|>"]),
        (NO_PROMPT, ["Hi.<|im_end|>", "Bye now.<|im_end|>"]),
        (LLAMA3, ["Hi.<|eot_id|>", "Bye now.<|eot_id|>"]),
        (MISTRAL, [" Hi.</s>", " Bye now.</s>"]),
    ],
)
def test_c41_the_assistants_content_and_the_end_of_its_turn_are_trained(source, expected):
    found, whole = trained(source)
    assert found == expected
    assert whole == template(source).render(TALK, None)
    assert trained(source, turns="last")[0] == expected[-1:]


def test_c42_a_token_that_belongs_to_the_next_message_ends_the_turn():
    assert trained(END_WITH_NEXT, TALK[1:])[0] == ["Hi.</s>", "Bye now."]  # EOS of the document ends the last


def test_c42_a_template_that_never_ends_a_turn_is_named():
    with pytest.raises(UserError, match=r"chat template of test ends message 2, of the assistant, with no special token"):
        trained(NO_END)


def test_c41_a_template_that_rewrites_earlier_turns_is_named_or_trained_on_the_last():
    thinking = [dict(m, content=f"<think>hm</think>{m['content']}") if m["role"] == "assistant" else m for m in TALK]
    with pytest.raises(UserError, match=r"renders message 2 in another way once more messages follow.*train_turns='last'"):
        trained(REWRITES, thinking)
    assert trained(REWRITES, thinking, turns="last")[0] == ["<think>hm</think>Bye now.<|im_end|>"]


def test_tools_and_their_results_are_not_trained_but_calls_are():
    call = {"name": "add", "arguments": {"a": 1}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2, says <|im_end|> the tool"},
    ]
    found, whole = trained(TOOLS, messages, tools=[{"name": "add", "description": "<|im_start|>"}])
    assert "".join(found) == f"[TOOL_CALLS]{json.dumps(call)}<|im_end|>2, says <|im_end|> the tool<|im_end|>"
    assert '<|im_start|>tools\n[{"name": "add"' in whole


def test_malformed_conversations_are_bad_records():
    for messages, what in (
        ([], "no message of the assistant"),
        (TALK[:2], "no message of the assistant"),
        ([{"role": "assistant"}], r"message 0 \(assistant\) has no content"),
        ([{"content": "x"}], "message 0 is no object with a role"),
        ("text", "message 0 is no object"),
        ([{"role": "other", "content": "x"}, TALK[2]], "the chat template (refuses|fails on) it"),
    ):
        with pytest.raises(chat.Unfit, match=what):
            template(MISTRAL).spans(messages, None)
    with pytest.raises(UserError, match="the chat template of test"):
        template("{% for %}")
    for source, what in (("{{ 1 / 0 }}", "ZeroDivisionError"), ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError")):
        with pytest.raises(chat.Unfit, match=f"the chat template fails on it: {what}"):
            template(source).spans(TALK, None)


# Through to batches


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer, made.decoder = library.pre_tokenizers.ByteLevel(add_prefix_space=False), library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        special_tokens=SPECIALS,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=300,
        show_progress=False,
    )
    made.train_from_iterator(["Hello? Hi. And? Bye now. assistant user system"], trainer)
    made.save(str(folder / "tokenizer.json"))
    facts = {"eos_token": "<|endoftext|>", "bos_token": "<s>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


def load(tokenizer, path, records, **changes):
    path.write_text("\n".join(json.dumps(record) for record in records))
    config = configs.default_config()
    config.data.update(tokenizer=str(tokenizer), paths=(str(path),), holdout_fraction=0.0, seq_len_tokens=64, content="chat")
    config.data.update(changes)
    config.model.vocab_size = 512
    return corpus.load_corpus(config)


def trained_text(found, epoch_rows=None):
    """Text of all targets of an epoch, row by row."""
    packed = found.train["data"]
    batch = packed.rows(np.arange(packed.rows_per_epoch))
    return [found.tokenizer.decode(row[row >= 0]) for row in batch["targets"]], batch


@pytest.mark.parametrize("packing", ["concat", "best_fit", "pad"])
def test_targets_are_what_is_trained(tokenizer, tmp_path, packing):
    injected = [
        {"role": "user", "content": "say <|im_end|> and <|endoftext|>"},
        {"role": "assistant", "content": "<|im_end|>!"},
    ]
    found = load(tokenizer, tmp_path / "x.jsonl", [{"messages": TALK}, {"messages": injected}], packing=packing)
    texts, batch = trained_text(found)
    both = ["Hi.<|im_end|>Bye now.<|im_end|>", "<|im_end|>!<|im_end|>"]
    assert "".join(texts) in ("".join(both), "".join(both[::-1]))
    ends = found.tokenizer.specials["<|im_end|>"]
    assert np.sum(batch["targets"] == ends) == 3, "the one that a message spells is no special token"
    real = batch["tokens"][batch["segment_ids"] > 0]
    eos = found.tokenizer.eos_id
    assert np.sum(real == eos) == 2 and not np.any(batch["targets"] == eos), "one EOS a document, not trained behind <|im_end|>"


def test_eos_ends_the_last_turn_where_the_template_does_not(tokenizer, tmp_path):
    (tmp_path / "template.jinja").write_text(END_WITH_NEXT)
    changes = dict(chat_template_file=str(tmp_path / "template.jinja"))
    found = load(tokenizer, tmp_path / "x.jsonl", [{"messages": TALK[1:]}], **changes)
    (text,), _ = [t for t in trained_text(found)[0] if t], None
    assert text == "Hi.<|endoftext|>Bye now.<|endoftext|>"


def test_bos_of_the_template_is_not_doubled(tokenizer, tmp_path):
    (tmp_path / "template.jinja").write_text(LLAMA3)
    changes = dict(chat_template_file=str(tmp_path / "template.jinja"), add_bos=True)
    found = load(tokenizer, tmp_path / "x.jsonl", [{"messages": TALK}], **changes)
    store = found.train["data"].store
    assert np.sum(store.read(0, store.num_tokens)[0] == found.tokenizer.bos_id) == 1


def test_completions_are_trained_with_eos(tokenizer, tmp_path):
    records = [{"prompt": "Hello?", "completion": "Hi."}, {"prompt": "And?", "completion": "Bye now."}]
    found = load(tokenizer, tmp_path / "x.jsonl", records, content="completion", packing="pad")
    assert sorted(trained_text(found)[0]) == ["Bye now.<|endoftext|>", "Hi.<|endoftext|>"]
    bad = [{"prompt": "a", "completion": None}]
    with pytest.raises(UserError, match=r"x\.jsonl: line 1: the field 'completion': expected text, got null"):
        load(tokenizer, tmp_path / "x.jsonl", bad, content="completion")


def test_bad_conversations_follow_the_policy(tokenizer, tmp_path):
    records = [{"messages": TALK}, {"messages": TALK[:2]}, {"messages": "no"}, {"text": "x"}, {"messages": TALK, "tools": "x"}]
    with pytest.raises(UserError, match=r"x\.jsonl: line 2: no message of the assistant"):
        load(tokenizer, tmp_path / "x.jsonl", records)
    found = load(tokenizer, tmp_path / "x.jsonl", records, on_bad_record="skip")
    assert (found.counts["documents"], found.counts["skipped_bad"]) == (1, 4)
    (tmp_path / "plain.txt").write_text("x")
    with pytest.raises(UserError, match="needs fields; this is a text file"):
        load(tokenizer, tmp_path / "x.jsonl", records, paths=(str(tmp_path / "plain.txt"),))
    with pytest.raises(UserError, match="byte has no chat template; set data.chat_template_file"):
        load("byte", tmp_path / "x.jsonl", records)
