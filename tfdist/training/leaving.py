"""Signals that ask the job to save and leave: from their coming to the step after which all replicas stop.

SIGUSR1, SIGTERM (preemption) and SIGINT (Ctrl-C) only set a variable, whichever process they come to. Every step reads
it and sums it over the replicas together with the gradients, so that all of them stop after the same step. Nothing here
waits for another process: a peer that is about to be asked may be dead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Literal

import tensorflow as tf

__all__ = ["Leaving", "Why", "why"]

Why = Literal["preempted", "interrupted"]

_PREEMPTED = 1.0
_INTERRUPTED = 2.0**20
"""More than the sum of the others' requests can be."""


class Leaving:
    """What this process has been asked. Make it outside of a strategy's scope."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self.request = tf.Variable(0.0, trainable=False, name="leave")
            """What a step adds up over the replicas; 0 while nobody asks."""
        self._interrupts = 0

    @property
    def asked(self) -> float:
        """The present value, for a process that decides alone."""
        return float(self.request)

    def ask(self, number: int) -> None:
        """Take in a signal. A second interrupt ends this process at once."""
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                print("tfdist: interrupted a second time: ended without saving", file=sys.stderr, flush=True)
                os._exit(130)
        self.request.assign(_INTERRUPTED if number == signal.SIGINT or self._interrupts else _PREEMPTED)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, signals are requests. Only the main thread can arrange that; in another one nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard, wake = socket.socketpair()
        wake.setblocking(False)
        # Python's own handlers wait until TensorFlow's call returns, which is when the chunk is done. What writes to
        # this descriptor does not wait, and the thread takes it from there.
        before_fd = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        listener = threading.Thread(target=self._listen, args=(heard,), name="tfdist-signals", daemon=True)
        listener.start()
        try:
            yield
        finally:
            for number, handler in before.items():
                # One that TensorFlow has installed cannot be put back from here.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(before_fd)
            wake.close()
            listener.join()
            heard.close()

    def _listen(self, heard: socket.socket) -> None:
        while numbers := heard.recv(64):
            for number in numbers:
                if number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
                    self.ask(number)


def why(total: float) -> Why | None:
    """What the sum of all replicas' requests says."""
    return None if total <= 0 else "interrupted" if total >= _INTERRUPTED else "preempted"
