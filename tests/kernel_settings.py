"""The values of EDGESPEC_KERNELS that are worth a test run of their own on this processor, a line each.

    python -m tests.kernel_settings

Where a processor has a single layout besides the plain one, the automatic choice tests that layout already.
"""

from __future__ import annotations

from edgespec.kernels.layouts import available_layouts
from edgespec.kernels.report_store import ensure_report, layouts_in_use
from edgespec.kernels.setting import PLAIN, setting_of
from edgespec.llama.runtime.backend import start_backend


def settings() -> list[str]:
    """The plain layout, and each of several others alone; none if the processor has no other."""
    start_backend()
    # A layout that crashes here is not run.
    working = layouts_in_use([layout.name for layout in available_layouts()], ensure_report())
    others = [setting for layout in working if (setting := setting_of(layout))]
    return [PLAIN, *(others if len(others) > 1 else [])] if others else []


if __name__ == "__main__":
    print("\n".join(settings()))
