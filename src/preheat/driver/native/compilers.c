/* Compilers in the process: their machine code gets the PTX of the same program as a section.

   The emulator executes PTX alone. NVRTC and nvJitLink give out machine code, which the program may keep
   in a cache and load in another process. So the PTX travels in the code, in a section
   (section.c): NVRTC has the PTX of each program. A link has the PTX of its inputs, and link-time
   optimisation a second link, whose result is PTX.

   Libraries find these functions by `dlsym`, which is wrapped here. Several versions of a compiler may be
   loaded, and each has its own wrappers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "section.h"

typedef void* (*Find)(void*, const char*);

static Find last_find; /* the `dlsym` of the C library */
static Find next_find; /* in the next library, which may be the audit library */

static Find find_next(void) {
    static const char* const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17", NULL};
    for (int i = 0; !last_find && versions[i]; i++)
        *(void**)&last_find = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    Find found = last_find ? (Find)last_find(RTLD_NEXT, "dlsym") : NULL;
    next_find = found ? found : last_find;
    return next_find;
}

/* Return a function as the program would find it without this library. */
static void* real_dlsym(void* handle, const char* name) {
    Find find = next_find ? next_find : find_next();
    return find ? find(handle, name) : NULL;
}

/* One version of a compiler library that is loaded */
typedef struct {
    void* _Atomic base; /* its address; NULL: free */
    void* handle;
} Library;

enum { VERSIONS = 4 };
static Library nvrtc[VERSIONS], nvjitlink[VERSIONS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Return the number of the library that has a function, or -1 if there are too many. */
static int number_of(Library* libraries, void* function) {
    Dl_info info;
    int found = -1;
    if (!dladdr(function, &info)) return -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; found < 0 && i < VERSIONS; i++) {
        if (!libraries[i].base) {
            libraries[i].handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
            libraries[i].base = info.dli_fbase;
        }
        if (libraries[i].base == info.dli_fbase) found = i;
    }
    pthread_mutex_unlock(&lock);
    return found >= 0 && libraries[found].handle ? found : -1;
}

