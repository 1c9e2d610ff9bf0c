"""llama.cpp's libraries for EdgeSpec, compiled for all processors of an architecture.

EdgeSpec loads them in place of those that were compiled on the machine.
"""

from pathlib import Path

LIBRARIES = Path(__file__).parent / "lib"

# The version of llama-cpp-python, whose structures of llama.cpp these libraries have.
LLAMA_CPP_PYTHON = "0.3.36"
