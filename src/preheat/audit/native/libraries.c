/* Libraries that have a compiler inside: a process reports each of them that it has mapped.

   PREHEAT_AUDIT_COMPILERS has the patterns of their names, separated by colons. They are compared
   with the name that a library was loaded by, the one that it was linked with (DT_SONAME), and that of its file
   where it was loaded by a link. A library is found in the list of the loader, wherever its load came from: the
   program was linked against it, another library needs it, or `dlopen` loaded it. The list is searched

     - when the process starts
     - in each thread, in its first lookup of a symbol after a `dlopen`: before the library is used
     - before a library is closed, because it is not in the list afterwards
     - when the process executes another program, and when it ends.

   `dlopen` itself must return to its caller, whose search path the loader uses. So nothing can be searched
   after it, and it only notes that something may be new. */
#define _GNU_SOURCE
#include "audit.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_PATTERNS = 64, MOST_LIBRARIES = 64, PATTERN_BYTES = 4096, HOOK_BYTES = 256 };

static char pattern_text[PATTERN_BYTES];
static const char* patterns[MOST_PATTERNS];
static int pattern_count;
static _Atomic uint64_t reported[MOST_LIBRARIES]; /* hashes of their paths */
static atomic_uint reported_count;
static char hooks[HOOK_BYTES]; /* the compilers that have a hook in this process, each with a comma */
static pid_t owner;            /* this process; between vfork and exec, a child has another id */

/* How often `dlopen` was called, and what this thread knew of it when it searched. */
static atomic_uint opens;
static unsigned opens_at_fork;
static _Thread_local unsigned known_opens __attribute__((tls_model("initial-exec")));

/* What the loader has counted when the list was searched to its end. Its lock protects all but `adds`. */
static _Atomic unsigned long long searched_adds;
static unsigned long long searched_subs;
static size_t searched; /* libraries at the beginning of the list that need no second look */

/* Return whether a name has a pattern, in which a star is any text. There may be one star. */
static int matches(const char* name, const char* pattern) {
    const char* star = strchr(pattern, '*');
    if (!star)
        return !strcmp(name, pattern);
    size_t before = (size_t)(star - pattern), after = strlen(star + 1), length = strlen(name);
    return length >= before + after && !strncmp(name, pattern, before) &&
           !strcmp(name + length - after, star + 1);
}

static int has_pattern(const char* name) {
    for (int i = 0; i < pattern_count; i++)
        if (matches(name, patterns[i]))
            return 1;
    return 0;
}

/* Return whether a library was not found before in this process. */
static int is_new(const char* path) {
    uint64_t name = 0xcbf29ce484222325ull;
    for (const char* at = path; *at; at++)
        name = (name ^ (unsigned char)*at) * 0x100000001b3ull;
    for (unsigned i = 0; i < MOST_LIBRARIES; i++)
        if (reported[i] == name)
            return 0;
    reported[reported_count++ % MOST_LIBRARIES] = name;
    return 1;
}

/* Report a library that was loaded from a path, and has a pattern by a name. */
static void report_library(const char* path, const char* name) {
    Scratch* scratch = map_memory(sizeof *scratch);
    if (!scratch)
        return;
    Line line;
    line_begin(&line, scratch->text, sizeof scratch->text, "library", audit_now());
    line.recent = 1;
    line_text(&line, "path", path);
    line_text(&line, "name", name);
    line_text(&line, "hooks", hooks);
    line_write(&line);
    unmap_memory(scratch, sizeof *scratch);
}

enum { SEARCH_ON, FOUND, UNCHANGED };

typedef struct {
    size_t at;
    unsigned long long adds, loaded; /* as the loader counts them; `loaded` is for all namespaces */
    char path[PATH_BYTES], file[PATH_BYTES], name[PATH_BYTES];
} Search;

/* Return the name that a library was linked with; empty if it has none. */
static const char* soname_of(const struct dl_phdr_info* library) {
    const ElfW(Dyn)* entry = NULL;
    ElfW(Addr) strings = 0, name = 0;
    for (int i = 0; i < library->dlpi_phnum; i++)
        if (library->dlpi_phdr[i].p_type == PT_DYNAMIC)
            entry = (const void*)(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr);
    for (; entry && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_STRTAB)
            strings = entry->d_un.d_ptr;
        else if (entry->d_tag == DT_SONAME)
            name = entry->d_un.d_val;
    }
    if (!strings || !name)
        return "";
    if (strings < library->dlpi_addr) /* The loader has not relocated it, as in the library of the kernel. */
        strings += library->dlpi_addr;
    return (const char*)(strings + name);
}

/* Return the name by which a library has a pattern, or NULL. */
static const char* matching_name(const struct dl_phdr_info* library, char file[PATH_BYTES]) {
    const char *path = library->dlpi_name, *soname = soname_of(library);
    char any;
    if (has_pattern(base_name(path)))
        return path;
    if (has_pattern(soname))
        return soname;
    int is_link = !is_sandboxed() && readlink(path, &any, sizeof any) > 0;
    return is_link && realpath(path, file) && has_pattern(base_name(file)) ? file : NULL;
}

