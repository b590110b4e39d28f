"""The table of checks, in the order in which they run."""

from __future__ import annotations

from jaxtrain.gpu_check import attention, layers, machine, rates
from jaxtrain.gpu_check.records import Check

SECTIONS = MACHINE, NUMERICS, RATES = "machine", "numerics", "rates"

CHECKS = (
    Check(MACHINE, "devices", machine.devices, 1),
    Check(MACHINE, "versions", machine.libraries, 1),
    Check(MACHINE, "clocks and limits", machine.driver, 1),
    *(
        Check(NUMERICS, f"attention, {name}, {dtype}", attention.check(name, dtype), 25)
        for dtype, names in attention.TOP.items()
        for name in names
    ),
    Check(NUMERICS, "experts, fp8, loss", layers.check, 20),
    Check(NUMERICS, "collectives", layers.collectives, 15, devices=2),
    Check(NUMERICS, "layouts", layers.layouts, 60),
    Check(RATES, "products", rates.timed(rates.products), 20),
    Check(RATES, "attention", rates.timed(rates.attention), 15),
    Check(RATES, "memory", rates.timed(rates.memory), 5),
    Check(RATES, "launches", rates.timed(rates.launches), 5),
    Check(RATES, "pinned copies", rates.host_copies, 5),
    Check(RATES, "collectives", rates.collective_rates, 60, devices=2),
)
