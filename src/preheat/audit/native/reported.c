/* Loads that the driver reports: NVIDIA's through CUPTI (cupti.c), and the CPU driver of preheat itself.

   The functions of loads.c then report nothing. They remember who called, and still refuse. */
#define _GNU_SOURCE
#include "audit.h"

#include <pthread.h>
#include <string.h>

int loads_reported;

/* A load that is under way in a thread. It is allocated at the first load of the thread, because every
   thread of every program would have to make room for it otherwise, and freed when the thread ends. */
typedef struct {
    int depth;
    Image image;
    Load load;
    Scratch scratch;
} Current;
static _Thread_local Current* current;
static pthread_key_t ends_with_thread;

static void free_current(void* memory) {
    current = NULL;
    unmap_memory(memory, sizeof(Current));
}

static Current* current_load(void) {
    if (!current && (current = map_memory(sizeof *current)))
        pthread_setspecific(ends_with_thread, current);
    return current;
}

int prepare_loads(void) {
    if (pthread_key_create(&ends_with_thread, free_current))
        return 0;
    prepare_backtraces();
    prepare_device();
    return 1;
}

/* Find the library that made the call: by the wrapped function, or by the stack where CUDA itself called. */
static void find_caller(char* out, size_t size) {
    out[0] = 0;
    if (load_caller)
        calling_library(load_caller, out, size);
    if (!out[0] || is_part_of_cuda(out))
        calling_object(out, size);
}

static void describe_linked(Image* image) {
    memset(image, 0, sizeof *image);
    image->kind = "linked";
}

void begin_load(const char* call, const char* by, const void* address, size_t size, int input,
                const char* path) {
    if (!current_load())
        return;
    if (current->depth++)
        return; /* The outer call is the one that the program made. */
    Scratch* scratch = &current->scratch;
    if (path)
        describe_file(&current->image, path, input);
    else if (strcmp(call, "cuLinkComplete"))
        describe_image(&current->image, address, size, input, 1);
    else
        describe_linked(&current->image);
    find_caller(scratch->object, sizeof scratch->object);
    audit_site(scratch->site, sizeof scratch->site);
    current->load = (Load){call, by, audit_now(), 0, scratch->object};
}

void end_load(int result) {
    if (!current || !current->depth || --current->depth)
        return;
    current->load.result = result;
    report_load(&current->scratch, &current->image, &current->load);
    if (!result)
        report_device();
}

int is_loading(void) { return current && current->depth > 0; }

/* The CPU driver. It has no modules that it does not report: the CUDA runtime does not work with it. */

/* Called when it starts. Return 0 if there is no audit, or one that wants no loads. */
EXPORT int preheat_audit_cpu_driver(void) {
    char buffer[512];
    Line line;
    if (!audit_directory[0] || !audit_reports || !prepare_loads())
        return 0;
    loads_reported = 1;
    line_begin(&line, buffer, sizeof buffer, "cpu_driver", audit_now());
    line_write(&line);
    return 1;
}

/* Called before it loads an image or a file. `input` is a CUjitInputType, or -1. */
EXPORT void preheat_audit_load_begins(const char* call, const void* image, size_t size, int input,
                                      const char* path) {
    begin_load(call, "cpu driver", image, size, input, path);
}

EXPORT void preheat_audit_load_ends(int result) { end_load(result); }
