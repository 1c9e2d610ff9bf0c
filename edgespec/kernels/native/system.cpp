// What systems do in different ways: see system.h.
#include "system.h"
#include <cstdint>
#include <thread>

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace edgespec {

#if defined(_WIN32)

bool LoadedLibrary::open(const void * within) {
    constexpr DWORD AS_IT_IS = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    return GetModuleHandleExA(AS_IT_IS, (LPCSTR) within, (HMODULE *) &handle);
}

void * LoadedLibrary::find(const char * name) const {
    // Windows looks for a symbol in one library at a time.
    const HMODULE base = GetModuleHandleA("ggml-base.dll");
    void * found = (void *) GetProcAddress((HMODULE) handle, name);
    return found || !base ? found : (void *) GetProcAddress(base, name);
}

#else

bool LoadedLibrary::open(const void * within) {
    Dl_info info;
    handle = dladdr(within, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
    return handle;
}

void * LoadedLibrary::find(const char * name) const { return dlsym(handle, name); }

#endif

int usable_cores() {
#ifdef __linux__
    cpu_set_t allowed;
    if (!sched_getaffinity(0, sizeof allowed, &allowed)) return CPU_COUNT(&allowed);
#endif
    const unsigned cores = std::thread::hardware_concurrency();
    return cores < 1 ? 1 : (int) cores;
}

void advise_huge_pages(void * memory, size_t size) {
#ifdef MADV_HUGEPAGE
    const size_t page = (size_t) sysconf(_SC_PAGESIZE);
    const size_t lead = (page - (uintptr_t) memory % page) % page;
    if (size > lead) madvise((char *) memory + lead, (size - lead) / page * page, MADV_HUGEPAGE);
#else
    (void) memory;
    (void) size;
#endif
}

}  // namespace edgespec
