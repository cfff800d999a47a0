/* Who made a call: the Python frames of the thread, or the library that the call came from.

   Libraries release the GIL before they call the driver, so that the frames cannot be read by the C API.
   The handler of `faulthandler` can: it is made for signal handlers, and writes the frames of its own
   thread to a file without the GIL. Python registers it for a signal number that is never raised, and
   this file calls it as a function. */
#define _GNU_SOURCE
#include "audit.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LOWEST_FILE = 700, NANOSECONDS = 50000, TRIES = 20000 }; /* one second of waiting */
enum { MAPS_BYTES = 16384, FORKED_FRAMES = 12, MOST_FRAMES_BYTES = 1 << 20 };

static struct {
    void (*_Atomic dump)(int);
    int number;
    int file; /* of `faulthandler`, which keeps its number */
    pid_t owner;
    dev_t device;
    ino_t inode;
    int (*is_initialized)(void);
    struct sigaction before;
} python;
static atomic_int holder; /* the thread that uses the file of `faulthandler`, or 0 */

/* Make an empty file under the number `at`, or under a high number. Return the number, or -1. */
static int make_file(int at) {
    int made = memfd_create("preheat-audit", MFD_CLOEXEC);
    if (made < 0)
        return -1;
    if (made == at)
        return at;
    int file = at >= 0 ? dup3(made, at, O_CLOEXEC) : fcntl(made, F_DUPFD_CLOEXEC, LOWEST_FILE);
    if (file < 0 && at < 0)
        file = fcntl(made, F_DUPFD_CLOEXEC, 64);
    close(made);
    return file;
}

/* Called by Python before `faulthandler.register`: return the number of the file to register. */
EXPORT int preheat_audit_python_file(int number) {
    struct stat status;
    if (!audit_directory[0] || sigaction(number, NULL, &python.before))
        return -1;
    python.file = make_file(-1);
    if (python.file < 0 || fstat(python.file, &status))
        return -1;
    python.device = status.st_dev, python.inode = status.st_ino, python.owner = getpid();
    return python.file;
}

/* Called by Python after `faulthandler.register`: take its handler, and give the signal back. */
EXPORT int preheat_audit_python(int number) {
    struct sigaction action;
    if (sigaction(number, NULL, &action) || action.sa_handler == SIG_DFL ||
        action.sa_handler == SIG_IGN || (action.sa_flags & SA_SIGINFO))
        return -1;
    sigaction(number, &python.before, NULL);
    python.number = number;
    *(void**)&python.is_initialized = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    python.dump = python.is_initialized ? action.sa_handler : NULL;
    return python.dump ? 0 : -1;
}

/* Called by Python when it exits. */
EXPORT void preheat_audit_python_ends(void) { python.dump = NULL; }

/* The state of the descriptor before `borrow`. */
enum { OWN = -2, CLOSED = -1 };

/* Prepare the descriptor for this process. give_back() restores its previous state. A child shares the
   file with its parent, and after vfork it shares all variables here, too. Return 0 if the number belongs
   to the program by now. */
static int borrow(int* before) {
    struct stat status;
    *before = CLOSED; /* A child that is about to exec has closed it. */
    if (fstat(python.file, &status))
        return errno == EBADF && make_file(python.file) >= 0;
    if (status.st_dev != python.device || status.st_ino != python.inode)
        return 0;
    *before = OWN;
    if (python.owner == getpid())
        return !ftruncate(python.file, 0) && !lseek(python.file, 0, SEEK_SET);
    *before = fcntl(python.file, F_DUPFD_CLOEXEC, LOWEST_FILE);
    return *before >= 0 && make_file(python.file) >= 0;
}

static void give_back(int before) {
    if (before == CLOSED)
        close(python.file);
    if (before >= 0) {
        dup3(before, python.file, O_CLOEXEC);
        close(before);
    }
}

/* In a forked child, the thread that used the file does not exist any more. */
static void release_in_child(void) { holder = 0; }

void prepare_sites(void) { pthread_atfork(NULL, NULL, release_in_child); }

/* Wait for other threads, for a bounded time: a child of a plain system call has none. */
static int acquire(void) {
    const struct timespec pause = {0, NANOSECONDS};
    int self = (int)syscall(SYS_gettid);
    for (int tries = 0; tries < TRIES; tries++) {
        int expected = 0;
        if (atomic_compare_exchange_strong(&holder, &expected, self))
            return 1;
        if (expected == self)
            return 0; /* A signal handler interrupted this function. */
        nanosleep(&pause, NULL);
    }
    return 0;
}

size_t audit_site(char* out, size_t size) {
    out[0] = 0;
    if (!python.dump || !python.is_initialized())
        return 0;
    int error = errno;
    if (!acquire()) {
        errno = error;
        return 0;
    }
    ssize_t length = 0;
    int before;
    void (*dump)(int) = python.dump;
    if (dump && borrow(&before)) {
        if (fits_limit(python.file, MOST_FRAMES_BYTES)) {
            dump(python.number);
            length = pread(python.file, out, size - 1, 0);
        }
        give_back(before);
    }
    holder = 0;
    out[length > 0 ? length : 0] = 0;
    errno = error;
    return length > 0 ? (size_t)length : 0;
}

