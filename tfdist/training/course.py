"""The course of a run: chunks of steps, and between them evaluations, decisions and actions, until it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tfdist.cluster.channel import shared
from tfdist.config import Settings
from tfdist.errors import NonFiniteError, TfdistError, UsageError
from tfdist.strategies.session import Session
from tfdist.training.actions import Action, Moment, act
from tfdist.training.chunk import Chunk
from tfdist.training.console import Console, Plan
from tfdist.training.coordination import CoordinatedLoop
from tfdist.training.learning_rate import Plateau
from tfdist.training.loops import TrainingLoop
from tfdist.training.phases import ACTION
from tfdist.training.stopping import Decisions
from tfdist.training.weighting import fault_of

__all__ = ["Course"]


class Course:
    """One run from its first step to its last. Every process goes it alike."""

    def __init__(
        self,
        plan: Plan,
        session: Session,
        settings: Settings,
        *,
        loop: TrainingLoop | CoordinatedLoop,
        iterator: Any,
        evaluate: Mapping[str, Callable[[], dict[str, float]]],
        decisions: Decisions,
        plateau: Plateau | None,
        kept: Sequence[Any],
        actions: Sequence[Action],
        console: Console,
    ) -> None:
        """Take what was prepared.

        Args:
            evaluate: for each split, in their order.
            kept: the variables that the best evaluation is remembered by.
        """
        self._plan = plan
        self._session = session
        self._settings = settings
        self._loop = loop
        self._iterator = iterator
        self._evaluate = evaluate
        self._decisions = decisions
        self._plateau = plateau
        self._kept = kept
        self._best: tuple[list[np.ndarray], int, dict[str, dict[str, float]]] | None = None
        self._actions = actions
        self._console = console
        self.step = 0
        """Steps that have been done, those that were skipped among them."""
        self.stopped: str | None = None
        """Why the run ended before its last step."""
        self._in_chunk = False
        self._evaluated = 0  # the step of the last evaluation
        self.chunks: list[Chunk] = []
        self.metrics: dict[str, dict[str, float]] = {}
        """Of the last evaluation, by split; at the end of the restored one, where there is one."""

    def run(self) -> None:
        """Go to the end.

        Raises:
            NonFiniteError: a step was not finite, and the settings say to stop.
            UsageError: a step's weights or its learning rate cannot be used.
        """
        plan, every = self._plan, self._settings.validate_every
        # Local steps are averaged at the end of a chunk, which must not depend on who looks on.
        by_epoch = bool(self._actions) or self._settings.sync_every is not None
        while self.step < self._plan.steps and self.stopped is None:
            due = plan.next_end(self.step, every) if every else plan.steps
            if by_epoch:
                due = min(due, plan.next_end(self.step))
            self._in_chunk = True
            steps = min(self._settings.chunk, due - self.step)
            ahead = 0 if self._actions else due - self.step - steps  # an action may stop the run after any chunk
            chunk = self._loop.run(self._iterator, steps, self.step, ahead)
            self.chunks.append(chunk)
            if chunk.halted:
                raise self._halted(chunk)
            self._in_chunk = False
            self.step += len(chunk.losses)
            self._loop.forget()
            rate = float(chunk.rows.sum() / chunk.seconds.sum())
            self._console.progress(self.step, float(chunk.losses[-1].sum()), rate, float(chunk.rates[-1, 0]))
            self._act("chunk")
            if self._ends or (every and plan.ends_epoch(self.step, every)):
                self._evaluate_all()
            if plan.ends_epoch(self.step):
                self._act("epoch")
            if self._ends and self._evaluated != self.step:  # an action has asked to stop just now
                self._evaluate_all()
        if self._best is not None:
            values, step, self.metrics = self._best
            for variable, value in zip(self._kept, values, strict=True):
                variable.assign(value)
            self._console.note(f"the weights of step {step} are restored, which were the best")

    @property
    def done(self) -> int:
        """Steps that have been done, also while a chunk runs, or where it has failed."""
        return self.step + (self._loop.steps_done() if self._in_chunk else 0)

    @property
    def where(self) -> str:
        """How far the run has come, as in "at step 7"."""
        return f"at step {self.done + 1}" if self._in_chunk else f"after step {self.step}"

    @property
    def _ends(self) -> bool:
        return self.step == self._plan.steps or self.stopped is not None

    def _evaluate_all(self) -> None:
        self._evaluated = self.step
        for split, evaluate in self._evaluate.items():
            self.metrics[split] = evaluate()
            self._console.evaluated(self.step, split, self.metrics[split])
        if self._decisions.active:
            self._decide()
        self._act("evaluation")

    def _decide(self) -> None:
        """Act on an evaluation."""
        decision = self._decisions.after(self.step, self._plan.epoch(self.step), self.metrics)
        if decision.improved and self._settings.restore_best:
            self._best = [variable.numpy() for variable in self._kept], self.step, dict(self.metrics)
        if decision.reduce_learning_rate and self._plateau is not None:
            factor = self._settings.plateau_factor
            self._plateau.reduce(factor)
            self._console.note(f"step {self.step}: no better; the learning rate is multiplied by {factor}")
        if decision.stop is not None and self.step < self._plan.steps:
            self.stopped = self.stopped or decision.stop
            self._console.note(f"step {self.step}: stopping early, since {decision.stop}")

    def _act(self, kind: Literal["chunk", "evaluation", "epoch"]) -> None:
        if not self._actions:
            return
        chunk = self.chunks[-1]
        moment = Moment(
            kind=kind,
            step=self.step,
            epoch=self._plan.epoch(self.step),
            loss=float(chunk.losses[-1].sum()),
            learning_rate=float(chunk.rates[-1, 0]),
            examples_per_second=float(chunk.rows.sum() / chunk.seconds.sum()),
            metrics={split: dict(values) for split, values in self.metrics.items()},
            is_chief=self._session.is_chief,
        )
        voters = None if self._session.asynchronous else self._session.strategy
        with self._loop.phases.at(ACTION):
            stop = act(self._actions, moment, voters)
        if stop and self.step < self._plan.steps:
            self.stopped = self.stopped or f"an action asked for it after step {self.step}"

    def _halted(self, chunk: Chunk) -> TfdistError:
        """The error that every rank raises."""
        step = self.step + len(chunk.losses)
        ending = "the step was not applied, and all ranks stop"
        fault = fault_of(chunk.faults)
        if fault:
            return shared(UsageError(f"step {step}: {fault}. So {ending}."))
        rates = chunk.rates[-1]
        if not (np.isfinite(rates) & (rates >= 0)).all():
            return shared(
                UsageError(
                    f"step {step}: the learning rate is {', '.join(map(str, rates))}; {ending}. The optimizer's "
                    "schedule must give finite numbers, 0 or more."
                )
            )
        count, ids = chunk.suspects
        where = f"on replica {ids}" if count == 1 else f"on {count} of {self._plan.replicas} replicas"
        what = f"the loss is not finite {where}" if count else "the gradients are not finite"
        return shared(
            NonFiniteError(
                f"step {step}: {what}; {ending}. Lower the learning rate, look at the examples of that step, or set "
                "nan_policy='skip'."
            )
        )
