"""Our train step beside MaxText's, torch's and one written by hand in jax: the same model, batch, weights and machine.

    python scripts/bench/compare.py --config=configs/bench_tiny.py --out=DIR [--systems=jaxtrain,plain_jax,torch,maxtext]
        [--rounds=5] [--steps=20] [--torch-python=PATH] [--maxtext-python=PATH] [--config.a.b=VALUE ...]

Every round starts each system once, in a process of its own, in shuffled order; a run is 1 + --steps steps, each waited for.
Ratios are between runs of one round, so that a machine whose speed drifts does not favour one. DIR gets results.json, table.md
and ratios.png after each round. Systems that are not installed are named, the others run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Sequence

import report
from problem import refusals

from jaxtrain.command_line import command, load_config, split_overrides
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError

HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class System:
    """One of those that are compared: its script, the flag that names its interpreter, what it needs and how to get that."""

    script: str
    imports: str = ""
    python: str = ""
    get: str = ""
    flags: tuple[str, ...] = ()


TORCH = ("torch_fsdp.py", "torch, transformers", "torch_python", "pip install torch transformers, in a venv of its own; "
         "--torch-python=VENV/bin/python")  # fmt: skip
SYSTEMS = {
    "jaxtrain": System("step.py"),
    "plain_jax": System("plain_jax.py", "jax, optax"),
    "torch": System(*TORCH),
    "torch_compiled": System(*TORCH, ("--compile",)),
    "maxtext": System(
        "maxtext_step.py",
        "maxtext.trainers.pre_train.train",
        "maxtext_python",
        "Python 3.12, pip install maxtext==0.2.5 and what it imports, in a venv of its own; --maxtext-python=VENV/bin/python "
        "(and --maxtext=CHECKOUT for its sources instead of the package)",
    ),
}


def main(arguments: Sequence[str]) -> None:
    """The command; `arguments` without the program's name."""
    parser = argparse.ArgumentParser(
        prog="python scripts/bench/compare.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--systems", default="jaxtrain,plain_jax,torch,maxtext", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each system (default 5)")
    parser.add_argument("--steps", type=int, default=20, help="steps to time after the first (default 20)")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the results")
    parser.add_argument("--seed", type=int, default=0, help="of the order in each round")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter that has torch; default: this one")
    parser.add_argument("--maxtext-python", default=sys.executable, help="interpreter that has MaxText; default: this one")
    parser.add_argument("--maxtext", type=pathlib.Path, help="a checkout of MaxText, instead of the installed package")
    config, args = load_config(arguments, parser)
    systems = args.systems.split(",")
    problems = [f"--systems: no system {name!r}; there are {', '.join(SYSTEMS)}" for name in systems if name not in SYSTEMS]
    problems += [f"--{name}={n}: must be at least 1" for name in ("rounds", "steps") if (n := getattr(args, name)) < 1]
    if len(set(systems)) != len(systems):
        problems.append(f"--systems={args.systems}: names a system twice")
    if (args.out / "problem").exists() or (args.out / "results.json").exists():
        problems.append(f"--out={args.out}: has results already; name another folder")
    if args.maxtext and not (args.maxtext / "src" / "maxtext").is_dir():
        problems.append(f"--maxtext={args.maxtext}: has no src/maxtext; name a checkout of MaxText")
    if problems := problems + refusals(config):
        raise ConfigError(problems)
    overrides, _ = split_overrides(parser.parse_known_args(arguments)[1])
    args.settings = [f"--config={args.config}", *(f"--config.{key}={value}" for key, value in overrides)]
    args.out.mkdir(parents=True, exist_ok=True)
    compare(systems, args)


def compare(systems: Sequence[str], args: argparse.Namespace) -> None:
    """Runs the rounds; writes the results after each. Raises UserError when nothing can be measured."""
    problem = args.out / "problem"
    missing = {name: why for name in systems if (why := absent(name, args))}
    for name, why in missing.items():
        print(f"{name:<14} missing: {why}", flush=True)
    systems = [name for name in systems if name not in missing]
    made = ["problem.py", *args.settings, f"--steps={args.steps}", f"--out={problem}"]
    if not systems:
        raise UserError("none of these systems is installed")
    if subprocess.run([sys.executable, HERE / made[0], *made[1:]], check=False).returncode:
        raise UserError("the problem could not be written, as said above")
    facts = json.loads((problem / "problem.json").read_text())
    results = {"command": sys.argv, "problem": facts, "missing": missing, "failed": {}, "runs": []}
    order = random.Random(args.seed)
    for number in range(args.rounds):
        for name in order.sample(systems, len(systems)):
            if name in results["failed"]:
                continue
            found, why = run(name, facts, args)
            if why:
                results["failed"][name] = why
                print(f"round {number + 1}  {name:<14} failed: {why}", flush=True)
                continue
            results["runs"].append({"system": name, "round": number} | found)
            text = f"{found['step_median_s']:.4f} s a step, load {found['load_average']:.1f}"
            print(f"round {number + 1}  {name:<14} {text}", flush=True)
        (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        if results["runs"]:
            (args.out / "table.md").write_text(report.table(results))
            report.plot(results, args.out / "ratios.png")
    if not results["runs"]:
        raise UserError("every system failed, as said above")
    print("\n" + report.table(results) + f"\nWrote {args.out}/results.json, table.md and ratios.png", flush=True)


def environment(name: str, args: argparse.Namespace) -> dict[str, str]:
    """Variables of a system's process: where its package is, if it is not an installed one."""
    paths = {"jaxtrain": HERE.parents[1], "maxtext": args.maxtext and args.maxtext / "src"}
    return os.environ | ({"PYTHONPATH": str(paths[name])} if paths.get(name) else {})


def absent(name: str, args: argparse.Namespace) -> str:
    """How to get a system that is not installed; "" for one that is."""
    system = SYSTEMS[name]
    probe = f"import {system.imports}" if system.imports else ""
    try:
        done = subprocess.run([getattr(args, system.python, sys.executable), "-c", probe], env=environment(name, args),
                              capture_output=True, text=True, check=False)  # fmt: skip
        why = last_line(done.stderr) if done.returncode else ""
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
    return f"{why}. {system.get}".rstrip(". ") if why else ""


def run(name: str, facts: dict, args: argparse.Namespace) -> tuple[dict, str]:
    """One run of a system: its figures, or why there are none."""
    system, file = SYSTEMS[name], args.out / "run.json"
    file.unlink(missing_ok=True)
    python = getattr(args, system.python, sys.executable)
    launcher = [python]
    if "torch" in name and facts["platform"] == "gpu":
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={facts['devices']}"]
    given = args.settings if name == "jaxtrain" else [f"--problem={args.out / 'problem'}", *system.flags]
    variables = environment(name, args) | ({"JAX_PLATFORMS": "cpu"} if facts["platform"] == "cpu" else {})
    started = time.monotonic()
    line = [*launcher, str(HERE / system.script), *given, f"--steps={args.steps}", f"--json={file}"]
    done = subprocess.run(line, env=variables, capture_output=True, text=True, check=False)
    if done.returncode or not file.exists():
        return {}, f"exit code {done.returncode}, {last_line(done.stderr)}"
    found = json.loads(file.read_text())
    file.unlink()
    return found | {"command": line, "to_first_step_s": found["first_step_at_s"] - started}, ""


def last_line(text: str) -> str:
    """The last line of what a process said."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


if __name__ == "__main__":
    command(main, sys.argv[1:])