/* Call a function of the library itself. An audit does not see it: the program has not asked for it. */
#define CALL(library, name, parameters, arguments) \
    ((int(*) parameters)last_find((library)->handle, #name))arguments

/* NVRTC */

static Texts ptx_of_program(const Library* library, void* program) {
    Texts texts = {NULL, 0};
    size_t size = 0;
    char* text = NULL;
    if (!CALL(library, nvrtcGetPTXSize, (void*, size_t*), (program, &size)) && size) text = malloc(size);
    if (text && !CALL(library, nvrtcGetPTX, (void*, char*), (program, text))) add_text(&texts, text, size);
    free(text);
    return texts;
}

/* Call NVRTC for a cubin. `out` is NULL if the size alone is wanted. */
static int get_cubin(const Library* library, void* program, size_t* size, char* out) {
    size_t plain = 0;
    int status = CALL(library, nvrtcGetCUBINSize, (void*, size_t*), (program, &plain));
    *size = plain;
    if (status || !plain) return out ? CALL(library, nvrtcGetCUBIN, (void*, char*), (program, out)) : status;
    Texts texts = ptx_of_program(library, program);
    char* cubin = out ? out : malloc(plain);
    if (cubin) status = CALL(library, nvrtcGetCUBIN, (void*, char*), (program, cubin));
    if (cubin && !status) *size = packed_size(cubin, plain, &texts);
    if (out && !status) pack(out, plain, &texts);
    if (!out) free(cubin);
    free(texts.data);
    return status;
}

/* nvJitLink */

/* Kinds of input, as the library numbers them. */
enum { INPUT_PTX = 2, INPUT_LTO_IR = 3, INPUT_FATBIN = 4, INPUT_OBJECT = 5, INPUT_ANY = 10 };

/* A link that is under way: the PTX of its inputs, and the second link, which makes PTX of its LTO-IR. */
typedef struct Link {
    struct Link* next;
    void* handle;
    void* second; /* NULL: there is no link-time optimisation, or it has ended */
    Texts texts;
} Link;

static Link* links;

static Link* link_of(void* handle) {
    pthread_mutex_lock(&lock);
    Link* found = links;
    while (found && found->handle != handle) found = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

static Link* take_link(void* handle) {
    pthread_mutex_lock(&lock);
    Link** at = &links;
    while (*at && (*at)->handle != handle) at = &(*at)->next;
    Link* found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Begin the second link, with the same options, if this one optimises at link time. */
static void* begin_second(const Library* library, uint32_t count, const char** options) {
    int optimises = 0, makes_ptx = 0;
    void* handle = NULL;
    const char** more = malloc((count + 1) * sizeof *more);
    for (uint32_t i = 0; more && i < count; i++) {
        more[i] = options[i];
        optimises |= !strcmp(options[i], "-lto") || !strcmp(options[i], "-dlto");
        makes_ptx |= !strcmp(options[i], "-ptx");
    }
    if (more && optimises && !makes_ptx) {
        more[count] = "-ptx";
        if (CALL(library, nvJitLinkCreate, (void**, uint32_t, const char**), (&handle, count + 1, more)))
            handle = NULL;
    }
    free(more);
    return handle;
}

static int link_create(const Library* library, void** handle, uint32_t count, const char** options) {
    int status = CALL(library, nvJitLinkCreate, (void**, uint32_t, const char**), (handle, count, options));
    Link* made = status ? NULL : calloc(1, sizeof *made);
    if (!made) return status;
    made->handle = *handle;
    made->second = begin_second(library, count, options);
    pthread_mutex_lock(&lock);
    made->next = links;
    links = made;
    pthread_mutex_unlock(&lock);
    return status;
}

static int has_lto_ir(int kind, const void* data, size_t size) {
    static const unsigned char magic[] = {0xed, 0x43, 0x4e, 0x7f};
    if (kind == INPUT_ANY) return size > sizeof magic && !memcmp(data, magic, sizeof magic);
    return kind == INPUT_LTO_IR || kind == INPUT_FATBIN || kind == INPUT_OBJECT;
}

/* Keep the PTX of an input. */
static void note_input(const Library* library, Link* link, int kind, const void* data, size_t size,
                       const char* name) {
    if (!link) return;
    if (size >= SELFMAG && !memcmp(data, ELFMAG, SELFMAG)) {
        add_text_of(&link->texts, data, size);
        if (kind != INPUT_OBJECT) return;
    } else if (kind == INPUT_PTX || (kind == INPUT_ANY && memmem(data, size, ".version", 8))) {
        add_text(&link->texts, data, size);
        return;
    }
    if (link->second && has_lto_ir(kind, data, size))
        CALL(library, nvJitLinkAddData, (void*, int, const void*, size_t, const char*),
             (link->second, kind, data, size, name));
}

static int link_add_data(const Library* library, void* handle, int kind, const void* data, size_t size,
                         const char* name) {
    int status = CALL(library, nvJitLinkAddData, (void*, int, const void*, size_t, const char*),
                      (handle, kind, data, size, name));
    if (!status && data) note_input(library, link_of(handle), kind, data, size, name);
    return status;
}

static int link_add_file(const Library* library, void* handle, int kind, const char* path) {
    int status = CALL(library, nvJitLinkAddFile, (void*, int, const char*), (handle, kind, path));
    FILE* file = status ? NULL : fopen(path, "rbe");
    if (!file) return status;
    char* data = NULL;
    long size = fseek(file, 0, SEEK_END) ? -1 : ftell(file);
    if (size > 0 && !fseek(file, 0, SEEK_SET)) data = malloc((size_t)size);
    if (data && fread(data, 1, (size_t)size, file) == (size_t)size)
        note_input(library, link_of(handle), kind, data, (size_t)size, path);
    free(data);
    fclose(file);
    return status;
}

/* End the second link, and keep its PTX. */
static void end_second(const Library* library, Link* link) {
    size_t size = 0;
    char* text = NULL;
    void* second = link->second;
    link->second = NULL;
    if (!second) return;
    if (!CALL(library, nvJitLinkComplete, (void*), (second)) &&
        !CALL(library, nvJitLinkGetLinkedPtxSize, (void*, size_t*), (second, &size)) && size)
        text = malloc(size);
    if (text && !CALL(library, nvJitLinkGetLinkedPtx, (void*, char*), (second, text)))
        add_text(&link->texts, text, size);
    free(text);
    CALL(library, nvJitLinkDestroy, (void**), (&second));
}

/* Call nvJitLink for a cubin. `out` is NULL if the size alone is wanted. */
static int get_linked(const Library* library, void* handle, size_t* size, char* out) {
    size_t plain = 0;
    int status = CALL(library, nvJitLinkGetLinkedCubinSize, (void*, size_t*), (handle, &plain));
    Link* link = link_of(handle);
    *size = plain;
    if (status || !plain || !link)
        return out ? CALL(library, nvJitLinkGetLinkedCubin, (void*, char*), (handle, out)) : status;
    end_second(library, link);
    char* cubin = out ? out : malloc(plain);
    if (cubin) status = CALL(library, nvJitLinkGetLinkedCubin, (void*, char*), (handle, cubin));
    if (cubin && !status) *size = packed_size(cubin, plain, &link->texts);
    if (out && !status) pack(out, plain, &link->texts);
    if (!out) free(cubin);
    return status;
}

static int link_destroy(const Library* library, void** handle) {
    Link* link = handle ? take_link(*handle) : NULL;
    if (link) {
        if (link->second) CALL(library, nvJitLinkDestroy, (void**), (&link->second));
        free(link->texts.data);
        free(link);
    }
    return CALL(library, nvJitLinkDestroy, (void**), (handle));
}

/* The wrappers, for each version of a library */

#define WRAPPERS(n)                                                                                   \
    static int get_cubin_size_##n(void* program, size_t* size) {                                      \
        return get_cubin(&nvrtc[n], program, size, NULL);                                             \
    }                                                                                                 \
    static int get_cubin_##n(void* program, char* out) {                                              \
        size_t size;                                                                                  \
        return get_cubin(&nvrtc[n], program, &size, out);                                             \
    }                                                                                                 \
    static int create_##n(void** handle, uint32_t count, const char** options) {                      \
        return link_create(&nvjitlink[n], handle, count, options);                                    \
    }                                                                                                 \
    static int add_data_##n(void* handle, int kind, const void* data, size_t size, const char* name) { \
        return link_add_data(&nvjitlink[n], handle, kind, data, size, name);                          \
    }                                                                                                 \
    static int add_file_##n(void* handle, int kind, const char* path) {                               \
        return link_add_file(&nvjitlink[n], handle, kind, path);                                      \
    }                                                                                                 \
    static int get_linked_size_##n(void* handle, size_t* size) {                                      \
        return get_linked(&nvjitlink[n], handle, size, NULL);                                         \
    }                                                                                                 \
    static int get_linked_##n(void* handle, void* out) {                                              \
        size_t size;                                                                                  \
        return get_linked(&nvjitlink[n], handle, &size, out);                                         \
    }                                                                                                 \
    static int destroy_##n(void** handle) { return link_destroy(&nvjitlink[n], handle); }
