// A stand-in for NVRTC, nvJitLink or libNVVM. A compile returns RESULT, so that a test sees which library did it.

#ifdef libnvrtc
int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    (void)program, (void)count, (void)options;
    return RESULT;
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
