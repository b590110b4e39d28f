"""Trains: `python -m jaxtrain.main --config=configs/x.py --workdir=DIR [--config.section.key=VALUE ...]`.

Whether the layout of a config computes what one device computes: `python -m jaxtrain.parity --config=configs/x.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxtrain import api
from jaxtrain import config as configs
from jaxtrain.command_line import command, load_config
from jaxtrain.observe import clock
from jaxtrain.runtime import stop


def main(arguments: Sequence[str]) -> None:
    """The training command."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxtrain.main",
        description="Trains a model; given again, the same command continues where it stopped.",
        epilog="All settings, with their defaults:\n" + configs.describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workdir", required=True, help="folder for checkpoints, metrics and the resolved config")
    config, args = load_config(arguments, parser)
    api.train(config, args.workdir)


if __name__ == "__main__":
    clock.count_process_start()
    stop.install()
    command(main, of_a_run=True)
