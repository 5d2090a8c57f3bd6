#!/usr/bin/env bash
# Trains under Slurm, one process per GPU.
#   GPUS=16 GPUS_PER_NODE=8 tools/slurm_train.sh PARTITION JOB_NAME CONFIG [options of tools/train.py]
# SRUN_ARGS holds further options of srun.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: [GPUS=8] $0 PARTITION JOB_NAME CONFIG [options of tools/train.py]" >&2
    exit 2
fi
PARTITION=$1
JOB_NAME=$2
CONFIG=$3
shift 3
GPUS=${GPUS:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-$((GPUS < 8 ? GPUS : 8))}
# shellcheck disable=SC2086  # SRUN_ARGS holds several words
exec srun -p "$PARTITION" \
    --job-name="$JOB_NAME" \
    --gres="gpu:$GPUS_PER_NODE" \
    --ntasks="$GPUS" \
    --ntasks-per-node="$GPUS_PER_NODE" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$(dirname "$0")/train.py" "$CONFIG" --launcher slurm "$@"
