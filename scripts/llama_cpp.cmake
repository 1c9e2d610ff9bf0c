# Read behind the project() of llama-cpp-python, and by the project of the wheel; changes how llama.cpp is compiled, not what.

# llama-cpp-python forces llama.cpp's library for its own programs on and installs it. Nothing here loads that library, and
# it takes over half of the time to compile. A plain variable hides the cached one that is forced.
set(LLAMA_BUILD_COMMON OFF)

# Collecting garbage takes GCC a tenth of the time that it compiles for. Half a gigabyte has room for nearly all files.
add_compile_options("$<$<COMPILE_LANG_AND_ID:CXX,GNU>:SHELL:--param ggc-min-heapsize=524288>")

# Most of the time that is left goes into reading the same headers and instantiating the same templates again, and into
# optimizing what runs once per model. So files are compiled several at a time, and the latter with -O1. Files that are not
# named stay as they are.
function(edgespec_unit target name flags)
    if(NOT TARGET ${target})
        return()
    endif()
    get_target_property(folder ${target} SOURCE_DIR)
    get_target_property(sources ${target} SOURCES)
    set(text "")
    foreach(file ${ARGN})
        if(NOT file IN_LIST sources)
            message(FATAL_ERROR "${target} has no ${file}")
        endif()
        list(REMOVE_ITEM sources ${file})
        cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY ${folder} OUTPUT_VARIABLE path)
        string(APPEND text "#include \"${path}\"\n")
    endforeach()
    set(unit ${CMAKE_BINARY_DIR}/units/${target}-${name}.cpp)
    file(CONFIGURE OUTPUT ${unit} CONTENT "${text}" @ONLY)
    set_source_files_properties(${unit} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS "${flags}")
    set_target_properties(${target} PROPERTIES SOURCES "${sources};${unit}")
endfunction()

function(edgespec_units)
    if(MSVC OR NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" OR NOT TARGET llama)
        return()
    endif()
    # What loads models and reads texts.
    edgespec_unit(llama load "-O1" llama-model-loader.cpp llama-model-saver.cpp llama-arch.cpp llama-hparams.cpp
        llama-mmap.cpp llama-impl.cpp llama-io.cpp llama-cparams.cpp llama-quant.cpp llama-adapter.cpp llama.cpp)
    edgespec_unit(llama text "-O1" llama-vocab.cpp unicode.cpp unicode-data.cpp)
    edgespec_unit(llama answer "-O1" llama-grammar.cpp llama-chat.cpp llama-sampler.cpp)
    edgespec_unit(llama model "-O1" llama-model.cpp)
    # What runs in every pass.
    edgespec_unit(llama pass "-O3" llama-context.cpp llama-graph.cpp llama-batch.cpp llama-memory.cpp
        llama-memory-recurrent.cpp)
    edgespec_unit(llama cache "-O3" llama-kv-cache.cpp llama-kv-cache-iswa.cpp llama-kv-cache-dsa.cpp
        llama-kv-cache-dsa-iswa.cpp llama-kv-cache-msa.cpp llama-kv-cache-dsv4.cpp llama-memory-hybrid.cpp
        llama-memory-hybrid-iswa.cpp llama-memory-hybrid-idx.cpp)
    edgespec_models()
    edgespec_unit(ggml-base files "-O1" gguf.cpp ggml-backend-meta.cpp ggml-opt.cpp ggml-threading.cpp ggml.cpp)
    edgespec_unit(ggml backends "-O1" ggml-backend-reg.cpp ggml-backend-dl.cpp)
    foreach(cpu ggml-cpu ${EDGESPEC_CPUS}) # the latter in a build for several kinds of processor
        edgespec_unit(${cpu} backend "" ggml-cpu/ggml-cpu.cpp ggml-cpu/traits.cpp ggml-cpu/hbm.cpp ggml-cpu/amx/amx.cpp)
        edgespec_unit(${cpu} values "" ggml-cpu/binary-ops.cpp ggml-cpu/unary-ops.cpp ggml-cpu/vec.cpp)
    endforeach()
    edgespec_with(-O1 ggml-rpc ggml-rpc.cpp transport.cpp)
    edgespec_images()
    # Weights are quantized once, and decoded a row at a time.
    edgespec_with(-O2 ggml-base ggml-quants.c)
    if(TARGET vendor-hash)
        set_target_properties(vendor-hash PROPERTIES EXCLUDE_FROM_ALL ON)  # compiled only for what needs it
    endif()
endfunction()

# Files for which the compiler is to take less trouble.
function(edgespec_with level target)
    if(TARGET ${target})
        get_target_property(folder ${target} SOURCE_DIR)
        list(TRANSFORM ARGN PREPEND ${folder}/ OUTPUT_VARIABLE paths)
        set_source_files_properties(${paths} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS "${level}")
    endif()
endfunction()

# The architectures, which describe graphs: few enough units to spare time, enough for all cores.
function(edgespec_models)
    get_target_property(files llama SOURCES)
    list(FILTER files INCLUDE REGEX "(^|/)models/[^/]*$")
    list(LENGTH files count)
    math(EXPR size "(${count} + 4) / 5")
    foreach(number RANGE 4)
        math(EXPR start "${number} * ${size}")
        list(SUBLIST files ${start} ${size} some)
        edgespec_unit(llama models-${number} "-O1" ${some})
    endforeach()
    set_target_properties(llama PROPERTIES UNITY_BUILD OFF)
endfunction()

# What reads images: it describes graphs, too, and clip.cpp reads a file's header, so little of it need be fast.
function(edgespec_images)
    if(NOT TARGET mtmd)
        return()
    endif()
    get_target_property(files mtmd SOURCES)
    list(FILTER files INCLUDE REGEX "^models/.*[.]cpp$")
    edgespec_unit(mtmd models "-O1" ${files})
    edgespec_unit(mtmd chunks "-O1" mtmd.cpp mtmd-audio.cpp)
    edgespec_with(-O0 mtmd clip.cpp)
    edgespec_with(-O1 mtmd mtmd-helper.cpp mtmd-helper-gen.cpp)
    edgespec_with(-O2 mtmd mtmd-image.cpp)
endfunction()

cmake_language(DEFER CALL edgespec_units)
