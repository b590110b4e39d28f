"""Breaks runs of several real processes on this machine in many ways and prints a table of what happened.

    python scripts/fault_table.py [--tries=5] [--processes=2] [--only=REGEX] [--list] [--out=DIR]

Each fault is tried several times, at a random moment of its phase. Shown are: the tries that ended as they must, the longest
time that the ending took (or, of those that recover, the recovery), the most steps done twice, how often the arrays at the end
equal those of an undisturbed run, the machine's load meanwhile, and the line that the survivors print. Runs are of
configs/tiny.py made smaller, on CPU, and share a folder of compiled programs but where a fault is about compiling.
The exit code is 1 if any try went wrong; what the processes printed is in DIR then.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from fault_recovery import RECOVERIES, Recovered, Untried
from fault_runs import ROOT, SMALL, Run, clean, ended_by

LATE = """from jaxtrain.train import loop
compile_step = loop._compile_step
loop._compile_step = lambda program: (time.sleep({}), compile_step(program))[1]"""
HANG = """import os
from jaxtrain.checkpoint.manager import Checkpointer
save = Checkpointer.save
Checkpointer.save = lambda *arguments: time.sleep(600 if os.path.exists({!r}) else 0) or save(*arguments)"""
FULL = """from jaxtrain.checkpoint import arrays
def full(*_):
    raise OSError(28, "No space left on device")
arrays.start_save = full"""
OWN_DISK = """import pathlib
from jaxtrain.runtime import shared_folder
shared_folder.SEEN_WITHIN_S = 2
resolve = pathlib.Path.resolve
pathlib.Path.resolve = lambda path: resolve(path.parent / "run" if path.name == "own" else path)"""
KEYS = """import logging
log = logging.getLogger("jax._src.compiler")
log.setLevel(logging.DEBUG)
log.addHandler(logging.FileHandler({!r}))
log.propagate = False"""


# Faults. Each gets a folder, the number of processes and a random generator, breaks a run, checks how it ended, and returns the
# seconds that this took and the line that says so.

Outcome = tuple[float, str]


def differs(settings: dict, words: str) -> Callable[..., Outcome]:
    """One process has other settings: all end with exit code 2."""

    def fault(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
        return all_refuse(Run(folder, count, {rng.randrange(1, count): settings}), words)

    return fault


def other_text(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """The same path, but other contents in one process: a host with an old copy."""
    homes = {index: folder / f"host{index}" for index in range(count)}
    odd = rng.randrange(1, count)
    for index, home in homes.items():
        home.mkdir(parents=True)
        (home / "mine.txt").write_text("\n".join(f"{i} plus {i}" for i in range(2000 + (index == odd))))
    run = Run(folder, count, {index: {"cwd": home} for index, home in homes.items()}, data__paths="mine.txt")
    return all_refuse(run, "fingerprint of data")


def other_source(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """One process has another version of this package: a host that was not updated."""
    shutil.copytree(ROOT / "jaxtrain", folder / "old" / "jaxtrain", ignore=shutil.ignore_patterns("__pycache__"))
    with open(folder / "old" / "jaxtrain" / "errors.py", "a") as file:
        file.write("# changed\n")
    own = {rng.randrange(1, count): {"variables": {"PYTHONPATH": str(folder / "old")}}}
    return all_refuse(Run(folder, count, own), "source of jaxtrain")


def other_workdir(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """One process has another workdir."""
    own = {rng.randrange(1, count): {"arguments": [f"--workdir={folder}/elsewhere"]}}
    return all_refuse(Run(folder, count, own), "--workdir: ")


def own_disk(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """The same path, but a folder of its own in one process: a host's local disk."""
    own = {rng.randrange(1, count): {"arguments": [f"--workdir={folder}/own"], "entry": OWN_DISK}}
    return all_refuse(Run(folder, count, own), "storage that all hosts share")


def all_refuse(run: Run, words: str) -> Outcome:
    run.finish()
    assert set(run.codes) == {2}, run.codes
    for index in range(len(run.codes)):
        clean(run, index)
        assert any(words in line for line in run.lines(index)), run.lines(index)[-3:]
    return time.monotonic() - run.started, next(line.strip() for line in run.lines(0) if words in line)


