"""Training: cross-entropy against the target's laws, resumable, the same weights for the same seed and texts.

The student reads what the target wrote, never its own drafts. That is what acceptance needs: a draft token counts only
when all before it in its block were accepted, and then the text before it is the target's.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from outrider.distill.batches import Batch, Batcher, plan
from outrider.distill.shard import ScoredText
from outrider.distill.student import Learner
from outrider.lm.engine import ModelRefused

_BETAS = (0.9, 0.98)
_WARM_UP_STEPS = 30
# Between two points of the curve.
_CURVE_STEPS = 10
_LEAST_RATE = 0.02
_CLIP = 1.0
# Least part of a law that the head's tokens must have before it is scaled up to a whole one.
_LEAST_MASS = 0.05


@dataclass(frozen=True)
class TrainingOptions:
    """How the student learns.

    Attributes:
        epochs: turns through all texts.
        batch_tokens: tokens of a step, padding included.
        learning_rate: the highest; it rises for some steps and falls along a cosine.
        greedy_weight: weight of the target's likeliest token; the rest is the law's at temperature 1.
        seed: of the order.
        checkpoint_steps: steps between two checkpoints.
        positions: of a block, at which a student learns that is fed by states: the target's, its own at the later ones.
        begun_with: hash of the weights that the student begins with, where they are not the target's.
    """

    epochs: int = 4
    batch_tokens: int = 2048
    learning_rate: float = 2e-3
    greedy_weight: float = 0.3
    seed: int = 0
    checkpoint_steps: int = 200
    positions: int = 1
    begun_with: str = ""


# (steps done, running mean of the loss), as far as training came.
Curve = tuple[tuple[int, float], ...]

# Called with the steps done, all steps, and a running mean of the loss.
Progress = Callable[[int, int, float], None]


@dataclass
class _Done:
    """How far a run is.

    Attributes:
        mean: running, of the loss.
        curve: as it was after some of the steps.
    """

    steps: int = 0
    mean: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)

    def add(self, loss: float, *, last: bool) -> None:
        self.mean = loss if self.steps == 0 else 0.98 * self.mean + 0.02 * loss
        self.steps += 1
        if self.steps % _CURVE_STEPS == 0 or last:
            self.curve.append((self.steps, self.mean))


def train(
    student: Learner,
    batcher: Batcher,
    texts: Sequence[ScoredText],
    options: TrainingOptions,
    checkpoint: Path,
    progress: Progress,
) -> Curve:
    """Trains to the end, from `checkpoint` on where there is one; returns how the loss fell.

    Raises ModelRefused when the checkpoint is another run's.
    """
    steps = [
        batch
        for epoch in range(options.epochs)
        for batch in plan(texts, options.batch_tokens, np.random.default_rng([options.seed, epoch]))
    ]
    optimizer = torch.optim.AdamW(student.learned.parameters(), betas=_BETAS, weight_decay=0.0)
    identity = asdict(options) | {"steps": len(steps)}
    done = _restore(checkpoint, identity, student, optimizer)
    for step in range(done.steps, len(steps)):
        loss = _step(
            student,
            optimizer,
            batcher.batch([texts[i] for i in steps[step]]),
            _rate(step, len(steps), options),
            options,
        )
        done.add(loss, last=step + 1 == len(steps))
        progress(done.steps, len(steps), done.mean)
        if done.steps % options.checkpoint_steps == 0 or done.steps == len(steps):
            _save(checkpoint, identity, student, optimizer, done)
    return tuple(done.curve)


def _step(
    student: Learner, optimizer: torch.optim.Optimizer, batch: Batch, rate: float, options: TrainingOptions
) -> float:
    weights = batch.probs / batch.probs.sum(1, keepdim=True).clamp_min(_LEAST_MASS) * (1 - options.greedy_weight)
    weights[:, 0] += options.greedy_weight * (batch.probs[:, 0] > 0)
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=_fast_bfloat16(batch.tokens.device)):
        loss = student.loss(batch, weights / len(weights))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(student.learned.parameters(), _CLIP)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _rate(step: int, steps: int, options: TrainingOptions) -> float:
    rising = min(1.0, (step + 1) / _WARM_UP_STEPS)
    falling = max(_LEAST_RATE, 0.5 * (1 + math.cos(math.pi * step / steps)))
    return options.learning_rate * rising * falling


def _fast_bfloat16(device: torch.device) -> bool:
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _save(
    path: Path, identity: dict[str, object], student: Learner, optimizer: torch.optim.Optimizer, done: _Done
) -> None:
    part = path.with_suffix(".part")
    state = {"student": student.learned.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"identity": identity, "done": asdict(done)}, part)
    os.replace(part, path)


def _restore(path: Path, identity: dict[str, object], student: Learner, optimizer: torch.optim.Optimizer) -> _Done:
    if not path.exists():
        return _Done()
    state = torch.load(path, weights_only=True)
    if state["identity"] != identity or "done" not in state:
        raise ModelRefused(f"{path} is a checkpoint of another run; remove it to begin again")
    student.learned.load_state_dict(state["student"])
    optimizer.load_state_dict(state["optimizer"])
    return _Done(**state["done"])
