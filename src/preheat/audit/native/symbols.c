/* Lookups of symbols: `dlsym` and `dlvsym` return the wrapped functions.

   Both depend on the library that calls them, for RTLD_DEFAULT and for RTLD_NEXT. The real function must see
   the return address of the caller. Therefore it is called as the last step, which the compiler turns into a
   jump. */
#define _GNU_SOURCE
#include "audit.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>

typedef void* (*Find)(void*, const char*);
typedef void* (*FindVersion)(void*, const char*, const char*);

static Find real_find; /* the `dlsym` of the next library: of the CPU driver, or of the C library */
static FindVersion real_find_version;

/* The real functions. Here, the names `dlsym` and `dlvsym` lead to the wrappers, and so does every name that
   the loader looks up. So `dlvsym` is read from the symbol table of the C library. */

/* Return the number of symbols from the hash table of GNU, which has no field for it. */
static size_t count_symbols(const uint32_t* table) {
    uint32_t buckets = table[0], first = table[1], last = 0;
    const uint32_t* bucket = table + 4 + table[2] * (sizeof(ElfW(Addr)) / sizeof *table);
    const uint32_t* chain = bucket + buckets;
    for (uint32_t i = 0; i < buckets; i++)
        last = bucket[i] > last ? bucket[i] : last;
    if (last < first)
        return first;
    while (!(chain[last - first] & 1))
        last++;
    return (size_t)last + 1;
}

static void* read_definition(const struct dl_phdr_info* info, const ElfW(Dyn)* entry, const char* name) {
    const ElfW(Sym)* symbols = NULL;
    const char* names = NULL;
    size_t count = 0;
    for (; entry->d_tag != DT_NULL; entry++) {
        ElfW(Addr) base = entry->d_un.d_ptr < info->dlpi_addr ? info->dlpi_addr : 0;
        const void* at = (const void*)(base + entry->d_un.d_ptr);
        if (entry->d_tag == DT_SYMTAB)
            symbols = at;
        else if (entry->d_tag == DT_STRTAB)
            names = at;
        else if (entry->d_tag == DT_GNU_HASH)
            count = count_symbols(at);
    }
    for (size_t i = 1; symbols && names && i < count; i++)
        if (symbols[i].st_shndx != SHN_UNDEF && !strcmp(names + symbols[i].st_name, name))
            return (void*)(info->dlpi_addr + symbols[i].st_value);
    return NULL;
}

static int search_c_library(struct dl_phdr_info* info, size_t size, void* found) {
    (void)size;
    const char* name = info->dlpi_name ? base_name(info->dlpi_name) : "";
    if (strcmp(name, "libc.so.6") && strcmp(name, "libdl.so.2"))
        return 0;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) {
            const void* entries = (const void*)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
            *(void**)found = read_definition(info, entries, "dlvsym");
        }
    return *(void**)found != NULL;
}

static FindVersion find_real_version(void) {
    void* found = NULL;
    dl_iterate_phdr(search_c_library, &found);
    *(void**)&real_find_version = found;
    return real_find_version;
}

static Find find_real(void) {
    static const char* const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17", NULL};
    FindVersion find_version = find_real_version();
    Find last = NULL;
    for (int i = 0; find_version && !last && versions[i]; i++)
        *(void**)&last = find_version(RTLD_NEXT, "dlsym", versions[i]);
    Find next = last ? (Find)last(RTLD_NEXT, "dlsym") : NULL;
    real_find = next ? next : last;
    return real_find;
}

/* In this function and the next one, the variable that is volatile keeps the call from being a jump: the
   real function must see that this library calls. */
void* real_dlsym(void* handle, const char* name) {
    Find find = real_find ? real_find : find_real();
    void* volatile found = find ? find(handle, name) : NULL;
    return found;
}

/* Look up a function, of a version unless that is NULL. */
static void* find_real_symbol(void* handle, const char* name, const char* version) {
    if (!version)
        return real_dlsym(handle, name);
    FindVersion find = real_find_version ? real_find_version : find_real_version();
    void* volatile found = find ? find(handle, name, version) : NULL;
    return found;
}

