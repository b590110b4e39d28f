# Sourced by train.sh and test.sh. `setup_venv [EXTRA]` makes .venv in the repository with jaxtrain installed from here, and sets
# VENV_PYTHON; with nothing to do it costs a few milliseconds. `cuda_extra` prints the CUDA extra for this machine's driver.
#
#   PYTHON=/path/to/python3.12   the Python to build .venv with; default: the first of 3.11-3.13 found that runs and has venv
#   JAXTRAIN_VENV=DIR            instead of .venv
#   JAXTRAIN_ACCELERATOR=cpu     instead of looking for a GPU: cpu, cuda12 or cuda13

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${JAXTRAIN_VENV:-$ROOT/.venv}
VENV_PYTHON=$VENV/bin/python
STAMP=$VENV/jaxtrain-installed # line 1: what was installed, from where; line 2: the extras

say() { echo "jaxtrain: $*" >&2; }
die() { say "$*"; exit 1; }

# Prints why a candidate is of no use, by running it: shims exist without the version behind them, Debian ships Python without venv.
python_problem() { # COMMAND BELOW_MINOR
  local out
  out=$("$1" -c '
import sys
found, below = sys.version_info[:2], (3, int(sys.argv[1]))
if found < (3, 11): sys.exit("is Python %d.%d, too old" % found)
if found >= below: sys.exit("is Python %d.%d, newer than tested; PYTHON=... takes it all the same" % found)
try: import ensurepip, venv
except ImportError: sys.exit("has no venv module (Debian, Ubuntu: apt install python3-venv)")
' "$2" 2>&1) && return 1
  echo "${out##*$'\n'}"
}

find_python() {
  local candidate problem tried=""
  if [ -n "${PYTHON:-}" ]; then
    if problem=$(python_problem "$PYTHON" 99); then die "PYTHON=$PYTHON cannot be used: $problem (needed: 3.11 or newer)"; fi
    command -v "$PYTHON"
    return
  fi
  for candidate in python3 python3.12 python3.13 python3.11 python; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if problem=$(python_problem "$candidate" 14); then
      tried+=$'\n'"  $(command -v "$candidate"): $problem"
    else
      command -v "$candidate"
      return
    fi
  done
  die "no usable Python 3.11, 3.12 or 3.13 found. Install one (Debian, Ubuntu: apt install python3 python3-venv), or set" \
    "PYTHON=/path/to/python.${tried:+ Tried:$tried}"
}

# The CUDA version that the driver supports is in the head of nvidia-smi's table.
cuda_extra() {
  local version
  case ${JAXTRAIN_ACCELERATOR:-auto} in
    auto) ;;
    cpu) return 0 ;;
    cuda12 | cuda13) echo "$JAXTRAIN_ACCELERATOR"; return ;;
    *) die "JAXTRAIN_ACCELERATOR=$JAXTRAIN_ACCELERATOR: must be cpu, cuda12 or cuda13" ;;
  esac
  case $(nvidia-smi -L 2>/dev/null) in *GPU\ *) ;; *) return 0 ;; esac
  version=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[^:]*Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1)
  if [ -z "$version" ]; then
    die "nvidia-smi shows a GPU but no CUDA version; set JAXTRAIN_ACCELERATOR=cuda12, cuda13 or cpu"
  elif [ "$version" -ge 13 ]; then
    echo cuda13
  elif [ "$version" -eq 12 ]; then
    echo cuda12
  else
    die "the GPU driver supports CUDA $version only; update it to one for CUDA 12 or newer, or set JAXTRAIN_ACCELERATOR=cpu"
  fi
}

installed_extras() { sed -n 2p "$STAMP" 2>/dev/null || true; }

up_to_date() { # EXTRAS
  local extra installed
  [ -x "$VENV_PYTHON" ] && [ "$(sed -n 1p "$STAMP" 2>/dev/null)" = "$WANTED" ] || return 1
  installed=$(installed_extras)
  for extra in $1; do [[ " $installed " == *" $extra "* ]] || return 1; done
}

setup_venv() { # [EXTRA]
  local extras=${1:-} extra python size
  # An installed CUDA extra stays, without asking the driver again; else a machine that has got a GPU is noticed here.
  if [[ -n ${JAXTRAIN_ACCELERATOR:-} || $(installed_extras) != *cuda* ]]; then
    extra=$(cuda_extra) || exit 1
    extras="$extras $extra"
  fi
  WANTED="$(cksum <"$ROOT/pyproject.toml") $ROOT"
  if up_to_date "$extras"; then return; fi

  exec 9<"$ROOT/pyproject.toml" # one installation at a time
  if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
    say "waiting for another installation to end ..."
    flock 9 || true
  fi
  up_to_date "$extras" || install_into_venv "$extras"
  exec 9<&- # else the training would hold the lock
}

# For an extra that one can do without: false, and what was installed still counts, when it cannot be installed.
try_extra() { # EXTRA
  local before
  before=$(cat "$STAMP")
  if (setup_venv "$1"); then return; fi # `die` ends the subshell only
  [ -e "$STAMP" ] || printf '%s\n' "$before" >"$STAMP"
  return 1
}

# Debian packages that a test needs, installed where nobody has to be asked: as root, in CI or with JAXTRAIN_APT=yes. False when
# the command is not there afterwards.
try_apt() { # COMMAND PACKAGE...
  local wanted=$1
  shift
  command -v "$wanted" >/dev/null 2>&1 && return
  [[ -n ${CI:-} || ${JAXTRAIN_APT:-} == yes ]] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
  say "installing $* by apt-get ..."
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq install -y --no-install-recommends "$@" </dev/null >/dev/null 2>&1 ||
    { apt-get -qq update </dev/null >&2 && apt-get -qq install -y --no-install-recommends "$@" </dev/null >/dev/null; } || true
  command -v "$wanted" >/dev/null 2>&1
}

install_into_venv() { # EXTRAS
  local extras=$1 extra python size="about 900 MB"
  if ! "$VENV_PYTHON" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    python=$(find_python) || exit 1
    say "making $VENV with $("$python" --version) ($python)"
    "$python" -m venv --clear "$VENV" || die "could not make $VENV (the reason is above); JAXTRAIN_VENV=DIR puts it elsewhere"
  fi
  for extra in $(installed_extras); do
    case " $extras " in *" $extra "*) ;; *) extras="$extras $extra" ;; esac
  done
  if [[ $extras == *cuda* && " $extras " == *" plan "* ]]; then # has all of `plan`, and of two plugins JAX would start neither
    extras=${extras/plan/}
    "$VENV_PYTHON" -m pip uninstall --quiet --yes jax-cuda12-plugin jax-cuda12-pjrt || true
  fi
  extras=$(echo $extras) # single spaces
  case $extras in *cuda*) size="about 6 GB" ;; *plan*) size="about 3.6 GB" ;; esac
  say "installing jaxtrain${extras:+[${extras// /,}]} into $VENV ($size, some minutes) ..."
  rm -f "$STAMP"
  "$VENV_PYTHON" -m pip install --quiet --quiet --no-input -e "$ROOT${extras:+[${extras// /,}]}" </dev/null ||
    die "installation failed; pip's reason is above, usual causes are in BUILD.md, Troubleshooting. Run again to retry"
  printf '%s\n%s\n' "$WANTED" "$extras" >"$STAMP"
  say "installed ($("$VENV_PYTHON" -m pip list 2>/dev/null | tail -n +3 | wc -l) packages, $(du -sh "$VENV" | cut -f1))"
}
