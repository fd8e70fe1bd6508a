"""Real steps after a prediction or without one: python -m tests.support.workers.predicted_run TRAIN PREDICTED.

TRAIN: options of `train` as JSON. PREDICTED: 1 or 0. Prints the digest of the weights.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

from benchmarks.real_step import made_up_batch
from pipeline.base.launch import detect
from pipeline.base.processes import run_and_exit
from pipeline.tools.planning.trace import trace
from pipeline.train.config import TrainConfig
from pipeline.train.models.sana import SanaTransformer
from pipeline.train.models.sana_config import numerics
from pipeline.train.parallel.mesh import open_mesh
from pipeline.train.parallel.parallelize import parallelize
from pipeline.train.parallel.shards import local
from pipeline.train.training import optimizers
from pipeline.train.training.objectives.flow import Flow
from pipeline.train.training.step import TrainStep
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
