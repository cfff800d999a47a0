/* PTX in a section of a cubin, beside the machine code: section.c. */
#ifndef PREHEAT_SECTION_H
#define PREHEAT_SECTION_H

#include <stddef.h>

/* Texts: PTX of several parts, each with a NUL byte after it. */
typedef struct {
    char* data; /* allocated by `add_text` */
    size_t size;
} Texts;

/* Add one text. The NUL bytes at its end are left out. */
void add_text(Texts* texts, const char* data, size_t size);

/* Add the PTX that is in the section of a cubin. */
void add_text_of(Texts* texts, const void* cubin, size_t size);

/* Return the size of a cubin with this PTX: `size` if it is no cubin, or there is no PTX. */
size_t packed_size(const void* cubin, size_t size, const Texts* texts);

/* Add the PTX to a cubin of `size` bytes, whose memory has room for `packed_size`. */
void pack(char* cubin, size_t size, const Texts* texts);

#endif
