#!/usr/bin/env bash
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={{ gpus }}
#SBATCH --exclusive
# Starts Ray on {{ nodes }} machines with {{ gpus }} GPUs each, and run.sh on the first of them.
#   Slurm: `sbatch cluster.sh` in this folder; activate verl's environment before, or add the line below `set`
#   other clusters: `bash cluster.sh head` on one machine, `bash cluster.sh worker HEAD_ADDRESS` on each of the others
# Further overrides of verl's settings: `sbatch cluster.sh slurm KEY=VALUE`, `bash cluster.sh head KEY=VALUE`.
set -euo pipefail
HERE="${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}"
PORT="${PORT:-6379}" NODES="${NODES:-{{ nodes }}}" GPUS="${GPUS:-{{ gpus }}}"
# Ray lets only processes with this token connect; it is on all machines if the folder is.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" RAY_AUTH_TOKEN_PATH="${RAY_AUTH_TOKEN_PATH:-$HERE/ray_token}"
role="${1:-slurm}"
shift || true
if [[ $role =~ slurm|head && ! -e $RAY_AUTH_TOKEN_PATH ]]; then
  (umask 077 && head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")
fi

if [ "$role" = slurm ]; then
  HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
  export HEAD
  exec srun --kill-on-bad-exit=1 bash "$HERE/cluster.sh" task "$@"
fi
if [ "$role" = task ]; then # one per machine
  if [ "$SLURM_PROCID" = 0 ]; then role=head; else role=worker && set -- "$HEAD"; fi
fi
if [ "$role" = worker ]; then
  until (exec 3<>"/dev/tcp/$1/$PORT") 2>/dev/null; do sleep 2; done
  ray start --address="$1:$PORT" --num-gpus="$GPUS" --block || true # ends when the head does
  exit 0
fi
ray start --head --port="$PORT" --num-gpus="$GPUS" --block &
trap "kill $! && wait $! || true" EXIT # no other Ray of this machine, which `ray stop` would end
export RAY_ADDRESS="127.0.0.1:$PORT"
python3 - "$NODES" <<'END'
import sys, time, ray
for attempt in range(600):
    try:
        ray.init(logging_level="ERROR", log_to_driver=False)
        break
    except ConnectionError:
        time.sleep(1)
while (alive := sum(node["Alive"] for node in ray.nodes())) < int(sys.argv[1]):
    print(f"{alive} of {sys.argv[1]} machines have joined", flush=True)
    time.sleep(2)
END
bash "$HERE/run.sh" "$@"
