/* The shim of the CPU driver: libcuda.so.1, whose functions are written in Python.

   Every entry point jumps through `driver_table`. The first call of a process imports
   `preheat.driver.bootstrap`, which fills the table.

     entry_points.def  every version of every function: facts from the headers of the toolkit
     errors.def        the status codes
     stubs.c           the entry points
     table.c           what the entry points jump to, and the lookup of functions by name and version
     start.c           the start of the driver in the Python of the process
     release.c         calls that release something, while an exception of Python is raised
     loads.c           reports of modules that are loaded, for an audit
     context.c         calls that need no interpreter lock: the current context, the capture mode
     compilers.c       the results of NVRTC and nvJitLink get their PTX as a section
     ptxas.c           so does that of a ptxas which the program starts
     section.c         the section

   The functions that `bootstrap` and `native` call have the prefix `preheat_driver_`. */
#ifndef PREHEAT_DRIVER_H
#define PREHEAT_DRIVER_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Status codes of the driver, which the C part returns itself. */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    DEINITIALIZED = 4,
    NO_DEVICE = 100,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
};

enum {
#define E(name, version, per_thread, symbol, kinds) SLOT_##symbol,
#include "entry_points.def"
#undef E
    SLOTS
};

/* stubs.c */
extern void* driver_table[SLOTS];
extern void driver_first_call(void);  /* finds the function of a slot, and calls it */
extern void driver_refuse(void);      /* counts the call, and returns NOT_SUPPORTED */
extern void driver_release(void);     /* calls a function that releases something: release.c */

/* table.c */
extern int driver_initialized;
void driver_fill(void* function); /* in every slot but the slots of functions in C */

/* start.c */
int driver_start(void); /* SUCCESS, or the status of every call of this process */

/* release.c */
int preheat_driver_releases(const char* name);
void driver_set_release(int slot, void* function);

/* loads.c */
void driver_report_loads(void); /* of the functions in the table, if there is an audit */

/* context.c */
int driver_set_current(void* context);
int driver_get_current(void** context);
int driver_push_current(void* context);
int driver_pop_current(void** context);
int driver_exchange_capture_mode(int* mode);

#endif
