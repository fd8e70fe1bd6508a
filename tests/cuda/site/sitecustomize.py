"""Python imports this at its start. On the pretended card kernels compute nothing, so what the product reads back from
the card to judge it is put in place: a step is finite, its loss is 0, all processes had as many samples; captions are
finite. FAKE_VERDICT=0: nothing is. Each step begins with a mark in FAKE_LOG."""

import importlib.abc
import importlib.machinery
import os
import sys
import threading


def mark(*words):
    if path := os.environ.get("FAKE_LOG"):
        with open(path, "a", encoding="utf-8") as log:
            print(os.environ.get("RANK", "0"), os.getpid(), threading.get_native_id(), "mark", *words, file=log)


def finite_steps(module):
    verdict, call = module.TrainStep.await_verdict, module.TrainStep.__call__

    def await_verdict(self):
        if (pending := self._pending) is not None:
            samples = pending.outcome.samples
            for place, value in enumerate((1, 1, samples, samples * samples / self.world, 0)):
                pending.verdict[place] = value
        return verdict(self)

    def marked(self, batches, step, *more, **named):
        mark("step", step)
        return call(self, batches, step, *more, **named)

    module.TrainStep.await_verdict, module.TrainStep.__call__ = await_verdict, marked


def small_losses(module):
    mean = module.mean_of

    def no_loss(values):
        mean(values)
        return 0.0

    module.mean_of = no_loss


def finite_captions(module):
    from unittest import mock

    import torch

    encode = module.TextEncoder.encode

    def marked_finite(self, captions):
        with mock.patch.object(torch, "isfinite", lambda values: torch.ones(values.shape, dtype=torch.bool)):
            return encode(self, captions)

    module.TextEncoder.encode = marked_finite


CHANGES = {
    "sana_pipe.train.training.step": finite_steps,
    "sana_pipe.train.training.throughput": small_losses,
    "sana_pipe.data.encoders.text": finite_captions,
}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("FAKE_VERDICT") != "0":
    sys.meta_path.insert(0, Finder())
