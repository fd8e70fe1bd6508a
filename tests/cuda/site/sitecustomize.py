"""Python imports this at its start. On the pretended card kernels compute nothing, so a step's verdict, which the card
computes, says that the step is finite, and that all processes had as many samples. FAKE_VERDICT=0: as it comes."""

import importlib.abc
import importlib.machinery
import os
import sys

STEP = "pipeline.training.step"


def finite_steps(module):
    real = module.TrainStep.await_verdict

    def await_verdict(self):
        if (pending := self._pending) is not None:
            samples = pending.outcome.samples
            for place, value in enumerate((1, 1, samples, samples * samples / self.world, 0)):
                pending.verdict[place] = value
        return real(self)

    module.TrainStep.await_verdict = await_verdict


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != STEP:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            finite_steps(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("FAKE_VERDICT") != "0":
    sys.meta_path.insert(0, Finder())
