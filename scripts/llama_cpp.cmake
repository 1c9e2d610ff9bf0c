# Read behind the project() of llama-cpp-python, which forces llama.cpp's library for its own programs on
# and installs it. Nothing here loads that library, and it takes over half of the time to compile. A plain
# variable hides the cached one that is forced.
set(LLAMA_BUILD_COMMON OFF)
