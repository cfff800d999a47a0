/* The audit library: it reports which modules reach the driver and which compilers are started.

   One shared library has two roles. As LD_PRELOAD it wraps the calls that load modules, that compile in
   the process and that start programs, and it can refuse them. As CUDA_INJECTION64_PATH it subscribes to
   CUPTI, which sees every module, whoever loads it. Both roles are in one library, so that each of them
   knows of the other and nothing is reported twice.

     events.c   one line of JSON for each event
     site.c     the Python line, or the library, that made a call
     image.c    the kind, the size and the place of a module
     roles.c    which programs are compilers, and which of their runs compile nothing
     copies.c   compilers under other names
     programs.c the wrapped functions that start programs
     children.c the wrapped functions that wait for programs
     loads.c    the wrapped functions of the driver
     compilers.c the wrapped functions of compilers in the process
     symbols.c  `dlsym` and `dlvsym`, which return the wrapped functions
     libraries.c the mapped libraries that have a compiler inside
     reported.c the loads that the driver itself reports
     cupti.c    the subscriber of CUPTI

   PREHEAT_AUDIT names the directory of the events. Without it, the library does nothing. With
   PREHEAT_AUDIT_ONLY=refusals, it reports neither loads nor compiles. PREHEAT_EVENTS names the file of the
   user to which refusals are appended, too. The code here also runs between
   vfork and exec, and on small stacks: there it uses no heap, takes no lock that it waits for, and keeps
   large buffers in separate memory (`map_memory`). */
#ifndef PREHEAT_AUDIT_H
#define PREHEAT_AUDIT_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

/* A call in the last step of a function becomes a jump, in a debug build, too. */
#if defined(__GNUC__) && !defined(__clang__)
#define LAST_CALL_IS_A_JUMP __attribute__((optimize("O2")))
#else
#define LAST_CALL_IS_A_JUMP
#endif

enum { LINE_BYTES = 16384, PATH_BYTES = 4096, SITE_BYTES = 65536 };

/* events.c */
typedef struct {
    char* data;
    size_t size, length;
    int recent; /* It may be dropped later, in a process that reports refusals only. */
} Line;

typedef enum { SEAL_OFF, SEAL_WARN, SEAL_ERROR } Seal;

/* What a sealed process refuses. */
typedef enum { REFUSED_START, REFUSED_RUN, REFUSED_LOAD, REFUSED_COMPILE } Refused;

/* The buffers of one event. */
typedef struct {
    char text[LINE_BYTES];
    char site[SITE_BYTES];
    char object[PATH_BYTES];
    char path[PATH_BYTES];
} Scratch;

extern char audit_directory[PATH_BYTES]; /* empty: the audit is off */
extern char audit_library[PATH_BYTES];   /* the path of this library */
extern char audit_user_events[PATH_BYTES]; /* the file of PREHEAT_EVENTS; empty: there is none */
extern Seal audit_seal;
extern int audit_reports; /* 0: only refusals are kept, in servers that run for long */
extern pid_t audit_self;  /* the process that loaded this library; a forked child is another one */

void* map_memory(size_t size); /* zeroed pages; NULL, and the event is noted as lost, if there are none */
void unmap_memory(void* memory, size_t size);

/* Return whether `count` more bytes fit into a file. Beyond RLIMIT_FSIZE, a write would raise SIGXFSZ, which
   ends a program. */
int fits_limit(int file, size_t count);

void prepare_events(void);
double audit_now(void);
void line_begin(Line* line, char* buffer, size_t size, const char* event, double time);
void line_text(Line* line, const char* key, const char* text);
void line_integer(Line* line, const char* key, long long value);
void line_seconds(Line* line, const char* key, double seconds);
void line_strings(Line* line, const char* key, char* const strings[]);
void line_site(Line* line, const char* site); /* Call it last: it takes the room that is left. */
int line_write(Line* line);                   /* appends the line to the file of this process */
void audit_debug(const char* format, ...) __attribute__((format(printf, 1, 2)));
/* The strings may be fields of `scratch`, except `text`. */
void report_refusal(Scratch* scratch, Refused what, const char* name, const char* caller);
void report_unseen(const char* what, const char* why);

