// What systems do in different ways.
#pragma once
#include <cstddef>

namespace edgespec {

// A library that this process has loaded, and those of ggml's that it depends on.
class LoadedLibrary {
    void * handle = nullptr;

  public:
    // The library that holds an address; false if there is none, or it cannot be opened.
    bool open(const void * within);
    // A function or a table of that name; null if it has none.
    void * find(const char * name) const;
};

// Processors that this process may use.
int usable_cores();

// Ask for huge pages, before the memory is written to: fewer faults while loading, fewer TLB misses in passes.
void advise_huge_pages(void * memory, size_t size);

}  // namespace edgespec
