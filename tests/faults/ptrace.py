"""Stops a child of this process at each of its system calls, so that it can be killed exactly there. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal

_TRACEME, _SYSCALL, _SETOPTIONS = 0, 24, 0x4200
_MARK_SYSCALLS, _END_WITH_TRACER = 1, 0x100000
_AT_SYSCALL = signal.SIGTRAP | 0x80

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def be_traced() -> None:
    """Called by the child: its calling thread is stopped at each system call from here on, when the parent asks."""
    _call(_TRACEME, 0)
    signal.raise_signal(signal.SIGSTOP)


def run_to(pid: int, boundary: int | None) -> tuple[int, int]:
    """Let a child that has called `be_traced` go on, and kill it at a boundary; returns those passed, and its status.

    Each system call has two boundaries: before and after it. Without `boundary`, it runs to its end.
    """
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        return 0, status
    _call(_SETOPTIONS, pid, _MARK_SYSCALLS | _END_WITH_TRACER)
    passed, forwarded = 0, 0
    while True:
        _call(_SYSCALL, pid, forwarded)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            return passed, status
        at_syscall = os.WSTOPSIG(status) == _AT_SYSCALL
        forwarded = 0 if at_syscall else os.WSTOPSIG(status)
        passed += at_syscall
        if passed == boundary:
            os.kill(pid, signal.SIGKILL)
            return passed, os.waitpid(pid, 0)[1]


def _call(request: int, pid: int, data: int = 0) -> None:
    if _libc.ptrace(request, pid, None, ctypes.c_void_p(data)) == -1:
        raise OSError(ctypes.get_errno(), f"ptrace: {os.strerror(ctypes.get_errno())}")
