"""What an exception says to a person. The exceptions are real ones, also those that come out of TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.unit.one_device import STRATEGY
from tfdist.cluster.causes import account, cause_of, is_aftermath, task_traceback, unwrapped
from tfdist.cluster.channel import Alone, together
from tfdist.errors import EnvironmentProblem, TfdistError, UsageError


def caught(work: Callable[[], Any]) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("it did not fail")


def sky_falls(*_: Any) -> Any:
    raise ValueError("the sky is falling\nall of it")


def in_python() -> None:
    sky_falls()


def in_a_py_function() -> None:
    @tf.function
    def step() -> tf.Tensor:
        with STRATEGY.scope():
            return tf.py_function(sky_falls, [1.0], tf.float32)

    step()


def in_a_kernel() -> None:
    @tf.function
    def step(i: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.Assert(i < 0, ["i is not negative:", i])]):
            return tf.identity(i)

    step(tf.constant(7))


def test_the_cause_of_an_error_of_ours_is_its_message() -> None:
    assert cause_of(UsageError("steps=0 must be 1 or more.")) == "steps=0 must be 1 or more."


def test_the_cause_of_a_python_error_is_its_kind_and_first_line() -> None:
    assert cause_of(caught(in_python)) == "ValueError: the sky is falling"


def test_a_want_of_memory_is_told() -> None:
    for error in (caught(lambda: tf.zeros([2**30, 2**20])), MemoryError()):
        assert cause_of(error).endswith("has run out of memory: take a smaller global_batch_size, or more processes")
    assert cause_of(tf.errors.ResourceExhaustedError(None, None, "a full queue")).endswith("a full queue")


@pytest.mark.parametrize("error", [AssertionError(), AssertionError("  \n ")])
def test_the_cause_of_an_error_without_text_is_its_kind(error: Exception) -> None:
    assert cause_of(error) == "AssertionError"


@pytest.mark.parametrize("code", [0, 3, None, "bye"])
def test_exit_is_named_as_such(code: Any) -> None:
    assert cause_of(SystemExit(code)) == f"SystemExit: the task's code called exit({code!r})"


def test_the_cause_of_a_python_error_inside_of_tensorflow_is_found() -> None:
    error = caught(in_a_py_function)
    assert type(error).__module__.startswith("tensorflow.")
    assert cause_of(error) == "ValueError: the sky is falling"


def test_the_cause_of_a_failing_kernel_is_its_first_telling_line() -> None:
    error = caught(in_a_kernel)
    assert str(error).startswith("Graph execution error")
    assert cause_of(error).startswith("InvalidArgumentError: assertion failed: [i is not negative:] [7]")


def test_the_account_of_a_python_error_is_its_traceback() -> None:
    text = account(caught(in_python))
    assert text.startswith("Traceback (most recent call last)")
    assert "in sky_falls" in text
    assert text.endswith("ValueError: the sky is falling\nall of it")


def test_the_account_of_a_failed_step_is_that_of_tensorflow() -> None:
    text = account(caught(in_a_py_function))
    assert not text.startswith("Traceback")
    assert text.startswith("InvalidArgumentError: ")
    assert "in sky_falls" in text
    assert "\n\n" not in text


def test_the_traceback_starts_in_the_code_of_the_task() -> None:
    # together() itself shortens; what it is given here is what it raised on.
    def through_ours() -> None:
        together(Alone(), "outer", in_python)

    text = str(caught(through_ours))
    assert text.splitlines()[1].startswith(f'  File "{__file__}"')
    assert "channel.py" not in text


def test_a_traceback_of_ours_alone_is_kept_whole() -> None:
    from tfdist.cluster.identity import identify

    error = caught(lambda: identify({"PMI_RANK": "x", "PMI_SIZE": "1"}))
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]
    assert "identity.py" in task_traceback(error)


def test_an_error_of_ours_is_found_under_what_tracing_makes_of_it() -> None:
    plain = UsageError("replica.loss was called twice")

    @tf.function
    def step() -> tf.Tensor:
        if tf.constant(True):
            raise plain
        return tf.constant(0)

    error = caught(step)
    assert isinstance(error, UsageError)
    assert unwrapped(error) is plain or str(unwrapped(error)) == "replica.loss was called twice"


def test_other_errors_are_left_alone() -> None:
    def one_after_the_other() -> None:
        try:
            raise EnvironmentProblem("first")
        except TfdistError:
            raise UsageError("second") from None

    error = caught(one_after_the_other)
    assert unwrapped(error) is error
    with contextlib.suppress(ValueError):
        in_python()
    assert isinstance(unwrapped(caught(in_python)), ValueError)


@pytest.mark.parametrize(
    "text",
    [
        "Connection reset by peer",
        "failed to connect to all addresses; last error: Connection refused",
        "Horovod has been shut down. This was caused by an exception on one of the ranks",
        "Collective ops is aborted by: something",
        "/job:worker/replica:0/task:1 heartbeat timed out",
    ],
)
def test_news_of_a_lost_peer_is_an_aftermath(text: str) -> None:
    assert is_aftermath(tf.errors.UnavailableError(None, None, f"Graph execution error:\n\n{text}"))
    assert not is_aftermath(OSError(text)), "the task's own connection"


def test_other_errors_are_no_aftermath() -> None:
    for work in (in_python, in_a_py_function, in_a_kernel):
        assert not is_aftermath(caught(work))


def test_a_python_error_in_a_step_is_no_aftermath_whatever_it_says() -> None:
    def lost_database(*_: Any) -> Any:
        raise OSError("Connection refused")

    error = caught(lambda: tf.function(lambda: tf.py_function(lost_database, [1.0], tf.float32))())
    assert "Connection refused" in str(error)
    assert not is_aftermath(error)
