// A library after the audit library that has a `dlsym` of its own, and counts its calls.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

typedef void *(*Find)(void *, const char *);
static int lookups;

int count_lookups(void) { return lookups; }

void *dlsym(void *handle, const char *name) {
    static Find next;
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17", NULL};
    for (int i = 0; !next && versions[i]; i++) *(void **)&next = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    lookups++;
    return next(handle, name);
}
