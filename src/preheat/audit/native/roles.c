/* Which programs are compilers or build tools, and which runs of a compiler only answer a question. */
#define _GNU_SOURCE
#include "audit.h"

#include <string.h>

typedef enum {
    NO_TOOL, DRIVER, LINKER, ASSEMBLER, FRONT_END, RUST, NVIDIA, NVCC, BUILD_TOOL, CLIENT
} Family;

static const struct {
    const char* name;
    Family family;
} tools[] = {
    {"gcc", DRIVER},      {"g++", DRIVER},        {"cc", DRIVER},        {"c++", DRIVER},
    {"clang", DRIVER},    {"clang++", DRIVER},    {"tcc", DRIVER},       {"hipcc", DRIVER},
    {"icx", DRIVER},      {"icpx", DRIVER},       {"gfortran", DRIVER},  {"nvc", DRIVER},
    {"nvc++", DRIVER},    {"nvfortran", DRIVER},  {"rustc", RUST},       {"llc", ASSEMBLER},
    {"f951", FRONT_END},  {"lto1", FRONT_END},    {"cc1", FRONT_END},    {"cc1plus", FRONT_END},
    {"cicc", FRONT_END},  {"cudafe++", FRONT_END}, {"as", ASSEMBLER},    {"collect2", LINKER},
    {"ld", LINKER},       {"ld.bfd", LINKER},     {"ld.gold", LINKER},   {"ld.lld", LINKER},
    {"lld", LINKER},      {"mold", LINKER},       {"nvcc", NVCC},        {"ptxas", NVIDIA},
    {"ptxas-blackwell", NVIDIA}, {"fatbinary", NVIDIA}, {"nvlink", NVIDIA}, {"tileiras", NVIDIA},
    /* These start compilers, and run where nothing has to be built. */
    {"ninja", BUILD_TOOL}, {"ninja-build", BUILD_TOOL}, {"samu", BUILD_TOOL}, {"make", BUILD_TOOL},
    {"gmake", BUILD_TOOL}, {"cmake", BUILD_TOOL}, {"ccache", BUILD_TOOL},
    /* A server compiles for these, which no process of the audit has started. */
    {"sccache", CLIENT}, {"distcc", CLIENT}, {"icecc", CLIENT},
};

/* Options after which the tool answers and compiles nothing, wherever they are. */
static const struct {
    Family family;
    const char* option; /* with "*" at its end: the start of an option */
} questions[] = {
    {DRIVER, "--version"}, {DRIVER, "--help"}, {DRIVER, "--target-help"},
    {DRIVER, "-###"}, {DRIVER, "-dumpversion"}, {DRIVER, "-dumpfullversion"}, {DRIVER, "-dumpmachine"},
    {DRIVER, "-dumpspecs"}, {DRIVER, "-print-search-dirs"}, {DRIVER, "-print-file-name=*"},
    {DRIVER, "-print-libgcc-file-name"}, {DRIVER, "-print-multi*"}, {DRIVER, "-print-prog-name=*"},
    {DRIVER, "-print-sysroot*"}, {DRIVER, "-print-resource-dir"}, {DRIVER, "-print-target*"},
    {DRIVER, "-print-effective-triple"}, {DRIVER, "-print-runtime-dir"}, {DRIVER, "-print-supported-*"},
    {DRIVER, "-print-rocm-search-dirs"},
    {LINKER, "--version"}, {LINKER, "--help"}, {LINKER, "--target-help"},
    {ASSEMBLER, "--version"}, {ASSEMBLER, "--help"}, {ASSEMBLER, "--target-help"},
    {FRONT_END, "--version"}, {FRONT_END, "--help"}, {FRONT_END, "--help=*"},
    {RUST, "--version"}, {RUST, "-V"}, {RUST, "-vV"}, {RUST, "--help"}, {RUST, "-h"}, {RUST, "--explain"},
    {NVIDIA, "--version"}, {NVIDIA, "-V"}, {NVIDIA, "--help"}, {NVIDIA, "-h"},
    {NVCC, "--version"}, {NVCC, "-V"}, {NVCC, "--help"}, {NVCC, "-h"}, {NVCC, "--dryrun"},
    {NVCC, "-dryrun"}, {NVCC, "--list-gpu-arch"}, {NVCC, "-arch-ls"}, {NVCC, "--list-gpu-code"},
    {NVCC, "-code-ls"},
};

/* Options that are a question only without any other argument. */
static const struct {
    Family family;
    const char* option;
} lone_questions[] = {
    {DRIVER, "-v"}, {DRIVER, "-V"}, {DRIVER, "-qversion"}, {DRIVER, "-Wl,--version"}, {NVCC, "-v"}, {NVIDIA, "-v"},
    {LINKER, "-v"}, {LINKER, "-V"}, {LINKER, "--verbose"}, {LINKER, "--print-sysroot"},
    {LINKER, "--print-output-format"},
};

const char* base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Return whether a name begins with a target of compilers, such as x86_64-linux-gnu-. One word before a tool is
   no target: run-as is no assembler. */
static int has_target(const char* name, size_t length) {
    return name[length - 1] == '-' && memchr(name, '-', length - 1);
}

