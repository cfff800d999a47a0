/* A ptxas that this library is loaded into adds its input to its output, as a section.

   Triton and nvcc start ptxas as a process, and a program under the driver passes LD_PRELOAD on to it. The
   library does nothing else there: ptxas calls no driver. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "section.h"

static char** words; /* the arguments of ptxas, and NULL */

/* Return the contents of a file; NULL if it cannot be read. */
static char* read_file(const char* path, size_t* size) {
    FILE* file = fopen(path, "rbe");
    char* data = NULL;
    long end = file && !fseek(file, 0, SEEK_END) ? ftell(file) : -1;
    if (end > 0 && !fseek(file, 0, SEEK_SET)) data = malloc((size_t)end);
    if (data && fread(data, 1, (size_t)end, file) != (size_t)end) {
        free(data);
        data = NULL;
    }
    if (file) fclose(file);
    *size = data ? (size_t)end : 0;
    return data;
}

/* Return the value of `-o FILE`, `--output-file FILE` or `--output-file=FILE`, or the default of ptxas. */
static const char* output_file(void) {
    static const char* const names[] = {"-o", "--output-file", "-output-file"};
    for (char** word = words; *word; word++)
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            size_t length = strlen(names[i]);
            if (strncmp(*word, names[i], length)) continue;
            if ((*word)[length] == '=') return *word + length + 1;
            if (!(*word)[length] && word[1]) return word[1];
        }
    return "elf.o";
}

/* Add the PTX of the file, if it is the input: other arguments are options and their values. */
static void add_input(Texts* texts, const char* path) {
    size_t size;
    char* data = *path == '-' ? NULL : read_file(path, &size);
    if (data && memmem(data, size, ".version", 8)) add_text(texts, data, size);
    free(data);
}

static void write_section(const char* path, const Texts* texts) {
    size_t size;
    char* plain = read_file(path, &size);
    size_t packed = plain ? packed_size(plain, size, texts) : size;
    char* cubin = packed > size ? realloc(plain, packed) : NULL;
    FILE* file = cubin ? fopen(path, "r+be") : NULL;
    if (file) {
        pack(cubin, size, texts);
        if (fwrite(cubin, 1, packed, file) != packed || fflush(file))
            fprintf(stderr, "preheat: the PTX cannot be added to %s: %s\n", path, strerror(errno));
        fclose(file);
    }
    free(cubin ? cubin : plain);
}

static void add_ptx(int status, void* unused) {
    Texts texts = {NULL, 0};
    const char* output = output_file();
    (void)unused;
    for (char** word = words; !status && *word; word++)
        if (*word != output) add_input(&texts, *word);
    if (texts.size) write_section(output, &texts);
    free(texts.data);
}

__attribute__((constructor)) static void look_for_ptxas(int count, char** arguments) {
    if (count < 2 || strncmp(program_invocation_short_name, "ptxas", 5)) return;
    words = arguments + 1;
    on_exit(add_ptx, NULL);
}
