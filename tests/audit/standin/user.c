// A library that was linked against a compiler library, and that searches for its function by RTLD_DEFAULT.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

int finds_compiler(void) { return dlsym(RTLD_DEFAULT, "nvrtcCompileProgram") != NULL; }
int finds_driver(void) { return dlsym(RTLD_DEFAULT, "cuInit") != NULL; }
