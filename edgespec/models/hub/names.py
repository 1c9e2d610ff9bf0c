"""Parses names: `org/repo[:quant]` on the Hub, and quantizations in file names.

Nothing here reads files or uses the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from edgespec.errors import UsageError

_PREFIXES = ("https://", "hf://", "huggingface.co/", "hf.co/")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_LINK = re.compile(
    rf"(?P<repo>{_REPO.pattern})/(?:blob|resolve|tree)/(?P<revision>[^/?#]+)(?:/(?P<path>[^?#]+\.gguf))?/?(?:[?#].*)?",
    re.ASCII | re.IGNORECASE,
)
_PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_LABEL = re.compile(
    r"(?:^|[-_./])(?P<label>(?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))(?=$|[-_./])",
    re.IGNORECASE,
)
# Files in model repositories that are not language models: vision encoders, importance matrices.
_NOT_A_MODEL = re.compile(r"(?:^|[-_./])(?:mmproj|imatrix)", re.IGNORECASE)

# Approximate bits per weight, by which the nearest quantization is found.
_BITS = {
    **{"IQ1_S": 1.6, "IQ1_M": 1.8, "TQ1_0": 1.7, "TQ2_0": 2.1, "IQ2_XXS": 2.1, "IQ2_XS": 2.3, "IQ2_S": 2.5},
    **{"IQ2_M": 2.7, "Q2_K_S": 2.8, "Q2_K": 2.9, "Q2_K_L": 3.0, "Q2_K_XL": 3.0, "IQ3_XXS": 3.1},
    **{"IQ3_XS": 3.3, "IQ3_S": 3.5, "Q3_K_S": 3.5, "IQ3_M": 3.6, "Q3_K_M": 3.9, "Q3_K_L": 4.2},
    **{"Q3_K_XL": 4.3, "IQ4_XS": 4.3, "MXFP4": 4.3, "MXFP4_MOE": 4.3, "NVFP4": 4.5, "IQ4_NL": 4.5},
    **{"Q4_0": 4.6, "Q4_K_S": 4.6, "Q4_K": 4.85, "Q4_K_M": 4.85, "Q4_K_L": 4.95, "Q4_K_XL": 4.9},
    **{"Q4_1": 5.0, "Q5_0": 5.55, "Q5_K_S": 5.55, "Q5_K": 5.7, "Q5_K_M": 5.7, "Q5_K_L": 5.8},
    **{"Q5_K_XL": 5.8, "Q5_1": 6.0, "Q6_K": 6.6, "Q6_K_L": 6.7, "Q6_K_XL": 6.9, "Q8_0": 8.5},
    **{"Q8_K_XL": 8.7, "BF16": 16.0, "F16": 16.1, "F32": 32.0},
}


@dataclass(frozen=True)
class HubName:
    """A model on the Hub: its repository, and what selects a file there (a quantization or a file name)."""

    repo: str
    pick: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}:{self.pick}" if self.pick else self.repo


@dataclass(frozen=True)
class ModelVariant:
    """One model in a repository: its files in order, their total size, and its quantization."""

    paths: tuple[str, ...]
    n_bytes: int  # 0 if the Hub gives no sizes
    label: str  # such as "Q4_K_M"; empty if the name has none

    @property
    def name(self) -> str:
        """The name of its first or only file, without folders."""
        return PurePosixPath(self.paths[0]).name


def parse_hub_name(text: str) -> HubName | None:
    """`org/repo[:pick]`, with or without the Hub's address before it; None if it is not such a name.

    Links to a file of the main revision are names, too.

    Raises:
        UsageError: it is a link to another revision.
    """
    rest = text.strip()
    for prefix in _PREFIXES:
        if rest.lower().startswith(prefix):
            rest = rest[len(prefix) :]
    repo, _, pick = rest.partition(":")
    if rest != text.strip() and (link := _LINK.fullmatch(rest)):
        if link["revision"] != "main":
            raise UsageError(f"{text} is not of the main revision.", "Only that is downloaded.")
        repo, pick = link["repo"], unquote(link["path"] or "")
    repo = repo.rstrip("/")
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        return None
    if not pick and repo.lower().endswith(".gguf") and "://" not in text:
        return None  # folder/model.gguf is a path
    return HubName(repo, pick.strip() or None)


def normal(label: str) -> str:
    """A quantization in its canonical form: capitals, underscores, F16 for FP16."""
    text = label.strip().upper().replace("-", "_").removeprefix("UD_")
    return {"FP16": "F16", "FP32": "F32"}.get(text, text)


def label_of(path: str) -> str:
    """The quantization in the name of a file or of its folder; empty if there is none."""
    stem = _PART.sub("", path.removesuffix(".gguf").removesuffix(".GGUF"))
    found = [match["label"] for match in _LABEL.finditer(stem)]
    return found[-1].upper() if found else ""


def is_known_label(label: str) -> bool:
    """Check that this is the name of a quantization."""
    return normal(label) in _BITS


def bits_of(label: str) -> float:
    """Estimate the bits a weight takes; 0 if unknown."""
    return _BITS.get(normal(label), 0.0)


def group_files(files: Iterable[tuple[str, int]]) -> tuple[ModelVariant, ...]:
    """The models among the files (path, bytes) of a repository; the parts of a split model are grouped.

    A split model with missing parts is left out.
    """
    groups: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for path, n_bytes in sorted(files):
        if not path.lower().endswith(".gguf") or _NOT_A_MODEL.search(path):
            continue
        stem = path[: -len(".gguf")]
        match = _PART.search(stem)
        key = (stem[: match.start()], int(match["count"])) if match else (stem, 1)
        groups.setdefault(key, []).append((path, n_bytes))
    return tuple(
        ModelVariant(tuple(path for path, _ in parts), sum(size for _, size in parts), label_of(parts[0][0]))
        for (_, count), parts in sorted(groups.items())
        if len(parts) == count
    )


@dataclass(frozen=True)
class FoundModel:
    """A model's first or only file, and notes about what was chosen."""

    path: Path
    notes: tuple[str, ...] = ()