def fails(
    own: Callable[[pathlib.Path], dict], code: int, words: str, first: int = 0, name: str = "process {} (", **settings
) -> Callable[..., Outcome]:
    """An error of one process, whichever: it ends with its code, the others within 10 s with a line that names it.

    own: folder -> settings of that process. words: of the error. first: of the processes that it may be. name: of the process,
    in the others' words.
    """

    def fault(folder: pathlib.Path, count: int, rng: random.Random, odd: int | None = None) -> Outcome:
        odd = rng.randrange(first, count) if odd is None else odd
        folder.mkdir(parents=True, exist_ok=True)
        return one_fails(Run(folder, count, {odd: own(folder)}, **settings), odd, code, words, name)

    return fault


def one_fails(run: Run, odd: int, code: int, words: str, name: str = "process {} (") -> Outcome:
    while run.processes[odd].poll() is None and not any(words in line for line in run.lines(odd)):
        time.sleep(0.02)
    seconds = run.finish(30)
    assert run.codes == [code if index == odd else 1 for index in range(len(run.codes))], (run.codes, run.lines(odd)[-3:])
    assert any(words in line for line in run.lines(odd)), run.lines(odd)[-3:]
    clean(run, odd)
    lines = [ended_by(run, index, name.format(odd)) for index in range(len(run.codes)) if index != odd]
    return within(seconds, 10), lines[0]


def broken_file(folder: pathlib.Path) -> dict:
    (folder / "broken.py").write_text("def get_config(:\n")
    return {"config": folder / "broken.py"}


def without_data(folder: pathlib.Path) -> dict:
    (folder / "mine.txt").write_text("\n".join(f"{i} plus {i}" for i in range(2000)))
    (folder / "empty").mkdir()
    return {"cwd": folder / "empty"}


