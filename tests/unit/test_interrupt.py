"""Ctrl-C and other signals, while an answer is written."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

import pytest

from edgespec.cli.interrupt import cancelling
from edgespec.speculation.drafters.base import NoDrafter
from tests.unit.fakes import fake_engine
from tests.waiting import PATIENCE_S, wait_until


class Witness:
    """Remembers which threads called for an end."""

    def __init__(self) -> None:
        self.callers: list[threading.Thread] = []

    def cancel(self) -> None:
        self.callers.append(threading.current_thread())


@pytest.mark.skipif(sys.platform == "win32", reason="a mutex of POSIX")
def test_ctrl_c_cancels_during_a_long_c_call() -> None:
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)

    class Unlocking(Witness):
        def cancel(self) -> None:
            super().cancel()
            if len(self.callers) == 1:
                libc.pthread_mutex_unlock(mutex)

    witness = Unlocking()
    hung = threading.Timer(PATIENCE_S, libc.pthread_mutex_unlock, (mutex,))
    hung.start()
    with cancelling(witness) as interruption:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        libc.pthread_mutex_lock(mutex)  # no signal ends this: it returns when the answer is cancelled
        timer.join()
        assert hung.is_alive()
        hung.cancel()
        wait_until(lambda: any(caller is not threading.main_thread() for caller in witness.callers))
    assert interruption.signal == signal.SIGINT
    assert interruption.exit_code == 130


def test_a_second_ctrl_c_ends_more_than_the_answer() -> None:
    witness = Witness()
    with cancelling(witness):
        signal.raise_signal(signal.SIGINT)
        assert witness.callers
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_afterwards_signals_do_what_they_did() -> None:
    earlier = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with cancelling(Witness(), signal.SIGTERM):
        assert signal.getsignal(signal.SIGTERM) != earlier[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == earlier
    assert signal.set_wakeup_fd(-1) == -1


def test_outside_the_main_thread_nothing_is_touched() -> None:
    seen: list[object] = []

    def work() -> None:
        with cancelling(Witness()) as interruption:
            seen.extend([bool(interruption), signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, signal.default_int_handler]


def test_a_signal_that_comes_before_an_answer_is_asked_for_ends_it() -> None:
    engine, _ = fake_engine(NoDrafter(), 5, never_ends=True)
    with engine:
        with cancelling(engine) as interruption:
            signal.raise_signal(signal.SIGINT)
            (last,) = interruption.reach(engine.stream([1]), engine)
        assert last.generation is not None
        assert last.generation.finish_reason == "cancelled"
