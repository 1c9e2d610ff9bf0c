"""Make the wheels of EdgeSpec that install without a compiler: scripts/wheel

It writes three wheels to dist, to be installed together (pip install dist/*.whl):

- edgespec itself;
- edgespec_llama: llama.cpp's libraries for all processors of this architecture, and EdgeSpec's own kernels;
- llama_cpp_python: the Python files of llama-cpp-python, whose own distribution would compile llama.cpp.

Needs Python 3.11 or later, a C++ compiler, and the network for the pinned tools and sources; Linux. The same
inputs, among them the compiler, give the same bytes. --platform win_amd64 compiles for Windows by MinGW-w64
(on Debian and Ubuntu: apt-get install g++-mingw-w64-x86-64-posix). Other systems' libraries are made by
cibuildwheel, for which --sources puts the sources together.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from email import message_from_bytes
from pathlib import Path

from environment import SetupError, log_tail, make_venv
from setup import read_pins

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
PROJECT = ROOT / "wheels" / "edgespec_llama"
TOOLS = ROOT / "scripts" / "wheel-tools.txt"

BINDINGS = "llama-cpp-python"
SOURCES_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
"""Of llama-cpp-python's source distribution, which contains llama.cpp."""

# Of the bindings, so that they are preferred to the distribution of the same version.
LOCAL_VERSION = "edgespec"
NEEDED = ("CMakeLists.txt", "LICENSE", "cmake", "ggml", "include", "licenses", "src", "tools/mtmd", "vendor")
EPOCH = 1_577_836_800  # the time of all files in wheels: 2020-01-01, as Hatchling sets it
DATE = (2020, 1, 1, 0, 0, 0)
MAX_BYTES = 40 * 1000**2
WINDOWS = "win_amd64"


class WheelError(Exception):
    """A wheel cannot be made; the text says why."""


def main() -> int:
    options = parse_arguments()
    try:
        folder = WORK / options.platform if options.platform else WORK
        tools = Tools(WORK / "tools")
        tools.install()
        sources = unpacked(options.source_distribution or download(tools), WORK)
        if options.sources:
            put_together(sources, options.sources)
            print(options.sources)
            return 0
        options.into.mkdir(parents=True, exist_ok=True)
        if not options.pure:
            put_together(sources, folder / "sources")
            report(compile_libraries(tools, folder, options.into, options.variants, options.platform))
        report(bindings_wheel(sources, options.into))
        report(edgespec_wheel(tools, options.into))
    except (WheelError, SetupError, OSError, tarfile.TarError) as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("wheel: interrupted; run it again to continue.", file=sys.stderr)
        return 130
    return 0