WRAPPERS(0)
WRAPPERS(1)
WRAPPERS(2)
WRAPPERS(3)

#define EACH(name) {(void*)name##_0, (void*)name##_1, (void*)name##_2, (void*)name##_3}
static const struct {
    const char* name;
    Library* libraries;
    void* wrappers[VERSIONS];
} wrapped[] = {
    {"nvrtcGetCUBINSize", nvrtc, EACH(get_cubin_size)},
    {"nvrtcGetCUBIN", nvrtc, EACH(get_cubin)},
    {"nvJitLinkCreate", nvjitlink, EACH(create)},
    {"nvJitLinkAddData", nvjitlink, EACH(add_data)},
    {"nvJitLinkAddFile", nvjitlink, EACH(add_file)},
    {"nvJitLinkGetLinkedCubinSize", nvjitlink, EACH(get_linked_size)},
    {"nvJitLinkGetLinkedCubin", nvjitlink, EACH(get_linked)},
    {"nvJitLinkDestroy", nvjitlink, EACH(destroy)},
};
enum { WRAPPED = sizeof wrapped / sizeof *wrapped };

/* Return the row of a function, also of one with a version: `__nvJitLinkCreate_13_0`. */
static int row_of(const char* name) {
    size_t length = strlen(name);
    if (!strncmp(name, "__nv", 4)) {
        name += 2;
        length = strcspn(name, "_");
    }
    for (int i = 0; i < WRAPPED; i++)
        if (strlen(wrapped[i].name) == length && !strncmp(name, wrapped[i].name, length)) return i;
    return -1;
}

/* Return the wrapper of a function, or NULL. */
static __attribute__((noinline)) void* find_wrapper(void* handle, const char* name) {
    int row = row_of(name);
    void* real = row < 0 ? NULL : real_dlsym(handle, name);
    int number = real ? number_of(wrapped[row].libraries, real) : -1;
    return number < 0 ? NULL : wrapped[row].wrappers[number];
}

/* RTLD_NEXT and RTLD_DEFAULT depend on the library that calls: the next function must see the return
   address of the caller. Therefore it is called as the last step, which the compiler turns into a jump. */
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O2")))
#endif
EXPORT void* dlsym(void* handle, const char* name) {
    Find find = next_find ? next_find : find_next();
    if (handle != RTLD_NEXT && (!strncmp(name, "nv", 2) || !strncmp(name, "__nv", 4))) {
        void* wrapper = find_wrapper(handle, name);
        if (wrapper) return wrapper;
    }
    return find(handle, name);
}
