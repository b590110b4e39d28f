"""The config tree: what a file and overrides may say, and that each mistake is told once, with what was meant."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from jaxtrain import config as configs
from jaxtrain.command_line import command, folder, require_ranges
from jaxtrain.config import ConfigError, default_config, validate, values
from jaxtrain.config import suggest as nearest
from jaxtrain.config.settings import SETTINGS
from jaxtrain.main import main

ROOT = pathlib.Path(__file__).parent.parent


def file(tmp_path, body=""):
    """A config file whose get_config changes the default config `c` by `body`."""
    path = tmp_path / "wish.py"
    lines = ["from jaxtrain.config import default_config", "def get_config(arg=None):", "    c = default_config()"]
    path.write_text("\n".join([*lines, textwrap.indent(textwrap.dedent(body).strip(), "    "), "    return c", ""]))
    return str(path)


def problems(path, *overrides, cross_check=validate.problems):
    """What `load` complains about."""
    with pytest.raises(ConfigError) as caught:
        configs.load(path, [tuple(text.split("=", 1)) for text in overrides], cross_check)
    return caught.value.problems


def loaded(path, *overrides):
    return configs.load(path, [tuple(text.split("=", 1)) for text in overrides], validate.problems)


# The default tree.


def test_defaults_are_valid():
    assert configs.check(default_config()) == []
    assert validate.problems(default_config(), 8) == []


def test_every_setting_has_a_doc_and_a_default_of_its_own_type():
    for section, settings in SETTINGS.items():
        for key, setting in settings.items():
            assert setting.doc, f"{section}.{key}"
            assert values.problem(setting, setting.default) is None, f"{section}.{key}"


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.optimizer, "lr", 1e-4),
        lambda c: c.optimizer.update(lr=1e-4),
        lambda c: c.optimizer.__setitem__("learing_rate", 1e-4),
        lambda c: setattr(c, "optimiser", {}),
    ],
)
def test_default_config_is_locked(change, tmp_path):
    for config in (default_config(), configs.load(file(tmp_path))):
        with pytest.raises((AttributeError, KeyError), match="locked"):
            change(config)


@pytest.mark.slow
def test_tree_is_locked_again_after_a_file_failed(tmp_path):
    problems(file(tmp_path, "raise ValueError('no')"))
    problems(file(tmp_path, f"from jaxtrain.config import load\nload({file(tmp_path)!r})\nc.lr = 1"))
    assert default_config().is_locked


def test_a_file_that_loads_another_stays_open(tmp_path):
    base = tmp_path / "base.py"
    base.write_text(pathlib.Path(file(tmp_path)).read_text())
    path = file(tmp_path, f"from jaxtrain.config import load\nload({str(base)!r})\nc = default_config()\nc.optimizer.lr = 1")
    assert problems(path) == ["optimizer.lr: unknown key; did you mean optimizer.learning_rate?"]


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("optimizer.learning_rate", "1e-4", "expected float, got str '1e-4'; write 0.0001 without quotes"),
        ("optimizer.learning_rate", float("nan"), "must be a finite number, got nan"),
        ("optimizer.learning_rate", float("inf"), "must be a finite number, got inf"),
        ("optimizer.learning_rate", None, "expected float, got NoneType None"),
        ("optimizer.learning_rate", -1, "must be at least 0.0, got -1.0"),
        ("optimizer.b1", 1.0, "must be less than 1.0, got 1.0"),
        ("optimizer.eps", 0, "must be more than 0.0, got 0.0"),
        ("optimizer.final_fraction", 1.5, "must be at most 1.0, got 1.5"),
        ("optimizer.name", "adam", "'adam' is not one of 'adamw', 'lion', 'muon', 'adafactor', 'sgd'; did you mean 'adamw'?"),
        ("precision.compute_dtype", "bf16", "'bf16' is not one of 'bfloat16', 'float32'; did you mean 'bfloat16'?"),
        ("sharding.zero_stage", 4, "4 is not one of 0, 1, 2, 3; did you mean 3?"),
        ("data.seq_len_tokens", -1, "must be at least 2, got -1"),
        ("data.seq_len_tokens", "256", "expected int, got str '256'; write 256 without quotes"),
        ("data.seq_len_tokens", 256.5, "expected int, got float 256.5"),
        ("data.seq_len_tokens", True, "expected int, got bool True"),
        ("data.paths", "corpus", "expected tuple, got str 'corpus'; write ('corpus',)"),
        ("data.paths", (1,), "expected a tuple of strings, got (1,)"),
        ("model.qk_norm", "true", "expected bool, got str 'true'; write True without quotes"),
        ("model.qk_norm", 1, "expected bool, got int 1"),
        ("model.attention_scale", 0.0, "must be more than 0.0, got 0.0"),
    ],
)
def test_check_finds_a_wrong_value(key, value, message):
    config, (section, name) = default_config(), key.split(".")
    config[section][name] = value
    assert configs.check(config) == [f"{key}: {message}"]


@pytest.mark.parametrize(
    "key, value, becomes",
    [
        ("optimizer.learning_rate", 1, 1.0),
        ("train.num_steps", 1e3, 1000),
        ("data.paths", ["a", "b"], ("a", "b")),
        ("model.attention_scale", 1, 1.0),
        ("model.attention_scale", None, None),
    ],
)
def test_check_converts_where_nothing_is_lost(key, value, becomes):
    config, (section, name) = default_config(), key.split(".")
    config[section][name] = value
    assert configs.check(config) == []
    assert config[section][name] == becomes and type(config[section][name]) is type(becomes)


def test_check_finds_missing_and_replaced_sections():
    config = default_config()
    config.optimizer = 3
    config.unlock()
    del config["mesh"]
    del config.train["seed"]
    assert configs.check(config) == [
        "mesh: section is missing; start from default_config()",
        f"optimizer: is a section, not a value (3); set its keys: {', '.join(SETTINGS['optimizer'])}",
        "train.seed: missing; start from default_config()",
    ]


# Files.


@pytest.mark.parametrize(
    "body, expected",
    [
        ("c.optimizer.learing_rate = 1e-4", "optimizer.learing_rate: unknown key; did you mean optimizer.learning_rate?"),
        ("c.optimizer.lr = 1e-4", "optimizer.lr: unknown key; did you mean optimizer.learning_rate?"),
        ("c.optimizer.update(lr='1e-4')", "optimizer.lr: unknown key; did you mean optimizer.learning_rate?"),
        ("c.train.lr = 1e-4", "train.lr: unknown key; did you mean optimizer.learning_rate?"),
        ("c.optimizer.eps = 10**400", "{file}:4: OverflowError: int too large to convert to float"),
        ("c.lr = '1e-4'", "lr: unknown key; did you mean optimizer.learning_rate?"),
        ("c.optimizer.eps = '3e-4'", "optimizer.eps: expected float, got str '3e-4'; write 0.0003 without quotes"),
        ("c.seq_len = -1", "seq_len: unknown key; did you mean data.seq_len_tokens?"),
        ("c.optimzer = {'name': 'sgd'}", "optimzer: unknown section; did you mean optimizer?"),
        ("c.optimizer.b1 = c.optimizer.beta1 / 2", "{file}:4: beta1: unknown key; did you mean optimizer.b1?"),
        ("x = 1\nc.train.num_steps = x / 0", "{file}:5: ZeroDivisionError: division by zero"),
        ("c.train.num_steps = = 3", "{file}:4: SyntaxError: invalid syntax"),
        ("import no_such_module", "{file}:4: ModuleNotFoundError: No module named 'no_such_module'"),
        ("return {}", "{file}: get_config() returned dict, not what default_config() gave it"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, body, expected):
    path = file(tmp_path, body)
    assert problems(path) == [expected.format(file=path)]


def test_missing_files(tmp_path):
    file(tmp_path)
    assert problems(f"{tmp_path}/wihs.py") == [f"--config={tmp_path}/wihs.py: no such file; did you mean {tmp_path}/wish.py?"]
    (tmp_path / "empty.py").write_text("")
    assert problems(f"{tmp_path}/empty.py") == [f"{tmp_path}/empty.py: defines no get_config()"]


def test_argument_of_get_config(tmp_path):
    path = file(tmp_path, "c.train.num_steps = int(arg or 7)")
    assert loaded(path).train.num_steps == 7
    assert loaded(f"{path}:9").train.num_steps == 9


def test_all_problems_at_once(tmp_path):
    path = file(tmp_path, "c.optimizer.learing_rate = 1e-4\nc.data.seq_len_tokens = -1\nc.trian = {'x': 1}")
    assert problems(path, "lr=3", "train.num_steps=abc", "model.dropout_residual=2") == [
        "optimizer.learing_rate: unknown key; did you mean optimizer.learning_rate?",
        "trian: unknown section; did you mean train?",
        "--config.lr: unknown key; did you mean optimizer.learning_rate?",
        "model.dropout_residual: must be less than 1.0, got 2.0",
        "data.seq_len_tokens: must be at least 2, got -1",
        "--config.train.num_steps: expected int, got 'abc'",
    ]
    assert str(ConfigError(problems(path))).splitlines()[0] == "3 problems in the configuration:"


def test_misspelt_keys_do_not_hide_what_settings_together_violate(tmp_path):
    path = file(tmp_path, "c.optimizer.learing_rate = 1e-4\nc.mesh.tensor = 5")
    assert [line.split(":")[0] for line in problems(path)] == [
        "optimizer.learing_rate",
        "model.vocab_pad_multiple",
        "model.mlp_dim",
        "data.seq_len_tokens",
    ]
    # Nothing is said of combinations as long as a value is not known.
    named = [line.split(":")[0] for line in problems(path, "mesh.tensor=x")]
    assert named == ["optimizer.learing_rate", "--config.mesh.tensor"]


# Overrides.


@pytest.mark.parametrize(
    "text, value",
    [
        ("optimizer.learning_rate=1e-4", 1e-4),
        ("optimizer.learning_rate=1", 1.0),
        ("train.num_steps=20", 20),
        ("train.num_steps=1e3", 1000),
        ("train.num_steps=1_000", 1000),
        ("data.seed=9007199254740993", 9007199254740993),
        ("mesh.data=-1", -1),
        ("model.qk_norm=true", True),
        ("model.qk_norm=Yes", True),
        ("model.init_scaled_outputs=0", False),
        ("model.init_scaled_outputs=off", False),
        ("model.attention_scale=0.5", 0.5),
        ("model.attention_scale=none", None),
        ("data.paths=a.txt,b c", ("a.txt", "b c")),
        ("data.paths=('a.txt', 'b')", ("a.txt", "b")),
        ("data.paths=", ()),
        ("data.paths='/d/a,b.txt',\"it's\",/c (1)", ("/d/a,b.txt", "it's", "/c (1)")),
        ("data.paths=it's,[x]/y", ("it's", "[x]/y")),
        ("data.paths=[' a,b']", (" a,b",)),
        ("train.seed=4294967295", 4294967295),
        ("runtime.coordinator_address=host:1=2", "host:1=2"),
    ],
)
def test_override(tmp_path, text, value):
    section, key = text.partition("=")[0].split(".")
    config = configs.load(file(tmp_path), [tuple(text.split("=", 1))])
    assert config[section][key] == value and type(config[section][key]) is type(value)
    assert config.is_locked


@pytest.mark.parametrize(
    "text, expected",
    [
        ("optimizer.lr=1e-4", "--config.optimizer.lr: unknown key; did you mean optimizer.learning_rate?"),
        ("optimzer.learning_rate=1", "--config.optimzer.learning_rate: unknown key; did you mean optimizer.learning_rate?"),
        ("learning_rate=1", "--config.learning_rate: unknown key; did you mean optimizer.learning_rate?"),
        ("optimizer=adamw", "--config.optimizer: is a section; write --config.optimizer.KEY=VALUE with one of "),
        ("train.num_steps=1.5", "--config.train.num_steps: expected int, got '1.5'"),
        ("train.num_steps=1e400", "--config.train.num_steps: expected int, got '1e400'"),
        ("train.num_steps=", "--config.train.num_steps: expected int, got ''"),
        ("model.qk_norm=maybe", "--config.model.qk_norm: expected bool, got 'maybe'"),
        ("optimizer.learning_rate=fast", "--config.optimizer.learning_rate: expected float, got 'fast'"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate: must be a finite number, got nan"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate: must be a finite number, got inf"),
        ("optimizer.learning_rate=1e39", "optimizer.learning_rate: must be at most 3.4e+38 in size (float32), got 1e+39"),
        ("optimizer.eps=1e-40", "optimizer.eps: must be 0 or at least 1.2e-38 in size (float32), got 1e-40"),
        ("optimizer.b2=0.99999999999", "optimizer.b2: must be less than 1.0, got 0.99999999999 (1.0 in float32)"),
        ("train.num_steps=1e30", "train.num_steps: must be at most 2147483647, got 1000000000000000019884624838656"),
        ("model.num_layers=9223372036854775808", "model.num_layers: must be at most 2147483647, got 9223372036854775808"),
        ("data.seed=9223372036854775808", "data.seed: must be at most 9223372036854775807, got 9223372036854775808"),
        ("train.seed=4294967296", "train.seed: must be at most 4294967295, got 4294967296"),
        ("train.num_steps=\u0665", "--config.train.num_steps: expected int, got '\u0665'"),
        ("train.num_steps=" + "9" * 5000, "--config.train.num_steps: expected int, got '99999"),
        ("data.paths='a,b", '--config.data.paths: expected tuple, got "\'a,b"; write a,b and put an element that contains a '),
        ("data.paths=a,''", "data.paths: an element is empty: ('a', '')"),
        ("data.paths=a\0b", "data.paths: contains a NUL character: ('a\\x00b',)"),
        ("runtime.compile_cache_dir=\0", "runtime.compile_cache_dir: contains a NUL character: '\\x00'"),
        (
            "eval.max_batches=20",
            "--config.eval.max_batches: is no setting any more: batches differ in rows by train.accumulation_steps; set "
            "eval.max_rows, which counts rows",
        ),
    ],
)
def test_wrong_override(tmp_path, text, expected):
    (problem,) = problems(file(tmp_path), text)
    assert problem.startswith(expected)


def test_overrides_beat_the_file_and_the_last_one_counts(tmp_path):
    path = file(tmp_path, "c.train.num_steps = 1e3\nc.optimizer.learning_rate = 'x'")
    config = loaded(path, "train.num_steps=5", "train.num_steps=6", "optimizer.learning_rate=1")
    assert config.train.num_steps == 6 and type(config.train.num_steps) is int
    assert config.optimizer.learning_rate == 1.0


# What a wrong key meant.


@pytest.mark.parametrize(
    "section, key, meant",
    [
        ("optimizer", "lr", "optimizer.learning_rate"),
        ("train", "lr", "optimizer.learning_rate"),
        (None, "batch_size", "data.global_batch_rows"),
        ("train", "batch-size", "data.global_batch_rows"),
        ("data", "seq_len", "data.seq_len_tokens"),
        ("model", "seq_len", "data.seq_len_tokens"),
        ("train", "max_steps", "train.num_steps"),
        ("train", "epochs", "train.num_steps"),
        ("model", "d_model", "model.embed_dim"),
        ("model", "hidden_size", "model.embed_dim"),
        ("model", "n_layers", "model.num_layers"),
        ("mesh", "tp", "mesh.tensor"),
        ("mesh", "dp", "mesh.data"),
        ("optimizer", "grad_accum", "train.accumulation_steps"),
        ("optimizer", "warmup", "optimizer.warmup_steps"),
        ("optimizer", "num_steps", "train.num_steps"),
        ("checkpoint", "save_every", "checkpoint.save_every_steps"),
        ("train", "save_every", "checkpoint.save_every_steps"),
        ("model", "norm_type", "model.norm"),
        ("model", "seed", "train.seed or data.seed"),
        ("optimizer", "wieght_decay", "optimizer.weight_decay"),
        ("optimiser", "weight_decay", "optimizer.weight_decay"),
        ("optimiser", "q", "optimizer"),
    ],
)
def test_nearest_key(section, key, meant):
    found = nearest.nearest_key(key, section, SETTINGS).removeprefix("; did you mean ").removesuffix("?")
    assert set(found.split(" or ")) == set(meant.split(" or "))


def test_nothing_near_lists_what_there_is():
    assert nearest.nearest_key("zzz", "observe", SETTINGS) == "; known: " + ", ".join(SETTINGS["observe"])
    assert nearest.nearest_key("zzz", None, SETTINGS) == f"; known: {', '.join(SETTINGS)}"


def test_other_names_point_to_settings_and_are_none_themselves():
    keys = {f"{section}.{key}" for section, settings in SETTINGS.items() for key in settings}
    assert set(nearest.ALIASES) <= keys
    names = " ".join(nearest.ALIASES.values()).split()
    assert len(names) == len(set(names)), "one name, one meaning"
    assert not set(names) & {key.partition(".")[2] for key in keys}


# Files written by `save`, and the command line.


def test_saved_config_reads_back_equal(tmp_path):
    config = loaded(file(tmp_path), "data.paths=a,b", "train.num_steps=3")
    configs.save(config, tmp_path / "config.json")
    again = configs.read(tmp_path / "config.json")
    assert again.to_dict() == config.to_dict() and again.is_locked
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("text", ["{", "[]", "{}", "3", '{"model": {"lr": 1}}', '{"model": 3}', "[" * 100_000, "\udcff"])
def test_damaged_saved_config(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=str(path)):
        configs.read(path)


def test_saved_config_of_another_version(tmp_path):
    tree = default_config().to_dict()
    tree["optimizer"]["lr"] = tree["optimizer"].pop("learning_rate")
    tree["eval"]["max_batches"] = tree["eval"].pop("max_rows")  # of an earlier version
    tree["train"].pop("z_loss")  # a later one has it too
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError) as caught:
        configs.read(tmp_path / "config.json")
    assert caught.value.problems == [
        f"{tmp_path}/config.json: optimizer.lr: unknown key; did you mean optimizer.learning_rate?",
    ]
    tree["optimizer"].pop("lr")
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert configs.read(tmp_path / "config.json").to_dict() == default_config().to_dict()


def test_settings_that_name_paths_or_addresses_are_marked():
    """So that `generate` does not follow those of a stranger's config.json."""
    words = {"path", "paths", "dir", "folder", "file", "address", "url", "host", "tokenizer", "from", "to"}
    for section, settings in SETTINGS.items():
        for key, setting in settings.items():
            inside = any(entry.location for entry in (setting.entries or {}).values())
            assert setting.location == (inside or bool(words & set(key.split("_")))), f"{section}.{key}"


