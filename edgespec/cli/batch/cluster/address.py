"""The value of `--ray`: a cluster's address, or this machine alone as the cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgespec.errors import UsageError

_MAX_ENGINES = 64
_FORMS = "Write the HOST:PORT of a cluster's head, auto, or local."


@dataclass(frozen=True)
class RayAddress:
    """The address of a Ray cluster.

    Attributes:
        address: as Ray takes it: HOST:PORT, or "auto" for the one that this machine belongs to. Empty for one
            that is started on this machine, for this run only.
        engines: how many engines to load on each node.
    """

    address: str = ""
    engines: int = 1

    @classmethod
    def parse(cls, text: str) -> RayAddress:
        """The address that people write as "local", "local:2", "auto" or "10.0.0.1:6379".

        Raises:
            UsageError: it is something else.
        """
        text = text.strip()
        if text == "auto":
            return cls("auto")
        if local := re.fullmatch(r"local(?::(\d{1,9}))?", text, re.ASCII):
            engines = int(local[1] or 1)
            if not 1 <= engines <= _MAX_ENGINES:
                raise UsageError(f"--ray is '{text}'.", f"local takes 1 to {_MAX_ENGINES} engines.")
            return cls(engines=engines)
        if text.startswith("ray://"):
            raise UsageError(
                f"--ray is '{text}', and Ray's client protocol is not supported.",
                "Run this on a machine of the cluster, and give the HOST:PORT of its head.",
            )
        found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/]+):(\d{1,5})", text, re.ASCII)
        if found is None or not 1 <= int(found[2]) <= 65535:
            raise UsageError(f"--ray is '{text}'.", _FORMS)
        return cls(text)

    @property
    def is_local(self) -> bool:
        """True if the cluster is started here."""
        return not self.address

    @property
    def host_and_port(self) -> tuple[str, int] | None:
        """The address at which its head listens; None if that is not known beforehand."""
        if self.address in ("", "auto"):
            return None
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)
