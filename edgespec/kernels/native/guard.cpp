// Calls of llama.cpp that fail where ggml would end the process: see guard.h.
#include "guard.h"
#include <cstdio>
#include <exception>
#include <stdexcept>

namespace {

thread_local int depth = 0;
thread_local bool stopped = false;  // by ggml_abort
void (*before)(const char *) = nullptr;

struct Guarded {
    Guarded() { depth++; }
    ~Guarded() { depth--; }
};

void copy(char * said, size_t size, const char * text) { snprintf(said, size, "%s", *text ? text : "no reason given"); }

template <typename Call> auto guarded(char * said, size_t size, Call call) -> decltype(call()) {
    said[0] = 0;
    const Guarded entered;
    try {
        return call();
    } catch (const std::exception & error) {
        copy(said, size, error.what());
    } catch (...) {
        copy(said, size, "an unknown exception");
    }
    return decltype(call())();  // of nothing, too
}

}  // namespace

extern "C" {

void edgespec_guard_enter(void) { depth++; }
void edgespec_guard_leave(void) { depth--; }

int edgespec_guard_stopped(void) {
    const bool found = stopped;
    stopped = false;
    return found;
}

int edgespec_guard_suspend(void) {
    const int entered = depth;
    depth = 0;
    return entered;
}

void edgespec_guard_resume(int entered) { depth = entered; }

void edgespec_on_abort(const char * message) {
    if (depth > 0) {
        stopped = true;
        throw std::runtime_error(message);
    }
    if (before) {
        before(message);
    } else {
        fprintf(stderr, "%s\n", message);
    }
}

void edgespec_abort_before(void (*callback)(const char *)) { before = callback; }

int32_t edgespec_guarded_batch(int32_t (*function)(void *, struct edgespec_batch), void * context,
                               const struct edgespec_batch * batch, char * said, size_t size) {
    return guarded(said, size, [&] { return function(context, *batch); });
}

void * edgespec_guarded(void * (*function)(void *), void * context, char * said, size_t size) {
    return guarded(said, size, [&] { return function(context); });
}

void edgespec_guarded_transfer(void (*function)(void *, void *, size_t, size_t), void * tensor, void * data, size_t offset,
                               size_t bytes, char * said, size_t size) {
    guarded(said, size, [&] { function(tensor, data, offset, bytes); });
}
}