def test_locations_are_left_behind(tmp_path):
    sources = 'data.sources={"web": {"paths": ["/etc"]}}'
    config = loaded(file(tmp_path), "data.paths=/etc", sources, "runtime.compile_cache_dir=/x", "train.num_steps=3")
    found = configs.without_locations(config)
    assert not found.data.sources and config.data.sources.web.paths == ("/etc",)
    assert (found.data.paths, found.runtime.compile_cache_dir, found.train.num_steps) == (("python_stdlib",), "auto", 3)
    assert found.is_locked and config.data.paths == ("/etc",)


def run(*arguments):
    """Exit code of the training command in this process; it must refuse before it would train."""
    with pytest.raises(SystemExit) as caught:
        command(main, ["--workdir=/nonexistent/never-made", *arguments])
    return caught.value.code


def test_command_line_mistakes(tmp_path, capsys):
    assert run(f"--config={file(tmp_path)}", "--config.lr", "1e-4", "--confg.x=1", "stray", "--config.train.seed") == 2
    assert capsys.readouterr().err.splitlines() == [
        "4 problems in the configuration:",
        "  - --confg.x=1: unknown argument; settings are given as --config.section.key=VALUE",
        "  - stray: unknown argument; settings are given as --config.section.key=VALUE",
        "  - --config.train.seed: no value; write --config.train.seed=VALUE",
        "  - --config.lr: unknown key; did you mean optimizer.learning_rate?",
    ]


