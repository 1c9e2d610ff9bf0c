"""Power saving and other programs' load, which make a machine slower than it could be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from edgespec.machine.cgroups import ROOT, read_text


@dataclass(frozen=True)
class Power:
    """Settings that save power.

    Attributes:
        on_battery: None without a battery.
        charge: of the battery, 0 to 1.
        governor: Linux's frequency governor of the first core, such as "powersave"; empty if unknown.
        scaling_driver: its driver; with "intel_pstate" and "amd-pstate-epp", "powersave" is the default.
        profile: of the platform, such as "low-power"; empty if unknown.
        lid_closed: None without a lid.
    """

    on_battery: bool | None = None
    charge: float | None = None
    governor: str = ""
    scaling_driver: str = ""
    profile: str = ""
    lid_closed: bool | None = None

    @property
    def saving(self) -> str:
        """The reason why the processor may run slower than it can, as a clause; empty if nothing says so."""
        if self.profile in ("low-power", "quiet"):
            return f"the power profile is {self.profile}"
        # These drivers choose the frequency themselves, and call that powersave.
        if self.governor == "powersave" and self.scaling_driver not in ("intel_pstate", "amd-pstate-epp"):
            return "the processor's governor is powersave"
        return ""


def probe_power(root: Path = ROOT) -> Power:
    """The power settings of this machine; what is unknown has its default."""
    on_battery = charge = None
    try:
        battery = psutil.sensors_battery() if root == ROOT else None
    except (AttributeError, OSError, RuntimeError, ValueError):
        battery = None  # not available on this system
    if battery is not None:
        on_battery, charge = battery.power_plugged is False, round(battery.percent / 100, 3)
    clock = root / "sys/devices/system/cpu/cpu0/cpufreq"
    return Power(
        on_battery=on_battery,
        charge=charge,
        governor=read_text(clock / "scaling_governor"),
        scaling_driver=read_text(clock / "scaling_driver"),
        profile=read_text(root / "sys/firmware/acpi/platform_profile"),
        lid_closed=_lid_closed(root),
    )


def busy_share(seconds: float = 0.25) -> float | None:
    """The share of all cores' time used by programs during the next `seconds`, 0 to 1; None if unknown."""
    try:
        return round(float(psutil.cpu_percent(interval=seconds)) / 100, 3)
    except (OSError, RuntimeError):
        return None


def _lid_closed(root: Path) -> bool | None:
    try:
        states = [read_text(path) for path in (root / "proc/acpi/button/lid").glob("*/state")]
    except OSError:
        return None
    return any("closed" in state for state in states) if states else None
