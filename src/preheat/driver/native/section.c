/* The section of a cubin that has the PTX which the machine code was made from.

   `toolchain/binaries/ptx_section.py` describes it, and makes and reads the same one. */
#define _GNU_SOURCE
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#include "section.h"

void add_text(Texts* texts, const char* data, size_t size) {
    while (size && !data[size - 1]) size--;
    char* grown = size ? realloc(texts->data, texts->size + size + 1) : NULL;
    if (!grown) return; /* The load of the module says that it has no PTX. */
    memcpy(grown + texts->size, data, size);
    texts->data = grown;
    texts->size += size;
    texts->data[texts->size++] = 0;
}

enum { PTX_SECTION = (int)0x80505458, MANY_SECTIONS = 0xff00, ALIGNMENT = 16 };

static size_t aligned(size_t size) { return (size + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1); }

/* Return the table of sections, and its number of rows; NULL if the bytes are no ELF file with one. */
static const Elf64_Shdr* sections_of(const void* image, size_t size, size_t* rows) {
    const Elf64_Ehdr* header = image;
    if (size < sizeof *header || memcmp(header->e_ident, ELFMAG, SELFMAG) ||
        header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_shentsize != sizeof(Elf64_Shdr) ||
        !header->e_shoff || header->e_shoff > size || size - header->e_shoff < sizeof(Elf64_Shdr))
        return NULL;
    const Elf64_Shdr* table = (const Elf64_Shdr*)((const char*)image + header->e_shoff);
    *rows = header->e_shnum ? header->e_shnum : table->sh_size;
    return *rows && *rows <= (size - header->e_shoff) / sizeof *table ? table : NULL;
}

/* Return the size of a cubin with this PTX. */
size_t packed_size(const void* cubin, size_t size, const Texts* texts) {
    size_t rows;
    if (!texts->size || !sections_of(cubin, size, &rows)) return size;
    return aligned(aligned(size) + texts->size) + (rows + 1) * sizeof(Elf64_Shdr);
}

/* Add the PTX to a cubin of `size` bytes, whose memory has room for `packed_size`. */
void pack(char* cubin, size_t size, const Texts* texts) {
    size_t rows;
    const Elf64_Shdr* table = texts->size ? sections_of(cubin, size, &rows) : NULL;
    if (!table) return;
    Elf64_Ehdr* header = (Elf64_Ehdr*)cubin;
    size_t start = aligned(size), place = aligned(start + texts->size);
    memset(cubin + size, 0, place - size);
    memcpy(cubin + start, texts->data, texts->size);
    Elf64_Shdr* made = (Elf64_Shdr*)(cubin + place);
    memcpy(made, table, rows * sizeof *made);
    made[rows] = (Elf64_Shdr){
        .sh_type = (Elf64_Word)PTX_SECTION,
        .sh_addr = header->e_shoff, /* where the table was, and how long the file was */
        .sh_offset = start,
        .sh_size = texts->size,
        .sh_addralign = 1,
        .sh_entsize = size,
    };
    header->e_shoff = place;
    header->e_shnum = rows + 1 < MANY_SECTIONS ? (Elf64_Half)(rows + 1) : 0;
    if (!header->e_shnum) made->sh_size = rows + 1;
}

/* Add the PTX that is in the section of a cubin. */
void add_text_of(Texts* texts, const void* cubin, size_t size) {
    size_t rows;
    const Elf64_Shdr* table = sections_of(cubin, size, &rows);
    const Elf64_Shdr* row = table ? &table[rows - 1] : NULL;
    if (row && row->sh_type == (Elf64_Word)PTX_SECTION && row->sh_offset <= size &&
        row->sh_size <= size - row->sh_offset)
        add_text(texts, (const char*)cubin + row->sh_offset, row->sh_size);
}