/* Return the tool that `path` names: alone, with a target before it, or a version behind it. */
static Family family_of(const char* path) {
    const char* name = base_name(path);
    size_t whole = strlen(name), length = whole;
    while (length && strchr("0123456789.", name[length - 1]))
        length--;
    if (length != whole && length && name[length - 1] == '-')
        length--; /* gcc-13, clang-18.1 */
    else
        length = whole;
    for (size_t i = 0; i < sizeof tools / sizeof *tools; i++) {
        size_t size = strlen(tools[i].name);
        if (size > length || strncmp(name + length - size, tools[i].name, size))
            continue;
        if (size == length || has_target(name, length - size))
            return tools[i].family; /* x86_64-linux-gnu-gcc */
    }
    return NO_TOOL;
}

static int matches(const char* word, const char* option) {
    size_t length = strlen(option);
    if (word[0] == '-' && word[1] == '-' && option[1] != '-')
        word++; /* --print-search-dirs is -print-search-dirs */
    return option[length - 1] == '*' ? !strncmp(word, option, length - 1) : !strcmp(word, option);
}

/* Return whether the argument after this option belongs to it. */
static int takes_value(const char* word) {
    static const char* const options[] = {
        "-o", "-x", "-D", "-U", "-A", "-I", "-L", "-B", "-T", "-u", "-z", "-e", "-MF", "-MT", "-MQ", "-include",
        "-imacros", "-isystem", "-iquote", "-idirafter", "-isysroot", "-aux-info", "-dumpbase", "-dumpdir",
        "-soname", "-Xlinker", "-Xassembler", "-Xpreprocessor", "-Xcompiler", "-Xptxas", "-Xnvlink", "-Xclang",
        "-mllvm", "--param", NULL};
    for (int i = 0; options[i]; i++)
        if (!strcmp(word, options[i]))
            return 1;
    return 0;
}

/* Return whether this is a search of `ctypes.util.find_library`: the linker lists the files that it would
   use, and gets no input but the library that is searched for. */
static int is_library_search(Family family, char* const argv[]) {
    const char* trace = family == DRIVER ? "-Wl,-t" : "-t";
    int traced = 0;
    for (int i = 1; argv[i]; i++) {
        if (!strcmp(argv[i], trace)) {
            traced = 1;
        } else if (!strcmp(argv[i], "-o") && argv[i + 1]) {
            i++;
            if (family == LINKER && strcmp(argv[i], "/dev/null"))
                return 0;
        } else if (!strcmp(argv[i], "-L") && argv[i + 1]) {
            i++;
        } else if (strncmp(argv[i], "-l", 2) && strncmp(argv[i], "-L", 2)) {
            return 0;
        }
    }
    return traced;
}

/* Return whether gcc is asked for its options, as by `gcc -Q -march=native --help=target`. It also compiles if
   there is a file. */
static int is_option_list(char* const argv[]) {
    int asked = 0;
    for (int i = 1; argv[i]; i++) {
        if (argv[i][0] != '-' || !argv[i][1])
            return 0;
        asked = asked || !strncmp(argv[i], "--help=", 7);
        if (takes_value(argv[i]) && argv[i + 1])
            i++;
    }
    return asked;
}

static int is_probe(Family family, char* const argv[]) {
    if (!argv || !argv[0] || !argv[1])
        return 0;
    for (int i = 1; argv[i]; i++) {
        for (size_t k = 0; k < sizeof questions / sizeof *questions; k++)
            if (questions[k].family == family && matches(argv[i], questions[k].option))
                return 1;
        if (takes_value(argv[i]) && argv[i + 1])
            i++;
    }
    for (size_t k = 0; !argv[2] && k < sizeof lone_questions / sizeof *lone_questions; k++)
        if (lone_questions[k].family == family && matches(argv[1], lone_questions[k].option))
            return 1;
    if (family == DRIVER && is_option_list(argv))
        return 1;
    return (family == DRIVER || family == LINKER) && is_library_search(family, argv);
}

/* Return whether a path does not name the program that runs: the loader of programs was executed, or a file
   that has no name, such as one in memory. The path is empty where there is no /proc. */
static int is_nameless(const char* path) {
    static const char deleted[] = " (deleted)"; /* as the kernel ends the path of such a file */
    const char* name = base_name(path);
    size_t length = strlen(path), end = sizeof deleted - 1;
    return !length || !strncmp(name, "ld-linux", 8) || !strncmp(name, "ld-musl", 7) || !strcmp(name, "ld.so") ||
           (length > end && !strcmp(path + length - end, deleted));
}

/* A program can have any first argument, so that it counts only where the path says nothing. */
const char* role_of(const char* path, char* const argv[]) {
    Family family = family_of(path);
    if (family == NO_TOOL && is_nameless(path) && argv && argv[0])
        family = family_of(argv[0]);
    if (family == NO_TOOL)
        return "";
    if (family == BUILD_TOOL)
        return "build tool";
    if (family == CLIENT) { /* `sccache gcc -c a.c` compiles, and `sccache --show-stats` does not. */
        const char* asked = argv && argv[0] && argv[1] ? role_of(argv[1], argv + 1) : "";
        return asked[0] ? asked : "build tool";
    }
    return is_probe(family, argv) ? "probe" : "compiler";
}
