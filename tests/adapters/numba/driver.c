// The stand-in for libcuda.so.1 of the tests of Triton, with the functions that cuda.core and Numba call
// in addition. Memory of the device is memory of the process, on which nothing computes.
#define cuGetProcAddress_v2 exact_proc_address
#define cuPointerGetAttribute pointer_attribute_for_triton
#include "../triton/standin/driver.c"
#undef cuGetProcAddress_v2
#undef cuPointerGetAttribute

// cuda.bindings asks for names without the suffix of their version.
CUresult cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t f, int *status) {
    static const char *const suffixes[] = {"", "_v2", "_v3", "_v4"};
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        char name[256];
        snprintf(name, sizeof name, "%s%s", symbol, suffixes[i]);
        if (exact_proc_address(name, found, version, f, status) == SUCCESS) return SUCCESS;
    }
    return NOT_FOUND;
}

CUresult cuDeviceGetUuid_v2(char *uuid, int device) {
    (void)device;
    memset(uuid, 7, 16);
    return SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    *bytes = (size_t)1 << 36;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = 1;
    return SUCCESS;
}
CUresult cuCtxPushCurrent_v2(Handle context) { return cuCtxSetCurrent(context); }
CUresult cuCtxPopCurrent_v2(Handle *context) { return cuCtxGetCurrent(context); }
CUresult cuCtxSynchronize(void) { return SUCCESS; }
CUresult cuStreamSynchronize(Handle stream) { (void)stream; return SUCCESS; }
CUresult cuStreamGetCtx_v2(Handle stream, Handle *context, Handle *green) {
    (void)stream;
    if (green) *green = NULL;
    return cuCtxGetCurrent(context);
}

CUresult cuMemGetInfo_v2(size_t *unused, size_t *total) {
    *unused = *total = (size_t)1 << 36;
    return SUCCESS;
}
CUresult cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    *pointer = (uint64_t)aligned_alloc(256, (size + 255) / 256 * 256);
    return *pointer ? SUCCESS : 2;  // CUDA_ERROR_OUT_OF_MEMORY
}
CUresult cuMemFree_v2(uint64_t pointer) { free((void *)pointer); return SUCCESS; }
CUresult cuMemsetD8_v2(uint64_t to, unsigned char value, size_t count) {
    memset((void *)to, value, count);
    return SUCCESS;
}
CUresult cuMemsetD8Async(uint64_t to, unsigned char value, size_t count, Handle stream) {
    (void)stream;
    return cuMemsetD8_v2(to, value, count);
}
CUresult cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    memcpy((void *)to, from, size);
    return SUCCESS;
}
CUresult cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    memcpy(to, (const void *)from, size);
    return SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, Handle stream) {
    (void)stream;
    return cuMemcpyHtoD_v2(to, from, size);
}
CUresult cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, Handle stream) {
    (void)stream;
    return cuMemcpyDtoH_v2(to, from, size);
}

CUresult cuLibraryLoadData(Handle *library, const void *image, int *o, void **v, unsigned n, int *lo,
                           void **lv, unsigned ln) {
    (void)o, (void)v, (void)n, (void)lo, (void)lv, (void)ln;
    return load(library, image);
}
// Every global is one word, such as the error codes of a kernel with checks.
CUresult cuLibraryGetGlobal(uint64_t *pointer, size_t *size, Handle library, const char *name) {
    static int word;
    (void)library, (void)name;
    *pointer = (uint64_t)&word;
    *size = sizeof word;
    return SUCCESS;
}
CUresult cuModuleGetGlobal_v2(uint64_t *pointer, size_t *size, Handle module, const char *name) {
    return cuLibraryGetGlobal(pointer, size, module, name);
}
CUresult cuLibraryUnload(Handle library) { (void)library; return SUCCESS; }
CUresult cuLibraryGetModule(Handle *module, Handle library) { *module = library; return SUCCESS; }
CUresult cuLibraryGetKernel(Handle *kernel, Handle library, const char *name) {
    return cuModuleGetFunction(kernel, library, name);
}
CUresult cuKernelGetFunction(Handle *function, Handle kernel) { *function = kernel; return SUCCESS; }
CUresult cuKernelGetAttribute(int *value, int attribute, Handle kernel, int device) {
    (void)device;
    return cuFuncGetAttribute(value, attribute, kernel);
}
CUresult cuKernelGetParamInfo(Handle kernel, size_t index, size_t *offset, size_t *size) {
    const Function *function = kernel;
    if (index >= (size_t)function->count) return 1;  // CUDA_ERROR_INVALID_VALUE
    *offset = 0;
    if (size) *size = (size_t)function->sizes[index];
    return SUCCESS;
}

// Every address is memory of the device.
CUresult cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    switch (attribute) {
    case 1: *(Handle *)value = current; break;      // its context
    case 2: *(unsigned *)value = 2; break;          // its kind: memory of the device
    case 3: *(uint64_t *)value = pointer; break;    // its address on the device
    default: *(int *)value = 0;                     // whether it is managed, its device
    }
    return SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **values, uint64_t pointer) {
    for (unsigned i = 0; i < count; i++) cuPointerGetAttribute(values[i], attributes[i], pointer);
    return SUCCESS;
}

CUresult cuLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, Handle stream, void **parameters, void **extra) {
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    return launch(function, parameters);
}
CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, Handle function, Handle shared,
                                          size_t dynamic, int limit) {
    (void)function, (void)shared, (void)dynamic, (void)limit;
    *grid = *block = 128;
    return SUCCESS;
}