@pytest.mark.parametrize(
    "body, expected",
    [
        ("import sys; sys.exit()", "wish.py:4: SystemExit: ; a config file returns its config, it must not end the program"),
        ("raise SystemExit(0)", "wish.py:4: SystemExit: 0; a config file returns its config, it must not end the program"),
        ("raise KeyboardInterrupt", "wish.py:4: KeyboardInterrupt: "),
        ("def f(): f()\nf()", "wish.py:4: RecursionError: maximum recursion depth exceeded"),
        ("class E(BaseException):\n    def __str__(self): return 1\nraise E", "wish.py:6: E: "),
        ("raise ValueError('a\\nb')", "wish.py:4: ValueError: a b"),
        ("import ml_collections as m\nc.x = m.config_dict.required_placeholder(int)", "wish.py: RequiredValueError: "),
        ("c.update({3: {4: 5}})", "wish.py: TypeError: '<' not supported between instances of 'int' and 'str'"),
        ("c.model['num_layers\\n'] = 5", "model.num_layers\\n: unknown key; did you mean model.num_layers?"),
        ("c.train.num_steps = 10**5000", "train.num_steps: must be at most 2147483647, got <int that cannot be shown>"),
        ("c.optimizer.name = 'x' * 9999", "optimizer.name: 'xxx"),
        ("c.data.paths = ('\\ud800',)", "data.paths: contains half a character (a lone surrogate): ('\\ud800',)"),
        ("c.memory.offload = ('a' * 9999,)", "memory.offload: unknown name 'aaa"),
    ],
)
def test_a_file_that_misbehaves_is_one_short_line(tmp_path, body, expected):
    (problem,) = problems(file(tmp_path, body))
    assert problem.removeprefix(f"{tmp_path}/").startswith(expected)
    assert len(problem) < 2500 and problem.isprintable()


