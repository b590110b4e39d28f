"""Calibration: the rates that plans rest on (`hardware.rates`), fitted to recorded steps, and the error band that follows.

A rate is a share of a peak, so it is scaled by planned over measured time of its class of work until the two agree. Rates of
work that takes less than 1% of a step stay as they are: nothing is learnt of them.
"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
from collections.abc import Sequence

from jaxtrain.errors import UserError
from jaxtrain.hardware import rates as hardware
from jaxtrain.hardware.rates import Basis, Measured, Rates
from jaxtrain.observe.profile.account import Account
from jaxtrain.observe.profile.operations import ATTENTION, MEMORY, PRODUCTS, label
from jaxtrain.observe.profile.planned import predict
from jaxtrain.observe.profile.study import Study

LEAST_SHARE, ROUNDS = 0.01, 12
SAME_STEPS_BAND, OTHER_STEPS_BAND = 0.05, 0.02  # least error bands: of steps that were fitted to, of others


def calibrate(studies: Sequence[Study], base: Basis) -> Measured:
    """Rates fitted to one or several recordings on one kind of GPU, beside those that `base` has measured already.

    The error band is the largest error of a step's time: of several recordings, each predicted with rates fitted to the others.
    Raises UserError for recordings that no rates follow from.
    """
    kinds = {study.facts["device_kind"] for study in studies}
    if len(kinds) > 1 or any(study.links is None for study in studies):
        what = "are of different GPUs" if len(kinds) > 1 else "is not in the table of GPUs: its figures are no rates of a GPU"
        raise UserError(f"--calibrate: {', '.join(sorted(kinds))} {what}")
    found = fit(studies, base.rates)
    if not found:
        raise UserError("--calibrate: no work that a rate is of takes 1% of the recorded steps")
    if len(studies) == 1:
        errors, least = [_error(studies[0], dataclasses.replace(base.rates, **found))], SAME_STEPS_BAND
    else:
        others = [[other for other in studies if other is not study] for study in studies]
        fitted = [dataclasses.replace(base.rates, **fit(rest, base.rates)) for rest in others]
        errors, least = [_error(study, rates) for study, rates in zip(studies, fitted, strict=True)], OTHER_STEPS_BAND
    names = [f"steps {s.facts['first_step']} to {s.facts['last_step']} of {s.folder.parent.parent.name}" for s in studies]
    evidence = {"source": ", ".join(names), "errors": errors, "steps_ms": [study.mean().wall / 1e6 for study in studies]}
    earlier = base.measured.rates if base.measured else {}
    today, facts = datetime.date.today().isoformat(), studies[0].facts
    band = max(least, *map(abs, errors))
    return Measured(studies[0].links.gpu.key, facts["versions"], today, earlier | found, band, evidence)


def save(measured: Measured, folder: pathlib.Path) -> pathlib.Path:
    """Writes the file that `plan --rates` and `tune --rates` read, and returns its path."""
    versions = measured.versions
    path = folder / f"rates_{measured.gpu}_jax{versions['jax']}_cudnn{versions['cudnn']}.json"
    hardware.save(path, measured)
    return path


def fit(studies: Sequence[Study], start: Rates) -> dict[str, float]:
    """Those rates, by name, that the recorded steps say something about."""
    measured = [_times(study, study.mean()) for study in studies]
    whole = sum(study.mean().wall for study in studies)
    names = [name for name in measured[0] if sum(times.get(name, 0.0) for times in measured) >= LEAST_SHARE * whole]
    found = {name: getattr(start, name) for name in names}
    for _ in range(ROUNDS):
        rates = dataclasses.replace(start, **found)
        planned = [_times(study, _predicted(study, rates)) for study in studies]
        for name in names:
            took, expected = (sum(times.get(name, 0.0) for times in each) for each in (measured, planned))
            found[name] = min(1.0, max(0.01, found[name] * expected / took))
    return found


def _times(study: Study, account: Account) -> dict[str, float]:
    """Nanoseconds of the work of each rate in a step."""
    fp8 = study.config.precision.products == "fp8"
    attention = {name: 0.0 for name in ("attention", "attention_backward")}
    for (part, kind), (_, time) in account.kernels.items():
        if kind == ATTENTION:
            attention["attention_backward" if part.endswith(", backward") else "attention"] += time
    crosses = {label(c): study.links.crosses(c.axes) for c in study.operations.every}
    sent = {name: 0.0 for name in ("nvlink", "network")}
    for name, times in account.sent.items():
        sent["network" if crosses.get(name) else "nvlink"] += times.total
    products = {"product_fp8" if fp8 else "product": account.parts[PRODUCTS]}
    return products | attention | {"memory": account.parts[MEMORY]} | sent


def _predicted(study: Study, rates: Rates) -> Account:
    return predict(study.operations, dataclasses.replace(study.links, rates=rates), study.busy).account


def _error(study: Study, rates: Rates) -> float:
    """Of the recorded step's time, as a share of the predicted one."""
    return study.mean().wall / _predicted(study, rates).wall - 1
