"""Making a drafter from a target: requantizing it.

llama.cpp's own quantizer does the work, in a child process: it holds the interpreter lock for minutes, aborts
on some damaged files, and logs to stderr. A child can be interrupted, can fail, and can be kept quiet.

The result is written next to `output` under a temporary name and loaded once to see that it works. Only then
is it renamed, so `output` is never half a model.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from edgespec.base.installation import install_command
from edgespec.errors import BackendError, EdgeSpecError, ModelFileError, OutputError, UsageError
from edgespec.files.writing import atomic_large_write, followed, writing_to
from edgespec.processes.children import python_command, run
from edgespec.processes.exit_status import describe_exit

# Every type that llama.cpp quantizes to without an importance matrix, most accurate first.
QUANTIZATIONS = (
    *("bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s"),
    *("q4_1", "q4_0", "iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "iq3_m", "iq3_s", "q2_k"),
)


def make_drafter(
    target: Path,
    output: Path,
    *,
    quantization: str = "q4_0",
    threads: int | None = None,
) -> Path:
    """Write a drafter made from `target` to `output`, replacing an existing file.

    Vocabulary and chat template are the target's, so the two always pair.

    Args:
        target: a GGUF model; of a split model, its first file.
        output: where the drafter goes; one file, even when the target is split.
        quantization: one of QUANTIZATIONS.
        threads: to quantize with; None means one for each processor.

    Returns:
        `output`.

    Raises:
        UsageError: an unknown quantization, or the drafter would overwrite its target.
        ModelFileError: `target` is no GGUF model.
    """
    _check_request(target, output, quantization, threads)
    partial = followed(output).with_name(f"{followed(output).name}.partial")
    request = {
        "target": os.fspath(target),
        "partial": os.fspath(partial),
        "ftype": f"LLAMA_FTYPE_MOSTLY_{quantization.upper()}",
        "threads": threads or 0,
    }
    # Opened here because llama.cpp does not say why it could not open a file.
    with (
        writing_to(output, "Choose an existing folder that you can write to."),
        atomic_large_write(output, partial),
    ):
        failure = _run_worker(request)
        if failure:
            raise _explain(failure, target, output, quantization)
    return output


def _check_request(target: Path, output: Path, quantization: str, threads: int | None) -> None:
    if quantization not in QUANTIZATIONS:
        raise UsageError(
            f"There is no quantization '{quantization}'.",
            f"Choose one of {', '.join(QUANTIZATIONS)}.",
        )
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be at least 1, not {threads}.")
    if not target.is_file():
        raise ModelFileError(f"There is no model file {target}.", "Give the path of a GGUF file.")
    refuse_to_overwrite(target, output)


def refuse_to_overwrite(source: Path, output: Path) -> None:
    """Raise UsageError if a drafter would take the place of a file that it is made from."""
    if output.exists() and output.samefile(source):
        raise UsageError(
            f"The drafter would overwrite {source}, from which it is made.", "Choose another output."
        )


def _run_worker(request: dict[str, Any]) -> dict[str, Any]:
    """Run the child. Returns what went wrong; empty if nothing did."""
    child = run(
        python_command("edgespec.llama.quantize_worker", json.dumps(request)),
        with_parent=True,
        # On an abort, llama.cpp would otherwise start a debugger to print a backtrace.
        variables={"GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        errors="replace",
    )
    if child.returncode == 0:
        failure: dict[str, Any] = json.loads(child.stdout)
        return failure
    last = (child.stderr.strip().splitlines() or ["no reason given"])[-1]
    return {"stage": "crash", "reason": f"its process {describe_exit(child.returncode)}: {last}"}


def _explain(failure: dict[str, Any], target: Path, output: Path, quantization: str) -> EdgeSpecError:
    reason = failure.get("reason", "")
    match failure["stage"]:
        case "import":
            return BackendError(f"llama.cpp cannot be loaded: {reason}", f"Run: {install_command()}")
        case "read":
            return ModelFileError(
                f"{target} cannot be read as a GGUF model: {reason}",
                "The file may be damaged, or not a model. Download it again.",
            )
        case "write":
            free = shutil.disk_usage(output.parent).free
            return OutputError(
                f"{output} could not be written completely.",
                f"Is the disk full? {free:,} bytes are free there.",
            )
        case _:
            return BackendError(
                f"llama.cpp could not make a drafter ({quantization}) from {target.name}: {reason}",
                "Another quantization may work, for example q8_0.",
            )
