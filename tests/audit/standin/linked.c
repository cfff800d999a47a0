// A library that is linked against compilers, and a program that calls a compiler in one of many ways.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef int (*Compile)(void *, int, const char **);

#ifdef LINKED
int nvrtcCompileProgram(void *, int, const char **);
int nvvmCompileProgram(void *, int, const char **);
int nvJitLinkComplete(void *);
int __nvJitLinkComplete_13_2(void *);

int compile_with(const char *name) {
    if (!strcmp(name, "nvrtcCompileProgram")) return nvrtcCompileProgram(NULL, 0, NULL);
    if (!strcmp(name, "nvvmCompileProgram")) return nvvmCompileProgram(NULL, 0, NULL);
    if (!strcmp(name, "nvJitLinkComplete")) return nvJitLinkComplete(NULL);
    return __nvJitLinkComplete_13_2(NULL);
}
#endif
#ifdef LIBRARY
// Addresses that another library calls, as torch has them of its library for NVRTC.
void *pass_on(const char *name) {
    if (!strcmp(name, "nvrtcCompileProgram")) return (void *)nvrtcCompileProgram;
    return (void *)nvvmCompileProgram;
}
int compile_default(void) {
    Compile found;
    *(void **)&found = dlsym(RTLD_DEFAULT, "nvrtcCompileProgram");
    return found ? found(NULL, 0, NULL) : 99;
}
int compile_next(void) {
    Compile found;
    *(void **)&found = dlsym(RTLD_NEXT, "nvrtcCompileProgram");
    return found ? found(NULL, 0, NULL) : 99;
}
#else

#pragma weak nvrtcCompileProgram
#ifndef LINKED
int nvrtcCompileProgram(void *, int, const char **);
#endif

// Return a function from the symbol table of a library.
static void *read_symbol(void *library, const char *name) {
    struct link_map *map;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    dlinfo(library, RTLD_DI_LINKMAP, &map);
    for (ElfW(Dyn) *entry = map->l_ld; entry->d_tag; entry++) {
        if (entry->d_tag == DT_SYMTAB) symbols = (const void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_STRTAB) names = (const void *)entry->d_un.d_ptr;
    }
    for (; (const char *)symbols < names; symbols++)
        if (symbols->st_shndx && !strcmp(names + symbols->st_name, name))
            return (char *)map->l_addr + symbols->st_value;
    return NULL;
}

static void *find(const char *how, const char *path) {
    static const char name[] = "nvrtcCompileProgram", version[] = "libnvrtc.so.13";
    int global = !strcmp(how, "default") || !strcmp(how, "next") || !strcmp(how, "dlvsym-default") ||
                 !strcmp(how, "program");
    void *library = !strcmp(how, "dlmopen") ? dlmopen(LM_ID_NEWLM, path, RTLD_NOW)
                    : strcmp(path, "none")  ? dlopen(path, global ? RTLD_NOW | RTLD_GLOBAL : RTLD_NOW)
                                            : NULL;
    if (!strcmp(how, "default")) return dlsym(RTLD_DEFAULT, name);
    if (!strcmp(how, "next")) return dlsym(RTLD_NEXT, name);
    if (!strcmp(how, "program")) return dlsym(dlopen(NULL, RTLD_NOW), name);
    if (!strcmp(how, "dlvsym")) return dlvsym(library, name, version);
    if (!strcmp(how, "dlvsym-default")) return dlvsym(RTLD_DEFAULT, name, version);
    if (!strcmp(how, "symbols")) return read_symbol(library, name);
    return dlsym(library, name);
}

int main(int count, char **words) {
    Compile compile = NULL;
    if (count < 3) return 9;
    if (!strcmp(words[1], "weak")) {
        puts(nvrtcCompileProgram ? "there" : "not there");
        return 0;
    }
#ifdef LINKED
    if (!strcmp(words[1], "call")) {
        printf("%d\n", compile_with(words[2]));
        return 0;
    }
#endif
    if (!strcmp(words[1], "library") || !strcmp(words[1], "deepbind")) {
        int (*call)(const char *), mode = words[1][0] == 'd' ? RTLD_DEEPBIND : 0;
        *(void **)&call = dlsym(dlopen(words[2], RTLD_NOW | mode), words[3]);
        printf("%d\n", call ? call(words[4]) : 98);
        return 0;
    }
    if (!strcmp(words[1], "pointer")) {
        void *(*pass_on)(const char *);
        *(void **)&pass_on = dlsym(dlopen(words[2], RTLD_NOW), "pass_on");
        *(void **)&compile = pass_on(words[3]);
    } else {
        *(void **)&compile = find(words[1], words[2]);
    }
    printf("%d\n", compile ? compile(NULL, 0, NULL) : 99);
    return 0;
}
#endif