/* Look at one library of the list. The loader holds its lock, so that nothing is reported here. */
static int look_at(struct dl_phdr_info* library, size_t size, void* data) {
    Search* search = data;
    (void)size;
    if (!search->at) {
        search->adds = library->dlpi_adds;
        search->loaded = library->dlpi_adds - library->dlpi_subs;
        if (library->dlpi_adds == searched_adds && library->dlpi_subs == searched_subs)
            return UNCHANGED;
        if (library->dlpi_subs != searched_subs)
            searched = 0;
        searched_subs = library->dlpi_subs;
    }
    if (search->at++ < searched)
        return SEARCH_ON;
    searched = search->at;
    const char* name = library->dlpi_name ? matching_name(library, search->file) : NULL;
    if (!name || !is_new(library->dlpi_name))
        return SEARCH_ON;
    snprintf(search->path, sizeof search->path, "%s", library->dlpi_name);
    snprintf(search->name, sizeof search->name, "%s", name);
    return FOUND;
}

/* Search the files that are mapped: `dlmopen` loads into lists of their own. */
static void search_maps(char* line, size_t size) {
    FILE* file = fopen("/proc/self/maps", "re");
    if (!file)
        return;
    while (fgets(line, (int)size, file)) {
        const char *rights = strchr(line, ' '), *path = strchr(line, '/');
        line[strcspn(line, "\n")] = 0;
        if (path && path > rights && rights[3] == 'x' && has_pattern(base_name(path)) && is_new(path))
            report_library(path, path);
    }
    fclose(file);
}

/* Report the libraries that are new in the list. */
static void search_list(void) {
    int error = errno, result;
    Search* search = map_memory(sizeof *search);
    if (!search)
        return;
    do {
        search->at = 0;
        result = dl_iterate_phdr(look_at, search);
        if (result == FOUND)
            report_library(search->path, search->name);
    } while (result == FOUND);
    if (result == SEARCH_ON) {
        searched_adds = search->adds;
        if (search->loaded > search->at)
            search_maps(search->path, sizeof search->path);
    }
    unmap_memory(search, sizeof *search);
    errno = error;
}

void report_opened_libraries(void) {
    unsigned now = opens;
    if (now == known_opens || !pattern_count)
        return;
    known_opens = now;
    search_list();
}

/* A forked child may not search before it has called `dlopen` itself: another thread of its parent may have
   held the lock of the loader, and holds it in the child for ever. */
void report_all_libraries(void) {
    if (pattern_count && getpid() == owner && opens != opens_at_fork)
        search_list();
}

static void begin_child(void) {
    owner = getpid();
    opens_at_fork = known_opens = opens;
}

void prepare_libraries(void) {
    const char* text = getenv("PREHEAT_AUDIT_COMPILERS");
    if (!text || strlen(text) >= sizeof pattern_text) {
        report_unseen("compilers inside libraries", "a program was started without PREHEAT_AUDIT_COMPILERS");
        return;
    }
    strcpy(pattern_text, text);
    char* rest = pattern_text;
    for (char* word; (word = strsep(&rest, ":")) && pattern_count < MOST_PATTERNS;)
        if (word[0])
            patterns[pattern_count++] = word;
    owner = getpid();
    opens++; /* The first process searches at its end, whether it calls `dlopen` here or not. */
    pthread_atfork(NULL, NULL, begin_child);
    search_list();
}

/* Called by Python when it has wrapped the functions by which a library compiles. A forked child has them,
   too, and the name with them. */
EXPORT void preheat_audit_hooked(const char* compiler) {
    char buffer[512];
    Line line;
    if (!audit_directory[0])
        return;
    size_t length = strlen(hooks);
    if (length + strlen(compiler) + 2 <= sizeof hooks)
        sprintf(hooks + length, "%s,", compiler);
    line_begin(&line, buffer, sizeof buffer, "hooked", audit_now());
    line.recent = 1;
    line_text(&line, "compiler", compiler);
    line_write(&line);
}

/* The functions of the loader */

typedef void* (*Open)(const char*, int);
typedef void* (*OpenList)(Lmid_t, const char*, int);

LAST_CALL_IS_A_JUMP EXPORT void* dlopen(const char* path, int mode) {
    static Open real;
    if (!real)
        *(void**)&real = real_dlsym(RTLD_NEXT, "dlopen");
    opens++;
    if (path && audit_directory[0] && !permit_open(path, CALLER))
        path = "a library of NVRTC, in a sealed process"; /* There is none, so that `dlerror` has a message. */
    return real(path, mode);
}

LAST_CALL_IS_A_JUMP EXPORT void* dlmopen(Lmid_t list, const char* path, int mode) {
    static OpenList real;
    if (!real)
        *(void**)&real = real_dlsym(RTLD_NEXT, "dlmopen");
    opens++;
    return real(list, path, mode);
}

EXPORT int dlclose(void* handle) {
    static int (*real)(void*);
    if (!real)
        *(void**)&real = real_dlsym(RTLD_NEXT, "dlclose");
    report_all_libraries();
    return real(handle);
}
