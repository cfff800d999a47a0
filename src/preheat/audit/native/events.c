/* Events: one line of JSON each, appended by one write to the file of the process.

   The file is opened when the process starts, because the process may lose its access to the directory: it
   may change its user or its root, or enter a sandbox that ends it when it opens a file. If the program has
   closed the descriptor, the file is opened for each event. So a program may also fork, exec, or be killed:
   what was written before stays. Each line is one write that begins with the end of a line, so that lines
   never mix, not even with one that a full disk has cut.

   A process may have no memory, no descriptor or no space left for an event. It then counts the event in a
   page that all processes of the audit share, which needs none of them: the report says that events are
   missing.

   A refusal is also appended to the file of PREHEAT_EVENTS, as the same `sealed` event that preheat itself
   writes there. Whoever watches that file sees a refusal at once, and not only in the report. */
#define _GNU_SOURCE
#include "audit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LONGEST_TEXT = 4000, CLOSING = 16, SMALL_LINE = 1024, NAME_BYTES = 64 };
enum { LOWEST_FILE = 700, LOWER_FILE = 64 }; /* numbers that programs do not expect to get */
enum { RECENT_FILES = 16, RECENT_BYTES = 65536 }; /* of events that may be dropped */

char audit_directory[PATH_BYTES];
char audit_library[PATH_BYTES];
char audit_user_events[PATH_BYTES];
Seal audit_seal;
int audit_reports = 1;
pid_t audit_self;

/* A descriptor and the file that it had at first. The program may have another file there by now. */
typedef struct {
    int file;
    dev_t device;
    ino_t inode;
} Kept;
static Kept kept_events = {-1, 0, 0}, standard_error = {-1, 0, 0};
static atomic_uint* losses; /* of all processes of the audit, in its file `losses` */

static void keep(Kept* kept, int file) {
    struct stat status;
    if (file < 0 || fstat(file, &status))
        return;
    *kept = (Kept){file, status.st_dev, status.st_ino};
}

static int is_same(const Kept* kept) {
    struct stat status;
    return kept->file >= 0 && !fstat(kept->file, &status) && status.st_dev == kept->device &&
           status.st_ino == kept->inode;
}

static void lose_event(void);

void* map_memory(size_t size) {
    void* memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED)
        return memory;
    lose_event();
    return NULL;
}

void unmap_memory(void* memory, size_t size) {
    int error = errno;
    if (memory)
        munmap(memory, size);
    errno = error;
}

double audit_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* It is the same clock in all processes. */
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Lines. Numbers are printed here, because `printf` needs a large stack and may allocate memory. */

static size_t put_digits(char* out, unsigned long long value, int least) {
    char digits[24];
    size_t count = 0, at = 0;
    do
        digits[count++] = (char)('0' + value % 10);
    while ((value /= 10) || count < (size_t)least);
    while (count)
        out[at++] = digits[--count];
    return at;
}

static size_t put_number(char* out, long long value) {
    size_t sign = value < 0;
    out[0] = '-';
    return sign + put_digits(out + sign, sign ? 0ull - (unsigned long long)value : (unsigned long long)value, 1);
}

static size_t room(const Line* line) {
    return line->length + CLOSING < line->size ? line->size - CLOSING - line->length : 0;
}

static void put(Line* line, const char* bytes, size_t count) {
    if (count > room(line))
        return;
    memcpy(line->data + line->length, bytes, count);
    line->length += count;
}

/* Return the length of the UTF-8 character at `text`; 0 if these bytes are not UTF-8. */
static size_t character_length(const char* text) {
    const unsigned char* byte = (const unsigned char*)text;
    unsigned first = byte[0];
    size_t length = first < 0x80 ? 1 : first >= 0xc2 && first < 0xe0 ? 2 : (first & 0xf0) == 0xe0 ? 3 :
                    first >= 0xf0 && first < 0xf5 ? 4 : 0;
    for (size_t i = 1; i < length; i++) /* It ends at the NUL after the text. */
        if ((byte[i] & 0xc0) != 0x80)
            return 0;
    int overlong = (first == 0xe0 && byte[1] < 0xa0) || (first == 0xf0 && byte[1] < 0x90);
    int surrogate = first == 0xed && byte[1] >= 0xa0;
    int beyond = first == 0xf4 && byte[1] >= 0x90;
    return overlong || surrogate || beyond ? 0 : length;
}

