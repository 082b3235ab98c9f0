"""What the chief shows while it trains: a progress bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["BarConsole", "Console", "LineConsole", "Plan", "SilentConsole", "numbers", "open_console"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run is about to do."""

    backend: str
    replicas: int
    steps: int
    steps_per_epoch: int | None
    global_batch_size: int
    examples: int | None
    threads: int
    accumulate: int = 1
    workers: int | None = None
    """Of an asynchronous run."""
    epochs: int | None = None
    """Of a run that is counted in epochs."""

    def headline(self) -> str:
        """One line for the start of a run."""
        count, what = (self.replicas, "replica") if self.workers is None else (self.workers, "worker")
        replicas = f"{count} {what}" if count == 1 else f"{count} {what}s"
        examples = "endless examples" if self.examples is None else f"{self.examples} examples"
        size = str(self.global_batch_size) if self.accumulate == 1 else f"{self.accumulate} × {self.global_batch_size}"
        return (
            f"training on {self.backend}, {replicas}: {self.steps} steps of {size} examples "
            f"({examples}), {self.threads} intra-op thread(s)"
        )

    def end_of_epoch(self, epoch: int) -> int:
        """The step at which an epoch ends, where epochs can be counted."""
        if self.workers is not None:  # batches of an asynchronous run go on over the end of an epoch
            assert self.examples is not None
            return -(-epoch * self.examples // self.global_batch_size)
        assert self.steps_per_epoch is not None
        return epoch * self.steps_per_epoch

    def epoch(self, step: int) -> int | None:
        """The epoch that a step belongs to, from 1, or whose end it holds; None where epochs cannot be counted."""
        if not self.steps_per_epoch:
            return None
        if self.workers is None:
            return -(-step // self.steps_per_epoch)
        assert self.examples is not None
        epoch = max(1, step * self.global_batch_size // self.examples)
        epoch = epoch if self.end_of_epoch(epoch) >= step else epoch + 1
        return epoch if self.epochs is None else min(epoch, self.epochs)

    def ends_epoch(self, step: int, every: int = 1) -> bool:
        """Whether an epoch ends at a step, whose number is a multiple of `every`."""
        epoch = self.epoch(step)
        return epoch is not None and epoch % every == 0 and self.end_of_epoch(epoch) == step

    def next_end(self, step: int, every: int = 1) -> int:
        """The next step after one at which such an epoch ends; the last step where epochs cannot be counted."""
        if not self.steps_per_epoch:
            return self.steps
        epoch = (self.epoch(step) or 0) // every * every
        while self.end_of_epoch(epoch) <= step:
            epoch += every
        return min(self.steps, self.end_of_epoch(epoch))

    def position(self, step: int) -> str:
        """Where a step is, as in `epoch 2/10 step 46/230`."""
        if not self.steps_per_epoch:
            return f"step {step}/{self.steps}"
        return f"epoch {self.epoch(step)}/{self.epoch(self.steps)} step {step}/{self.steps}"


class Console(Protocol):
    """Where a run is shown."""

    def begin(self, plan: Plan) -> None: ...
    def progress(self, step: int, loss: float, examples_per_second: float, learning_rate: float) -> None: ...
    def evaluated(self, step: int, split: str, metrics: dict[str, float]) -> None: ...
    def note(self, message: str) -> None: ...
    def end(self, message: str) -> None: ...
    def close(self) -> None: ...


class SilentConsole:
    """For every process but the chief."""

    def begin(self, plan: Plan) -> None:
        pass

    def progress(self, step: int, loss: float, examples_per_second: float, learning_rate: float) -> None:
        pass

    def evaluated(self, step: int, split: str, metrics: dict[str, float]) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def end(self, message: str) -> None:
        pass

    def close(self) -> None:
        pass


class LineConsole:
    """Plain lines, at most one of progress every `interval` seconds."""

    def __init__(self, interval: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._plan: Plan | None = None
        self._next = clock()

    def begin(self, plan: Plan) -> None:
        self._plan = plan
        print(plan.headline(), flush=True)

    def progress(self, step: int, loss: float, examples_per_second: float, learning_rate: float) -> None:
        assert self._plan is not None
        now = self._clock()
        if now < self._next and step < self._plan.steps:
            return
        self._next = now + self._interval
        rates = f"learning rate {learning_rate:.4g}  {examples_per_second:.0f} examples/s"
        print(f"{self._plan.position(step)}  loss {loss:.4g}  {rates}", flush=True)

    def evaluated(self, step: int, split: str, metrics: dict[str, float]) -> None:
        assert self._plan is not None
        print(f"{self._plan.position(step)}  {split}: {numbers(metrics)}", flush=True)

    def note(self, message: str) -> None:
        print(message, flush=True)

    def end(self, message: str) -> None:
        print(message, flush=True)

    def close(self) -> None:
        pass


class BarConsole:
    """A progress bar of the whole run; evaluations stay above it as lines."""

    def __init__(self, console: RichConsole) -> None:
        self._plan: Plan | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=None, rate="", visible=False)

    def begin(self, plan: Plan) -> None:
        self._plan = plan
        self._bar.start()
        self._bar.print(plan.headline(), highlight=False, soft_wrap=True)
        self._bar.update(self._task, total=plan.steps, description="first step", visible=True)

    def progress(self, step: int, loss: float, examples_per_second: float, learning_rate: float) -> None:
        assert self._plan is not None
        position = self._plan.position(step).partition(" step")[0]
        self._bar.update(
            self._task,
            completed=step,
            description=f"{position}  loss {loss:.4g}  lr {learning_rate:.3g}",
            rate=f"{examples_per_second:.0f} examples/s",
        )

    def evaluated(self, step: int, split: str, metrics: dict[str, float]) -> None:
        assert self._plan is not None
        self._bar.print(f"{self._plan.position(step)}  {split}: {numbers(metrics)}", highlight=False, soft_wrap=True)

    def note(self, message: str) -> None:
        self._bar.print(message, highlight=False, soft_wrap=True)

    def end(self, message: str) -> None:
        self.close()
        self._bar.console.print(message, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def open_console(*, visible: bool, width: int | None) -> Console:
    """The console for this process.

    Args:
        visible: whether this process speaks at all.
        width: columns of the terminal that shows its output; None where no terminal does.
    """
    if not visible:
        return SilentConsole()
    return LineConsole() if width is None else BarConsole(RichConsole(width=width or None))


def numbers(metrics: dict[str, float]) -> str:
    """Metrics on one line."""
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )
