/* Calls of llama.cpp that fail where ggml would end the process.
 *
 * When a graphics card fails, its backend throws an exception (Vulkan) or calls ggml_abort (CUDA and others), and nothing in
 * llama.cpp catches either. Within a guarded call, ggml_abort throws as well, and the call returns with what was said.
 * What the call was working on is then in no known state: it may be freed if memory ran out, and must not even be
 * freed if a device is gone.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* As llama_batch, which is passed by value. */
struct edgespec_batch {
    int32_t rows;
    void * pointers[6];
};

/* A thread may enter several times. Within, ggml_abort throws std::runtime_error; llama.cpp itself catches that where it
 * loads a model and sets up a context. */
void edgespec_guard_enter(void);
void edgespec_guard_leave(void);
/* Whether ggml_abort has thrown in this thread since the last question. */
int edgespec_guard_stopped(void);
/* Leaves them all for as long as a callback runs that no exception may pass, and enters them again. */
int edgespec_guard_suspend(void);
void edgespec_guard_resume(int entered);

/* ggml's callback for ggml_abort, and the one that was there before. */
void edgespec_on_abort(const char * message);
void edgespec_abort_before(void (*callback)(const char *));

/* Calls llama_decode, llama_encode or another function of this kind. `said` is empty if it has returned. */
int32_t edgespec_guarded_batch(int32_t (*function)(void *, struct edgespec_batch), void * context,
                               const struct edgespec_batch * batch, char * said, size_t size);
/* Calls a function that takes a context. */
void * edgespec_guarded(void * (*function)(void *), void * context, char * said, size_t size);
/* Calls ggml_backend_tensor_get or ggml_backend_tensor_set. */
void edgespec_guarded_transfer(void (*function)(void *, void *, size_t, size_t), void * tensor, void * data, size_t offset,
                               size_t bytes, char * said, size_t size);

#ifdef __cplusplus
}
#endif
