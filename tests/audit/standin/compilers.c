// A stand-in for NVRTC, nvJitLink or libNVVM. A compile returns RESULT, so that a test sees which library did it.
#include <dlfcn.h>

#ifdef libnvrtc
// NVRTC cannot compile without its built-in functions (7: NVRTC_ERROR_BUILTIN_OPERATION_FAILURE).
int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    (void)program, (void)count, (void)options;
    return dlopen("libnvrtc-builtins.so.13", RTLD_LAZY) ? RESULT : 7;
}
#endif
#ifdef libnvvm
int nvvmCompileProgram(void *program, int count, const char **options) {
    (void)program, (void)count, (void)options;
    return RESULT;
}
#endif
#ifdef libnvJitLink
int nvJitLinkComplete(void *handle) {
    (void)handle;
    return RESULT;
}
int __nvJitLinkComplete_13_2(void *handle) {
    (void)handle;
    return RESULT;
}
#endif
