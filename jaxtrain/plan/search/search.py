"""Searches layouts of a model on a cluster: the closed form puts them in order, the compiler decides.

What the formula says cannot fit is never compiled, what the compiler says does not fit is never proposed. Three rounds, each
with a share of the compilations and of the time: meshes, stages, policies and rows; then what offload makes possible and what
lies between policies, around the best; then prefetch for the best. Compiled results are kept in a folder, by everything that
they depend on, so that a search that is stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections

import jaxtrain
from jaxtrain.config import ConfigError
from jaxtrain.files import write_whole
from jaxtrain.plan import compile
from jaxtrain.plan.search import candidates
from jaxtrain.plan.search.advice import Change, changed
from jaxtrain.plan.search.candidates import Candidate
from jaxtrain.plan.study import study

BETTER = 1.05  # what is left is compiled while it is expected to take no longer than so many times the best so far
SHARES = (0.6, 0.85, 1.0)  # of compilations and time, by the end of each round
FEW = 3  # best layouts whose neighbours are tried
WORTH_SAYING = 0.02  # of the step's time or FLOPs


@dataclasses.dataclass(frozen=True)
class Result:
    """A layout as compiled. `reason`: what speaks for or against it; `headroom_bytes`: negative where it does not fit."""

    settings: dict[str, Any]
    peak_bytes: int
    headroom_bytes: int
    step_s: float
    exposed_s: float
    tokens_per_s: float
    mfu: float
    fits: bool
    reason: str


def search(
    config: ml_collections.ConfigDict,
    topology: compile.Topology,
    folder: pathlib.Path,
    limit_s: float,
    most: int = 24,
    progress: Callable[[int, int, str], None] = lambda done, of, text: None,
) -> list[Result]:
    """Compiles the most promising layouts while there is time; those that fit, fastest first, then those that do not.

    Args:
      folder: for compiled results.
      limit_s: no compilation begins after it.
      most: compilations at most, those in the folder not counted.
      progress: told (done, of how many, what) before each compilation.
    """
    search = _Search(config, topology, folder, limit_s, most, progress)
    every = candidates.layouts(config, topology)
    search.round(every, SHARES[0])
    good = [result.settings for result in search.best()[:FEW]]
    between = candidates.between_policies(config, topology, good)
    offloaded = candidates.offloaded(config, topology, every, search.missing, search.slowest())
    search.round(sorted([*every, *between, *offloaded], key=lambda c: c.seconds), SHARES[1])
    if best := search.best():
        search.round(candidates.prefetches(config, topology, best[0].settings), SHARES[2])
    return search.best() + sorted((r for r in search.results.values() if not r.fits), key=lambda r: r.peak_bytes)


def alike(found: Sequence[Result], band: float) -> list[int]:
    """Numbers, from 1, of the layouts that fit and are slower than the first by less than the error band of predicted times."""
    fitting = [result.step_s for result in found if result.fits]
    return [number for number, step_s in enumerate(fitting[1:], 2) if step_s < fitting[0] * (1 + band)]


class _Search:
    """What is known so far."""

    def __init__(self, config, topology, folder, limit_s, most, progress):
        self.config, self.topology, self.folder, self.progress = config, topology, folder, progress
        self.started, self.limit_s, self.most, self.compiled = time.monotonic(), limit_s, most, 0
        self.results: dict[str, Result] = {}  # by the change
        self.of_mesh: dict[tuple, float] = {}  # the least ratio of compiled to formula's time, of layouts that fit
        self.errors: list[tuple[tuple, int]] = []  # kind of a layout, bytes that the compiler needed beyond the formula

    def best(self) -> list[Result]:
        """Those that fit, fastest first."""
        return sorted((result for result in self.results.values() if result.fits), key=lambda r: r.step_s)

    def slowest(self) -> float:
        """Seconds, as they are expected, beyond which a layout is not worth compiling: by the best so far."""
        return min((result.step_s for result in self.best()), default=float("inf")) * BETTER

    def missing(self, candidate: Candidate) -> int:
        """Bytes that a layout lacks, 0 or less if it fits."""
        result = self.results.get(str(candidate.change))
        if result and result.peak_bytes:
            return -result.headroom_bytes
        return candidate.bytes + max(0, self._error(candidate)) + candidate.estimated - self.topology.gpu.memory_bytes

    def _error(self, candidate: Candidate) -> int:
        """The least by which the compiler needed more than the formula: for layouts of its kind, or else of its policy."""
        kind = _kind(candidate)
        alike = [error for other, error in self.errors if other == kind]
        return min(alike or (error for other, error in self.errors if other[0] == kind[0]), default=0)

    def round(self, waiting: Sequence[Candidate], share: float) -> None:
        """Compiles candidates, each time the one that seems fastest of those that may fit, by what is known by then.

        It ends when the rest are slower by formula than the best so far, or the share is used up.
        """
        while candidate := min(filter(self._may_do, waiting), key=self._expected, default=None):
            if self._expected(candidate) > self.slowest():
                return
            path = self.folder / f"{_key(self.config, self.topology, candidate.change)}.json"
            if path.exists():
                result = _read(path)
            elif self.compiled >= share * self.most or time.monotonic() - self.started > share * self.limit_s:
                return
            else:
                self.progress(self.compiled, self.most, str(candidate.change))
                result = _compiled(self.config, self.topology, candidate)
                self.compiled += 1
                _write(path, result)
            self._learn(candidate, result)

    def _expected(self, candidate: Candidate) -> float:
        """Seconds by formula, which errs alike on one mesh (on what stays exposed, most of all): as it did there."""
        return candidate.seconds * self.of_mesh.get(_mesh(candidate), 1.0)

    def _may_do(self, candidate: Candidate) -> bool:
        return str(candidate.change) not in self.results and self.missing(candidate) <= 0

    def _learn(self, candidate: Candidate, result: Result) -> None:
        self.results[str(candidate.change)] = result
        if result.fits:
            ratio, mesh = result.step_s / candidate.seconds, _mesh(candidate)
            self.of_mesh[mesh] = min(ratio, self.of_mesh.get(mesh, ratio))
        if result.peak_bytes:
            self.errors.append((_kind(candidate), result.peak_bytes - candidate.bytes))


def _mesh(candidate: Candidate) -> tuple:
    return tuple(size for key, size in sorted(candidate.settings.items()) if key.startswith("mesh."))


def _kind(candidate: Candidate) -> tuple:
    """Of layouts for which the formula errs alike; the policy first."""
    s = candidate.settings
    return s["memory.remat"], s["memory.remat_every_blocks"], s["sharding.zero_stage"], s["mesh.data"] > 1


def _read(path: pathlib.Path) -> Result:
    result = Result(**json.loads(path.read_text()))
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in result.settings.items()}
    return dataclasses.replace(result, settings=settings)


def _write(path: pathlib.Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(dataclasses.asdict(result)))


def _compiled(config, topology, candidate: Candidate) -> Result:
    settings = candidate.settings
    try:
        plan = study(changed(config, candidate.change), topology)
    except ConfigError as error:
        return Result(settings, 0, 0, 0.0, 0.0, 0.0, 0.0, False, error.problems[0])
    t, fits = plan.timeline, plan.verdict != "does not fit"
    if fits:
        waited = dict(plan.communication.axis_waited_s) | {"the host": t.host_s + t.launch_s}
        parts = [f"{plan.headroom_bytes / 2**30:.1f} GiB left"]
        parts += [f"waits {100 * s / t.step_s:.0f}% for {what}" for what, s in waited.items() if s > WORTH_SAYING * t.step_s]
        if plan.recomputed_flops > WORTH_SAYING:
            parts.append(f"{100 * plan.recomputed_flops:.0f}% more FLOPs than the model's")
        if host := sum(plan.ledger.host.values()):
            parts.append(f"{host / 2**30:.1f} GiB on the host")
    else:
        parts = [f"{-plan.headroom_bytes / 2**30:.1f} GiB too much"]
    found = plan.peak_bytes, plan.headroom_bytes, t.step_s, t.exposed_s, plan.tokens_per_s, plan.mfu, fits
    return Result(settings, *found, "; ".join(parts))


def _key(config, topology, change: Change) -> str:
    """Of everything that a result depends on: settings, cluster, rates, jax, and the code of this package."""
    parts = [
        changed(config, change).to_json(sort_keys=True),
        str(topology),
        repr(topology.basis.rates),
        jax.__version__,
        _code(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _code() -> str:
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(jaxtrain.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def override_file(base: str, result: Result) -> str:
    """A config file that takes the settings of `base` and changes what the result changes."""
    file, _, argument = base.partition(":")
    lines = [f"    config.{key} = {value!a}" for key, value in result.settings.items()]
    return "\n".join(
        [
            ascii(f"{base} as laid out by python -m jaxtrain.tune: {result.reason}."),  # whatever signs the path has
            "",
            "from __future__ import annotations",
            "",
            "import runpy",
            "",
            "",
            f"def get_config(arg={argument!a}):",
            f"    make = runpy.run_path({str(pathlib.Path(file).resolve())!a})['get_config']",
            "    config = make(arg) if arg else make()",
            *lines,
            "    return config",
            "",
        ]
    )
