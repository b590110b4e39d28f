#!/usr/bin/env bash
# Sets up what is missing, then checks style and runs the tests. Arguments go to pytest: bash scripts/test.sh -k mesh -x
# scripts/setup.sh tells how to choose Python and the folder of the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup_venv test
cd "$ROOT"
"$VENV_PYTHON" -m ruff check . || die "ruff found the problems above; many are mended by: $VENV_PYTHON -m ruff check --fix ."
exec "$VENV_PYTHON" -m pytest "$@"
