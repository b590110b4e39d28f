"""Every setting says what another value changes in a run that is continued; what differs is found and told apart."""

import json

import pytest

from jaxtrain import config as configs
from jaxtrain.config import default_config
from jaxtrain.config.changes import Change, changes, recorded
from jaxtrain.config.setting import FUNCTION, NOTHING, ROWS, SECTION_CHANGES, TRAINING
from jaxtrain.config.settings import SETTINGS

ALL = [(section, key, setting) for section, settings in SETTINGS.items() for key, setting in settings.items()]
FREE = "mesh sharding pipeline memory overlap runtime observe eval checkpoint"  # where, how fast, what is shown


def other(setting):
    """A value that is not the default, of the right type; whether it makes sense does not matter here."""
    if setting.choices:
        return next((choice for choice in setting.choices if choice != setting.default), None)
    by_type = {bool: lambda v: not v, int: lambda v: (v or 0) + 1, float: lambda v: (v or 0.0) + 0.5}
    by_type |= {dict: lambda v: {"x": {"weight": 1.0}}, str: lambda v: f"{v}x", tuple: lambda v: (*v, "x")}
    return by_type[setting.type](setting.default)


@pytest.mark.parametrize("section, key, setting", ALL, ids=[f"{section}.{key}" for section, key, _ in ALL])
def test_each_setting_is_classified_and_its_change_is_found(section, key, setting):
    assert setting.changes in (FUNCTION, ROWS, TRAINING, NOTHING)
    if section in FREE.split():
        assert setting.changes == NOTHING  # a run moves to another mesh or machine without a word
    if section == "precision":
        assert setting.changes != NOTHING
    if (value := other(setting)) is None:
        pytest.skip("has a single value")
    config = default_config()
    config.unlock()[section].update({key: value})
    old, new = recorded(default_config()), recorded(config)
    assert [change[::3] for change in changes(old, new)] == [(f"{section}.{key}", setting.changes)]
    assert changes(new, new) == [] and json.loads(json.dumps(new)) == new


def test_sections_cover_the_tree():
    assert set(SECTION_CHANGES) == set(SETTINGS)


MEANT = {
    FUNCTION: "model.rope_theta model.norm_eps model.sliding_window_tokens model.attention_softcap model.logit_softcap "
    "model.scale_embeddings model.attention_scale model.vocab_size model.num_heads model.tie_embeddings model.router_scale "
    "model.capacity_factor precision.compute_dtype precision.products",
    ROWS: "train.seed data.seed data.global_batch_rows data.seq_len_tokens",
    TRAINING: "model.dropout_residual model.dropout_attention model.dropout_embedding optimizer.name optimizer.learning_rate "
    "optimizer.schedule optimizer.b1 optimizer.weight_decay train.num_steps train.accumulation_steps train.z_loss "
    "train.label_smoothing train.balance_loss precision.reduce_dtype data.paths data.tokenizer",
    NOTHING: "model.init_stddev optimizer.max_nonfinite_steps data.num_workers train.log_every_steps",
}


@pytest.mark.parametrize("kind", MEANT)
def test_what_kinds_mean(kind):
    for name in MEANT[kind].split():
        section, key = name.split(".")
        assert SETTINGS[section][key].changes == kind, name


def test_settings_of_other_versions(tmp_path):
    """A setting that did not exist then has its default; one that there is no longer is passed over."""
    config = default_config()
    config.optimizer.learning_rate = 0.5
    configs.save(config, tmp_path / "config.json")
    tree = json.loads((tmp_path / "config.json").read_text())
    del tree["model"]["rope_theta"], tree["overlap"]
    tree["model"]["of_long_ago"] = 7
    new = recorded(default_config())
    assert changes(recorded(tree), new) == [Change("optimizer.learning_rate", 0.5, 3e-4, TRAINING)]
    config.model.rope_theta = 5e5
    found = changes(recorded(tree), recorded(config))
    assert found == [Change("model.rope_theta", 10_000.0, 5e5, FUNCTION)]
