/* Calls that need no interpreter lock, because programs make them before and after everything else: the
   stack of current contexts and the capture mode, each of the calling thread.

   A context is one of these objects. It is never freed, so that the handle of a destroyed context can be
   recognised. */
#include <stdlib.h>

#include "driver.h"

enum { MAX_CURRENT = 256, MAX_MODE = 2 };

typedef struct Context {
    struct Context* next;
    int alive;
} Context;

static Context* contexts;
static __thread Context* stack[MAX_CURRENT];
static __thread int depth;
static __thread int capture_mode; /* 0: global, 1: thread local, 2: relaxed */

static int is_context(const void* handle) {
    for (const Context* each = __atomic_load_n(&contexts, __ATOMIC_ACQUIRE); each; each = each->next)
        if (each == handle) return __atomic_load_n(&each->alive, __ATOMIC_RELAXED);
    return 0;
}

int driver_push_current(void* context) {
    if (!context || !is_context(context)) return INVALID_CONTEXT;
    if (depth == MAX_CURRENT) return OUT_OF_MEMORY;
    stack[depth++] = context;
    return SUCCESS;
}

int driver_pop_current(void** context) {
    if (!depth) return INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return SUCCESS;
}

int driver_set_current(void* context) {
    if (context && !is_context(context)) return INVALID_CONTEXT;
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return SUCCESS;
}

int driver_get_current(void** context) {
    if (!driver_initialized) return NOT_INITIALIZED;
    if (!context) return INVALID_VALUE;
    *context = depth ? stack[depth - 1] : NULL;
    return SUCCESS;
}

int driver_exchange_capture_mode(int* mode) {
    if (!mode || *mode < 0 || *mode > MAX_MODE) return INVALID_VALUE;
    int old = capture_mode;
    capture_mode = *mode;
    *mode = old;
    return SUCCESS;
}

/* For Python. Its interpreter lock is held during these calls, so that only one thread makes them. */

EXPORT void* preheat_driver_new_context(void) {
    Context* made = calloc(1, sizeof *made);
    if (!made) return NULL;
    made->alive = 1;
    made->next = contexts;
    __atomic_store_n(&contexts, made, __ATOMIC_RELEASE);
    return made;
}

EXPORT void preheat_driver_context_alive(void* context, int alive) {
    __atomic_store_n(&((Context*)context)->alive, alive, __ATOMIC_RELAXED);
}

EXPORT void* preheat_driver_current(void) { return depth ? stack[depth - 1] : NULL; }
EXPORT int preheat_driver_capture_mode(void) { return capture_mode; }
EXPORT void preheat_driver_push(void* context) { driver_push_current(context); }
EXPORT void preheat_driver_pop(void) { driver_pop_current(NULL); }
