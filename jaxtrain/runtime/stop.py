"""Stopping on a signal: SIGTERM, SIGUSR1 or Ctrl-C to any process ends all after the same step, with that step saved.

A Python signal handler waits for the main thread, which may be in a compiler or a collective for minutes. So a thread reads the
signals from a pipe that the C-level handler writes to. Before the first step there is nothing to save and the process ends at
once. Later, each process freezes its count of launches (`proceed`), the largest count of all is the one where all stop, and a
process that is behind goes on until there: whoever has launched a collective finds the others in it.

SIGUSR2 asks this process to record a profile (`profile_asked`).

Signals are taken only after `install`, which `python -m jaxtrain.main` calls; elsewhere they do what they always do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jaxtrain.errors import Stopped
from jaxtrain.runtime import control

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PROFILE = signal.SIGUSR2
TWICE_S = 0.3  # a terminal and a launcher may both pass on one Ctrl-C: that is not a second one


class _State:
    """Of this process. `launches`: of programs that all processes run; `limit`: after how many all stop."""

    def __init__(self):
        self.lock = threading.Lock()
        self.decided = threading.Event()
        self.running = self.frozen = self.stopped = False
        self.launches, self.limit = 0, 0
        self.reason = ""
        self.grace_s = 0.0
        self.asked_at = 0.0  # when the last Ctrl-C came


_state = _State()
_profile = threading.Event()


def install() -> None:
    """Takes over the signals. Only the main thread may call it; again is harmless."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in (*SIGNALS, PROFILE):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), name="signals", daemon=True).start()


def begin(grace_s: float) -> None:
    """From here on there is something to save: `proceed` says when to stop. `grace_s`: how long stopping may take then."""
    global _state
    asked_at, _state = _state.asked_at, _State()
    _state.asked_at, _state.grace_s, _state.running = asked_at, grace_s, True


def proceed() -> bool:
    """Whether to launch the next program that all processes run together; False: stop here, as all others do."""
    state = _state
    with state.lock:
        if not state.frozen:
            state.launches += 1
            return True
    state.decided.wait()
    if state.launches < state.limit:
        state.launches += 1
        return True
    state.stopped = True
    return False


def while_proceeding(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, each for a launch of its own, up to where all stop."""
    for batch in batches:
        if not proceed():
            return
        yield batch


def stopped() -> bool:
    """Whether `proceed` has said no."""
    return _state.stopped


def profile_asked() -> bool:
    """Whether a profile has been asked for since this was last called."""
    asked = _profile.is_set()
    _profile.clear()
    return asked


def error(done: str, saved: int | None) -> Stopped:
    """What to raise when the run has stopped. `done`: what it did last; `saved`: step of the newest checkpoint."""
    if not _state.reason:
        how = "the same command continues from the newest checkpoint" if saved is not None else "there is no checkpoint yet"
        return Stopped(f"stopped by the user; {how}", 130)
    how = f"the same command continues from the checkpoint of step {saved}" if saved is not None else "there is no checkpoint"
    return Stopped(f"stopped by {_state.reason}: {done}; {how}", _exit_code(_state.reason))


def follow_parent() -> None:
    """In a child process that helps this one: signals to all processes of a job leave it alone, and it ends with its parent."""
    parent, numbers = os.getppid(), (*SIGNALS, signal.SIGHUP)
    for number in (signal.SIGINT, signal.SIGUSR1, PROFILE, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # threads that libraries have started already are not reached by the mask
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def watch() -> None:
        while os.getppid() == parent:
            got = signal.sigtimedwait(numbers, 1.0)
            if got and got.si_signo == signal.SIGTERM and got.si_pid == parent:
                break
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _watch(pipe: int) -> None:
    while data := os.read(pipe, 1):
        if (number := data[0]) in SIGNALS:
            _asked(signal.Signals(number))
        elif number == PROFILE:
            _profile.set()


def _asked(number: signal.Signals) -> None:
    now, name = time.monotonic(), "Ctrl-C" if number == signal.SIGINT else number.name
    again = number == signal.SIGINT and _state.asked_at and now - _state.asked_at > TWICE_S
    if number == signal.SIGINT and not again:
        _state.asked_at = now
    if again:
        control.fail("stopped by a second Ctrl-C")
        control.say("stopped by a second Ctrl-C; what was not saved yet is lost")
        control.end(130)
    if control.current:
        control.current.ask_to_stop(name)
    else:
        _decide(_freeze(name), name)


def _freeze(reason: str) -> int | None:
    with _state.lock:
        if not _state.running:
            return None
        if not _state.frozen:
            control.say(f"{reason}: stopping after the step that is under way")
        _state.frozen, _state.reason = True, reason
        return _state.launches


def _decide(limit: int | None, reason: str) -> None:
    if limit is None:
        control.say(f"stopped by {reason} before the first step: there was nothing to save")
        control.end(_exit_code(reason))
    if not _state.decided.is_set():
        _state.limit = limit
        _state.decided.set()
        timer = threading.Timer(_state.grace_s, _too_late, (_state.grace_s,))
        timer.daemon = True
        timer.start()


def _too_late(grace_s: float) -> None:
    text = f"not saved {grace_s:g} s after the signal (runtime.grace_s); older checkpoints are whole"
    control.say(f"error: {text}")
    control.fail(text)
    control.end(1)


def _exit_code(reason: str) -> int:
    return 130 if reason.startswith("Ctrl-C") else 0


control.on_stop = _freeze, _decide
