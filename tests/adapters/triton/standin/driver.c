// A stand-in for libcuda.so.1, with which Triton runs up to the launch where there is no GPU.
//
// The CPU driver executes kernels (test_on_cpu_driver.py), and therefore cannot show what this one shows: the
// bytes of each parameter, also of sizes and addresses for which no machine has memory, and machine code as
// `ptxas` alone makes it, without PTX in it.
//
// It answers the compute capability STANDIN_CC ("90"), and accepts modules and launches. Each load and
// each launch is a line of the file STANDIN_LOG: "PID load KIND" and "PID launch NAME SIZE:HEX …", with
// the bytes of all parameters. Their sizes come from the loaded cubin, as in the real driver.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
typedef void *Handle;

enum { SUCCESS = 0, NOT_FOUND = 500, MOST_PARAMETERS = 64 };

typedef struct {
    char *name;
    int count;
    int sizes[MOST_PARAMETERS];
} Function;

static int capability(void) {
    const char *text = getenv("STANDIN_CC");
    return text ? atoi(text) : 90;
}

static FILE *open_log(void) {
    const char *path = getenv("STANDIN_LOG");
    return path ? fopen(path, "a") : NULL;
}

static const char *kind_of(const void *image) {
    const unsigned char *bytes = image;
    if (!memcmp(bytes, ELFMAG, SELFMAG)) return "cubin";
    if (bytes[0] == '/' || bytes[0] == '.' || bytes[0] == '\n') return "ptx";
    return "unknown";
}

static CUresult load(Handle *module, const void *image) {
    FILE *log = open_log();
    if (log) {
        fprintf(log, "%d load %s\n", getpid(), kind_of(image));
        fclose(log);
    }
    if (strcmp(kind_of(image), "cubin")) return 200;  // CUDA_ERROR_INVALID_IMAGE
    const Elf64_Ehdr *header = image;
    size_t size = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    size_t programs = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    if (programs > size) size = programs;
    const Elf64_Shdr *sections = (const void *)((const char *)image + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++) {
        size_t end = sections[i].sh_offset + sections[i].sh_size;
        if (sections[i].sh_type != SHT_NOBITS && end > size) size = end;
    }
    *module = malloc(size);
    memcpy(*module, image, size);
    return SUCCESS;
}

// Reads the sizes of the parameters from the section .nv.info.NAME.
static void read_parameters(const char *image, Function *function) {
    const Elf64_Ehdr *header = (const void *)image;
    const Elf64_Shdr *sections = (const void *)(image + header->e_shoff);
    const char *names = image + sections[header->e_shstrndx].sh_offset;
    char wanted[512];
    snprintf(wanted, sizeof wanted, ".nv.info.%s", function->name);
    for (int i = 0; i < header->e_shnum; i++) {
        if (strcmp(names + sections[i].sh_name, wanted)) continue;
        const unsigned char *at = (const void *)(image + sections[i].sh_offset);
        const unsigned char *end = at + sections[i].sh_size;
        while (at + 4 <= end) {
            int format = at[0], attribute = at[1], length = at[2] | at[3] << 8;
            at += 4;
            if (format != 4) continue;        // The value is in the two bytes of the length.
            if (attribute == 0x17) {          // EIATTR_KPARAM_INFO
                int ordinal = at[4] | at[5] << 8;
                uint32_t word;
                memcpy(&word, at + 8, sizeof word);
                if (ordinal < MOST_PARAMETERS) function->sizes[ordinal] = (int)(word >> 18);
                if (ordinal >= function->count) function->count = ordinal + 1;
            }
            at += length;
        }
    }
}

static CUresult launch(const Function *function, void **parameters) {
    FILE *log = open_log();
    if (!log) return SUCCESS;
    // One write for each line: several processes have the file.
    char *line = NULL;
    size_t length = 0;
    FILE *text = open_memstream(&line, &length);
    fprintf(text, "%d launch %s", getpid(), function->name);
    for (int i = 0; i < function->count; i++) {
        fprintf(text, " %d:", function->sizes[i]);
        const unsigned char *bytes = parameters[i];
        for (int b = function->sizes[i] - 1; b >= 0; b--) fprintf(text, "%02x", bytes[b]);
    }
    fprintf(text, "\n");
    fclose(text);
    fwrite(line, 1, length, log);
    fclose(log);
    free(line);
    return SUCCESS;
}

CUresult cuInit(unsigned flags) { (void)flags; return SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
CUresult cuDeviceGet(int *device, int index) { *device = index; return SUCCESS; }
CUresult cuDeviceGetName(char *name, int size, int device) {
    (void)device;
    snprintf(name, (size_t)size, "stand-in sm_%d", capability());
    return SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 75: *value = capability() / 10; break;
    case 76: *value = capability() % 10; break;
    case 97: *value = 227 * 1024; break;      // shared memory of a block that opted in
    case 10: *value = 32; break;
    case 16: *value = 132; break;
    case 12: *value = 65536; break;
    default: *value = 1024;
    }
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(Handle *context, int device) {
    (void)device;
    *context = (Handle)0x1000;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
static Handle current;
CUresult cuCtxSetCurrent(Handle context) { current = context; return SUCCESS; }
CUresult cuCtxGetCurrent(Handle *context) { *context = current; return SUCCESS; }
CUresult cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, int limit) { (void)limit; *value = 0; return SUCCESS; }
CUresult cuCtxSetLimit(int limit, size_t value) { (void)limit; (void)value; return SUCCESS; }
CUresult cuModuleLoadData(Handle *module, const void *image) { return load(module, image); }
CUresult cuModuleLoadDataEx(Handle *module, const void *image, unsigned n, int *o, void **v) {
    (void)n, (void)o, (void)v;
    return load(module, image);
}
CUresult cuModuleUnload(Handle module) { (void)module; return SUCCESS; }
CUresult cuModuleGetFunction(Handle *made, Handle module, const char *name) {
    Function *function = calloc(1, sizeof *function);
    function->name = strdup(name);
    read_parameters(module, function);
    *made = function;
    return SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, int attribute, Handle function) {
    (void)function;
    *value = attribute == 0 ? 1024 : 0;
    return SUCCESS;
}
CUresult cuFuncSetAttribute(Handle f, int attribute, int value) {
    (void)f, (void)attribute, (void)value;
    return SUCCESS;
}
CUresult cuFuncSetCacheConfig(Handle f, int config) { (void)f, (void)config; return SUCCESS; }
CUresult cuLaunchKernelEx(Handle config, Handle function, void **parameters, void **extra) {
    (void)config, (void)extra;
    return launch(function, parameters);
}
CUresult cuPointerGetAttribute(void *out, int attribute, uint64_t pointer) {
    (void)attribute;
    *(uint64_t *)out = pointer;
    return SUCCESS;
}
CUresult cuStreamIsCapturing(Handle stream, int *status) { (void)stream; *status = 0; return SUCCESS; }
CUresult cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "error of the stand-in";
    return SUCCESS;
}
CUresult cuGetErrorName(int error, const char **text) { return cuGetErrorString(error, text); }
CUresult cuOccupancyMaxActiveClusters(int *count, Handle function, Handle config) {
    (void)function, (void)config;
    *count = 1;
    return SUCCESS;
}
CUresult cuTensorMapEncodeTiled(void) { return SUCCESS; }
CUresult cuTensorMapEncodeIm2col(void) { return SUCCESS; }
CUresult cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t f, int *status) {
    (void)version, (void)f;
    void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    *found = self ? dlsym(self, symbol) : NULL;
    if (status) *status = *found ? 0 : 1;
    return *found ? SUCCESS : NOT_FOUND;
}
