#!/bin/bash
# torchrun and accelerate, by hand: copy the lines you need. `--no-python` runs the installed command as it is.

# ---- encode ------------------------------------------------------------------------------------------------------
# Each process takes its share and uses the GPU of its local rank. There are no collectives: a process that ends early
# ends, one that dies is made up for by the others, and running the command again continues.

# one node, eight GPUs
torchrun --standalone --nproc-per-node 8 --no-python sana-pipe encode --data /data/pictures

# two nodes; run it on both, NODE=0 on the first
torchrun --nnodes 2 --node-rank "$NODE" --nproc-per-node 8 --master-addr first-node --master-port 29500 \
    --no-python sana-pipe encode --data /data/pictures

# the same through accelerate
accelerate launch --num_processes 8 --no_python sana-pipe encode --data /data/pictures

# without any launcher: four terminals, machines or containers that share the cache
sana-pipe encode --data /data/pictures --task-index 0 --task-count 4

# torchrun passes SIGTERM on: units in hand are finished or dropped (encode.grace_s). It kills after 30 s, so keep
# encode.grace_s below that; its own exit code then names the signal, although every sana-pipe ended with 0.

# ---- train -------------------------------------------------------------------------------------------------------
torchrun --standalone --nproc-per-node 8 --no-python sana-pipe train --resume auto

torchrun --nnodes 2 --node-rank "$NODE" --nproc-per-node 8 --master-addr first-node --master-port 29500 \
    --no-python sana-pipe train --resume auto