def test_numbers_of_numpy_and_paths_are_what_they_stand_for(tmp_path):
    body = "import numpy as np, pathlib\nc.train.num_steps = np.int64(5)\nc.model.qk_norm = np.bool_(True)\n"
    config = loaded(file(tmp_path, body + "c.data.paths = [pathlib.Path('/a'), 'b']"))
    assert (config.train.num_steps, config.model.qk_norm, config.data.paths) == (5, True, ("/a", "b"))
    assert type(config.train.num_steps) is int and type(config.model.qk_norm) is bool


@pytest.mark.parametrize(
    "workdir, expected",
    [
        ("", "--workdir=: is empty; name a folder"),
        ("wish.py", "--workdir=wish.py: wish.py is not a folder; name a folder"),
        ("wish.py/run", "--workdir=wish.py/run: {}/wish.py is not a folder; name a folder"),
        ("dangling", "--workdir=dangling: dangling is not a folder; name a folder"),
        ("~no_such_user/x", "--workdir=~no_such_user/x: Could not determine home directory; name a folder"),
        ("a\0b", "--workdir=a\\x00b: contains a NUL character; name a folder"),
        ("a" * 300, f"--workdir={'a' * 200}: File name too long; name a folder"),
    ],
)
def test_a_workdir_that_cannot_be_one(tmp_path, monkeypatch, capsys, workdir, expected):
    monkeypatch.chdir(tmp_path)
    os.symlink("nowhere", "dangling")
    with pytest.raises(SystemExit) as stopped:
        command(main, [f"--config={file(tmp_path)}", f"--workdir={workdir}"])
    problem = capsys.readouterr().err.splitlines()[1].removeprefix("  - ")
    assert stopped.value.code == 2 and problem in (expected, expected.format(tmp_path))


