#!/usr/bin/env bash
# One node's part of a Ray cluster inside a Slurm job; ends with Ray, then copies Ray's logs.
#
#   node.sh address             this node's address for the others (of G2RPO_INTERFACE, if set)
#   node.sh head ADDRESS PORT   Ray's head; PORT + 1 is its dashboard, PORT + 2 Ray Client
#   node.sh worker HEAD         a node more for the head at HEAD (address:port)
#
# G2RPO_PYTHON, G2RPO_LOGS (folder for the logs) and RAY_AUTH_* are set by the caller;
# G2RPO_RAY_OPTIONS goes to `ray start`.
set -uo pipefail
role=${1:?address, head or worker}

address() {
  "$G2RPO_PYTHON" - "${G2RPO_INTERFACE:-}" <<'PYTHON'
import socket, sys
import psutil, ray
interface = sys.argv[1]
if not interface:
    print(ray.util.get_node_ip_address())
    sys.exit()
known = psutil.net_if_addrs()
if interface not in known:
    sys.exit(f"G2RPO_INTERFACE={interface}: this node has {', '.join(known)}")
print(next(a.address for a in known[interface] if a.family == socket.AF_INET))
PYTHON
}

[[ $role != address ]] || { address; exit; }

temp=/tmp/g2rpo-$SLURM_JOB_ID-${SLURM_STEP_ID:-0}-${SLURM_NODEID:-0} # short: sockets lie in it
logs=$G2RPO_LOGS/$SLURMD_NODENAME
mkdir -p "$logs" || exit 1
# The kernel chooses all ports that nobody has to know: jobs that share a node do not meet.
options=(--block --disable-usage-stats --temp-dir="$temp" --num-cpus="$SLURM_CPUS_ON_NODE"
  --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0)
[[ -z ${SLURM_GPUS_ON_NODE:-} ]] || options+=(--num-gpus="$SLURM_GPUS_ON_NODE")
# shellcheck disable=SC2206  # several options in one variable
options+=(${G2RPO_RAY_OPTIONS:-})
ray() { "$G2RPO_PYTHON" -m ray.scripts.scripts start "${options[@]}" "$@" > "$logs/ray_start.log" 2>&1 & child=$!; }
trap 'ending=1; [[ -z ${child:-} ]] || kill -TERM "$child"' URG TERM
if [[ $role == head ]]; then
  ray --head --node-ip-address="$2" --port="$3" --dashboard-port=$(($3 + 1)) \
    --ray-client-server-port=$(($3 + 2))
else
  ray --address="$2" --node-ip-address="$(address)"
fi
while wait "$child"; code=$?; kill -0 "$child" 2>/dev/null; do :; done
wait "$child"; code=$?
[[ -z ${ending:-} ]] || code=0 # as asked
[[ $code == 0 ]] ||
  echo "node.sh: Ray on $SLURMD_NODENAME ended with $code: $(tail -n 5 "$logs/ray_start.log")" >&2
cp -r "$temp"/session_2*/logs/. "$logs/" && rm -rf "$temp"
exit "$code"