/* Append text as the inside of a JSON string. It is cut where it would take more than `most` bytes. A byte
   that is not UTF-8, as names of files may have it, becomes the replacement character. */
static void put_escaped(Line* line, const char* text, size_t most) {
    static const char hex[] = "0123456789abcdef";
    size_t end = line->length + most;
    while (*text) {
        unsigned char byte = (unsigned char)*text;
        size_t length = character_length(text), count = length;
        char escaped[6] = {'\\', (char)byte};
        if (byte == '"' || byte == '\\') {
            count = 2;
        } else if (byte < 0x20) {
            memcpy(escaped, "\\u00", 4);
            escaped[4] = hex[byte >> 4], escaped[5] = hex[byte & 15];
            count = 6;
        } else if (!length) {
            memcpy(escaped, "\\ufffd", 6);
            count = 6;
        }
        if (line->length + count > end || count > room(line))
            return;
        put(line, count == length ? text : escaped, count);
        text += length ? length : 1;
    }
}

static int put_key(Line* line, const char* key, size_t needed) {
    if (strlen(key) + 8 + needed > room(line))
        return 0;
    if (line->data[line->length - 1] != '{')
        put(line, ", ", 2);
    put(line, "\"", 1);
    put(line, key, strlen(key));
    put(line, "\": ", 3); /* the spaces of Python's `json` */
    return 1;
}

static void put_text(Line* line, const char* key, const char* text, size_t most) {
    if (!text || !put_key(line, key, 16))
        return;
    size_t left = room(line) - 8;
    put(line, "\"", 1);
    put_escaped(line, text, left < most ? left : most);
    put(line, "\"", 1);
}

void line_text(Line* line, const char* key, const char* text) { put_text(line, key, text, LONGEST_TEXT); }

void line_integer(Line* line, const char* key, long long value) {
    char text[32];
    size_t length = put_number(text, value);
    if (put_key(line, key, length))
        put(line, text, length);
}

void line_seconds(Line* line, const char* key, double seconds) {
    char text[64];
    long long micros = (long long)(seconds * 1e6 + 0.5);
    size_t length = put_number(text, micros / 1000000);
    text[length++] = '.';
    length += put_digits(text + length, (unsigned long long)(micros % 1000000), 6);
    if (put_key(line, key, length))
        put(line, text, length);
}

void line_strings(Line* line, const char* key, char* const strings[]) {
    if (!put_key(line, key, 16))
        return;
    put(line, "[", 1);
    size_t limit = line->length + LONGEST_TEXT;
    for (int i = 0; strings && strings[i] && line->length + 8 < limit && room(line) > 16; i++) {
        put(line, i ? ",\"" : "\"", i ? 2 : 1);
        put_escaped(line, strings[i], limit - line->length < room(line) - 8 ? limit - line->length : room(line) - 8);
        put(line, "\"", 1);
    }
    put(line, "]", 1);
}

/* Return the innermost frame of the program in `site`, or else of any library, without indentation. */
static const char* program_frame(const char* site, char* out, size_t size) {
    static const char* const libraries[] = {"/site-packages/", "/dist-packages/", "/lib/python3",
                                            "/lib64/python3", "<frozen ", NULL};
    const char *start = NULL, *innermost = NULL;
    for (const char* at = site; (at = strstr(at, "  File ")) && !start; at += 2) {
        size_t length = strcspn(at, "\n");
        int library = 0;
        for (int i = 0; libraries[i]; i++)
            library = library || memmem(at, length, libraries[i], strlen(libraries[i]));
        if (!innermost)
            innermost = at;
        if (!library)
            start = at;
    }
    start = start ? start : innermost;
    if (!start)
        return NULL;
    size_t length = strcspn(start + 2, "\n");
    length = length < size ? length : size - 1;
    memcpy(out, start + 2, length);
    out[length] = 0;
    return out;
}

