"""The end of a child process, in words."""

from __future__ import annotations

import signal
import sys

if sys.platform == "win32":
    # Exit codes of crashes; the first is that of C's abort.
    _FAULTS = {
        3: "abort",
        0xC0000005: "access violation",
        0xC000001D: "illegal instruction",
        0xC0000094: "arithmetic fault",
        0xC00000FD: "stack overflow",
        0xC0000374: "heap corruption",
        0xC0000409: "abort",
    }
    _OUT_OF_TIME, _CONTROL_C = 1816, 0xC000013A
else:
    _FAULTS = {
        -signal.SIGILL: "illegal instruction",
        -signal.SIGSEGV: "segmentation fault",
        -signal.SIGBUS: "bus error",
        -signal.SIGFPE: "arithmetic fault",
        -signal.SIGABRT: "abort",
    }
    _OUT_OF_TIME, _CONTROL_C = -signal.SIGXCPU, None


def describe_exit(returncode: int) -> str:
    """Describe the end of a failed process: "crashed (segmentation fault)", "was ended by SIGTERM" ..."""
    if fault := crash_fault(returncode):
        return f"crashed ({fault})"
    if by := ending_signal(returncode):
        return f"was ended by {by}"
    # Windows' own statuses are known by their hexadecimal digits.
    return f"ended with status {returncode if returncode < 1 << 16 else f'0x{returncode:X}'}"


def crash_fault(returncode: int | None) -> str:
    """The fault that ended a process, such as "segmentation fault"; empty if there was none."""
    return "" if returncode is None else _FAULTS.get(returncode, "")


def ran_out_of_time(returncode: int | None) -> bool:
    """True if the system ended a process because it took more processor time than it may."""
    return returncode == _OUT_OF_TIME


def ending_signal(returncode: int | None) -> str:
    """The signal that ended a process other than by a fault, such as "SIGKILL"; empty if there was none."""
    if returncode is None or crash_fault(returncode):
        return ""
    return "Ctrl-C" if returncode == _CONTROL_C else signal_name(returncode)


def signal_name(returncode: int) -> str:
    """The signal that ended a process, such as "SIGSEGV"; empty if none did."""
    if returncode >= 0:
        return ""
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
