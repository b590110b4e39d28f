"""Measured rates: what is written is read, what is wrong is named, and predictions say what they rest on."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxtrain import tune
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.hardware import rates
from jaxtrain.plan import __main__ as plan_command
from jaxtrain.plan import compile

VERSIONS = {"jax": "0.10.2", "jaxlib": "0.10.2", "cudnn": "9.10.0", "driver": "570.1"}
MEASURED = rates.Measured("h200", VERSIONS, "2026-11-30", {"product": 0.7, "memory": 0.9}, 0.1, {"product": [[8192, 0.7]]})


def test_what_is_saved_is_read(tmp_path):
    path = tmp_path / "new" / "rates.json"
    rates.save(path, MEASURED)
    basis = rates.load(path, "h200")
    assert basis.rates == dataclasses.replace(rates.RATES, product=0.7, memory=0.9)
    assert basis.error_band == 0.1 and basis.measured == MEASURED
    assert str(basis).startswith(
        "measured on h200 with jax 0.10.2, jaxlib 0.10.2, cudnn 9.10.0, driver 570.1, 2026-11-30: product, "
    )
    assert "; planned: product_fp8," in str(basis) and [p.name for p in path.parent.iterdir()] == ["rates.json"]
    topology = compile.parse_topology("h200:1x8", path)
    assert topology.basis == basis and str(topology) == "h200:1x8" and hash(topology) is not None


def test_without_a_file_rates_are_planned():
    assert rates.load("", "h200") == rates.PLANNED and "not measured" in str(rates.PLANNED)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"gpu": "h100"}, "gpu: was measured on h100, the topology has h200"),
        ({"gpu": 7}, "gpu: must be a key as in topologies, got 7"),
        ({"date": "yesterday"}, "date: must be YYYY-MM-DD, got 'yesterday'"),
        ({"versions": {**VERSIONS, "nccl": "2"}}, "versions.nccl: unknown version"),
        ({"versions": {"jax": "1"}}, "versions.cudnn: is missing"),
        ({"rates": [1]}, "rates: must be an object, got [1]"),
        ({"rates": {"prodct": 0.5}}, "rates.prodct: unknown rate"),
        ({"rates": {"product": "0.5"}}, "rates.product: must be a number, got '0.5'"),
        ({"rates": {"product": True}}, "rates.product: must be a number, got True"),
        ({"rates": {"product": 0}}, "rates.product: must be positive and finite, got 0"),
        ({"rates": {"product": float("nan")}}, "rates.product: must be positive and finite, got nan"),
        ({"rates": {"memory": 10**400}}, "rates.memory: must be positive and finite, got 1000"),
        ({"rates": {"slowed": 0.9}}, "rates.slowed: must be at least 1 and finite, got 0.9"),
        ({"error_band": -1}, "error_band: must be positive and finite, got -1"),
        ({"erorr_band": 1}, "erorr_band: unknown field; known: gpu,"),
    ],
)
def test_wrong_files_are_refused(tmp_path, change, problem):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(dataclasses.asdict(MEASURED) | change))
    with pytest.raises(ConfigError) as caught:
        rates.load(path, "h200")
    assert any(p.startswith(f"--rates={path}: {problem}") for p in caught.value.problems)
    if change != {"gpu": "h100"} and "erorr_band" not in change:
        with pytest.raises(ValueError):
            rates.save(path, dataclasses.replace(MEASURED, **change))


@pytest.mark.parametrize(
    "text, problem", [("{", "is not JSON"), ("[]", "holds list"), ("{}", "gpu: is missing"), ("[" * 99999, "JSON")]
)
def test_files_of_something_else_are_refused(tmp_path, text, problem):
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        rates.load(path, "h200")


@pytest.mark.parametrize("command", [plan_command, tune])
def test_commands_refuse_before_they_compile(tmp_path, command):
    arguments = ["--config=configs/llama3_8b.py", "--topology=h100:1x8", f"--rates={tmp_path}/rates.json"]
    with pytest.raises(UserError, match=r"--rates=.*rates.json: cannot be read: No such file"):
        command.main(arguments)
    rates.save(tmp_path / "rates.json", MEASURED)
    with pytest.raises(ConfigError, match="was measured on h200, the topology has h100"):
        command.main(arguments)


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        rates.save(tmp_path / "file" / "rates.json", MEASURED)
