#!/bin/bash
# torchrun, by hand: copy the lines you need (accelerate: accelerate.sh). `--no-python` runs the installed command.

# Batches change their shape: let the allocator grow its blocks (sana-pipe sets this, too, where it is not set).
[ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

# ---- encode ------------------------------------------------------------------------------------------------------
# Each process takes its share and uses the GPU of its local rank. There are no collectives: a process that ends early
# ends, one that dies is made up for by the others, and running the command again continues.

# one node, eight GPUs
torchrun --standalone --nproc-per-node 8 --no-python sana-pipe encode --data /data/pictures

# two nodes; run it on both, NODE=0 on the first
torchrun --nnodes 2 --node-rank "$NODE" --nproc-per-node 8 --master-addr first-node --master-port 29500 \
    --no-python sana-pipe encode --data /data/pictures

# without any launcher: four terminals, machines or containers that share the cache
sana-pipe encode --data /data/pictures --task-index 0 --task-count 4

# torchrun passes SIGTERM on: units in hand are finished or dropped (encode.grace_s). It kills after 30 s, so keep
# encode.grace_s below that; its own exit code then names the signal, although every sana-pipe ended with 0.

# ---- train -------------------------------------------------------------------------------------------------------
# one node, eight GPUs
torchrun --standalone --nproc-per-node 8 --no-python sana-pipe train --resume auto

# two nodes, always both; run it on both, NODE=0 on the first
torchrun --nnodes 2 --node-rank "$NODE" --nproc-per-node 8 --master-addr first-node --master-port 29500 \
    --no-python sana-pipe train --resume auto

# ---- train, elastic ----------------------------------------------------------------------------------------------
# A process that dies, or a node that is lost, ends the others within patience_s and 5 minutes; torchrun then starts all
# of them anew, and --resume auto continues from the last published checkpoint with as many processes as there are.
# The batch of a step does not depend on their number: choose bucket.batch_multiple so that every number divides it, and
# leave train.parallel.dp_shard at -1.
# Without the first line restarted processes meet at the addresses of the lost ones; sana-pipe then refuses to wait.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# How long torchrun waits after SIGTERM before it kills: long enough for a checkpoint, and no longer than you would wait
# for survivors of a crash that hang in a collective.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120

# one node: restarts after a crash
torchrun --standalone --nproc-per-node 8 --max-restarts 10 --no-python sana-pipe train --resume auto

# one to four nodes, which may come and go; the same line on each. Losing first-node ends the job: start it again.
torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 100 \
    --rdzv-backend c10d --rdzv-endpoint first-node:29500 --rdzv-id sana \
    --no-python sana-pipe train --resume auto
