#!/usr/bin/env bash
# Sets up what is missing, then trains: without arguments the quickstart, and shows a sample of what it learned.
#
#   bash scripts/train.sh                                         the quickstart, into runs/quickstart
#   bash scripts/train.sh --config=configs/x.py --workdir=DIR     any run; all arguments go to python -m jaxtrain.main
#
# scripts/setup.sh tells how to choose Python, the folder of the environment, and CPU or CUDA.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

config="" workdir="" help="" previous=""
for argument in "$@"; do
  case $previous in
    --config) config=$argument ;;
    --workdir) workdir=$argument ;;
  esac
  case $argument in
    --config=*) config=${argument#*=} ;;
    --workdir=*) workdir=${argument#*=} ;;
    -h | --help) help=yes ;;
  esac
  previous=$argument
done

setup_venv

here=$ROOT/
if [ "$PWD" = "$ROOT" ]; then here=""; fi # short paths in what is printed
arguments=()
quickstart=""
if [ -z "$config" ]; then
  quickstart=yes
  arguments+=("--config=${here}configs/quickstart.py")
  if [[ $(installed_extras) == *cuda* && ${JAXTRAIN_ACCELERATOR:-} != cpu ]]; then
    # The quickstart's layout is for eight fake devices; here there are real ones.
    arguments+=(--config.runtime.fake_devices=0 --config.mesh.{data=-1,fsdp=1,tensor=1})
  fi
fi
if [ -z "$workdir" ]; then
  name=${config:-quickstart.py}
  workdir=${here}runs/$(basename "${name%%:*}" .py)
  arguments+=("--workdir=$workdir")
fi

"$VENV_PYTHON" -m jaxtrain.main ${arguments[@]+"${arguments[@]}"} "$@" || { code=$?; say "training stopped with exit code $code"; exit $code; }
if [ -n "$quickstart" ] && [ -z "$help" ]; then
  echo
  echo "A sample from $workdir after \"def \":"
  "$VENV_PYTHON" -m jaxtrain.generate "--workdir=$workdir" --prompt="def " --temperature=0.6 || { code=$?; say "sampling stopped with exit code $code"; exit $code; }
fi