/* The line of the program has its own field, because a deep stack has no room in an event. */
void line_site(Line* line, const char* site) {
    char frame[SMALL_LINE];
    if (!site || !site[0])
        return;
    line_text(line, "program", program_frame(site, frame, sizeof frame));
    put_text(line, "site", site, line->size);
}

void line_begin(Line* line, char* buffer, size_t size, const char* event, double time) {
    *line = (Line){buffer, size, 0, 0};
    put(line, "\n{", 2);
    line_text(line, "event", event);
    line_seconds(line, "time", time);
    line_integer(line, "pid", getpid());
}

/* Append texts to a path. It has room for the directory and NAME_BYTES. */
static void name_file(char* path, const char* const parts[]) {
    size_t length = strlen(audit_directory);
    memcpy(path, audit_directory, length);
    path[length++] = '/';
    for (int i = 0; parts[i]; i++) {
        size_t more = strlen(parts[i]);
        memcpy(path + length, parts[i], more);
        length += more;
    }
    path[length] = 0;
}

/* Name a file of this process. Users have their own files, because a process may change its user and cannot
   write to its former file any more. */
static void name_own_file(char* path, const char* before, unsigned number, const char* after) {
    char pid[24], user[24];
    pid[put_digits(pid, number, 1)] = 0;
    user[put_digits(user, geteuid(), 1)] = 0;
    name_file(path, (const char* const[]){before, pid, "-", user, after, NULL});
}

/* Open the file for the events of this process. With refusals alone, there are too few for a file of each
   process. */
static int open_events(int recent) {
    char path[strlen(audit_directory) + NAME_BYTES];
    unsigned pid = (unsigned)getpid();
    if (recent)
        name_own_file(path, "recent-", pid % RECENT_FILES, ".jsonl");
    else if (audit_reports)
        name_own_file(path, "", pid, ".jsonl");
    else
        name_file(path, (const char* const[]){"refusals.jsonl", NULL});
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    struct stat status;
    if (file >= 0 && recent && !fstat(file, &status) && status.st_size > RECENT_BYTES &&
        ftruncate(file, 0)) {
        close(file);
        return -1;
    }
    return file;
}

/* Map the counter of lost events. Its page was written when the file was made, so that a full disk does not
   matter later. */
static void map_losses(void) {
    char path[strlen(audit_directory) + NAME_BYTES];
    struct stat status;
    name_file(path, (const char* const[]){"losses", NULL});
    int file = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0)
        return;
    if (!fstat(file, &status) && status.st_size >= (off_t)sizeof *losses) {
        void* page = mmap(NULL, sizeof *losses, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        losses = page == MAP_FAILED ? NULL : page;
    }
    close(file);
}

/* Note that an event cannot be written. Without the counter, an empty file tells that there are such events. */
static void lose_event(void) {
    int error = errno;
    char path[strlen(audit_directory) + NAME_BYTES];
    if (losses) {
        atomic_fetch_add(losses, 1);
    } else if (audit_directory[0]) {
        name_own_file(path, "", (unsigned)getpid(), ".lost");
        mknod(path, S_IFREG | 0600, 0);
    }
    errno = error;
}

int fits_limit(int file, size_t count) {
    struct rlimit limit;
    struct stat status;
    if (getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur == RLIM_INFINITY)
        return 1;
    if (fstat(file, &status) || !S_ISREG(status.st_mode))
        return 1;
    return (unsigned long long)status.st_size + count <= limit.rlim_cur;
}

