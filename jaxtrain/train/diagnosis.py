"""What is wrong inside a step: the first layer and activation that is not finite, the weights and the batch; and statistics of
activations every so many steps.

The train step bears nothing of it. A forward pass that notes every named activation (`Program.activations`) is compiled when it
is first needed: after a step whose gradient is not finite, on that step's batch (`observe.check_nans`), or when statistics are
due (`observe.activation_stats_every_steps`), on its first microbatch. It is without dropout.
"""

from __future__ import annotations

import json
import logging
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.model.batch import Batch
from jaxtrain.remat.probe import FIGURES
from jaxtrain.train.program import Program

log = logging.getLogger(__name__)
STATISTICS, FOLDER = "activations.jsonl", "nonfinite"
MOST_EXPLAINED = 3  # steps of a run; more would say the same


class Diagnosis:
    """Keeps the newest batches and explains steps. `tokenizer`: for the text of a batch."""

    def __init__(self, program: Program, tokenizer: Any, workdir: pathlib.Path):
        self._program, self._tokenizer, self._workdir = program, tokenizer, workdir
        settings = program.config.observe
        self._checks, self._every = settings.check_nans, settings.activation_stats_every_steps
        self._kept: dict[int, tuple[dict[str, np.ndarray], Batch]] = {}
        self._figures: dict[int, Any] = {}
        self._params: Any = None
        self._explained = 0

    def launched(self, step: int, rows: dict[str, np.ndarray], batch: Batch, params: Any) -> None:
        """After the launch of a step: its batch, as this process's rows and on the devices, and the newest weights."""
        if self._checks:
            self._kept[step], self._params = (rows, batch), params
        if self._every and step % self._every == 0:
            self._figures[step] = self._program.activations(params, _microbatch(batch, 0))

    def finished(self, step: int, grad_norm: float, loss: float) -> None:
        """After the metrics of a step have come: writes statistics, and says where a gradient that is not finite comes from."""
        if found := self._figures.pop(step, None):
            self._write_statistics(step, jax.device_get(found))
        rows, batch = self._kept.pop(step, (None, None))
        if batch is None or math.isfinite(grad_norm) or self._explained == MOST_EXPLAINED:
            return
        self._explained += 1
        try:
            for text in self.explain(batch, loss):
                log.warning("Step %d: %s", step, text)
        except Exception as error:  # of the compiler or an allocator: the run itself goes on
            log.warning("Step %d: cannot be explained: %s", step, str(error).partition("\n")[0])
        if path := self._write_rows(step, rows):
            log.warning("Step %d: the batch as text is in %s", step, path)

    def forget(self) -> None:
        """Drops batches and weights, so that another state has room."""
        self._kept, self._figures, self._params = {}, {}, None

    def explain(self, batch: Batch, loss: float) -> Iterator[str]:
        """Sentences: which weights are not finite, and the first activation that is not. `loss`: that the step had."""
        if bad := nonfinite_weights(self._params):
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            yield f"weights that are not finite: {', '.join(bad[:5])}{more}"
        count = batch.tokens.shape[0]
        for number in range(count):
            found = jax.device_get(self._program.activations(self._params, _microbatch(batch, number)))
            for (layer, _, name), figures in sorted(found.items(), key=lambda item: item[0][1]):
                share = figures[FIGURES.index("nonfinite")] / figures[0]
                if share:
                    where = f"layer {int(layer)} (the first is 0), {name}" if layer else name
                    of = f" of microbatch {number}" if count > 1 else ""
                    yield f"the first activation that is not finite{of}: {where}; {100 * share:.3g}% of its numbers"
                    return
        known = "all activations are finite in the forward pass (without dropout)"
        if math.isfinite(loss):
            yield f"{known}, and so is the loss, {loss:.4g}: the backward overflows"
        else:
            yield f"{known}, the loss is not: the head's logits overflow, or what is added to the loss"

    def _write_statistics(self, step: int, found: dict) -> None:
        if jax.process_index():
            return
        fp8 = self._program.config.precision.products == "fp8"
        lines = []
        for (layer, _, name), figures in sorted(found.items(), key=lambda item: item[0][1]):
            count, nonfinite, zeros, squares, vanish, largest = map(float, figures)
            row = {"step": step, "layer": int(layer) if layer else None, "activation": name}
            row |= {
                "rms": math.sqrt(squares / count),
                "largest": largest,
                "zeros": zeros / count,
                "nonfinite": nonfinite / count,
            }
            lines.append(json.dumps(row | ({"zero_in_fp8": vanish / count} if fp8 else {})) + "\n")
        self._write(self._workdir / STATISTICS, "".join(lines), "a")

    def _write_rows(self, step: int, rows: dict[str, np.ndarray]) -> pathlib.Path | None:
        """This process's rows as text, documents apart."""
        length, parts = rows["tokens"].shape[-1], []
        flat = (rows[key].reshape(-1, length) for key in ("tokens", "segment_ids"))
        for number, (tokens, segments) in enumerate(zip(*flat, strict=True)):
            for segment in range(1, int(segments.max(initial=0)) + 1):
                text = self._tokenizer.decode(tokens[segments == segment].tolist())
                parts.append(f"--- row {number} of process {jax.process_index()}, document {segment}\n{text}\n")
        path = self._workdir / FOLDER / f"step_{step:08d}_process_{jax.process_index()}.txt"
        return path if self._write(path, "".join(parts), "w") else None

    def _write(self, path: pathlib.Path, text: str, mode: str) -> bool:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            log.warning("%s: cannot be written: %s", path, error.strerror)
            return False
        return True


def nonfinite_weights(params: Any) -> list[str]:
    """Dotted names of weights with numbers that are not finite; of those of blocks, with their places in the stack."""
    found = []
    counts = jax.device_get(_nonfinite(params))
    for path, bad in jax.tree_util.tree_leaves_with_path(counts):
        name = ".".join(str(key.key) for key in path)
        if "blocks" in name.partition(".")[0]:
            found += [f"{name}[{place}]" for place in np.flatnonzero(bad)]
        elif np.any(bad):
            found.append(name)
    return found


@jax.jit
def _nonfinite(params: Any) -> Any:
    """Along the first dimension of each array, whether anything is not finite."""
    return jax.tree.map(lambda a: jnp.any(~jnp.isfinite(a), axis=tuple(range(1, a.ndim))), params)


def _microbatch(batch: Batch, number: int) -> Batch:
    return Batch(*(array[number] for array in batch))