/* Compile functions, as a caller finds them */

static int is_here(const void* function) {
    Dl_info found, own;
    return function && dladdr(function, &found) && dladdr((const void*)is_here, &own) &&
           found.dli_fbase == own.dli_fbase;
}

/* Look up a function in the library that calls and in those that it needs. Programs can use these although
   they are not global. The program itself has global ones only. */
static void* find_below(const void* caller, const char* name, const char* version) {
    Dl_info info;
    struct link_map* map = NULL;
    if (!dladdr1(caller, &info, (void**)&map, RTLD_DL_LINKMAP) || !map || !map->l_name[0])
        return NULL;
    void* library = dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD);
    void* found = library ? find_real_symbol(library, name, version) : NULL;
    if (library)
        dlclose(library); /* It stays loaded, because it is running. */
    Dl_info place;
    return found && dladdr(found, &place) && place.dli_fbase != info.dli_fbase ? found : NULL;
}

int is_defined_at(const void* address, const char* name) {
    Dl_info info, place;
    struct link_map* map = NULL;
    if (!dladdr1(address, &info, (void**)&map, RTLD_DL_LINKMAP) || !map)
        return 0;
    void* library = dlopen(map->l_name[0] ? map->l_name : NULL, RTLD_LAZY | RTLD_NOLOAD);
    void* found = library ? real_dlsym(library, name) : NULL;
    if (library)
        dlclose(library);
    return found && dladdr(found, &place) && place.dli_fbase == info.dli_fbase;
}

/* Return whether an address is in the program itself, whose libraries are the global ones. */
static int is_program(const void* address) {
    Dl_info info;
    struct link_map* map = NULL;
    return dladdr1(address, &info, (void**)&map, RTLD_DL_LINKMAP) && map && !map->l_name[0];
}

/* Return the function that a lookup finds without this library, or NULL. */
static void* find_compile_call(void* handle, const char* name, const char* version, const void* caller) {
    void* found = handle == RTLD_NEXT && !is_program(caller) ? NULL : find_real_symbol(handle, name, version);
    if (is_here(found)) /* The version was named. The next one is in the libraries that are loaded globally. */
        found = find_real_symbol(RTLD_NEXT, name, version);
    if (!found && (handle == RTLD_DEFAULT || handle == RTLD_NEXT))
        found = find_below(caller, name, version);
    return found;
}

void* find_linked(const char* name, const char* version, const char* soname, const void* caller) {
    void* found = find_real_symbol(RTLD_NEXT, name, version);
    if (!found && !version)
        found = find_below(caller, name, NULL);
    void* library = found ? NULL : dlopen(soname, RTLD_LAZY | RTLD_NOLOAD);
    if (library) {
        found = find_real_symbol(library, name, version);
        dlclose(library); /* It stays loaded, because a library that is loaded needs it. */
    }
    return found;
}

LAST_CALL_IS_A_JUMP EXPORT void* dlsym(void* handle, const char* name) {
    Find real = real_find ? real_find : find_real();
    report_opened_libraries();
    if (audit_directory[0] && name[0] == 'c' && handle != RTLD_NEXT && is_driver_call(name))
        return find_driver_call(handle, name);
    if (audit_directory[0] && is_compile_call(name)) {
        void* found = find_compile_call(handle, name, NULL, CALLER);
        if (found)
            return wrap_compile_call(name, found);
    }
    return real(handle, name); /* It sets the error that the caller reads by `dlerror`, too. */
}

LAST_CALL_IS_A_JUMP EXPORT void* dlvsym(void* handle, const char* name, const char* version) {
    FindVersion real = real_find_version ? real_find_version : find_real_version();
    report_opened_libraries();
    if (audit_directory[0] && is_compile_call(name)) {
        void* found = find_compile_call(handle, name, version, CALLER);
        if (found)
            return wrap_compile_call(name, found);
        if (handle == RTLD_DEFAULT)
            return find_real_symbol(RTLD_NEXT, name, version); /* It would find the function here. */
    }
    return real(handle, name, version);
}
