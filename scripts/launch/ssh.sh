#!/usr/bin/env bash
# Trains on hosts that ssh reaches without a password, one process a host:
#
#   HOSTS="node1 node2" bash scripts/launch/ssh.sh --config=configs/llama3_8b.py --workdir=/shared/runs/mine [...]
#
# Everything goes to `python -m jaxtrain.main`. DIR, the folder to start in (default: this one), and the workdir must be there on all
# hosts. Process 0 is on the first host, whose name the others must be able to reach. Lines of the others begin with [1], [2], ...
# Ctrl-C or SIGTERM: all save the same step and end; a second one ends them at once. The exit code is the first that is not 0.
set -u
read -ra hosts <<< "${HOSTS:?names the hosts, in order of process: HOSTS=\"node1 node2\"}"
DIR=${DIR:-$PWD}
PYTHON=${PYTHON:-python}                         # on the hosts: the Python that jaxtrain is installed for
PORT=${PORT:-$((10000 + RANDOM % 12000))}        # of the first host
SSH=${SSH:-ssh -o BatchMode=yes}

run=/tmp/jaxtrain-$(id -u)-$PORT-$$
pids=()
signal=TERM
pass_on() { # a host that is being reached has no number of a process yet
  for i in "${!hosts[@]}"; do
    $SSH "${hosts[i]}" "for _ in 1 2 3 4 5; do [ -s $run.$i ] && break; sleep 1; done; kill -$signal \$(cat $run.$i)" \
      < /dev/null 2> /dev/null &
  done
  signal=KILL
}
trap pass_on INT TERM # first of all: a signal to this script alone would leave the processes running
for i in "${!hosts[@]}"; do
  [ $signal = TERM ] || break # stopped meanwhile
  variables="JAX_COORDINATOR_ADDRESS=${hosts[0]#*@}:$PORT JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$i PYTHONUNBUFFERED=1"
  command="cd $(printf %q "$DIR") && echo \$\$ > $run.$i && exec env $variables$(printf ' %q' "$PYTHON" -m jaxtrain.main "$@")"
  # A session of its own: Ctrl-C is passed on by the trap, and must not end ssh.
  setsid $SSH "${hosts[i]}" "$command" < /dev/null > >(if ((i)); then sed -u "s/^/[$i] /"; else cat; fi) 2>&1 &
  pids+=($!)
done

code=0
for pid in "${pids[@]}"; do
  wait "$pid"; own=$?
  while kill -0 "$pid" 2> /dev/null; do wait "$pid"; own=$?; done # a signal ends a wait, but not the process
  ((code)) || code=$own
done
trap '' INT TERM
for i in "${!hosts[@]}"; do $SSH "${hosts[i]}" "rm -f $run.$i" < /dev/null 2> /dev/null & done
wait
exit $code
