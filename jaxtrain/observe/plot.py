"""loss.png and experts.png from metrics.jsonl: losses and learning rate; loads of experts."""

from __future__ import annotations

import pathlib
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.observe.metrics import read_rows

_TRAIN, _HELD_OUT, _RATE = "#4c78a8", "#e45756", "#72809a"


def loss_plot(workdir: str | pathlib.Path) -> pathlib.Path | None:
    """Draws WORKDIR/loss.png and returns its path; None when no loss has been recorded. Raises UserError."""
    rows = read_rows(workdir)
    train, held_out, rate = (_curve(rows, name) for name in ("loss", "eval_loss", "learning_rate"))
    if not train[0] and not held_out[0]:
        return None
    # A figure without pyplot: no window system is asked for, no state is left behind.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.5, 5.0), dpi=150, layout="constrained")
    if rate[0]:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        bottom.plot(*rate, color=_RATE, linewidth=1.5)
        bottom.set_ylabel("learning rate")
        bottom.set_ylim(bottom=0)
        bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axes = (top, bottom)
    else:
        top = bottom = figure.subplots()
        axes = (top,)
    if train[0]:
        top.plot(*train, color=_TRAIN, linewidth=1.3, label=f"training, last {train[1][-1]:.3f}")
    if held_out[0]:
        top.plot(*held_out, "o-", color=_HELD_OUT, linewidth=1.8, markersize=5, label=f"held out, last {held_out[1][-1]:.3f}")
    top.set_ylabel("loss (nats per token)")
    top.legend(frameon=False, fontsize=11)
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    return _save(figure, axes, pathlib.Path(workdir) / "loss.png")


def experts_plot(workdir: str | pathlib.Path, load: list[list[float]] | None) -> pathlib.Path | None:
    """Draws WORKDIR/experts.png and returns its path; None for a dense model. Raises UserError.

    Above, the fullest expert and the balancing loss over the steps; below, the load [L][E] of the last step. 1: an even share.
    """
    rows = read_rows(workdir)
    fullest, balance = _curve(rows, "largest_load"), _curve(rows, "balance_loss")
    if not fullest[0] or not load:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.5, 5.0), dpi=150, layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(2, 1))
    top.plot(*fullest, color=_HELD_OUT, linewidth=1.5, label=f"fullest expert of any layer, last {fullest[1][-1]:.2f}")
    top.plot(*balance, color=_TRAIN, linewidth=1.5, label=f"balancing loss, unscaled, last {balance[1][-1]:.3f}")
    top.axhline(1.0, color=_RATE, linewidth=0.8)
    top.set_ylabel("even share = 1")
    top.set_xlabel("step")
    top.legend(frameon=False, fontsize=11)
    image = bottom.imshow(load, aspect="auto", cmap="coolwarm", vmin=0.0, vmax=2.0)
    bottom.set_xlabel("expert")
    bottom.set_ylabel("layer")
    for axis in (bottom.xaxis, bottom.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=bottom, label="load, last step")
    return _save(figure, (top,), pathlib.Path(workdir) / "experts.png")


def _save(figure, axes, path: pathlib.Path) -> pathlib.Path:
    for axis in axes:
        axis.grid(color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. Free space or choose another --workdir.") from error
    return path


def _curve(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    # null, a non-finite value, is a gap in the line
    points = [(row["step"], float("nan") if row[name] is None else row[name]) for row in rows if name in row]
    return [step for step, _ in points], [value for _, value in points]
