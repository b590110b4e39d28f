"""A profile as a file for https://ui.perfetto.dev: devices as processes, streams as threads, steps above, parts of the model.

Format: JSON of the "Trace Event Format" (Chrome), which Perfetto reads, compressed.
"""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxtrain.observe.profile.study import Study
from jaxtrain.observe.profile.trace import windows


def write(found: Study, path: pathlib.Path) -> None:
    """Writes the file."""
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=4) as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": list(_events(found))}, file)


def _events(found: Study) -> Iterator[dict[str, Any]]:
    number = 0
    for process, trace in found.traces.items():
        for device, events in trace.devices.items():
            number += 1
            title = f"process {process}, {device}" if len(found.traces) > 1 else device
            yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}}
            streams = {stream: thread for thread, stream in enumerate(sorted({event.stream for event in events}), 1)}
            for name, thread in {"steps": 0, **streams}.items():
                yield {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": name}}
            for step, start, end in windows(trace, device):
                yield _slice(f"step {step}", (start, end), number, 0, {})
            for event in events:
                operation = found.operations(event.name, event.op)
                arguments = {"class": operation.kind, "kernel": event.name, "operation": event.op}
                title = operation.collective or operation.part
                yield _slice(title, (event.start, event.end), number, streams[event.stream], arguments)


def _slice(name: str, span: tuple[float, float], process: int, thread: int, arguments: dict) -> dict[str, Any]:
    start, end = span
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3}  # microseconds
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": arguments}
