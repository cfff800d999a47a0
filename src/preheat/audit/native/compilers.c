/* Compilers in the process: NVRTC, nvJitLink and libNVVM.

   A program finds their functions by `dlsym`, or it is linked against them. `exports.map` says how a linked
   program, and no other one, finds the functions here. */
#define _GNU_SOURCE
#include "audit.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* What a refused call returns */
enum { NVRTC_ERROR_COMPILATION = 6, NVJITLINK_ERROR_INTERNAL = 6, NVVM_ERROR_COMPILATION = 9 };

/* Report a compile that took place. */
static int report_compile(const char* library, double started, int result, const void* caller) {
    int error = errno;
    Scratch* scratch = audit_reports && audit_directory[0] ? map_memory(sizeof *scratch) : NULL;
    if (!scratch)
        return result;
    Line line;
    line_begin(&line, scratch->text, sizeof scratch->text, "compile", audit_now());
    line_text(&line, "compiler", library);
    line_seconds(&line, "seconds", audit_now() - started);
    line_integer(&line, "result", result);
    line_text(&line, "caller", calling_library(caller, scratch->object, sizeof scratch->object));
    audit_site(scratch->site, sizeof scratch->site);
    line_site(&line, scratch->site);
    line_write(&line);
    unmap_memory(scratch, sizeof *scratch);
    errno = error;
    return result;
}

static int permit_compile(const char* library, const void* caller) {
    Scratch* scratch = audit_seal == SEAL_OFF ? NULL : map_memory(sizeof *scratch);
    if (scratch) {
        audit_site(scratch->site, sizeof scratch->site);
        calling_library(caller, scratch->object, sizeof scratch->object);
        report_refusal(scratch, REFUSED_COMPILE, library, scratch->object);
        unmap_memory(scratch, sizeof *scratch);
    }
    return audit_seal != SEAL_ERROR;
}

/* Called by Python before a wrapped function of a library compiles. `site` has the frames of the call. */
EXPORT int preheat_audit_permit(const char* compiler, const char* site) {
    Scratch* scratch = audit_seal == SEAL_OFF || !audit_directory[0] ? NULL : map_memory(sizeof *scratch);
    if (scratch) {
        snprintf(scratch->site, sizeof scratch->site, "%s", site);
        report_refusal(scratch, REFUSED_COMPILE, compiler, NULL);
        unmap_memory(scratch, sizeof *scratch);
    }
    return audit_seal != SEAL_ERROR;
}

static atomic_int compiles; /* that are seen and under way, in any thread */

/* NVRTC opens its library of built-in functions when it compiles, however its function was found. */
int permit_open(const char* path, const void* caller) {
    if (strncmp(base_name(path), "libnvrtc-builtins", 17) || compiles ||
        !is_defined_at(caller, "nvrtcCompileProgram"))
        return 1;
    if (audit_seal == SEAL_OFF)
        report_unseen("compiles by NVRTC", "the process did not find its function by dlsym");
    return permit_compile("NVRTC", caller);
}

/* A process may have several versions of a library. Each that `dlsym` finds has its own wrapper. */
enum { VERSIONS = 4 };
#define COMPILE(function, library, refused, parameters, arguments, real) \
    int function parameters { \
        if (!permit_compile(library, CALLER)) \
            return refused; \
        void* found = real; \
        if (!found) \
            return refused; \
        double started = audit_now(); \
        compiles++; \
        int result = ((int(*) parameters)found)arguments; \
        compiles--; \
        return report_compile(library, started, result, CALLER); \
    }
