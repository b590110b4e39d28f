"""The functions of `import jaxtrain`: what they are called, and the examples of docs/api.md from top to bottom."""

from __future__ import annotations

import inspect
import json
import pathlib
import re
import subprocess
import sys

import pytest

import jaxtrain
from jaxtrain import api
from jaxtrain import config as configs
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.train.weights import config_of

ROOT = pathlib.Path(__file__).parent.parent


def test_functions_are_those_of_the_commands(monkeypatch):
    """Under their names whether or not a package of the same name has been imported, and packages stay packages."""
    import jaxtrain.plan.candidates

    for name in ("train", "plan", "parity", "generate", "load_config"):
        monkeypatch.setattr(api, name, lambda *args, name=name, **options: (name, args, options))
        assert getattr(jaxtrain, name)(1, a=2) == (name, (1,), {"a": 2})
        assert name in dir(jaxtrain)
    assert jaxtrain.plan.candidates.__name__ == "jaxtrain.plan.candidates"
    with pytest.raises(AttributeError, match="has no attribute 'tain'"):
        getattr(jaxtrain, "tain")  # noqa: B009


def test_importing_loads_nothing():
    code = "import sys, jaxtrain; print([m for m in sys.modules if m.split('.')[0] in ('jax', 'numpy', 'ml_collections')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_public_functions_have_few_parameters():
    for name in ("load_config", "train", "plan", "parity", "generate"):
        named = [p for p in inspect.signature(getattr(api, name)).parameters.values() if p.kind != p.VAR_KEYWORD]
        assert len(named) <= 7, name


def test_overrides_are_values_or_text():
    config = jaxtrain.load_config(ROOT / "configs/tiny.py", {"train.num_steps": 7, "data.paths": "a,b", "data.seed": "1e3"})
    assert (config.train.num_steps, config.data.paths, config.data.seed) == (7, ("a", "b"), 1000)
    with pytest.raises(ConfigError, match="optimizer.learning_rate: must be at least 0.0, got -1.0"):
        jaxtrain.load_config("configs/tiny.py", [("optimizer.learning_rate", -1)])


@pytest.mark.parametrize("call", [api.train, lambda c, d: api.plan(c, "h200:1x8"), lambda c, d: api.parity(c)])
def test_a_config_made_by_hand_is_checked(call, tmp_path):
    config = configs.default_config()
    config.train.num_steps = "many"
    with pytest.raises(ConfigError, match="train.num_steps: expected int, got str 'many'"):
        call(config, tmp_path)
    assert not list(tmp_path.iterdir())


def strangers(tmp_path, **changes):
    """The folder of a run, with a config.json that names paths and addresses."""
    tree = configs.default_config().to_dict()
    tree["runtime"].update(compile_cache_dir=str(tmp_path / "cache"), coordinator_address="evil:1", platform="gpu")
    tree["data"].update(paths=["/etc"], cache_dir="/etc", sources={"x": {"paths": ["/etc"]}})
    for key, value in changes.items():
        section, name = key.split("__")
        tree[section][name] = value
    (tmp_path / "config.json").write_text(json.dumps(tree))
    return tmp_path


def test_sampling_follows_no_path_of_a_workdir(tmp_path):
    folder = strangers(tmp_path, pipeline__schedule="gpipe", memory__offload=["moments"])
    config = config_of(folder, {}, [("mesh.tensor", 2)], text=True)
    kept = configs.default_config()
    assert config.runtime == kept.runtime and config.data == kept.data and config.mesh.tensor == 2
    with pytest.raises(UserError, match="no checkpoint in"):
        jaxtrain.generate(tmp_path, "x", max_tokens=3)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "changes, options, message",
    [
        ({"data__tokenizer": "/etc/x"}, {}, "/etc/x, which is not followed: if it is right, --config.data.tokenizer=/etc/x"),
        ({"model__num_kv_heads": 3}, {}, "8 query heads are not a multiple of 3 key/value heads"),
        ({}, {"tensor": 3}, "model.num_kv_heads: 8 key/value heads|model.mlp_dim: 688 does not divide"),
        ({}, {"max_tokens": 9999}, "--max-tokens: 1 of the prompt .* 9999 exceed model.max_len_tokens=8192"),
        ({}, {"temperature": float("nan")}, "--temperature: must be at least 0.0, got nan"),
        ({}, {"seed": 2**32}, "--seed: must be at least 0 and at most 4294967295, got 4294967296"),
        ({}, {"num_samples": 0, "top_p": 2.0}, "2 problems"),
    ],
)
def test_sampling_refuses_before_it_loads_weights(tmp_path, changes, options, message):
    with pytest.raises(ConfigError, match=message):
        jaxtrain.generate(strangers(tmp_path, **changes), "x", **options)


@pytest.mark.slow
def test_examples_of_the_docs_run(tmp_path):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)
    assert len(examples) == 6
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(examples)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs/api/summary.json").exists()
    assert "did you mean optimizer.learning_rate?" in result.stdout and "[] ['loss'" in result.stdout