def unwritable(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """The workdir cannot be made, which process 0 alone finds out."""
    everywhere = {index: {"arguments": ["--workdir=/proc/run"]} for index in range(count)}
    return one_fails(Run(folder, count, everywhere), 0, 1, "cannot be written")


def second_run(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """Another run in the same workdir: it is refused, and the first goes on as if nothing had been."""
    first = Run(folder, count)
    first.wait_for("step 20/")
    everywhere = {index: {"arguments": [f"--workdir={folder}/run"]} for index in range(count)}
    second = Run(folder / "second", count, everywhere)
    if count > 1:
        seconds, _ = one_fails(second, 0, 1, "trains in this folder")
    else:
        seconds = second.finish(30)
        assert second.codes == [1] and "trains in this folder" in second.lines(0)[-1], second.lines(0)[-3:]
    first.signal(0, signal.SIGTERM)
    first.finish(60)
    assert first.codes == [0] * count, first.codes
    goes_on(first, folder, count)
    return seconds, second.lines(0)[-1]


def all_killed(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """kill -9 of all processes: the same command takes the workdir over and goes on."""
    run = Run(folder, count)
    run.wait_for("step 120/")
    time.sleep(rng.uniform(0, 2))
    for index in range(count):
        run.signal(index, signal.SIGKILL)
    seconds = run.finish(10)
    again = goes_on(run, folder, count, always=True)
    return seconds, next(line for line in again.lines(0) if "taken over from" in line)


def goes_on(run: Run, folder: pathlib.Path, count: int, always: bool = False, **settings) -> Run:
    """The same command again, for three steps: it continues from the newest checkpoint. Of several tries the first does it."""
    step = run.checkpoints()[-1]
    if not always and folder.name.isdigit() and int(folder.name):
        return run
    again = Run(folder, count, **settings | dict(train__num_steps=step + 3))
    again.finish()
    assert again.codes == [0] * count, (again.codes, [again.lines(i)[-3:] for i in range(count)])
    assert any(f"checkpoint of step {step}" in text for text in again.lines(0)), again.lines(0)
    return again


def gone(number: int, victim: str, phase: str = "training") -> Callable[..., Outcome]:
    """A process is killed or frozen."""

    def fault(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
        run = Run(folder, count, **({} if phase == "training" else {"runtime__compile_cache_dir": ""}))
        odd = 0 if victim == "coordinator" else rng.randrange(1, count)
        run.wait_for("step 20/" if phase == "training" else "Data: ")
        time.sleep(rng.uniform(0, 3 if phase == "training" else 1))
        run.signal(odd, number)
        seconds = run.finish(60, frozen=[odd])
        lines = [ended_by(run, i, f"process {odd} (") for i in range(count) if i != odd]
        assert all(run.codes[i] == 1 for i in range(count) if i != odd), run.codes
        return within(seconds, SMALL["runtime.heartbeat_timeout_s"]), lines[0]

    return fault


def stops(number: int, phase: str, everyone: bool = False) -> Callable[..., Outcome]:
    """A signal to one process: all save the same step and exit with 0 (Ctrl-C: 130), and the run goes on from there.

    everyone: to all processes and their children at once, as schedulers and terminals send it.
    """

    def fault(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
        settings: dict = {
            "compilation": dict(runtime__compile_cache_dir=""),
            "training": {},
            "evaluation": dict(eval__every_steps=50, eval__max_rows=0, data__holdout_fraction=0.9),
            "saving": dict(checkpoint__save_every_steps=1),
            "loader processes": dict(data__num_workers=2),
        }[phase]
        run = Run(folder, count, **settings)
        if phase == "compilation":
            run.wait_for("Data: ", timeout_s=60)
            time.sleep(rng.uniform(0, 0.5))
        else:
            run.wait_for("step 40/")
            time.sleep(rng.uniform(0, 2))
        if everyone:
            for process in run.processes:
                os.killpg(process.pid, number)
        else:
            run.signal(rng.randrange(count), number)
        seconds = run.finish(60)
        assert set(run.codes) == {130 if number == signal.SIGINT else 0}, (run.codes, [run.lines(i)[-4:] for i in range(count)])
        for index in range(count):
            clean(run, index)
        line = next(line for line in run.lines(0) if "stopped by" in line)
        if phase == "compilation":
            assert not run.checkpoints() and "nothing to save" in line
            return within(seconds, 5), line
        step = int(re.search(r"step (\d+) was the last", line)[1])
        assert run.checkpoints()[-1] == step, (run.checkpoints(), step)
        goes_on(run, folder, count, **settings)
        return within(seconds, 10), line

    return fault


def twice(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """Ctrl-C again while the first one's checkpoint is awaited: all end at once."""
    run = Run(folder, count, eval__every_steps=50)
    run.wait_for("step 20/")
    time.sleep(rng.uniform(0, 2))
    odd = rng.randrange(count)
    for other in range(count):
        if other != odd:
            run.signal(other, signal.SIGSTOP)  # so that the first one cannot be answered
    run.signal(odd, signal.SIGINT)
    time.sleep(1)
    run.signal(odd, signal.SIGINT)
    run.processes[odd].wait(10)
    for other in range(count):
        run.signal(other, signal.SIGCONT)
    seconds = run.finish(60)
    assert run.codes[odd] == 130, run.codes
    for index in range(count):
        clean(run, index)
    return within(seconds, 10), next(line for line in run.lines(odd) if "second" in line)


def hangs(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """A file server that does not answer when the last step is to be saved: all end when runtime.grace_s is over."""
    flag = folder / "hang"
    run = Run(folder, count, dict.fromkeys(range(count), {"entry": HANG.format(str(flag))}), runtime__grace_s=5)
    run.wait_for("step 120/")
    flag.write_text("")
    run.signal(rng.randrange(count), signal.SIGTERM)
    seconds = run.finish(60)
    lines = [ended_by(run, index, "runtime.grace_s") for index in range(count)]
    assert run.codes == [1] * count, run.codes
    goes_on(run, folder, count)
    return within(seconds, 5 + 10), lines[0]


def warm_cache(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """A compile cache filled by another run: all processes look for the same program and find it."""
    cache = dict(runtime__compile_cache_dir=folder / "cache", train__num_steps=30)
    runs, found = [], []
    for name in ("cold", "warm"):
        logs = [folder / f"{name}{index}.keys" for index in range(count)]
        folder.mkdir(parents=True, exist_ok=True)
        runs.append(Run(folder / name, count, {i: {"entry": KEYS.format(str(log))} for i, log in enumerate(logs)}, **cache))
        runs[-1].finish()
        assert runs[-1].codes == [0] * count, (runs[-1].codes, [runs[-1].lines(i)[-4:] for i in range(count)])
        pattern = r"(?i)cache (hit|miss) for 'jit_train_step' with key (\S+)"
        found.append({re.search(pattern, log.read_text()).groups() for log in logs})
    (cold, key), (warm, warm_key) = (pairs.pop() for pairs in found)
    assert found == [set(), set()] and key == warm_key and (cold, warm) == ("MISS", "hit"), (found, cold, warm)
    same_losses(*runs)
    return time.monotonic() - runs[1].started, f"{said(runs[0], 'Step compiled')} -> {said(runs[1], 'Step compiled')}"


def own_caches(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """Each host has a folder of its own, and that of one is empty: it compiles, the others wait."""
    run = Run(folder, count, {rng.randrange(count): {"runtime.compile_cache_dir": folder / "empty"}}, train__num_steps=30)
    run.finish()
    assert run.codes == [0] * count, (run.codes, [run.lines(i)[-4:] for i in range(count)])
    return time.monotonic() - run.started, said(run, "step 30/30")


def late(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """One process comes to the first step 40 s after the others, which have it from the cache."""
    runs = [
        Run(folder / name, count, {rng.randrange(count): {"entry": entry}}, train__num_steps=30)
        for name, entry in (("late", LATE.format(40)),)
    ]
    runs[0].finish()
    runs.append(Run(folder / "punctual", count, train__num_steps=30))
    runs[1].finish()
    for run in runs:
        assert run.codes == [0] * count, (run.codes, [run.lines(i)[-4:] for i in range(count)])
    same_losses(*runs)
    return runs[1].started - runs[0].started, said(runs[0], "step 30/30")


def no_warning(folder: pathlib.Path, count: int, rng: random.Random) -> Outcome:
    """An axis `tensor` over processes of one machine crosses no node: nobody warns of it."""
    run = Run(folder, count, train__num_steps=30, mesh__data=1, mesh__tensor=count)
    run.finish()
    assert run.codes == [0] * count, run.codes
    assert not any("crosses" in line for index in range(count) for line in run.lines(index))
    return time.monotonic() - run.started, said(run, "step 30/30")


def said(run: Run, words: str) -> str:
    """The line of process 0 with these words, without its time of day."""
    return next(line for line in run.lines(0) if words in line)[9:]


def same_losses(*runs: Run) -> None:
    losses = [re.search(r"step 30/30 · loss ([\d.]+)", "\n".join(run.lines(0)))[1] for run in runs]
    assert len(set(losses)) == 1, losses


def within(seconds: float, limit: float) -> float:
    assert seconds <= limit, f"took {seconds:.1f} s, more than {limit} s"
    return seconds


# By what the fault is about: a disagreement, compiling, an error of one process, its death, a signal, the machine, the workdir.
FAULTS: dict[str, Callable[..., Outcome]] = {
    "another train.seed in one process": differs({"train.seed": 7}, "train.seed: 0 in process 0"),
    "another learning rate in one process": differs({"optimizer.learning_rate": 0.5}, "optimizer.learning_rate: "),
    "another source of jaxtrain in one process": other_source,
    "another text in one process, same path": other_text,
    "another workdir in one process": other_workdir,
    "workdir on one process's own disk": own_disk,
    "warm compile cache": warm_cache,
    "one process's own compile cache is empty": own_caches,
    "one process 40 s late, warm cache": late,
    "one process with a bad setting": fails(lambda _: {"train.num_steps": -1}, 2, "train.num_steps: "),
    "one process with a broken config file": fails(broken_file, 2, "broken.py"),
    "one process without --workdir": fails(lambda _: {"arguments": []}, 2, "--workdir"),
    "one process with a file for --workdir": fails(lambda _: {"arguments": [f"--workdir={__file__}"]}, 2, "not a folder"),
    "one process with a wrong count": fails(
        lambda _: {"variables": {"JAX_NUM_PROCESSES": "4"}}, 2, "runtime.num_processes: ", first=1, mesh__data=-1
    ),
    "one process without its own number": fails(
        lambda _: {"variables": {"JAX_PROCESS_ID": "x"}}, 2, "JAX_PROCESS_ID='x'", first=1, name="a process on "
    ),
    "one process without its data": fails(without_data, 1, "mine.txt", data__paths="mine.txt"),
    "one process cannot save": fails(lambda _: {"entry": FULL}, 1, "No space left"),
    "one process of all cannot write the workdir": unwritable,
    "kill -9 of a worker": gone(signal.SIGKILL, "worker"),
    "kill -9 of process 0": gone(signal.SIGKILL, "coordinator"),
    "kill -9 of a worker, compilation": gone(signal.SIGKILL, "worker", "compilation"),
    "SIGSTOP of a worker": gone(signal.SIGSTOP, "worker"),
    "SIGSTOP of process 0": gone(signal.SIGSTOP, "coordinator"),
    "SIGTERM to one, compilation": stops(signal.SIGTERM, "compilation"),
    "SIGTERM to one, training": stops(signal.SIGTERM, "training"),
    "SIGTERM to one, evaluation": stops(signal.SIGTERM, "evaluation"),
    "SIGTERM to one, saving": stops(signal.SIGTERM, "saving"),
    "SIGTERM to all, with loader processes": stops(signal.SIGTERM, "loader processes", everyone=True),
    "SIGTERM, and the save hangs": hangs,
    "SIGUSR1 to one, training": stops(signal.SIGUSR1, "training"),
    "Ctrl-C, compilation": stops(signal.SIGINT, "compilation"),
    "Ctrl-C, training": stops(signal.SIGINT, "training"),
    "Ctrl-C to all, with loader processes": stops(signal.SIGINT, "loader processes", everyone=True),
    "Ctrl-C twice, the others frozen": twice,
    "mesh.tensor over processes of one machine": no_warning,
    "a second run in the workdir": second_run,
    "kill -9 of all, and the same command again": all_killed,
    **RECOVERIES,
}
NEED_SEVERAL = (
    "one process",
    "another",
    "SIGSTOP",
    "kill -9 of a worker",
    "kill -9 of process 0",
    "twice",
    "mesh.tensor",
    "cut",
)


def row(name: str, tries: int, outcomes: Sequence[Outcome | Recovered], load: float) -> str:
    """A line of the table."""
    seconds, line = max((one[0] for one in outcomes), default=0.0), outcomes[-1][1] if outcomes else ""
    recovered = [one for one in outcomes if isinstance(one, Recovered)]
    lost = f"{max(one.lost for one in recovered)}" if recovered else ""
    equal = f"{sum(one.equal for one in recovered)}/{len(recovered)}" if recovered else ""
    return f"| {name} | {len(outcomes)}/{tries} | {seconds:.1f} s | {lost} | {equal} | {load:.1f} | `{line}` |"


def main(arguments: Sequence[str]) -> int:
    """Tries the faults and prints the table; 1 if any try went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="the fault of this name, or those whose names match it")
    parser.add_argument("--list", action="store_true", help="print the names of the faults, and nothing else")
    parser.add_argument("--out", type=pathlib.Path, help="folder that keeps what the processes printed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    chosen = [name for name in FAULTS if name == args.only] or [name for name in FAULTS if re.search(args.only, name)]
    chosen = [name for name in chosen if args.processes > 1 or not any(word in name for word in NEED_SEVERAL)]
    if args.list:
        print("\n".join(chosen))
        return 0
    out, wrong = (args.out or pathlib.Path(tempfile.mkdtemp(prefix="faults-"))).absolute(), 0
    Run.cache = out / "cache"
    print(f"| Fault, {args.processes} processes | As it must | Longest | Lost | Equal | Load | What is said |", flush=True)
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in chosen:
        rng, outcomes, load = random.Random(f"{args.seed} {name}"), [], 0.0
        for attempt in range(args.tries):
            folder = out / re.sub(r"\W+", "_", name) / str(attempt)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                outcomes.append(FAULTS[name](folder, args.processes, rng))
            except Untried as reason:
                print(f"{name}: not tried: {reason}", file=sys.stderr, flush=True)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                wrong += 1
                print(f"{folder}: {error}", file=sys.stderr, flush=True)
            load = max(load, os.getloadavg()[0])
        print(row(name, args.tries, outcomes, load), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
