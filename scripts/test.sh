#!/usr/bin/env bash
# Sets up what is missing, then checks style and types and runs the tests. Arguments go to pytest: bash scripts/test.sh -k mesh -x
# scripts/setup.sh tells how to choose Python and the folder of the environment. Tests that compile for GPUs need 2.7 GB of
# libraries, but no GPU; JAXTRAIN_PLAN=no leaves both out. In CI, or with JAXTRAIN_APT=yes, SLURM is installed by apt as well.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup_venv test
if [[ ${JAXTRAIN_PLAN:-yes} != no && $(installed_extras) != *cuda* ]]; then
  if [[ $(uname -sm) != "Linux x86_64" ]]; then
    say "tests that compile for GPUs will be skipped: their libraries are for Linux on x86-64, this is $(uname -sm)"
  elif ! try_extra plan; then
    say "tests that compile for GPUs will be skipped: their libraries could not be installed (the reason is above)"
  fi
fi
if ! try_apt slurmctld slurm-wlm munge; then
  say "the test on a SLURM cluster will be skipped: it needs slurm-wlm and munge (JAXTRAIN_APT=yes installs them, as root)"
fi
cd "$ROOT"
"$VENV_PYTHON" -m ruff check . || die "ruff found the problems above; many are mended by: $VENV_PYTHON -m ruff check --fix ."
"$VENV_PYTHON" -m mypy || die "mypy found the problems above (section tool.mypy of pyproject.toml)"
# One worker per core, each file in one worker: tests of a file share what they compile. tests/conftest.py orders the files.
exec "$VENV_PYTHON" -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@"