/* site.c */
void prepare_sites(void);
size_t audit_site(char* out, size_t size); /* frames of the calling thread; 0 if there are none */
const char* object_of(const void* address, char* out, size_t size);
const char* calling_object(char* out, size_t size);
const char* calling_library(const void* address, char* out, size_t size);
int is_part_of_cuda(const char* path);
void prepare_backtraces(void); /* Call it before calling_object() and calling_library(). */
/* Find the file that an address is mapped from, and the offset in it, without a lock of the loader. */
int mapped_file(const void* address, char* out, size_t size, unsigned long long* offset);

/* image.c */
typedef struct {
    const char* kind; /* cubin, fatbin, ptx, ltoir, object, archive, linked, file, unknown */
    unsigned long long bytes;
    unsigned long long offset;       /* of the image in `file` */
    int ptx, code;                   /* entries of a fat binary: PTX or IR, machine code for the device */
    char file[PATH_BYTES];           /* the file that the image is in, or "" */
    char saved[64];                  /* the name of the copy in the directory of the audit, or "" */
} Image;

/* `size` is 0 where the caller does not give it. `input` is a CUjitInputType, or -1. With `keep`, an image
   that is in no file is copied. */
void describe_image(Image* image, const void* address, size_t size, int input, int keep);
void describe_file(Image* image, const char* path, int input);
int needs_compiler(const Image* image);
const char* image_name(const Image* image); /* the kind as messages name it */

/* Reports a load. It is the same line for both roles. */
typedef struct {
    const char* call;
    const char* by;
    double started;
    int result;
    const char* caller;
} Load;
void report_load(Scratch* scratch, const Image* image, const Load* load);

/* Reports the compute capability of the device, once in each process. */
void prepare_device(void);
void report_device(void);
int device_capability(void); /* such as 90; 0 if it is not known */

/* roles.c */
const char* role_of(const char* path, char* const argv[]); /* "compiler", "probe", "build tool", or "" */
const char* base_name(const char* path);

/* copies.c */
const char* role_of_copy(const char* path, char* const argv[]); /* as role_of(), by the content of the file */

/* children.c */
void prepare_children(int preloaded);
void note_other_wait(void);        /* A function of the C library has waited for a child. */
void note_sandbox(void);           /* From now on, a system call may end this process. */
int is_sandboxed(void);
void report_unseen_children(void); /* that this program has waited for, at its end */

/* symbols.c */
void* real_dlsym(void* handle, const char* name);
int is_defined_at(const void* address, const char* name); /* by the library at this address */
/* Return the compile function that a linked program calls without this library: of a version, or NULL for
   functions without versions. Programs may pass its address on, so `caller` need not be linked to it. */
void* find_linked(const char* name, const char* version, const char* soname, const void* caller);

/* compilers.c */
int is_compile_call(const char* name);
/* Return 0 for a library that NVRTC opens in order to compile, if that is refused. */
int permit_open(const char* path, const void* caller);
void* wrap_compile_call(const char* name, void* real);

/* loads.c */
void* find_driver(const char* name);
int is_driver_call(const char* name);
/* Return the wrapper of a function of the driver; NULL in a program that has not loaded the driver. */
void* find_driver_call(void* handle, const char* name);
extern _Thread_local const void* load_caller; /* who called the wrapped load that is under way, or NULL */

/* libraries.c */
void prepare_libraries(void);       /* reports those that are mapped at the start */
void report_opened_libraries(void); /* those that `dlopen` has loaded; costs nothing if it was not called */
void report_all_libraries(void);    /* all that are mapped; nothing between vfork and exec */

/* reported.c */
extern int loads_reported; /* CUPTI or the CPU driver reports the loads of this process */
int prepare_loads(void);   /* Return 0 if loads cannot be reported. */
/* Begin and end the report of a load: of a file if `path` is given. */
void begin_load(const char* call, const char* by, const void* address, size_t size, int input,
                const char* path);
void end_load(int result);
int is_loading(void);

#endif
