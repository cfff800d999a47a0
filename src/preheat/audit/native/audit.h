/* The audit library: it tells which modules reach the driver and which compilers are started.

   One shared library has two roles. As LD_PRELOAD it wraps the calls that load modules, that compile in
   the process and that start programs, and it can refuse them. As CUDA_INJECTION64_PATH it subscribes to
   CUPTI, which sees every module, whoever loads it. Both roles are in one library, so that each of them
   knows of the other and nothing is reported twice.

     events.c   one line of JSON for each event
     site.c     the Python line, or the library, that made a call
     image.c    the kind, the size and the place of a module
     programs.c the wrapped functions that start programs
     loads.c    the wrapped functions of the driver and of compilers
     cupti.c    the subscriber of CUPTI

   PREHEAT_AUDIT names the directory of the events. Without it, the library does nothing. With
   PREHEAT_AUDIT_ONLY=refusals, it reports neither loads nor compiles. The code here
   also runs between vfork and exec: there it uses no heap and takes no lock that it waits for. */
#ifndef PREHEAT_AUDIT_H
#define PREHEAT_AUDIT_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

enum { LINE_BYTES = 12288, PATH_BYTES = 4096, SITE_BYTES = 4096 };

/* events.c */
typedef struct {
    char data[LINE_BYTES];
    size_t length;
} Line;

typedef enum { SEAL_OFF, SEAL_WARN, SEAL_ERROR } Seal;

extern char audit_directory[PATH_BYTES]; /* empty: the audit is off */
extern char audit_library[PATH_BYTES];   /* the path of this library */
extern Seal audit_seal;
extern int audit_reports; /* 0: only starts and refusals are reported, in servers that run for long */

double audit_now(void);
void line_begin(Line* line, const char* event);
void line_text(Line* line, const char* key, const char* text);
void line_integer(Line* line, const char* key, long long value);
void line_seconds(Line* line, const char* key, double seconds);
void line_words(Line* line, const char* key, char* const words[]);
void line_write(Line* line);          /* appends the line to the file of this process */
void audit_debug(const char* format, ...) __attribute__((format(printf, 1, 2)));
void audit_complain(const char* what, const char* name, const char* site, const char* caller);
void audit_say_unseen(const char* what, const char* why);

/* site.c */
size_t audit_site(char* out, size_t size); /* frames of the calling thread; 0 if there are none */
const char* object_of(const void* address, char* out, size_t size);
const char* calling_object(char* out, size_t size);
void prepare_backtraces(void);

/* image.c */
typedef struct {
    const char* kind; /* cubin, fatbin, ptx, ltoir, archive, file, unknown */
    unsigned long long bytes;
    unsigned long long offset;       /* of the image in `file` */
    int ptx, code;                   /* entries of a fat binary: of PTX or IR, of machine code */
    char file[PATH_BYTES];           /* the file that the image is in, or "" */
    char saved[64];                  /* the name of the copy in the directory of the audit, or "" */
} Image;

/* `size` is 0 where the caller does not give it. `input` is a CUjitInputType, or -1. With `keep`, an image
   that is in no file is copied. */
void describe_image(Image* image, const void* address, size_t size, int input, int keep);
void describe_file(Image* image, const char* path);
int needs_compiler(const Image* image);

/* Reports a load. It is the same line for both roles. */
typedef struct {
    const char* call;
    const char* by;
    double started;
    int result;
    const char* site;
    const char* caller;
} Load;
void report_load(const Image* image, const Load* load);

/* Reports the compute capability of the device, once in each process. `find` returns driver functions. */
void prepare_device(void* (*find)(const char*));
void report_device(void);

/* loads.c */
void* real_dlsym(void* handle, const char* name);

/* cupti.c */
extern int cupti_active; /* CUPTI reports the loads of this process */

#endif
