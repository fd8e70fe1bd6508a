"""Real steps after a prediction or without one: python -m tests.support.workers.predicted_run TRAIN PREDICTED.

TRAIN: options of `train` as JSON. PREDICTED: 1 or 0. Prints the digest of the weights.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

from benchmarks.real_step import made_up_batch
from sana_pipe.base.launch import detect
from sana_pipe.base.processes import run_and_exit
from sana_pipe.tools.planning.trace import trace
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import numerics
from sana_pipe.train.parallel.mesh import open_mesh
from sana_pipe.train.parallel.parallelize import parallelize
from sana_pipe.train.parallel.shards import local
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.objectives.flow import Flow
from sana_pipe.train.training.step import TrainStep
from tests.support.narrow import ALONE, COMPUTE, NARROW, SHAPE


def main() -> None:
    train = TrainConfig.model_validate({**COMPUTE, **json.loads(sys.argv[1])})
    if int(sys.argv[2]):
        hook = sys.excepthook
        for on_gpu in (True, False):
            trace(NARROW, train, ALONE, SHAPE, on_gpu=on_gpu)
        assert sys.excepthook is hook
    device = torch.device("cpu")
    with open_mesh(detect(), train.parallel, device) as mesh:
        model = parallelize(SanaTransformer.from_scratch(NARROW, 0, numerics=numerics(train)), mesh, train)
        optimizer = optimizers.build(model.module, train.optim, device)
        step = TrainStep(model, Flow(train.flow), optimizer, train, device)
        for number in (1, 2, 3):
            step([made_up_batch(NARROW, SHAPE, 0)], number)
        digest = hashlib.sha256()
        for _, value in sorted(model.module.state_dict().items()):
            digest.update(local(value).contiguous().view(torch.uint8).numpy().tobytes())
    print("digest", digest.hexdigest())


if __name__ == "__main__":
    run_and_exit(main)
