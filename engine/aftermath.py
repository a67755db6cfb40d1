"""What rank 0 does once its engine has failed, in a thread of its own, since the one that steps may hang for ever.

The started ranks are killed, also those that stand still, which ends what waits for them in gloo; NCCL's work is
aborted; a step that computes without an end is interrupted. The step then raises, and its caller learns the reason.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import distributed_c10d

from engine.errors import EngineDeadError
from engine.log import logger

_LAST_WORDS_SECONDS = 1.0
_ABORT_SECONDS = 1.5
_EXIT_SECONDS = 8.0
_POLL_SECONDS = 0.05


class Aftermath:
    """Frees a step that hangs; `is_in_step` says whether one runs, `step_thread` which thread that is."""

    def __init__(self, kill_ranks: Callable[[], None], is_in_step: Callable[[], bool], step_thread: Callable[[], int]):
        self._kill_ranks, self._is_in_step, self._step_thread = kill_ranks, is_in_step, step_thread

    def begin(self, must_exit: bool) -> None:
        threading.Thread(target=self._run, args=(must_exit,), name="aftermath", daemon=True).start()

    def _run(self, must_exit: bool) -> None:
        self._wait(_LAST_WORDS_SECONDS)
        self._kill_ranks()
        if self._wait(_ABORT_SECONDS):
            abort_process_group()
        if self._wait(_ABORT_SECONDS):
            self._interrupt()
        if self._wait(_EXIT_SECONDS - _LAST_WORDS_SECONDS - 2 * _ABORT_SECONDS):
            logger.error("the step of rank 0 cannot be ended%s", "; exiting" if must_exit else "")
            if must_exit:
                os._exit(1)

    def _wait(self, seconds: float) -> bool:
        """Whether a step still runs after so long."""
        deadline = time.monotonic() + seconds
        while self._is_in_step() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self._is_in_step()

    def _interrupt(self) -> None:
        """Raises in the thread that steps, as soon as it runs Python again."""
        thread = ctypes.c_ulong(self._step_thread())
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(EngineDeadError))


def abort_process_group() -> None:
    """Ends NCCL's pending work, also that which waits for a rank that is no more. gloo has nothing of the kind.

    In a thread of its own: NCCL ends the work at once, but then waits for graphs that hold its collectives.
    """
    thread = threading.Thread(target=_abort, name="abort", daemon=True)
    thread.start()
    thread.join(_ABORT_SECONDS)


def _abort() -> None:
    if not _is_nccl():
        return
    try:
        distributed_c10d._abort_process_group()
    except (RuntimeError, ValueError, AttributeError, AssertionError) as error:  # not public, so it may be elsewhere
        logger.warning("NCCL could not be aborted: %s", error)


def end_process_group(has_failed: bool) -> None:
    """Frees the process group. After a failure without waiting for the other ranks, as NCCL's own end would."""
    if has_failed and _is_nccl():
        abort_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()


def _is_nccl() -> bool:
    return dist.is_initialized() and dist.get_backend() == dist.Backend.NCCL