/* Objects by address. `dladdr` would wait for a `dlopen` of another thread; this does not. */

typedef struct {
    uintptr_t address;
    char* out;
    size_t size;
    int found;
} ObjectSearch;

static int search_object(struct dl_phdr_info* info, size_t size, void* data) {
    (void)size;
    ObjectSearch* search = data;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr)* part = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + part->p_vaddr;
        if (part->p_type != PT_LOAD || search->address < start || search->address >= start + part->p_memsz)
            continue;
        const char* name = info->dlpi_name && info->dlpi_name[0] ? info->dlpi_name : "/proc/self/exe";
        snprintf(search->out, search->size, "%s", name);
        search->found = 1;
        return 1;
    }
    return 0;
}

static unsigned long long hexadecimal(const char** at) {
    unsigned long long value = 0;
    for (;; (*at)++) {
        char c = **at;
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0)
            return value;
        value = value * 16 + (unsigned long long)digit;
    }
}

/* Read one line of /proc/self/maps: "start-end rights offset device inode   path". */
static int match_mapping(const char* line, uintptr_t address, char* out, size_t size,
                         unsigned long long* offset) {
    unsigned long long start = hexadecimal(&line);
    line += *line == '-';
    unsigned long long end = hexadecimal(&line);
    const char* path = strchr(line, '/');
    if (address < start || address >= end || !path)
        return 0;
    line += strspn(line, " ");
    line += strcspn(line, " ");
    line += strspn(line, " ");
    *offset = hexadecimal(&line) + (address - start);
    snprintf(out, size, "%s", path);
    return 1;
}

int mapped_file(const void* address, char* out, size_t size, unsigned long long* offset) {
    int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), found = 0;
    char* text = file < 0 ? NULL : map_memory(MAPS_BYTES);
    size_t kept = 0;
    ssize_t count;
    out[0] = 0;
    while (text && !found && (count = read(file, text + kept, MAPS_BYTES - 1 - kept)) > 0) {
        char* line = text;
        text[kept + (size_t)count] = 0;
        for (char* end; !found && (end = strchr(line, '\n')); line = end + 1) {
            *end = 0;
            found = match_mapping(line, (uintptr_t)address, out, size, offset);
        }
        kept = strlen(line);
        memmove(text, line, kept);
    }
    unmap_memory(text, MAPS_BYTES);
    if (file >= 0)
        close(file);
    return found;
}

/* Return the path of the program or library at an address, in `out`; "" if there is none. */
const char* object_of(const void* address, char* out, size_t size) {
    ObjectSearch search = {(uintptr_t)address, out, size, 0};
    unsigned long long offset;
    out[0] = 0;
    if (getpid() != audit_self) { /* Another thread may have held the lock of the loader at the fork. */
        mapped_file(address, out, size, &offset);
        return out;
    }
    dl_iterate_phdr(search_object, &search);
    if (search.found && !strcmp(out, "/proc/self/exe")) {
        ssize_t length = readlink("/proc/self/exe", out, size - 1);
        out[length > 0 ? length : 0] = 0;
    }
    return out;
}

int is_part_of_cuda(const char* path) {
    static const char* const parts[] = {"libcuda.so", "libcupti.so", "libcudart.so", "libnvidia-", NULL};
    const char* name = strrchr(path, '/');
    name = name ? name + 1 : path;
    for (int i = 0; parts[i]; i++)
        if (!strncmp(name, parts[i], strlen(parts[i])))
            return 1;
    return !strcmp(path, audit_library);
}

/* Load now what `backtrace` loads at its first call. */
void prepare_backtraces(void) {
    static atomic_flag done = ATOMIC_FLAG_INIT;
    void* frames[2];
    if (!atomic_flag_test_and_set(&done))
        backtrace(frames, 2);
}

/* cuda.bindings passes calls on. cuda.core, which calls it without a frame of Python, is the library. */
static int is_binding(const char* path) { return strstr(path, "/cuda/bindings/") != NULL; }
static int is_core(const char* path) { return strstr(path, "/cuda/core/") != NULL; }

/* Return the innermost library on the stack that is not part of CUDA. */
const char* calling_object(char* out, size_t size) {
    void* frames[48];
    char next[PATH_BYTES];
    int count = backtrace(frames, getpid() == audit_self ? 48 : FORKED_FRAMES), found = 0;
    for (int i = 1; i < count; i++) {
        object_of(frames[i], next, sizeof next);
        if (found && !is_binding(next) && !is_core(next))
            break;
        if (!next[0] || (!found && is_part_of_cuda(next)))
            continue;
        if (!found || is_core(next))
            snprintf(out, size, "%s", next);
        if (!is_binding(next))
            return out;
        found = 1;
    }
    if (!found)
        out[0] = 0;
    return out;
}

/* Return the library that called from an address: the object there, or the caller of a binding. */
const char* calling_library(const void* address, char* out, size_t size) {
    object_of(address, out, size);
    return is_binding(out) ? calling_object(out, size) : out;
}
