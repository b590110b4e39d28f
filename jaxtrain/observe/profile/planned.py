"""What the plan says of the step that a profile recorded: the same compiled program, simulated at the rates of its GPU.

So neither a config that has changed since nor another compiler is between measured and planned times; what differs is how fast
the work is done.
"""

from __future__ import annotations

import collections
import dataclasses

from jaxtrain.observe.profile.account import EXPOSED, HOST_GAPS, IDLE, Account, Sent
from jaxtrain.observe.profile.operations import (
    ATTENTION,
    COLLECTIVES,
    COMPUTING,
    COPIES,
    MEMORY,
    OTHER,
    PRODUCTS,
    Operations,
    label,
)
from jaxtrain.plan.predict import roofline, timeline
from jaxtrain.plan.predict.roofline import Links
from jaxtrain.plan.predict.timeline import Timeline
from jaxtrain.plan.read.hlo import Module, executions


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The simulated step, and the same figures as an `Account` has. Times of parts of the model are of their kernels alone."""

    timeline: Timeline
    account: Account


def predict(operations: Operations, links: Links, busy: dict[str, float] | None = None) -> Prediction:
    """The prediction for a program on GPUs with `links`. `busy`: see `timeline.simulate`."""
    module = operations.module
    found = list(operations.every)
    simulated = timeline.simulate(module, found, links, busy)
    sent: dict[str, Sent] = collections.defaultdict(Sent)
    for c in found:
        old, runs = sent[label(c)], c.executions
        sent[label(c)] = Sent(old.count + runs, old.total + 1e9 * simulated.times[c.id] * runs, old.exposed)
    for key, waited in simulated.waits.items():
        name = label(next(c for c in found if c.id == key))
        sent[name] = dataclasses.replace(sent[name], exposed=sent[name].exposed + 1e9 * waited)
    seconds = {
        PRODUCTS: simulated.product_s,
        ATTENTION: simulated.attention_s,
        MEMORY: simulated.memory_s,
        OTHER: 0.0,
        EXPOSED: simulated.exposed_s,
        COPIES: simulated.host_s,
        HOST_GAPS: simulated.launch_s,
        IDLE: simulated.bubble_s,
    }
    kernels = _kernels(operations, module, links)
    for name, values in sent.items():
        kernels[name, COLLECTIVES] = values.count, values.total
    parts = {part: 1e9 * value for part, value in seconds.items()}
    hidden = sum(values.total - values.exposed for values in sent.values())
    return Prediction(simulated, Account(0, 1e9 * simulated.step_s, parts, hidden, dict(sent), kernels))


def _kernels(operations: Operations, module: Module, links: Links) -> dict[tuple[str, str], tuple[float, float]]:
    """How often the kernels of each part of the model run in a step, and their nanoseconds."""
    found: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    inside = {called for node in module.nodes.values() if node.opcode in ("fusion", "async-start") for called in node.called}
    for computation, places in module.paths(skip=lambda i: i.opcode in ("fusion", "async-start")).items():
        if computation in inside:
            continue
        runs = sum(map(executions, places))
        for node in module.computations[computation].instructions:
            seconds = roofline.cost(module, node).seconds(links.gpu, links.rates)
            operation = operations.of_node(node)
            if seconds and operation.kind in COMPUTING:
                sums = found[operation.part, operation.kind]
                sums[0] += runs
                sums[1] += 1e9 * seconds * runs
    return {key: (count, time) for key, (count, time) in found.items()}
