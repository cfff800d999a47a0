/* Modules in memory: their kind, their size, and where they came from.

   An image may be damaged, and its headers may point anywhere. All of it is read by the kernel, which
   returns an error where the processor would stop the program. */
#define _GNU_SOURCE
#include "audit.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRAPPER = 0x466243b1u, FATBIN = 0xba55ed50u, LTO_IR = 0x7f4e43edu };
enum { ENTRY_ELF = 2, SPECIFIC = 0x100000, MOST_ENTRIES = 4096, CHUNK = 4096 };
enum { INPUT_PTX = 1, INPUT_OBJECT = 3, INPUT_LIBRARY = 4, INPUT_NVVM = 5 }; /* CUjitInputType */
#define MOST_BYTES (256ull << 20)

/* Copy memory through a pipe: a write of memory that does not exist is an error, and no crash. */
static size_t peek_by_pipe(char* to, const char* from, size_t count) {
    int ends[2];
    size_t done = 0;
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK))
        return 0;
    while (done < count) {
        size_t wanted = count - done < CHUNK ? count - done : CHUNK;
        ssize_t written = write(ends[1], from + done, wanted);
        if (written <= 0 || read(ends[0], to + done, (size_t)written) != written)
            break;
        done += (size_t)written;
    }
    close(ends[0]);
    close(ends[1]);
    return done;
}

/* Copy memory of this process. Return how many bytes could be read. */
static size_t peek(void* to, const void* from, size_t count) {
    static atomic_int forbidden; /* A sandbox may forbid the call. */
    struct iovec here = {to, count}, there = {(void*)from, count};
    ssize_t copied = forbidden ? -1 : process_vm_readv(getpid(), &here, 1, &there, 1, 0);
    if (copied >= 0)
        return (size_t)copied;
    if (!forbidden && errno == EFAULT)
        return 0;
    forbidden = 1;
    return peek_by_pipe(to, from, count);
}

static int peek_all(void* to, const void* from, size_t count) {
    int error = errno;
    int whole = peek(to, from, count) == count;
    errno = error;
    return whole;
}

/* The wrapper around a fat binary, which nvcc puts into programs. */
typedef struct {
    uint32_t magic, version;
    const void* data;
    const void* more;
} Wrapper;

typedef struct {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size;
} FatbinHeader;

typedef struct {
    uint16_t kind, version;
    uint32_t header_size;
    uint64_t size;
    uint32_t unpadded, unknown, versions, arch, name[2];
    uint64_t flags;
} FatbinEntry;

/* Return whether machine code runs on the device: on the same family, and not on an older device. */
static int runs_on_device(const FatbinEntry* entry) {
    uint32_t capability = (uint32_t)device_capability();
    if (!capability)
        return 1;
    if (entry->flags & SPECIFIC) /* an architecture with the suffix `a`, whose code runs on no other */
        return entry->arch == capability;
    return entry->arch / 10 == capability / 10 && entry->arch <= capability;
}

/* Return whether the driver can compile PTX or IR for the device. */
static int is_for_device(const FatbinEntry* entry) {
    uint32_t capability = (uint32_t)device_capability();
    return !capability || entry->arch <= capability;
}

static unsigned long long elf_bytes(const char* address) {
    Elf64_Ehdr header;
    if (!peek_all(&header, address, sizeof header) || header.e_ident[EI_CLASS] != ELFCLASS64)
        return 0;
    unsigned long long end = header.e_shoff + (unsigned long long)header.e_shnum * header.e_shentsize;
    unsigned long long segments = header.e_phoff + (unsigned long long)header.e_phnum * header.e_phentsize;
    if (segments > end)
        end = segments;
    for (int i = 0; i < header.e_shnum; i++) {
        Elf64_Shdr section;
        if (!peek_all(&section, address + header.e_shoff + (size_t)i * header.e_shentsize, sizeof section))
            return 0;
        if (section.sh_type != SHT_NOBITS && section.sh_offset + section.sh_size > end)
            end = section.sh_offset + section.sh_size;
    }
    return end;
}

