"""What the processes of `tests.support.forked` need not import: the packages that take seconds."""
# ruff: noqa: F401

import diffusers.models.autoencoders.autoencoder_dc
import diffusers.schedulers.scheduling_dpmsolver_multistep
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import transformers.models.auto.tokenization_auto
import transformers.models.gemma.tokenization_gemma
import transformers.models.gemma2.modeling_gemma2

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.train
import tests.support.workers.lowered

torch.set_num_threads(1)