static int write_whole(int file, const char* bytes, size_t count) {
    return fits_limit(file, count) && write(file, bytes, count) == (ssize_t)count;
}

/* Append a line, which begins and ends with the end of a line. Return 0 if that is not possible. The loss is
   noted, but for a line that may be dropped. */
static int append(const char* bytes, size_t count, int recent) {
    int is_kept = !recent && is_same(&kept_events);
    int file = is_kept ? kept_events.file : open_events(recent);
    int written = file >= 0 && write_whole(file, bytes, count);
    if (file >= 0 && !is_kept)
        close(file);
    if (!written && !recent)
        lose_event();
    return written;
}

int line_write(Line* line) {
    if (!audit_directory[0])
        return 0;
    int error = errno;
    memcpy(line->data + line->length, "}\n", 2);
    int written = append(line->data, line->length + 2, line->recent && !audit_reports);
    errno = error;
    return written;
}

/* Called by Python with one line of JSON, between two ends of lines. */
EXPORT int preheat_audit_append(const char* bytes, size_t count) {
    return audit_directory[0] && append(bytes, count, 0);
}

/* Remember standard error, and open what later events need. */
void prepare_events(void) {
    keep(&standard_error, STDERR_FILENO);
    map_losses();
    int file = open_events(0);
    if (file < 0)
        return;
    int high = fcntl(file, F_DUPFD_CLOEXEC, LOWEST_FILE);
    keep(&kept_events, high >= 0 ? high : fcntl(file, F_DUPFD_CLOEXEC, LOWER_FILE));
    close(file);
}

/* With PREHEAT_AUDIT_DEBUG, write a message to the file debug.log of the directory. */
void audit_debug(const char* format, ...) {
    if (!audit_directory[0] || !getenv("PREHEAT_AUDIT_DEBUG"))
        return;
    int error = errno;
    char text[1024], path[PATH_BYTES + 32];
    int start = snprintf(text, sizeof text, "%d ", (int)getpid());
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + start, sizeof text - (size_t)start - 1, format, arguments);
    va_end(arguments);
    strcat(text, "\n");
    snprintf(path, sizeof path, "%s/debug.log", audit_directory);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file >= 0) {
        write_whole(file, text, strlen(text));
        close(file);
    }
    errno = error;
}

void report_unseen(const char* what, const char* why) {
    char buffer[SMALL_LINE];
    Line line;
    line_begin(&line, buffer, sizeof buffer, "unseen", audit_now());
    line_text(&line, "what", what);
    line_text(&line, "why", why);
    line_write(&line);
}

/* Append texts to `out`, as far as they fit. */
static size_t join(char* out, size_t size, const char* const texts[], size_t count) {
    size_t length = 0;
    for (size_t i = 0; i < count; i++) {
        size_t more = strlen(texts[i]), left = size - length;
        more = more < left ? more : left;
        memcpy(out + length, texts[i], more);
        length += more;
    }
    return length;
}

/* Say on standard error what was refused, if it is still the file that it was at the start. */
static void say_refusal(Scratch* scratch, Refused what, const char* name, const char* caller) {
    static const char* const actions[] = {"starting the compiler ", "running the compiler ", "loading ",
                                          "a compile by "};
    char frame[SMALL_LINE];
    const char* where = scratch->site[0] ? program_frame(scratch->site, frame, sizeof frame) : NULL;
    where = where ? where : caller && caller[0] ? caller : NULL;
    int refused = audit_seal == SEAL_ERROR;
    const char* const texts[] = {
        "preheat: this process is sealed", refused ? ": " : " (warning only): ", actions[what], name,
        refused ? " was refused" : " was permitted",
        what != REFUSED_LOAD ? "" : refused ? " (the driver would have to compile it)" : " (the driver has to compile it)",
        where ? ", called from " : "", where ? where : "",
    };
    if (!is_same(&standard_error))
        return;
    size_t length = join(scratch->text, sizeof scratch->text - 1, texts, sizeof texts / sizeof *texts);
    scratch->text[length] = '\n';
    write_whole(STDERR_FILENO, scratch->text, length + 1);
}