#define COMPILER(name, library, refused, parameters, arguments) \
    static void* _Atomic name##_real[VERSIONS]; \
    static COMPILE(name##_0, library, refused, parameters, arguments, name##_real[0]) \
    static COMPILE(name##_1, library, refused, parameters, arguments, name##_real[1]) \
    static COMPILE(name##_2, library, refused, parameters, arguments, name##_real[2]) \
    static COMPILE(name##_3, library, refused, parameters, arguments, name##_real[3]) \
    static void* const name##_wrappers[VERSIONS] = {(void*)name##_0, (void*)name##_1, (void*)name##_2, \
                                                    (void*)name##_3};

#define NVRTC_PARAMETERS (void* program, int count, const char* const* options)
#define NVRTC_ARGUMENTS (program, count, options)
#define NVVM_PARAMETERS (void* program, int count, const char** options)
#define NVVM_ARGUMENTS (program, count, options)
COMPILER(nvrtcCompileProgram, "NVRTC", NVRTC_ERROR_COMPILATION, NVRTC_PARAMETERS, NVRTC_ARGUMENTS)
COMPILER(nvJitLinkComplete, "nvJitLink", NVJITLINK_ERROR_INTERNAL, (void* handle), (handle))
COMPILER(nvvmCompileProgram, "libNVVM", NVVM_ERROR_COMPILATION, NVVM_PARAMETERS, NVVM_ARGUMENTS)

static void* _Atomic unwrapped; /* a function of a fifth version */

static void* compiler_wrapper(void* _Atomic* reals, void* const* wrappers, void* real) {
    prepare_backtraces();
    for (int i = 0; i < VERSIONS; i++) {
        void* empty = NULL;
        if (atomic_compare_exchange_strong(&reals[i], &empty, real) || empty == real)
            return wrappers[i];
    }
    if (real == unwrapped)
        return real;
    unwrapped = real;
    report_unseen("compiles in the process", "it has loaded more than four versions of one compiler library");
    return real;
}

int is_compile_call(const char* name) {
    if (name[0] != 'n' && name[0] != '_')
        return 0;
    return !strcmp(name, "nvrtcCompileProgram") || !strcmp(name, "nvvmCompileProgram") ||
           !strcmp(name, "nvJitLinkComplete") || !strncmp(name, "__nvJitLinkComplete_", 20);
}

void* wrap_compile_call(const char* name, void* real) {
    if (!strcmp(name, "nvrtcCompileProgram"))
        return compiler_wrapper(nvrtcCompileProgram_real, nvrtcCompileProgram_wrappers, real);
    if (!strcmp(name, "nvvmCompileProgram"))
        return compiler_wrapper(nvvmCompileProgram_real, nvvmCompileProgram_wrappers, real);
    return compiler_wrapper(nvJitLinkComplete_real, nvJitLinkComplete_wrappers, real);
}

/* Programs that are linked against the libraries. A function of each version has its own name here. */

#define LINKED(function, name, version, library, refused, parameters, arguments) \
    EXPORT COMPILE(function, library, refused, parameters, arguments, \
                   find_linked(name, version, version, CALLER)) \
    __asm__(".symver " #function ", " name "@" version);

#define NVRTC(number, version) \
    LINKED(linked_nvrtc_##number, "nvrtcCompileProgram", version, "NVRTC", NVRTC_ERROR_COMPILATION, \
           NVRTC_PARAMETERS, NVRTC_ARGUMENTS)
NVRTC(11_0, "libnvrtc.so.11.0")
NVRTC(11_1, "libnvrtc.so.11.1")
NVRTC(11_2, "libnvrtc.so.11.2")
NVRTC(12, "libnvrtc.so.12")
NVRTC(13, "libnvrtc.so.13")
NVRTC(14, "libnvrtc.so.14")

/* The header of each release calls the function of its release. */
#define NVJITLINK(number, name, version) \
    LINKED(linked_nvjitlink_##number, name, version, "nvJitLink", NVJITLINK_ERROR_INTERNAL, (void* handle), \
           (handle))
#define RELEASE(major, minor) \
    NVJITLINK(major##_##minor, "__nvJitLinkComplete_" #major "_" #minor, "libnvJitLink.so." #major)
#define RELEASES(major) \
    NVJITLINK(major, "nvJitLinkComplete", "libnvJitLink.so." #major) \
    RELEASE(major, 0) RELEASE(major, 1) RELEASE(major, 2) RELEASE(major, 3) RELEASE(major, 4) \
    RELEASE(major, 5) RELEASE(major, 6) RELEASE(major, 7) RELEASE(major, 8) RELEASE(major, 9)
RELEASES(12)
RELEASES(13)
RELEASES(14)

EXPORT COMPILE(linked_nvvm, "libNVVM", NVVM_ERROR_COMPILATION, NVVM_PARAMETERS, NVVM_ARGUMENTS,
               find_linked("nvvmCompileProgram", NULL, "libnvvm.so.4", CALLER))
__asm__(".symver linked_nvvm, nvvmCompileProgram@PREHEAT");
