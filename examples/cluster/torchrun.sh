#!/usr/bin/env bash
# Trains on several machines without a scheduler. Run it on each of them, with the same arguments:
#
#   NODES=2 GPUS=8 examples/cluster/torchrun.sh HEAD RUN_ID SPEC [key=value ...]
#
# HEAD    host name of one of the machines, whose port 29400 the others reach. Start that one first. It has to stay.
# RUN_ID  a name for this job, another one for each run. Machines find each other by it, and a machine that comes back
#         goes on with the run of its job.
# SPEC    the same file on every machine. run.dir lies on a disk that all share.
set -euo pipefail
head=$1
run_id=$2
shift 2

# Since PyTorch shares the agents' store with the ranks, agents fail when a machine joins. This gives ranks their own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# PyTorch's allocator grows its segments, and leaves less memory between tensors. Plans count on it.
export PYTORCH_ALLOC_CONF=expandable_segments:True

# --nnodes        NODES=2 waits for a lost machine to come back, NODES=1:2 goes on with the one that is left; then the
#                 spec leaves out parallel.dense.dp, so that the layout fits either.
# --rdzv-conf     how long to wait for it, in seconds
# --max-restarts  ranks that a joining machine stops have saved, but count as failed on the machines that see it last.
exec torchrun \
  --nnodes="${NODES:-2}" \
  --nproc-per-node="${GPUS:-8}" \
  --rdzv-backend=c10d \
  --rdzv-endpoint="$head:29400" \
  --rdzv-id="$run_id" \
  --rdzv-conf=join_timeout=3600 \
  --max-restarts=100 \
  -m moefw train "$@" --resume=auto
