"""Signals that ask to save and leave: what they set, and that a running TensorFlow call does not hold them back."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.jobs import run_alone
from tfdist.training.leaving import Leaving, why


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_becomes_a_request(number: signal.Signals) -> None:
    leaving = Leaving()
    before = signal.getsignal(number)
    with leaving.listening():
        assert leaving.asked == 0
        os.kill(os.getpid(), number)
        _until(lambda: leaving.asked > 0)
        assert why(leaving.asked) == "preempted"
    assert signal.getsignal(number) == before


def test_an_interrupt_tells_itself_from_preemption_in_any_sum() -> None:
    leaving = Leaving()
    leaving.ask(signal.SIGTERM)
    assert why(4096 * leaving.asked) == "preempted"
    leaving.ask(signal.SIGINT)
    assert why(leaving.asked) == "interrupted"
    leaving.ask(signal.SIGTERM)
    assert why(leaving.asked) == "interrupted", "what the user asked stays"
    assert why(0.0) is None


def test_in_another_thread_nothing_changes() -> None:
    leaving, seen = Leaving(), []

    def run() -> None:
        with leaving.listening():
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


def test_a_second_interrupt_ends_at_once_in_the_middle_of_a_call(tmp_path) -> None:
    """The main thread is inside TensorFlow for minutes, and Python's own handlers would wait for it."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, threading, time\n"
        "import tensorflow as tf\n"
        "from tfdist.training.leaving import Leaving\n"
        "leaving = Leaving()\n"
        "@tf.function\n"
        "def long():\n"
        "    return tf.while_loop(lambda t: t < end, lambda t: [tf.timestamp()], [tf.timestamp()])\n"
        "end = tf.timestamp() + 150\n"
        "def interrupt():\n"
        "    time.sleep(1)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    while not leaving.asked:\n"
        "        time.sleep(0.01)\n"
        "    print('asked', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "with leaving.listening():\n"
        "    threading.Thread(target=interrupt, daemon=True).start()\n"
        "    long()\n"
    )
    ended = run_alone(program, timeout=200)
    assert ended.code == 130, ended.output
    assert "asked" in ended.output
    assert "interrupted a second time: ended without saving" in ended.output


def _until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
