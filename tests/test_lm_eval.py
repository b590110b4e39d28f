"""python -m jaxtrain.lm_eval: tasks of lm-evaluation-harness give what the logits say."""

from __future__ import annotations

import json
import types

import jax
import numpy as np
import pytest
from hf import GOLDEN, batch_of, load, program_of

from jaxtrain import generate
from jaxtrain.command_line import command
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.model.batch import Batch

pytest.importorskip("lm_eval")
from jaxtrain import lm_eval

pytestmark = pytest.mark.slow  # its light tests share what the others compile

FLOAT32 = [("precision.compute_dtype", "float32")]
EOS = 257
LONG = "A text that is longer than the model's context of sixty-four bytes, so that it is scored in windows. " * 2


@pytest.fixture(scope="module")
def harness():
    return lm_eval.Harness(GOLDEN / "llama", FLOAT32)


@pytest.fixture(scope="module")
def log_p():
    """Log-probabilities of the next token at each position of a text's ids, by the training program's logits."""
    program = program_of(GOLDEN / "llama")
    params = load(program, GOLDEN / "llama")

    def found(ids):
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(ids)] = ids
        return np.asarray(jax.nn.log_softmax(program.logits(params, Batch(**batch_of(tokens)))[0], -1))

    return found


def asked(*arguments):
    return types.SimpleNamespace(args=arguments)


def test_likelihoods_of_continuations(harness, log_p):
    pairs = [("2 + 2 = ", "4"), ("2 + 2 = ", "five"), ("", "alone"), ("x" * 90, "the latest bytes count")]
    found = harness.loglikelihood([asked(*pair) for pair in pairs])
    for (before, after), (value, greedy) in zip(pairs, found, strict=True):
        spaces = len(before) - len(before.rstrip())  # the harness counts spaces at the end of a context to what follows
        after = before[len(before) - spaces :] + after
        context = list(before.rstrip().encode()) or [EOS]
        after = list(after.encode())
        ids = [*context, *after][-65:]
        p = log_p(ids[:-1])[len(ids) - 1 - len(after) : len(ids) - 1]
        assert value == pytest.approx(sum(p[range(len(after)), after]), abs=1e-3)
        assert greedy == bool((p.argmax(-1) == after).all())
    begin = next(c for c in "abcdefgh" if log_p(list(c.encode()))[0].argmax() < 128)  # what follows is text of its own
    likeliest = chr(log_p(list(begin.encode()))[0].argmax())
    assert harness.loglikelihood([asked(begin, likeliest)])[0][1] or likeliest.isspace()
    with pytest.raises(UserError, match="a continuation of 100 tokens exceeds model.max_len_tokens=64"):
        harness.loglikelihood([asked("a", "b" * 100)])


def test_whole_texts_are_scored_in_windows(harness, log_p):
    ids, total = list(LONG.encode()), 0.0
    for start in range(0, len(ids), 64):
        window = ids[start : start + 64]
        if start == 0:
            before = [EOS]
        else:
            before = ids[:start][-(65 - len(window)) :]  # as much context as there is room for
        p = log_p([*before, *window][:-1])[len(before) - 1 :]
        total += sum(p[i, id] for i, id in enumerate(window))
    found = harness.loglikelihood_rolling([asked("short"), asked(LONG)])
    assert found[1] == pytest.approx(total, abs=1e-2)
    assert found[0] == pytest.approx(harness.loglikelihood([asked("", "short")])[0][0], abs=1e-4)


def test_generation(harness):
    whole = generate.generate(GOLDEN / "llama", ["abc", "wxyz"], max_tokens=12, temperature=0.0, overrides=FLOAT32)
    greedy = {"until": [], "max_gen_toks": 12, "do_sample": False}
    assert harness.generate_until([asked("abc", greedy), asked("wxyz", greedy)]) == whole
    mark = whole[0][3:5]
    [cut] = harness.generate_until([asked("abc", {"until": mark, "max_gen_toks": 12})])
    assert mark and cut == whole[0][: whole[0].find(mark)]
    [tail] = harness.generate_until([asked("y" * 100 + "abc", {"max_gen_toks": 12})])
    assert isinstance(tail, str)  # the latest 52 tokens of the prompt
    with pytest.raises(UserError, match="generates with num_beams"):
        harness.generate_until([asked("abc", {"num_beams": 3})])
    with pytest.raises(UserError, match="max_gen_toks=64 leaves no room"):
        harness.generate_until([asked("abc", {"max_gen_toks": 64})])


TASKS = {
    "sums": """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "said": """
task: said
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/said.jsonl}}
test_split: test
output_type: generate_until
generation_kwargs: {until: [], max_gen_toks: 12, do_sample: false}
doc_to_text: "{{prompt}}"
doc_to_target: "{{text}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


def test_tasks_of_ones_own(tmp_path, harness, capsys, monkeypatch):
    """Made data and two tasks, without a network: what is right by the logits is counted as right."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    choices = [" 4", " 5"]
    values = [harness.loglikelihood([asked("2 + 2 =", choice)])[0][0] for choice in choices]
    docs = [{"question": "2 + 2 =", "choices": choices, "answer": int(np.argmax(values))}]
    docs += [{"question": "2 + 2 =", "choices": choices, "answer": int(np.argmin(values))}] * 3
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, docs)))
    [text] = harness.generate_until([asked("abc", {"max_gen_toks": 12})])
    (tmp_path / "said.jsonl").write_text("\n".join(map(json.dumps, [{"prompt": "abc", "text": t} for t in (text, "not this")])))
    for name, yaml in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.replace("FOLDER", str(tmp_path)))
    arguments = [f"--hf={GOLDEN / 'llama'}", f"--include-path={tmp_path}", "--config.precision.compute_dtype=float32"]
    lm_eval.main([*arguments, "--tasks=sums,said", f"--json={tmp_path / 'found.json'}"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sums"]["acc,none"] == 0.25 and found["said"]["exact_match,none"] == 0.5
    assert "|sums" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--tasks: nonsense is no task"):
        lm_eval.main([*arguments, "--tasks=sums,nonsense"])


def test_refusals(capsys, monkeypatch):
    with pytest.raises(ConfigError, match="--wat: unknown argument"):
        lm_eval.main([f"--hf={GOLDEN / 'llama'}", "--tasks=a", "--wat"])
    with pytest.raises(ConfigError, match="--limit: must be at least 0"):
        lm_eval.main([f"--hf={GOLDEN / 'llama'}", "--tasks=a", "--limit=-1"])
    monkeypatch.setattr(lm_eval, "TemplateLM", object)
    with pytest.raises(SystemExit) as ended:
        command(lm_eval.main, [f"--hf={GOLDEN / 'llama'}", "--tasks=a"])
    assert ended.value.code == 1 and "jaxtrain[eval]" in capsys.readouterr().err