static unsigned long long fatbin_bytes(Image* image, const char* address) {
    FatbinHeader header;
    if (!peek_all(&header, address, sizeof header))
        return 0;
    unsigned long long end = header.header_size + header.size, at = header.header_size;
    for (int i = 0; i < MOST_ENTRIES && at + sizeof(FatbinEntry) <= end; i++) {
        FatbinEntry entry;
        if (!peek_all(&entry, address + at, sizeof entry) || entry.header_size < sizeof entry ||
            entry.size > end)
            break;
        if (entry.kind != ENTRY_ELF)
            image->ptx += is_for_device(&entry);
        else if (runs_on_device(&entry))
            image->code++;
        at += entry.header_size + entry.size;
    }
    return end;
}

static unsigned long long text_bytes(const char* address) {
    char chunk[CHUNK];
    for (unsigned long long at = 0; at < MOST_BYTES;) {
        size_t wanted = CHUNK - (size_t)((uintptr_t)(address + at) % CHUNK); /* up to the next page */
        size_t count = peek(chunk, address + at, wanted);
        size_t length = strnlen(chunk, count);
        at += length;
        if (length < count || !count)
            return at;
    }
    return MOST_BYTES;
}

static int is_ptx(const char* address) {
    char start[CHUNK + 1];
    size_t count = peek(start, address, CHUNK - (size_t)((uintptr_t)address % CHUNK));
    if (count == CHUNK - (size_t)((uintptr_t)address % CHUNK) && count < CHUNK)
        count += peek(start + count, address + count, CHUNK - count);
    start[count] = 0;
    return strstr(start, ".version") != NULL; /* Comments may come before it. */
}

/* The file that an address is mapped from, as part of a program or library. */
typedef struct {
    uintptr_t address;
    Image* image;
} FileSearch;

static int search_file(struct dl_phdr_info* info, size_t size, void* data) {
    (void)size;
    FileSearch* search = data;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr)* part = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + part->p_vaddr;
        if (part->p_type != PT_LOAD || search->address < start || search->address >= start + part->p_filesz)
            continue;
        const char* name = info->dlpi_name && info->dlpi_name[0] ? info->dlpi_name : "/proc/self/exe";
        if (!realpath(name, search->image->file))
            snprintf(search->image->file, PATH_BYTES, "%s", name);
        search->image->offset = part->p_offset + (search->address - start);
        return 1;
    }
    return 0;
}

static unsigned long long classify(Image* image, const char* address, size_t size, int input) {
    uint32_t magic = 0;
    if (!peek_all(&magic, address, sizeof magic)) {
        image->kind = "unknown";
        return size;
    }
    if (magic == 0x464c457f) {
        image->kind = input == INPUT_OBJECT ? "object" : "cubin";
        return size ? size : elf_bytes(address);
    }
    if (magic == FATBIN) {
        image->kind = "fatbin";
        return fatbin_bytes(image, address);
    }
    if (magic == LTO_IR || input == INPUT_NVVM) {
        image->kind = "ltoir";
        return size;
    }
    if (input == INPUT_LIBRARY || !memcmp(&magic, "!<ar", 4)) {
        image->kind = "archive";
        return size;
    }
    image->kind = input == INPUT_PTX || is_ptx(address) ? "ptx" : "unknown";
    return size ? size : strcmp(image->kind, "ptx") ? 0 : text_bytes(address);
}

/* Write a copy into the directory of the audit. The kernel reads the memory of the image. */
static void save_image(Image* image, const void* address) {
    static atomic_uint number;
    char path[PATH_BYTES + 80];
    int file = -1;
    unsigned long long wanted = image->bytes;
    if (!wanted || wanted > MOST_BYTES)
        return;
    for (int tries = 0; file < 0 && tries < 10000; tries++) {
        snprintf(image->saved, sizeof image->saved, "%d-%u.image", (int)getpid(), number++);
        snprintf(path, sizeof path, "%s/%s", audit_directory, image->saved);
        file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (file < 0 && errno != EEXIST)
            break;
    }
    unsigned long long done = 0;
    while (file >= 0 && done < wanted && fits_limit(file, wanted - done)) {
        ssize_t written = write(file, (const char*)address + done, wanted - done);
        if (written <= 0)
            break;
        done += (unsigned long long)written;
    }
    if (file >= 0)
        close(file);
    if (file >= 0 && done < wanted)
        unlink(path);
    if (done < wanted)
        image->saved[0] = 0;
}