/* Shorten a frame of Python, `File "path", line 6 in f`, to `path:6`. Leave any other text as it is. */
static void shorten_frame(char* frame) {
    static const char before[] = "File \"", between[] = "\", line ";
    char* end = strstr(frame, between);
    if (strncmp(frame, before, sizeof before - 1) || !end)
        return;
    char *path = frame + sizeof before - 1, *number = end + sizeof between - 1;
    size_t length = (size_t)(end - path), digits = strspn(number, "0123456789");
    memmove(frame, path, length);
    frame[length] = ':';
    memmove(frame + length + 1, number, digits);
    frame[length + 1 + digits] = 0;
}

/* Say once that the file of PREHEAT_EVENTS cannot be written. */
static void say_unwritten(Scratch* scratch) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    const char* const texts[] = {"preheat: refusals are not written to ", audit_user_events,
                                 ", which PREHEAT_EVENTS names: it cannot be written"};
    if (!is_same(&standard_error) || atomic_flag_test_and_set(&said))
        return;
    size_t length = join(scratch->text, sizeof scratch->text - 1, texts, sizeof texts / sizeof *texts);
    scratch->text[length] = '\n';
    write_whole(STDERR_FILENO, scratch->text, length + 1);
}

/* Append a refusal to the file of PREHEAT_EVENTS: the event `sealed`, with the fields of preheat's own. */
static void emit_sealed(Scratch* scratch, Refused what, const char* name, const char* caller) {
    static const char* const reasons[] = {
        "compiler: the audit library saw that the process starts a compiler",
        "compiler: the audit library saw that the process is a compiler",
        "driver: the audit library saw code that the driver must compile",
        "compiler: the audit library saw a compile in the process",
    };
    char frame[SMALL_LINE] = "";
    struct timespec now;
    if (!audit_user_events[0])
        return;
    if (scratch->site[0] && program_frame(scratch->site, frame, sizeof frame))
        shorten_frame(frame);
    clock_gettime(CLOCK_REALTIME, &now);
    Line line = {scratch->text, sizeof scratch->text, 0, 0};
    put(&line, "{", 1);
    line_seconds(&line, "time", (double)now.tv_sec + (double)now.tv_nsec * 1e-9);
    line_text(&line, "event", "sealed");
    line_text(&line, "mode", audit_seal == SEAL_ERROR ? "error" : "warn");
    line_text(&line, "program", name);
    line_text(&line, "arch", "");
    line_text(&line, "caller", frame[0] ? frame : caller ? caller : "");
    line_text(&line, "reason", reasons[what]);
    memcpy(line.data + line.length, "}\n", 2);
    size_t count = line.length + 2;
    /* A pipe without a reader, or with a slow one, does not stop the program. */
    int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    int file = open(audit_user_events, flags, 0666);
    int written = file >= 0 && write_whole(file, line.data, count);
    if (file >= 0)
        close(file);
    if (!written)
        say_unwritten(scratch);
}

/* Report an action that the seal forbids. With SEAL_WARN, the action still happens. */
void report_refusal(Scratch* scratch, Refused what, const char* name, const char* caller) {
    static const char* const actions[] = {"start a compiler", "run a compiler",
                                          "load code that the driver must compile", "compile"};
    int error = errno;
    Line line;
    line_begin(&line, scratch->text, sizeof scratch->text, "refused", audit_now());
    line_integer(&line, "parent", getppid());
    line_text(&line, "what", actions[what]);
    line_text(&line, "name", name);
    line_text(&line, "seal", audit_seal == SEAL_ERROR ? "error" : "warn");
    line_text(&line, "caller", caller);
    line_site(&line, scratch->site);
    line_write(&line);
    emit_sealed(scratch, what, name, caller);
    say_refusal(scratch, what, name, caller);
    errno = error;
}
