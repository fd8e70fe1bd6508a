#!/bin/bash
# accelerate, by hand: copy the lines you need. accelerate only starts the processes; how the model is spread, its
# precision and everything else is what the configuration says. Answers of `accelerate config` for FSDP, DeepSpeed and
# others are refused, each by name, and so is another precision: pass --mixed_precision as train.precision has it (fp32
# is "no").

# Batches change their shape: let the allocator grow its blocks (sana-pipe sets this, too, where it is not set).
[ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

# ---- train -------------------------------------------------------------------------------------------------------
# one node, eight GPUs
accelerate launch --multi_gpu --num_machines 1 --num_processes 8 --mixed_precision bf16 --dynamo_backend no \
    --no_python sana-pipe train --resume auto

# two nodes; run it on both, NODE=0 on the first
accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --machine_rank "$NODE" \
    --main_process_ip first-node --main_process_port 29500 --mixed_precision bf16 --dynamo_backend no \
    --no_python sana-pipe train --resume auto

# restarts after a crash need a rendezvous whose store is not shared (see torchrun.sh)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
accelerate launch --multi_gpu --num_machines 1 --num_processes 8 --max_restarts 10 --rdzv_backend c10d \
    --mixed_precision bf16 --dynamo_backend no --no_python sana-pipe train --resume auto

# On the CPU accelerate starts one process, whatever --num_processes is: use torchrun there.

# ---- encode ------------------------------------------------------------------------------------------------------
accelerate launch --multi_gpu --num_machines 1 --num_processes 8 --mixed_precision no --dynamo_backend no \
    --no_python sana-pipe encode --data /data/pictures