void describe_image(Image* image, const void* address, size_t size, int input, int keep) {
    int error = errno;
    memset(image, 0, sizeof *image);
    Wrapper wrapper;
    if (peek_all(&wrapper, address, sizeof wrapper) && wrapper.magic == WRAPPER) {
        address = wrapper.data;
        size = 0;
    }
    image->bytes = classify(image, address, size, input);
    FileSearch search = {(uintptr_t)address, image};
    if (getpid() == audit_self)
        dl_iterate_phdr(search_file, &search);
    else /* Another thread may have held the lock of the loader at the fork. */
        mapped_file(address, image->file, sizeof image->file, &image->offset);
    if (keep && !image->file[0])
        save_image(image, address);
    errno = error;
}

/* Only what decides about a refusal is read here. The reader of the events looks at the other files. */
void describe_file(Image* image, const char* path, int input) {
    int error = errno;
    struct stat status;
    memset(image, 0, sizeof *image);
    int file = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    size_t size = file >= 0 && !fstat(file, &status) && S_ISREG(status.st_mode) ? (size_t)status.st_size : 0;
    void* content = size ? mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    if (content != MAP_FAILED) {
        classify(image, content, size, input);
        munmap(content, size);
    }
    if (file >= 0)
        close(file);
    if (!needs_compiler(image))
        image->kind = "file";
    if (path && !realpath(path, image->file))
        snprintf(image->file, PATH_BYTES, "%s", path);
    errno = error;
}

/* Return whether the driver must compile the image, on the device of this process. */
int needs_compiler(const Image* image) {
    if (!image->kind)
        return 0;
    if (!strcmp(image->kind, "ptx") || !strcmp(image->kind, "ltoir"))
        return 1;
    return !strcmp(image->kind, "fatbin") && image->ptx && !image->code;
}

const char* image_name(const Image* image) {
    if (!strcmp(image->kind, "fatbin"))
        return "a fat binary without machine code for the device";
    return !strcmp(image->kind, "ptx") ? "PTX" : !strcmp(image->kind, "ltoir") ? "LTO-IR" : image->kind;
}

void report_load(Scratch* scratch, const Image* image, const Load* load) {
    Line line;
    line_begin(&line, scratch->text, sizeof scratch->text, "load", audit_now());
    line_text(&line, "call", load->call);
    line_text(&line, "by", load->by);
    line_text(&line, "kind", image->kind);
    line_integer(&line, "bytes", (long long)image->bytes);
    line_integer(&line, "result", load->result);
    line_seconds(&line, "seconds", audit_now() - load->started);
    if (image->file[0]) {
        line_text(&line, "file", image->file);
        line_integer(&line, "offset", (long long)image->offset);
    }
    if (image->saved[0])
        line_text(&line, "saved", image->saved);
    line_text(&line, "caller", load->caller);
    line_site(&line, scratch->site);
    line_write(&line);
}

/* The device, whose architecture decides which entry of a fat binary is used */

static int (*get_device)(int*);
static int (*get_attribute)(int*, int, int);

void prepare_device(void) {
    if (get_attribute)
        return;
    *(void**)&get_device = find_driver("cuCtxGetDevice");
    *(void**)&get_attribute = find_driver("cuDeviceGetAttribute");
}

int device_capability(void) {
    enum { MAJOR = 75, MINOR = 76 }; /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_… */
    int device = 0, major = 0, minor = 0;
    if (!get_attribute)
        return 0;
    if (!get_device || get_device(&device))
        device = 0;
    if (get_attribute(&major, MAJOR, device) || get_attribute(&minor, MINOR, device))
        return 0;
    return 10 * major + minor;
}

void report_device(void) {
    static pid_t reported;
    char buffer[512];
    if (reported == getpid() || !get_attribute)
        return;
    reported = getpid();
    int capability = device_capability();
    if (!capability)
        return;
    Line line;
    line_begin(&line, buffer, sizeof buffer, "device", audit_now());
    line_integer(&line, "capability", capability);
    line_write(&line);
}
