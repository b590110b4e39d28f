"""The table of checks, in the order in which they run."""

from __future__ import annotations

import functools

from jaxtrain.gpu_check import attention, fit, layers, machine, models, profile, rates
from jaxtrain.gpu_check.records import HOST, OWN, Check

SECTIONS = "machine", "numerics", "rates", "models", "mixture", "profile", "fitted rates"
MACHINE, NUMERICS, RATES, MODELS, MIXTURE, PROFILE, FITTED = SECTIONS

PROFILED = models.DENSE[0]
CHECKS = (
    Check(MACHINE, "devices", machine.devices),
    Check(MACHINE, "versions", machine.libraries),
    Check(MACHINE, "clocks and limits", machine.driver),
    *(
        Check(NUMERICS, f"attention, {name}, {dtype}", functools.partial(attention.check, name, dtype))
        for dtype, names in attention.TOP.items()
        for name in names
    ),
    Check(NUMERICS, "experts, fp8, loss", layers.check),
    Check(NUMERICS, "collectives", layers.collectives, devices=2),
    Check(NUMERICS, "layouts", layers.layouts),
    Check(RATES, "products", functools.partial(rates.timed, rates.products)),
    Check(RATES, "experts", functools.partial(rates.timed, rates.experts)),
    Check(RATES, "attention", functools.partial(rates.timed, rates.attention)),
    Check(RATES, "memory", functools.partial(rates.timed, rates.memory)),
    Check(RATES, "launches", functools.partial(rates.timed, rates.launches)),
    Check(RATES, "pinned copies", rates.host_copies),
    Check(RATES, "collectives", functools.partial(rates.timed, rates.collective_programs), devices=2),
    Check(RATES, "as plans take them", fit.fit),
    Check(MODELS, "plans", models.plans, process=HOST),
    *(Check(MODELS, step.name, functools.partial(models.measure, step), process=OWN) for step in models.DENSE),
    *(Check(MIXTURE, step.name, functools.partial(models.measure, step), process=OWN) for step in models.MIXTURE),
    Check(PROFILE, PROFILED.name, functools.partial(profile.check, PROFILED), process=OWN),
    Check(FITTED, "file and error band", fit.write, process=HOST),
)
