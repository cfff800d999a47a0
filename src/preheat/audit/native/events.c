/* Events: one line of JSON each, appended by one write to the file of the process.

   The file is opened for each event. So a program may close all descriptors, fork, exec, or be killed:
   what was written before stays, and lines never mix. */
#define _GNU_SOURCE
#include "audit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LONGEST_TEXT = 3000, LONGEST_WORDS = 3000, CLOSING = 16 };

char audit_directory[PATH_BYTES];
char audit_library[PATH_BYTES];
Seal audit_seal;
int audit_reports = 1;

double audit_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* It is the same clock in all processes. */
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void put(Line* line, const char* bytes, size_t count) {
    if (line->length + count > LINE_BYTES - CLOSING)
        return;
    memcpy(line->data + line->length, bytes, count);
    line->length += count;
}

/* Append text as the inside of a JSON string, cut after `most` bytes. */
static void put_escaped(Line* line, const char* text, size_t most) {
    for (size_t i = 0; text[i] && i < most; i++) {
        unsigned char byte = (unsigned char)text[i];
        char escaped[8];
        if (byte == '"' || byte == '\\') {
            escaped[0] = '\\', escaped[1] = (char)byte;
            put(line, escaped, 2);
        } else if (byte < 0x20) {
            put(line, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", byte));
        } else {
            put(line, text + i, 1);
        }
    }
}

static void put_key(Line* line, const char* key) {
    if (line->length > 1)
        put(line, ",", 1);
    put(line, "\"", 1);
    put(line, key, strlen(key));
    put(line, "\":", 2);
}

void line_text(Line* line, const char* key, const char* text) {
    if (!text || line->length + strlen(key) + 8 > LINE_BYTES - CLOSING)
        return;
    size_t room = (LINE_BYTES - CLOSING - line->length - strlen(key) - 8) / 6; /* if all is escaped */
    put_key(line, key);
    put(line, "\"", 1);
    put_escaped(line, text, room < LONGEST_TEXT ? room : LONGEST_TEXT);
    put(line, "\"", 1);
}

void line_integer(Line* line, const char* key, long long value) {
    char text[32];
    int length = snprintf(text, sizeof text, "%lld", value);
    if (line->length + strlen(key) + 40 > LINE_BYTES - CLOSING)
        return;
    put_key(line, key);
    put(line, text, (size_t)length);
}

void line_seconds(Line* line, const char* key, double seconds) {
    long long micros = (long long)(seconds * 1e6 + 0.5);
    char text[48]; /* Integers only: printing a double may allocate memory. */
    int length = snprintf(text, sizeof text, "%lld.%06lld", micros / 1000000, micros % 1000000);
    if (line->length + strlen(key) + 60 > LINE_BYTES - CLOSING)
        return;
    put_key(line, key);
    put(line, text, (size_t)length);
}

void line_words(Line* line, const char* key, char* const words[]) {
    put_key(line, key);
    put(line, "[", 1);
    size_t limit = line->length + LONGEST_WORDS;
    for (int i = 0; words && words[i] && line->length < limit; i++) {
        size_t room = (limit - line->length) / 6;
        put(line, i ? ",\"" : "\"", i ? 2 : 1);
        put_escaped(line, words[i], room);
        put(line, "\"", 1);
    }
    put(line, "]", 1);
}

void line_begin(Line* line, const char* event) {
    line->length = 0;
    put(line, "{", 1);
    line_text(line, "event", event);
    line_seconds(line, "time", audit_now());
    line_integer(line, "pid", getpid());
}

void line_write(Line* line) {
    if (!audit_directory[0])
        return;
    int error = errno;
    char path[PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s/%d.jsonl", audit_directory, (int)getpid());
    memcpy(line->data + line->length, "}\n", 2);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file >= 0) {
        ssize_t written = write(file, line->data, line->length + 2);
        (void)written; /* A full disk loses events. It must not disturb the program. */
        close(file);
    }
    errno = error;
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
        ssize_t written = write(file, text, strlen(text));
        (void)written;
        close(file);
    }
    errno = error;
}

void audit_say_unseen(const char* what, const char* why) {
    Line line;
    line_begin(&line, "unseen");
    line_text(&line, "what", what);
    line_text(&line, "why", why);
    line_write(&line);
}

/* Return the innermost frame of the program in `site`, or else of any library, without indentation. */
static const char* first_frame(const char* site, char* out, size_t size) {
    const char *start = NULL, *fallback = NULL;
    for (const char* at = site; (at = strstr(at, "  File ")) && !start; at += 2) {
        size_t length = strcspn(at, "\n");
        int library = memmem(at, length, "/lib/python3", 12) || memmem(at, length, "<frozen ", 8);
        if (!fallback)
            fallback = at;
        if (!library)
            start = at;
    }
    start = start ? start : fallback;
    if (!start)
        return NULL;
    snprintf(out, size, "%.*s", (int)strcspn(start + 2, "\n"), start + 2);
    return out;
}

/* Report what a sealed process refuses, or with a seal that warns, does. */
void audit_complain(const char* what, const char* name, const char* site, const char* caller) {
    int error = errno;
    Line line;
    line_begin(&line, "refused");
    line_integer(&line, "parent", getppid());
    line_text(&line, "what", what);
    line_text(&line, "name", name);
    line_text(&line, "seal", audit_seal == SEAL_ERROR ? "error" : "warn");
    line_text(&line, "site", site);
    line_text(&line, "caller", caller);
    line_write(&line);
    char frame[512], text[2048];
    const char* where = site ? first_frame(site, frame, sizeof frame) : NULL;
    int length = snprintf(text, sizeof text, "preheat: this process is sealed, and %s %s: %s%s%s\n",
                          audit_seal == SEAL_ERROR ? "refuses to" : "should not", what, name,
                          where || caller ? ", asked by " : "", where ? where : caller ? caller : "");
    if (length > (int)sizeof text - 1)
        length = (int)sizeof text - 1;
    ssize_t written = write(STDERR_FILENO, text, (size_t)length);
    (void)written;
    errno = error;
}
