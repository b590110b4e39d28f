"""The sources of a run, out of the settings of `data`: which there are, their weights at each step, what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

import ml_collections

MAX_SOURCES = 128  # their numbers lie in seven bits of a target
CYCLE_ROWS = 1000  # in each run of so many rows every source has the same number


def sources(data: ml_collections.ConfigDict, eval: bool = False) -> dict[str, ml_collections.ConfigDict]:
    """The training sources (or held-out sets) by name, each the section `data` with its own settings put in.

    A run without `data.sources` has one, named "data"; without `data.eval_sources`, `data.eval_paths` is one named "eval".
    """
    entries = dict(data.eval_sources if eval else data.sources)
    if not entries and eval:
        entries = {"eval": {"paths": data.eval_paths}} if data.eval_paths else {}
    elif not entries:
        entries = {"data": {}}
    found = {}
    for name, entry in entries.items():
        own = ml_collections.ConfigDict({key: value for key, value in data.items() if key not in ("sources", "eval_sources")})
        own.update({"weight": 1.0, "weight_changes": ()})
        own.unlock().update(entry)
        found[name] = own.lock()
    return found


def weights(found: dict[str, ml_collections.ConfigDict]) -> list[tuple[int, list[float]]]:
    """(first step, weight of each source) of every stretch of steps, the first at step 0. Raises ValueError."""
    changes = {0: {}}
    for number, (name, source) in enumerate(found.items()):
        for change in source.weight_changes:
            step, colon, weight = change.partition(":")
            try:
                if not (colon and int(float(step)) > 0 and float(weight) >= 0):
                    raise ValueError
            except ValueError:
                raise ValueError(f"{name}.weight_changes: expected STEP:WEIGHT with step > 0, got {change!r}") from None
            changes.setdefault(int(float(step)), {})[number] = float(weight)
    current, stretches = [source.weight for source in found.values()], []
    for step in sorted(changes):
        for number, weight in changes[step].items():
            current[number] = weight
        stretches.append((step, list(current)))
    return stretches


def quotas(shares: Sequence[float]) -> list[int]:
    """Rows of each source in `CYCLE_ROWS`, by largest remainder. Raises ValueError where a weight gives not even one."""
    total = sum(shares)
    if total <= 0:
        raise ValueError("no weight is above 0")
    exact = [CYCLE_ROWS * share / total for share in shares]
    rows = [int(value) for value in exact]
    for number in sorted(range(len(exact)), key=lambda i: rows[i] - exact[i])[: CYCLE_ROWS - sum(rows)]:
        rows[number] += 1
    for number, (count, share) in enumerate(zip(rows, shares, strict=True)):
        if share > 0 and not count:
            raise ValueError(f"weight {share:g} of {total:g} is under one row in {CYCLE_ROWS}", number)
    return rows


def problems(data: ml_collections.ConfigDict) -> list[str]:
    """What is wrong with the sources taken together."""
    found = sources(data)
    try:
        stretches = weights(found)
    except ValueError as error:
        return [f"data.sources.{error}"]
    wrong = []
    for step, shares in stretches:
        try:
            quotas(shares)
        except ValueError as error:
            name = f".{list(found)[error.args[1]]}" if len(error.args) > 1 else ""
            wrong.append(f"data.sources{name}: from step {step}: {error.args[0]}; nearest: {sum(shares) / CYCLE_ROWS:g} or 0")
    names = [name for entries in (data.sources, data.eval_sources) for name in entries]
    wrong += [f"data.sources.{name}: a name has letters, digits, _ and - only" for name in names if not _is_name(name)]
    if len(data.sources) > MAX_SOURCES:
        wrong.append(f"data.sources: at most {MAX_SOURCES} are told apart in the metrics, got {len(data.sources)}; join some")
    if data.sources and data.max_epochs:
        wrong.append("data.max_epochs: with data.sources each has its own: set data.sources.NAME.max_epochs")
    if data.eval_sources and data.eval_paths:
        wrong.append("data.eval_paths: data.eval_sources takes its place; give one of them")
    return wrong


def _is_name(name: str) -> bool:
    return name.replace("_", "").replace("-", "").isalnum()
