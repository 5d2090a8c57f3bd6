#!/usr/bin/env bash
# Trains with several processes, one per GPU, or on CPUs where there is none.
#   tools/dist_train.sh CONFIG NUM_PROCS [options of tools/train.py]
# Several machines: set NNODES, NODE_RANK, MASTER_ADDR and PORT on each.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: $0 CONFIG NUM_PROCS [options of tools/train.py]" >&2
    exit 2
fi
CONFIG=$1
NUM_PROCS=$2
shift 2
exec "${PYTHON:-python}" -m mala_mm.engine.launch \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$NUM_PROCS" \
    "$(dirname "$0")/train.py" "$CONFIG" --launcher pytorch "$@"
