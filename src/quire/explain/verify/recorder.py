"""Records a request in the process of a model runner: a step feature that keeps the results of the layers' steps."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.contracts.parallel import Rank
from quire.contracts.step import StepPlan
from quire.explain.verify.parameters import changed_parameters
from quire.explain.verify.recording import Recording, stage_name
from quire.explain.verify.step_kinds import KINDS
from quire.explain.verify.steps import check_layers, watch
from quire.layers.context import StepContext
from quire.worker.features import Layers
from quire.worker.runner import StepRunner
from quire.worker.taps import HiddenTap

BETWEEN = "|"  # between stage and step in the name of a tensor


class LayerRecorder(HiddenTap):
    """Records the steps of a rank's layers, which run eagerly. Its operations are controls of the model runner.

    rank   of the model runner
    """

    def __init__(self, worker: StepRunner, rank: Rank) -> None:
        super().__init__(worker.model, self._keep)
        self.model, self.rank, self.recording = worker.model, rank, Recording()
        self.controls = {"record": self.record, "recorded": self.recorded, "changed": self.changed}

    def record(self, inner: bool) -> None:
        """Record all steps from now on. Raises ConfigError for layers whose steps are not known.

        inner   False: only the results of the halves of layers
        """
        if inner:
            check_layers(self.model)
        watch(self.model, self.recording, inner=inner)

    def run_layers(self, plan: StepPlan, hidden: Tensor, ctx: StepContext, layers: Layers) -> Tensor:
        self.recording.positions.append(ctx.positions.to("cpu", copy=True))
        return super().run_layers(plan, hidden, ctx, layers)

    @torch.inference_mode()
    def recorded(self, folder: str, length: int) -> None:
        """Write the recording to `folder`, with norm and logits. Of the ranks that share a stage one writes.

        length   tokens that count; 0: all that there are, and no norm, because the request has failed
        """
        recording, model = self.recording, self.model
        recording.settle(length or len(torch.cat(recording.positions).unique()))
        if self.rank.last and length:
            last = model.numbers[-1]
            hidden = recording.result(stage_name(last, recording.ends[last]), "sum")
            normed = model.norm(hidden.to(model.device))
            recording.keep("norm", "norm", normed)
            recording.keep("logits", "lm_head", model.head.whole(normed))
        if self.rank.place == 0:
            save(recording, Path(folder, f"{self.rank.stage}.safetensors"))

    def changed(self, folder: str) -> list[dict[str, Any]]:
        """Return the fields of a `Changed` for each parameter of this rank that is not the one in `folder`."""
        return [vars(one) for one in changed_parameters(self.model, Path(folder), self.rank)]

    def _keep(self, where: int | str, hidden: Tensor) -> None:
        if where != "embed":
            layer = self.model.numbers[int(where)]
            self.recording.keep(stage_name(layer, self.recording.ends[layer]), "sum", hidden)
        elif self.rank.first:
            self.recording.keep("embed", "embed_tokens", hidden)


def make(worker: StepRunner, rank: Rank) -> LayerRecorder:
    """Return a recorder for a model runner; see the control "attach" of a rank."""
    return LayerRecorder(worker, rank)


def save(recording: Recording, path: Path) -> None:
    """Write a settled recording to a file."""
    from safetensors.torch import save_file

    tensors = {f"{at}{BETWEEN}{step}": recording.result(at, step) for at, step in _steps(recording)}
    told = {
        "steps": [*_steps(recording)],
        "kinds": {stage: KINDS.index(kind) for stage, kind in recording.kinds.items()},
        "after": recording.after,
        "ends": recording.ends,
    }
    save_file(tensors, path, {"recording": json.dumps(told)})


def load(folder: Path) -> Recording:
    """Read the recordings of all stages of a pipeline, in their order, as one."""
    from safetensors import safe_open

    recording = Recording()
    for stage in range(len([*folder.iterdir()])):
        with safe_open(folder / f"{stage}.safetensors", "pt") as file:
            told = json.loads(file.metadata()["recording"])
            for at, step in told["steps"]:
                recording.keep(at, step, file.get_tensor(f"{at}{BETWEEN}{step}"))
        recording.kinds |= {name: KINDS[kind] for name, kind in told["kinds"].items()}
        recording.after |= {int(layer): path for layer, path in told["after"].items()}
        recording.ends |= {int(layer): half for layer, half in told["ends"].items()}
    recording.positions = [torch.arange(len(recording.pieces["embed"]["embed_tokens"][0]))]
    return recording


def _steps(recording: Recording) -> Iterator[tuple[str, str]]:
    return ((stage, step) for stage, steps in recording.pieces.items() for step in steps)
