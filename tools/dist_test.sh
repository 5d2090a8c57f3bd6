#!/usr/bin/env bash
# Evaluates with several processes, one per GPU, or on CPUs where there is none.
#   tools/dist_test.sh CONFIG CHECKPOINT NUM_PROCS [options of tools/test.py]
# Several machines: set NNODES, NODE_RANK, MASTER_ADDR and PORT on each.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 CONFIG CHECKPOINT NUM_PROCS [options of tools/test.py]" >&2
    exit 2
fi
CONFIG=$1
CHECKPOINT=$2
NUM_PROCS=$3
shift 3
exec "${PYTHON:-python}" -m mala_mm.engine.launch \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$NUM_PROCS" \
    "$(dirname "$0")/test.py" "$CONFIG" "$CHECKPOINT" --launcher pytorch "$@"
