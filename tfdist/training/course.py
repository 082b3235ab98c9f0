"""The course of a run: chunks of steps, and between them evaluations, decisions and actions, until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tfdist.cluster.channel import shared
from tfdist.config import Settings, save_interval
from tfdist.errors import NonFiniteError, TfdistError, UsageError
from tfdist.strategies.session import Session
from tfdist.training.actions import Action, Moment, act
from tfdist.training.chunk import Chunk
from tfdist.training.console import Console, Plan
from tfdist.training.coordination import CoordinatedLoop
from tfdist.training.learning_rate import Plateau
from tfdist.training.leaving import Why, why
from tfdist.training.loops import TrainingLoop
from tfdist.training.phases import ACTION
from tfdist.training.resuming import BEST
from tfdist.training.saving import Saver
from tfdist.training.stopping import Decisions, less_is_better
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
        kept: Mapping[str, Any],
        actions: Sequence[Action],
        console: Console,
        saver: Saver,
        about: Mapping[str, Any],
        check: Callable[[str], None],
    ) -> None:
        """Take what was prepared.

        Args:
            evaluate: for each split, in their order.
            kept: the variables that the best evaluation is remembered by, by name.
            about: what every checkpoint says beside the course's own state.
            check: compares the replicas' variables; it is told when, as in "after step 7".
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
        self._saver = saver
        self._about = dict(about)
        self._check = check
        self._save_steps, self._save_seconds = save_interval(settings.save_every)
        self._saved_at = time.monotonic()
        self._best_score: float | None = None
        self._actions = actions
        self._console = console
        self.step = 0
        """Steps that have been done, those that were skipped among them."""
        self.stopped: str | None = None
        """Why the run ended before its last step."""
        self.left: Why | None = None
        """Why this process leaves before that, to go on later."""
        self.first = 0
        """Steps that were done before this start."""
        self.totals = {"examples_seen": 0, "skipped_steps": 0}
        """Of all steps, those before this start among them."""
        self._in_chunk = False
        self._evaluated = 0  # the step of the last evaluation
        self._saved_step = self._checked = 0
        self.chunks: list[Chunk] = []
        self.metrics: dict[str, dict[str, float]] = {}
        """Of the last evaluation, by split; at the end of the restored one, where there is one."""

    def run(self) -> None:
        """Go to the end.

        Raises:
            NonFiniteError: a step was not finite, and the settings say to stop.
            UsageError: a step's weights or its learning rate cannot be used.
        """
        plan = self._plan
        until = plan.steps
        if self._settings.stop_after_steps is not None:
            until = min(until, self._round_end(self.first + self._settings.stop_after_steps))
        if self.first and self._evaluation_is_due and self._evaluated != self.step:
            self._after_steps()  # which a request to leave had put off
        while self.step < until and self.stopped is None and self.left is None:
            due = min(until, self._due())
            self._in_chunk = True
            steps = min(self._settings.chunk, due - self.step)
            # An action may stop the run after any chunk, and a save takes the variables as all steps have left them.
            ahead = 0 if self._actions or self._time_to_save else due - self.step - steps
            chunk = self._loop.run(self._iterator, steps, self.step, ahead)
            self.chunks.append(chunk)
            if chunk.halted:
                raise self._halted(chunk)
            self._in_chunk = False
            self.step += len(chunk.losses)
            self.totals["examples_seen"] += int(chunk.rows.sum())
            self.totals["skipped_steps"] += int(chunk.skipped.sum())
            self.left = why(chunk.leave)
            self._loop.forget()
            rate = float(chunk.rows.sum() / chunk.seconds.sum())
            self._console.progress(self.step, float(chunk.losses[-1].sum()), rate, float(chunk.rates[-1, 0]))
            self._act("chunk")
            if self.left is None:
                self._after_steps()
                if ahead == 0:
                    self._save_if_due()
        if self._saver.last != self.step:
            self._save()

    def restore_best(self) -> None:
        """At the end of a run: the weights of the best evaluation, where the settings ask for them."""
        if self._best is not None and self.ended:
            values, step, self.metrics = self._best
            for variable, value in zip(self._kept.values(), values, strict=True):
                variable.assign(value)
            self._console.note(f"the weights of step {step} are restored, which were the best")

    def resume(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from a checkpoint, whose values the variables have already.

        Args:
            arrays: what `_save` has written beside the variables.
        """
        own = state["run"]
        self.step = self.first = self._saved_step = step
        self.stopped = own["stopped"]
        self.totals = own["totals"]
        self.metrics = {split: _loss_first(values) for split, values in own["metrics"].items()}
        self._evaluated, self._best_score = own["evaluated"], own["best_score"]
        self._decisions.load(own["decisions"])
        if own["best"] is not None and self._settings.restore_best:
            self._best = [arrays[BEST + name] for name in self._kept], own["best"]["step"], own["best"]["metrics"]

    @property
    def ended(self) -> bool:
        """Whether the run is over, and not only this start of it."""
        return self._ends

    def _due(self) -> int:
        """The next step after which something other than another step comes."""
        plan, settings, every = self._plan, self._settings, self._settings.validate_every
        due = [plan.next_end(self.step, every) if every else plan.steps]
        # Local steps are averaged at the end of a chunk, which must not depend on who looks on.
        if self._actions or settings.sync_every is not None or self._saves_by_epoch:
            due.append(plan.next_end(self.step))
        due += [self._round_end(_next(self.step, n)) for n in (self._save_steps, settings.check_every) if n]
        return min(due)

    def _round_end(self, step: int) -> int:
        """The end of the round of local steps that a step is in; without local steps, the step itself."""
        every, epoch = self._settings.sync_every, self._plan.steps_per_epoch
        if every is None:
            return step
        start = (step - 1) // epoch * epoch if epoch else 0
        end = start + -(-(step - start) // every) * every
        return min(end, start + epoch) if epoch else end

    def _after_steps(self) -> None:
        """What follows where an evaluation is due, or an epoch ends."""
        if self._evaluation_is_due:
            self._evaluate_all()
        if self._plan.ends_epoch(self.step):
            self._act("epoch")
        if self._ends and self._evaluated != self.step:  # an action has asked to stop just now
            self._evaluate_all()
        every = self._settings.check_every
        if every and self.step // every > max(self._checked, self.first) // every:
            self._checked = self.step
            self._check(f"after step {self.step}")

    @property
    def _evaluation_is_due(self) -> bool:
        every = self._settings.validate_every
        return self._ends or (every > 0 and self._plan.ends_epoch(self.step, every))

    @property
    def _saves_by_epoch(self) -> bool:
        return self._settings.checkpoint_dir is not None and self._settings.save_every is None

    @property
    def _time_to_save(self) -> bool:
        return self._save_seconds is not None and time.monotonic() - self._saved_at >= self._save_seconds

    def _save_if_due(self) -> None:
        problem = self._saver.problem()
        if problem is not None:
            self._console.note(f"{problem} Training goes on, and the next save tries again.")
        by_steps = self._save_steps is not None and self.step // self._save_steps > self._saved_step // self._save_steps
        by_epoch = self._saves_by_epoch and self._plan.ends_epoch(self.step)
        if by_steps or by_epoch or self._time_to_save:
            self._save()

    def _save(self) -> None:
        """Begin to save the present state. Every process calls it; the chief writes."""
        best = self._best
        score = self._decisions.score(self.metrics) if self._evaluated == self.step and self.metrics else None
        run = {
            "stopped": self.stopped,
            "metrics": self.metrics,
            "totals": dict(self.totals),
            "evaluated": self._evaluated,
            "decisions": self._decisions.state(),
            "best": None if best is None else {"step": best[1], "metrics": best[2]},
            "best_score": self._best_score,
        }
        state = {**self._about, "epoch": self._plan.epoch(self.step), "run": run}
        arrays = {} if best is None else dict(zip([BEST + name for name in self._kept], best[0], strict=True))
        self._saver.save(self.step, state, arrays, score)
        self._saved_step, self._saved_at = self.step, time.monotonic()

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
        return self.step >= self._plan.steps or self.stopped is not None

    def _evaluate_all(self) -> None:
        self._evaluated = self.step
        for split, evaluate in self._evaluate.items():
            self.metrics[split] = evaluate()
            self._console.evaluated(self.step, split, self.metrics[split])
        if self._decisions.active:
            self._decide()
        self._act("evaluation")
        self._keep_best()

    def _keep_best(self) -> None:
        """Save where this evaluation is the best that keep_best has seen."""
        score = self._decisions.score(self.metrics)
        if score is None:
            return
        sign = 1.0 if less_is_better(self._settings.keep_best or "", self._settings.monitor_mode) else -1.0
        if self._best_score is None or sign * score < sign * self._best_score:
            self._best_score = score
            self._save()

    def _decide(self) -> None:
        """Act on an evaluation."""
        decision = self._decisions.after(self.step, self._plan.epoch(self.step), self.metrics)
        if decision.improved and self._settings.restore_best:
            self._best = [variable.numpy() for variable in self._kept.values()], self.step, dict(self.metrics)
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


def _next(step: int, every: int) -> int:
    """The next multiple of a number after a step."""
    return (step // every + 1) * every


def _loss_first(metrics: dict[str, float]) -> dict[str, float]:
    """As an evaluation gives them; a checkpoint has them in the order of their names."""
    return dict(sorted(metrics.items(), key=lambda item: item[0] != "loss"))