def parse_arguments() -> argparse.Namespace:
    description = (__doc__ or "").rpartition("\n\n")[0]
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--into", type=Path, default=ROOT / "dist", metavar="FOLDER", help="for the wheels (default: dist)"
    )
    parser.add_argument(
        "--source-distribution",
        type=Path,
        metavar="FILE",
        help=f"of {BINDINGS}, the pinned version (default: it is downloaded)",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[],
        metavar="NAME",
        help="for tests, kernels for these kinds of processor alone, by ggml's names, such as haswell",
    )
    parser.add_argument(
        "--platform", choices=[WINDOWS], help="to compile for (default: this system and processor)"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--pure", action="store_true", help="make the two wheels without libraries only")
    only.add_argument(
        "--sources",
        type=Path,
        metavar="FOLDER",
        help="put together what the libraries are compiled of there, and make nothing",
    )
    return parser.parse_args()


def report(wheel: Path) -> None:
    size = wheel.stat().st_size
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    print(f"{wheel}\n  {size / 1000**2:.1f} MB, sha256 {digest}", flush=True)


class Tools:
    """An environment with the pinned tools."""

    def __init__(self, path: Path) -> None:
        self._path = path
        folder, suffix = ("Scripts", ".exe") if sys.platform == "win32" else ("bin", "")
        self._python = path / folder / f"python{suffix}"
        self.log = path / "output.log"

    def install(self) -> None:
        """Install the tools, unless they are there."""
        mark = self._path / "installed.txt"
        if mark.exists() and mark.read_bytes() == TOOLS.read_bytes():
            return
        print("wheel: installing tools", flush=True)
        make_venv(self._path, "--clear")
        self.run("pip", "install", "--no-deps", "--requirement", str(TOOLS))
        shutil.copy(TOOLS, mark)

    def run(self, module: str, *arguments: str, extra: Mapping[str, str] | None = None) -> None:
        """Run a module, with its output going to the log."""
        path = os.pathsep.join([str(self._python.parent), os.environ.get("PATH", "")])
        fixed = {
            "PATH": path,
            "SOURCE_DATE_EPOCH": str(EPOCH),
            "PYTHONHASHSEED": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        with self.log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                [str(self._python), "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, **fixed, **(extra or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            raise WheelError(f"{module} failed:\n{log_tail(self.log)}\nThe whole output is in {self.log}")


# Sources.


def download(tools: Tools) -> Path:
    """The source distribution of the bindings, from the package index."""
    version = read_pins(ROOT / "constraints.txt")[BINDINGS]
    folder = WORK / "downloads"
    if not list(folder.glob("*.tar.gz")):
        print(f"wheel: downloading {BINDINGS} {version}", flush=True)
        tools.run(
            *("pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"),
            *("--dest", str(folder), f"{BINDINGS}=={version}"),
        )
    return one_of(folder, "*.tar.gz")


def unpacked(distribution: Path, into: Path) -> Path:
    """The folder of an unpacked source distribution, which must be the pinned one."""
    digest = hashlib.sha256(distribution.read_bytes()).hexdigest()
    if digest != SOURCES_SHA256:
        raise WheelError(
            f"{distribution} is not the pinned source distribution of {BINDINGS}: its SHA-256 is {digest}.\n"
            f"Delete it, or change the pin in {Path(__file__).name} if the version has changed."
        )
    folder = into / distribution.name.removesuffix(".tar.gz")
    if not (folder / "PKG-INFO").exists():
        with tarfile.open(distribution) as archive:
            archive.extractall(into, filter="data")
    return folder


def put_together(sources: Path, into: Path) -> None:
    """Gather what the libraries are compiled of; files that are there already keep their times.

    Args:
        sources: the unpacked source distribution.
    """
    llama_cpp = sources / "vendor" / "llama.cpp"
    for name in NEEDED:
        update(llama_cpp / name, into / "llama.cpp" / name)
    update(PROJECT, into)
    update(ROOT / "edgespec", into / "edgespec")
    update(ROOT / "LICENSE", into / "LICENSE")
    update(llama_cpp / "LICENSE", into / "LICENSE-llama.cpp")
    for name in ("build_fixes.h", "llama_cpp.cmake"):
        update(ROOT / "scripts" / name, into / name)


def update(source: Path, target: Path) -> None:
    """Copy what has changed, so that an interrupted compilation continues."""
    if source.is_dir():
        for inner in sorted(source.iterdir()):
            if inner.name not in ("__pycache__", "compiled"):
                update(inner, target / inner.name)
    elif not target.exists() or target.read_bytes() != source.read_bytes():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


# Wheels.


def compile_libraries(
    tools: Tools, folder: Path, into: Path, variants: Sequence[str], platform: str | None
) -> Path:
    """Compile the libraries, and find out on which systems they work.

    Args:
        folder: holds the sources.
        variants: the kinds of processor; all, if empty.
        platform: `WINDOWS`; None for this one.
    """
    kinds = (
        f"for {' and '.join(variants)}"
        if variants
        else "for all processors, which takes 17 minutes of processor time"
    )
    print(f"wheel: compiling llama.cpp {kinds}. The output is in {tools.log}", flush=True)
    sources, raw = folder / "sources", folder / "compiled"
    shutil.rmtree(raw, ignore_errors=True)
    define = "cmake.define."
    toolchain = f"{define}CMAKE_TOOLCHAIN_FILE={sources / 'mingw.cmake'}"
    tools.run(
        *("pip", "wheel", "--verbose", "--no-deps", "--no-index", "--no-build-isolation"),
        # Named even if there are none: CMake keeps those of the build before.
        *("--config-settings", f"{define}EDGESPEC_VARIANTS={';'.join(variants)}"),
        *(("--config-settings", toolchain) if platform else ()),
        *("--wheel-dir", str(raw), str(sources)),
        extra={
            "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count()))
        },
    )
    compiled = one_of(raw, "*.whl")
    if platform:
        name, files = for_platform(compiled, platform)
    else:
        name, files = repaired(tools, compiled, folder / "repaired")
    wheel = write_wheel(into, name, files)
    size = wheel.stat().st_size
    if size > MAX_BYTES:
        raise WheelError(f"{wheel.name} has {size / 1000**2:.1f} MB, more than {MAX_BYTES / 1000**2:.0f} MB")
    return wheel


def repaired(tools: Tools, wheel: Path, folder: Path) -> tuple[str, dict[str, bytes]]:
    """The wheel with the lowest version of the C library that has every function used, and libgomp inside."""
    shutil.rmtree(folder, ignore_errors=True)
    tools.run("auditwheel", "repair", "--plat", "auto", "--wheel-dir", str(folder), str(wheel))
    audited = one_of(folder, "*.whl")
    return audited.name, read_wheel(audited)


def for_platform(wheel: Path, platform: str) -> tuple[str, dict[str, bytes]]:
    """The wheel with the name and the tag of another platform than that on which it was compiled."""
    *parts, compiled_on = wheel.stem.split("-")
    files = read_wheel(wheel)
    [tags] = [path for path in files if path.endswith(".dist-info/WHEEL")]
    files[tags] = files[tags].replace(f"-{compiled_on}\n".encode(), f"-{platform}\n".encode())
    return "-".join([*parts, platform]) + ".whl", files


def read_wheel(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def bindings_wheel(sources: Path, into: Path) -> Path:
    """Make a wheel of llama-cpp-python's Python files, which loads the libraries of edgespec_llama."""
    metadata = message_from_bytes((sources / "PKG-INFO").read_bytes())
    version = f"{metadata['Version']}+{LOCAL_VERSION}"
    metadata.replace_header("Version", version)
    metadata.replace_header("Summary", f"{metadata['Summary']}, for the libraries of edgespec-llama")
    metadata["Requires-Dist"] = f"edgespec-llama=={own_version()}"
    metadata["License-File"] = "LICENSE.md"
    info = f"llama_cpp_python-{version}.dist-info"
    tags = "Wheel-Version: 1.0\nGenerator: edgespec\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {
        str(path.relative_to(sources)): path.read_bytes()
        for path in (sources / "llama_cpp").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    files[f"{info}/METADATA"] = metadata.as_bytes()
    files[f"{info}/WHEEL"] = tags.encode()
    files[f"{info}/licenses/LICENSE.md"] = (sources / "LICENSE.md").read_bytes()
    return write_wheel(into, f"llama_cpp_python-{version}-py3-none-any.whl", files)


def edgespec_wheel(tools: Tools, into: Path) -> Path:
    folder = WORK / "edgespec"
    shutil.rmtree(folder, ignore_errors=True)
    tools.run("hatchling", "build", "-t", "wheel", "-d", str(folder))
    return Path(shutil.copy(one_of(folder, "*.whl"), into))


def write_wheel(into: Path, name: str, files: Mapping[str, bytes]) -> Path:
    """Write a wheel with a new list of its files; the same files give the same bytes."""
    [info] = {path.partition("/")[0] for path in files if path.partition("/")[0].endswith(".dist-info")}
    record = f"{info}/RECORD"
    kept = {path: content for path, content in files.items() if path != record and not path.endswith("/")}
    lines = [f"{path},sha256={url_digest(content)},{len(content)}" for path, content in sorted(kept.items())]
    kept[record] = ("\n".join([*lines, f"{record},,"]) + "\n").encode()
    with zipfile.ZipFile(into / name, "w") as archive:
        for path in sorted(kept, key=lambda path: (path.startswith(info), path)):
            entry = zipfile.ZipInfo(path, DATE)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, kept[path], zipfile.ZIP_DEFLATED, 9)
    return into / name


def url_digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def own_version() -> str:
    found = re.search(r'__version__ = "(.+)"', (ROOT / "edgespec" / "version.py").read_text("utf-8"))
    if found is None:
        raise WheelError("edgespec/version.py names no version")
    return found[1]


def one_of(folder: Path, pattern: str) -> Path:
    found: Sequence[Path] = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise WheelError(f"there should be one {pattern} in {folder}, and there are {len(found)}")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