def test_home_is_meant_by_its_sign(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder("--workdir", "~/x") == tmp_path / "x"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 2**31, 10**400])
def test_flags_out_of_range(value):
    with pytest.raises(ConfigError, match="--most: must be at least 0"):
        require_ranges(("--most", value, 0, None), ("--limit_s", 1.5, 0, None))


def test_a_refused_config_never_loads_jax(tmp_path):
    """Through a process of its own: exit code 2, and devices are not touched, as jax is not even imported."""
    code = """
    import atexit, sys
    from jaxtrain.main import command, main
    atexit.register(lambda: print("jax" in sys.modules, "jaxlib" in sys.modules))
    command(main)
    """
    arguments = [f"--config={file(tmp_path)}", f"--workdir={tmp_path}/run", "--config.mesh.fsdp=5", "--config.mesh.tensor=2"]
    arguments += ["--config.runtime.fake_devices=8"]  # a mesh that does not fit is seen without starting devices too
    command_line = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    result = subprocess.run(command_line, capture_output=True, text=True, cwd=ROOT, env=_alone())
    assert result.returncode == 2
    assert "mesh: data=-1 x fsdp=5 x tensor=2 needs a multiple of 10 devices, there are 8; nearest: 10 devices" in result.stderr
    assert result.stdout == "False False\n"
    assert not (tmp_path / "run").exists()


def test_help_is_quick_and_complete():
    before = os.times()
    command_line = [sys.executable, "-m", "jaxtrain.main", "--help"]
    result = subprocess.run(command_line, capture_output=True, text=True, cwd=ROOT, env=_alone(), check=True)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    for section, settings in SETTINGS.items():
        for key, setting in settings.items():
            assert f"  --config.{section}.{key}=" in result.stdout
            assert setting.doc in result.stdout
            assert all(str(choice) in result.stdout for choice in setting.choices)
    assert seconds < 3  # of computing, which other work on the machine does not lengthen


def _alone():
    return {key: value for key, value in os.environ.items() if key not in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}
