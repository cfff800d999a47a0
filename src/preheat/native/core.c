/* The native core of preheat: launches, recorded launches and replays without a Python frame.

   Each type here handles the arguments that most calls have. Everything else, and every error, goes to
   the Python function that the object was given, which handles any arguments: `Launch.run` and
   `Replayer.run`.

     KernelLaunch   a prepared launch of the driver      devices/cuda/module.py
     GraphLaunch    a prepared replay of the driver      devices/cuda/graph.py
     WordSetter     prepared fills of the driver         devices/cuda/device.py
     Launcher       checks arguments and launches        devices/native_launch.py
     Replay         sets scalars and replays a graph     graph/replay.py
     file_times     the stamps of many files             toolchain/headers/evidence.py
     load_module    loads code                           devices/cuda/module.py
     load_function  resolves and loads a kernel          devices/cuda/module.py

   The driver's functions are given as addresses, so that this file needs neither its headers nor its
   library. The GIL is released during their calls. Arrays of preheat are read at the offsets of their
   slots, without a lookup by name; tensors of torch through the C functions that DLPack 1.3 defines;
   arrays of CuPy by their attributes. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <sys/stat.h>

#ifndef PREHEAT_SOURCES /* the hash of this file: `preheat.native` refuses an extension with another one */
#error "build it by: python hatch_build.py"
#endif

enum { MAX_PARAMS = 64, MAX_BYTES = 8 * MAX_PARAMS, MAX_TYPES = 8, MAX_SCALARS = 16 };
enum { THREADS = 0, SHARED = 1, HAS_CLUSTER = 10, CLUSTER = 11 }; /* CU_FUNC_ATTRIBUTE_…; CLUSTER has 3 */
enum { INVALID_CONTEXT = 201, INVALID_HANDLE = 400 }; /* of a launch under another context */

/* The start of every object here. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
} Callable;

/* The result of an attempt: done, not for this path (without an error set), or an error. */
typedef enum { DONE, UNFIT, FAILED } Outcome;

static PyObject *zero, *no_error, *empty;
static PyObject* unfit_errors; /* exceptions which mean that an argument is for the general path */
static struct {
    PyObject *_c_contiguous, *capture, *data, *device_id, *dtype, *graph, *handle, *interrupted, *is_conj;
    PyObject *is_neg, *last_site, *ptr, *records, *stream;
} name;

/* Turn the errors that a wrong argument causes into UNFIT. Others, such as an interrupt, stay set. */
static Outcome unfit_or_failed(void) {
    if (!PyErr_Occurred())
        return UNFIT;
    if (!PyErr_ExceptionMatches(unfit_errors))
        return FAILED;
    PyErr_Clear();
    return UNFIT;
}

/* Clear the error that is set, if any, and return it. */
static PyObject* take_error(void) {
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
#endif
}

/* Set an error that was taken. `PyErr_SetObject` would replace its context. Steals the reference. */
static void raise_again(PyObject* error) {
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(Py_NewRef(Py_TYPE(error)), error, PyException_GetTraceback(error));
#endif
}

static int is_false(PyObject* value) { /* Steals the reference. */
    if (!value)
        return -1;
    int result = PyObject_Not(value);
    Py_DECREF(value);
    return result;
}

/* Converters for `PyArg_ParseTuple`: to an address of data or of a function, and to a reference. */
static int to_pointer(PyObject* given, void* out) {
    unsigned long long number = PyLong_AsUnsignedLongLong(given);
    *(void**)out = (void*)(uintptr_t)number;
    return number != ULLONG_MAX || !PyErr_Occurred();
}

static int to_reference(PyObject* given, void* out) {
    Py_XSETREF(*(PyObject**)out, Py_NewRef(given));
    return 1;
}

static int has_names(PyTypeObject* type, PyObject* kwargs) {
    int given = kwargs && PyDict_GET_SIZE(kwargs);
    if (given)
        PyErr_Format(PyExc_TypeError, "%s takes no names", type->tp_name);
    return given;
}

/* Allocate an object that is called by `vectorcall`. Its fields are zero. */
static void* alloc_from(PyTypeObject* type, PyObject* kwargs, vectorcallfunc vectorcall) {
    if (has_names(type, kwargs))
        return NULL;
    Callable* self = (Callable*)type->tp_alloc(type, 0);
    if (self)
        self->vectorcall = vectorcall;
    return self;
}

/* Return a new object, or NULL without it if an error is set. Steals the reference. */
static PyObject* unless_error(void* self) {
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return self;
}

/* Call the Python function that handles every argument. */
static PyObject* call_general(PyObject* function, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
    return PyObject_Vectorcall(function, args, nargsf & ~PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
}

/* Keep the items of a tuple in the fields from `first` to `end`. */
static int take_references(PyObject* tuple, PyObject** first, PyObject** end) {
    if (PyTuple_GET_SIZE(tuple) != end - first) {
        PyErr_Format(PyExc_TypeError, "%zd references are needed", (Py_ssize_t)(end - first));
        return -1;
    }
    for (Py_ssize_t at = 0; at < end - first; at++)
        first[at] = Py_NewRef(PyTuple_GET_ITEM(tuple, at));
    return 0;
}

/* Define what the garbage collector needs for a type with references from one field to another. */
#define TRACK(Name, first, last)                                                                            \
    static int Name##_traverse(Name* self, visitproc visit, void* arg) {                                    \
        for (PyObject** each = &self->first; each <= &self->last; each++)                                   \
            Py_VISIT(*each);                                                                                \
        return 0;                                                                                           \
    }                                                                                                       \
    static int Name##_clear(Name* self) {                                                                   \
        for (PyObject** each = &self->first; each <= &self->last; each++)                                   \
            Py_CLEAR(*each);                                                                                \
        return 0;                                                                                           \
    }

/* Read a slot of a Python class at its offset. The reference is borrowed. NULL if it is not set. */
static inline PyObject* slot(PyObject* object, Py_ssize_t offset) {
    return *(PyObject**)((char*)object + offset);
}

static int slot_offset(PyObject* type, const char* attribute, Py_ssize_t* offset) { /* -1 with an error */
    PyObject* descriptor = PyObject_GetAttrString(type, attribute);
    if (!descriptor)
        return -1;
    int found = Py_IS_TYPE(descriptor, &PyMemberDescr_Type);
    if (found)
        *offset = ((PyMemberDescrObject*)descriptor)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%R.%s is not a slot", type, attribute);
    Py_DECREF(descriptor);
    return found ? 0 : -1;
}

/* The status of a call of the driver as Python code expects it. */
static PyObject* status_tuple(int status) {
    return status ? Py_BuildValue("(i)", status) : Py_NewRef(no_error);
}

/* The calls of one thread that make the context current, for work in a default stream. */
typedef struct {
    void* context; /* NULL if the work needs no current context */
    int (*push)(void*);
    int (*pop)(void**);
} InContext;

static int enter(const InContext* in) { return in->context ? in->push(in->context) : 0; }

static void leave(const InContext* in) {
    void* popped;
    if (in->context)
        in->pop(&popped);
}

static int to_in_context(PyObject* given, void* out) { /* None, or context, push and pop */
    InContext* in = out;
    return given == Py_None || PyArg_ParseTuple(given, "O&O&O&", to_pointer, &in->context, to_pointer,
                                                &in->push, to_pointer, &in->pop);
}

/* KernelLaunch */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                  void**, void**);
    void *function, *stream;
    unsigned grid[3], block[3], shared;
    PyObject* retry; /* called with the same arguments if another context was current, or None */
} KernelLaunch;

static PyTypeObject KernelLaunch_Type;

static int call_kernel(KernelLaunch* self, void** pointers) {
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = self->launch(self->function, self->grid[0], self->grid[1], self->grid[2], self->block[0],
                          self->block[1], self->block[2], self->shared, self->stream, pointers, NULL);
    Py_END_ALLOW_THREADS
    return status;
}

/* Submit a launch and return its status, a new reference to a tuple. NULL with an error. */
static PyObject* submit(PyObject* prepared, void** pointers) {
    if (Py_IS_TYPE(prepared, &KernelLaunch_Type)) {
        KernelLaunch* launch = (KernelLaunch*)prepared;
        int status = call_kernel(launch, pointers);
        int wrong_context = status == INVALID_CONTEXT || status == INVALID_HANDLE;
        if (!wrong_context || launch->retry == Py_None)
            return status_tuple(status);
        prepared = launch->retry;
    }
    PyObject* address = PyLong_FromVoidPtr(pointers);
    if (!address)
        return NULL;
    PyObject* args[] = {address, zero};
    PyObject* result = PyObject_Vectorcall(prepared, args, 2, NULL);
    Py_DECREF(address);
    return result;
}

/* 1 for the status of a call that failed, 0 for success, -1 with an error: `status` may be NULL. */
static int has_failed(PyObject* status) {
    if (status == no_error)
        return 0;
    PyObject* first = status ? PySequence_GetItem(status, 0) : NULL;
    if (!first)
        return -1;
    int failed = PyObject_IsTrue(first);
    Py_DECREF(first);
    return failed;
}

static PyObject* KernelLaunch_call(PyObject* callable, PyObject* const* args, size_t nargsf,
                                   PyObject* kwnames) {
    if (PyVectorcall_NARGS(nargsf) != 2 || kwnames)
        return PyErr_Format(PyExc_TypeError, "a prepared launch takes the address of the pointers, and 0");
    void** pointers;
    return to_pointer(args[0], &pointers) ? submit(callable, pointers) : NULL;
}

static PyObject* KernelLaunch_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    KernelLaunch* self = alloc_from(type, kwargs, KernelLaunch_call);
    if (!self)
        return NULL;
    self->retry = Py_NewRef(Py_None);
    PyArg_ParseTuple(args, "O&O&(III)(III)IO&|O&", to_pointer, &self->launch, to_pointer, &self->function,
                     &self->grid[0], &self->grid[1], &self->grid[2], &self->block[0], &self->block[1],
                     &self->block[2], &self->shared, to_pointer, &self->stream, to_reference, &self->retry);
    return unless_error(self);
}

TRACK(KernelLaunch, retry, retry)

/* GraphLaunch */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int (*launch)(void*, void*);
    int (*is_capturing)(void*, int*); /* NULL if it need not be asked */
    int (*record)(void*, void*);      /* NULL if no event is recorded after the launch */
    void *executable, *stream, *event;
    InContext in_context;
    PyObject* not_submitted; /* the status while another library captures the stream */
} GraphLaunch;

static PyTypeObject GraphLaunch_Type;

/* Launch and return the status, a new reference to a tuple. */
static PyObject* launch_native(GraphLaunch* self) {
    int status, capturing = 0;
    Py_BEGIN_ALLOW_THREADS
    status = enter(&self->in_context);
    if (!status) {
        status = self->is_capturing ? self->is_capturing(self->stream, &capturing) : 0;
        if (!status && !capturing)
            status = self->launch(self->executable, self->stream);
        if (!status && !capturing && self->record)
            status = self->record(self->event, self->stream);
        leave(&self->in_context);
    }
    Py_END_ALLOW_THREADS
    return capturing ? Py_NewRef(self->not_submitted) : status_tuple(status);
}

static PyObject* GraphLaunch_call(PyObject* callable, PyObject* const* args, size_t nargsf,
                                  PyObject* kwnames) {
    (void)args;
    if (PyVectorcall_NARGS(nargsf) || kwnames)
        return PyErr_Format(PyExc_TypeError, "a prepared replay takes no arguments");
    return launch_native((GraphLaunch*)callable);
}

static PyObject* GraphLaunch_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    GraphLaunch* self = alloc_from(type, kwargs, GraphLaunch_call);
    if (!self)
        return NULL;
    self->not_submitted = Py_NewRef(Py_None);
    PyArg_ParseTuple(args, "O&O&O&O&|O&O&O&O&", to_pointer, &self->launch, to_pointer, &self->executable,
                     to_pointer, &self->stream, to_in_context, &self->in_context, to_pointer,
                     &self->is_capturing, to_reference, &self->not_submitted, to_pointer, &self->record,
                     to_pointer, &self->event);
    return unless_error(self);
}

TRACK(GraphLaunch, not_submitted, not_submitted)

/* WordSetter */

typedef struct {
    uint64_t address;
    unsigned start, size; /* which bytes of the values */
} Word;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int (*fill8)(uint64_t, unsigned char, size_t, void*);
    int (*fill16)(uint64_t, unsigned short, size_t, void*);
    int (*fill32)(uint64_t, unsigned, size_t, void*);
    void* stream;
    InContext in_context;
    int num_words;
    unsigned size; /* of all values */
    Word words[2 * MAX_SCALARS];
} WordSetter;

static PyTypeObject WordSetter_Type;

static int fill_word(WordSetter* self, const Word* word, const unsigned char* values) {
    uint32_t bits = 0;
    memcpy(&bits, values + word->start, word->size);
    switch (word->size) {
    case 1: return self->fill8(word->address, (unsigned char)bits, 1, self->stream);
    case 2: return self->fill16(word->address, (unsigned short)bits, 1, self->stream);
    default: return self->fill32(word->address, bits, 1, self->stream);
    }
}

static int set_words(WordSetter* self, const unsigned char* values) {
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = enter(&self->in_context);
    if (!status) {
        for (int at = 0; at < self->num_words && !status; at++)
            status = fill_word(self, &self->words[at], values);
        leave(&self->in_context);
    }
    Py_END_ALLOW_THREADS
    return status;
}

static PyObject* WordSetter_call(PyObject* callable, PyObject* const* args, size_t nargsf,
                                 PyObject* kwnames) {
    WordSetter* self = (WordSetter*)callable;
    if (PyVectorcall_NARGS(nargsf) != 1 || kwnames || !PyBytes_Check(args[0]) ||
        PyBytes_GET_SIZE(args[0]) != self->size)
        return PyErr_Format(PyExc_TypeError, "this setter takes %u bytes", self->size);
    PyObject* values = Py_NewRef(args[0]);
    int status = set_words(self, (const unsigned char*)PyBytes_AS_STRING(values));
    Py_DECREF(values);
    return status_tuple(status);
}

/* Add the words of a value. Sets an error if there is no fill for them. */
static void add_words(WordSetter* self, uint64_t address, unsigned size) {
    unsigned word_size = size < 4 ? size : 4;
    if (size != 1 && size != 2 && size != 4 && size != 8) {
        PyErr_Format(PyExc_ValueError, "a setter takes values of 1, 2, 4 or 8 bytes, not %u", size);
        return;
    }
    for (unsigned start = 0; start < size; start += word_size)
        self->words[self->num_words++] = (Word){address + start, self->size + start, word_size};
    self->size += size;
}

static PyObject* WordSetter_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    unsigned long long address;
    unsigned size;
    PyObject* places = NULL;
    WordSetter* self = alloc_from(type, kwargs, WordSetter_call);
    if (!self)
        return NULL;
    PyArg_ParseTuple(args, "(O&O&O&)O&O!O&", to_pointer, &self->fill8, to_pointer, &self->fill16, to_pointer,
                     &self->fill32, to_pointer, &self->stream, &PyList_Type, &places, to_in_context,
                     &self->in_context);
    if (!PyErr_Occurred() && PyList_GET_SIZE(places) > MAX_SCALARS)
        PyErr_Format(PyExc_ValueError, "a setter takes up to %d values", MAX_SCALARS);
    for (Py_ssize_t at = 0; !PyErr_Occurred() && at < PyList_GET_SIZE(places); at++)
        if (PyArg_ParseTuple(PyList_GET_ITEM(places, at), "KI", &address, &size))
            add_words(self, address, size);
    return unless_error(self);
}

/* Numbers */

/* Store an int in a format of the module struct. UNFIT if it does not fit. */
static Outcome store_integer(PyObject* number, char code, void* out) {
    if (code == 'Q') {
        uint64_t value = PyLong_AsUnsignedLongLong(number);
        if (value == UINT64_MAX && PyErr_Occurred())
            return unfit_or_failed();
        memcpy(out, &value, 8);
        return DONE;
    }
    int overflow;
    int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow)
        return UNFIT;
#define STORE(type, least, most)                                                                            \
    {                                                                                                       \
        if (value < (least) || value > (most))                                                              \
            return UNFIT;                                                                                   \
        type exact = (type)value;                                                                           \
        memcpy(out, &exact, sizeof exact);                                                                  \
        return DONE;                                                                                        \
    }
    switch (code) {
    case 'b': STORE(int8_t, INT8_MIN, INT8_MAX)
    case 'B': STORE(uint8_t, 0, UINT8_MAX)
    case 'h': STORE(int16_t, INT16_MIN, INT16_MAX)
    case 'H': STORE(uint16_t, 0, UINT16_MAX)
    case 'i': STORE(int32_t, INT32_MIN, INT32_MAX)
    case 'I': STORE(uint32_t, 0, UINT32_MAX)
    case 'q': STORE(int64_t, INT64_MIN, INT64_MAX)
    }
    return UNFIT;
#undef STORE
}

/* Store a float or an int as a real number. A number beyond the range of a float becomes infinite. */
static Outcome store_real(PyObject* number, char code, void* out) {
    double value = PyFloat_AsDouble(number);
    if (value == -1.0 && PyErr_Occurred())
        return unfit_or_failed();
    if (code == 'f') {
        float single = (float)value;
        memcpy(out, &single, 4);
    } else
        memcpy(out, &value, 8);
    return DONE;
}

static Outcome store_boolean(PyObject* given, char* out) {
    *out = given == Py_True;
    return PyBool_Check(given) ? DONE : UNFIT;
}

static inline int is_real(char code) { return code == 'f' || code == 'd'; }

static inline int is_plain_number(PyObject* given, char code) {
    return PyLong_CheckExact(given) || (is_real(code) && PyFloat_CheckExact(given));
}

static inline Outcome store_number(PyObject* given, char code, void* out) {
    return is_real(code) ? store_real(given, code, out) : store_integer(given, code, out);
}

/* Launcher */

typedef struct {
    char code;          /* the struct format of a number, or 0 for a parameter that takes none */
    char boolean;       /* The number is True or False. */
    char memory;        /* The parameter takes memory. */
    char writes;        /* The kernel may write that memory. */
    char maybe_complex; /* The memory may hold complex numbers. */
    unsigned offset;    /* in the packed parameters */
    int num_types;      /* of the element types that the memory may have; 0 for any */
    PyObject* dtypes[MAX_TYPES];       /* as preheat has them. They live as long as the process. */
    uint32_t dlpack_types[MAX_TYPES]; /* as DLPack has them: code, bits and lanes */
} Param;

typedef struct {
    PyObject_VAR_HEAD
    vectorcallfunc vectorcall;
    PyObject *launch, *prepare, *raise_for_status, *raise_in_capture; /* a Launch and functions of it */
    PyObject *context, *thread_state, *submits;
    PyObject *stream, *stream_id, *stream_handle;
    PyObject* readers; /* how tensors of other libraries are read, by their type: see `Reader` */
    PyObject *call_site, *is_user_file;
    PyObject *context_type, *array_type, *uses_type, *buffer_type;
    Py_ssize_t context_unrestricted, context_lost;
    Py_ssize_t array_address, array_buffer, array_dtype, array_uses, uses_writer, uses_readers;
    Py_ssize_t uses_exports, uses_interface;
    Py_ssize_t buffer_context, buffer_open, buffer_uses;
    int device_type, device; /* as DLPack numbers them */
    int records;             /* Launches can be recorded into captures. */
    int num_params;
    unsigned size; /* of the packed parameters */
    Param params[];
} Launcher;

static PyTypeObject Launcher_Type;

static int has_dtype(const Param* param, PyObject* dtype) {
    for (int at = 0; at < param->num_types; at++)
        if (param->dtypes[at] == dtype)
            return 1;
    return !param->num_types;
}

static int has_dlpack_type(const Param* param, uint32_t type) {
    for (int at = 0; at < param->num_types; at++)
        if (param->dlpack_types[at] == type)
            return 1;
    return !param->num_types;
}

/* Return DONE if the stream may use this memory of ours without waiting. */
static Outcome has_right(Launcher* self, PyObject* uses, int write) {
    if (slot(uses, self->uses_writer) == self->stream)
        return DONE;
    PyObject* readers = slot(uses, self->uses_readers);
    if (write || !readers || !PyDict_CheckExact(readers))
        return UNFIT;
    int found = PyDict_Contains(readers, self->stream_id);
    return found < 0 ? FAILED : found ? DONE : UNFIT;
}

/* Another library may use this memory, in another stream of the capture: see `Uses.exported`. */
static int is_exported(Launcher* self, PyObject* uses) {
    PyObject* exports = slot(uses, self->uses_exports);
    int none = exports && PyDict_CheckExact(exports) && !PyDict_GET_SIZE(exports);
    return !none || slot(uses, self->uses_interface) != Py_False;
}

/* Return DONE if this memory of ours is valid here, for a launch that a replay will order. */
static Outcome is_open(Launcher* self, PyObject* array, PyObject* uses) {
    PyObject* buffer = slot(array, self->array_buffer);
    if (!buffer || !PyObject_TypeCheck(buffer, (PyTypeObject*)self->buffer_type))
        return UNFIT;
    int usable = slot(buffer, self->buffer_context) == self->context &&
                 slot(buffer, self->buffer_open) == Py_True && slot(buffer, self->buffer_uses) == uses;
    return usable && !is_exported(self, uses) ? DONE : UNFIT;
}

static Outcome store_array(Launcher* self, const Param* param, PyObject* array, int recording, void* out) {
    PyObject* dtype = slot(array, self->array_dtype);
    PyObject* uses = slot(array, self->array_uses);
    PyObject* address = slot(array, self->array_address);
    if (!uses || !Py_IS_TYPE(uses, (PyTypeObject*)self->uses_type) || !address || !PyLong_CheckExact(address))
        return UNFIT;
    if (!has_dtype(param, dtype))
        return UNFIT;
    Outcome usable = recording ? is_open(self, array, uses) : has_right(self, uses, param->writes);
    return usable == DONE ? store_integer(address, 'Q', out) : usable;
}

/* DLPack: the description of a tensor, and the table of functions that a library offers. */
typedef struct {
    void* data;
    int32_t device_type, device, ndim;
    uint32_t type; /* code, bits and lanes */
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *from_object, *to_object;
    int (*describe)(void* object, DLTensor* out);
    int (*current_stream)(int32_t device_type, int32_t device, void** out);
} ExchangeApi;

static int is_contiguous(const DLTensor* tensor) {
    int64_t step = 1;
    int dense = 1;
    for (int axis = tensor->ndim - 1; axis >= 0; axis--) {
        int64_t length = tensor->shape[axis];
        if (!length)
            return 1;
        if (tensor->strides && length != 1 && tensor->strides[axis] != step)
            dense = 0;
        step *= length;
    }
    return dense;
}

/* How tensors of a library are read: a capsule with the functions of DLPack, or for CuPy a tuple with
   the type of device, a dictionary from its element types to ours, and `get_current_stream`. */
typedef PyObject Reader;

static const ExchangeApi* exchange_api(Reader* reader) { /* NULL, perhaps without an error */
    const ExchangeApi* api = PyCapsule_GetPointer(reader, "dlpack_exchange_api");
    return api && api->major == 1 && api->describe && api->current_stream ? api : NULL;
}

/* Store the address of a tensor, after testing what its memory must be like. */
static Outcome store_by_dlpack(Launcher* self, const Param* param, PyObject* tensor, Reader* reader,
                               void* out) {
    DLTensor found;
    const ExchangeApi* api = exchange_api(reader);
    if (!api || api->describe(tensor, &found))
        return unfit_or_failed();
    if (found.device_type != self->device_type || found.device != self->device ||
        !has_dlpack_type(param, found.type) || !is_contiguous(&found) ||
        is_false(PyObject_CallMethodNoArgs(tensor, name.is_neg)) != 1 ||
        (param->maybe_complex && is_false(PyObject_CallMethodNoArgs(tensor, name.is_conj)) != 1))
        return unfit_or_failed();
    uint64_t address = (uint64_t)(uintptr_t)found.data + found.byte_offset;
    memcpy(out, &address, 8);
    return DONE;
}

/* 1 if an attribute is true, 0 if it is not, -1 with an error. */
static int attribute_is_true(PyObject* object, PyObject* attribute) {
    int is_not_true = is_false(PyObject_GetAttr(object, attribute));
    return is_not_true < 0 ? -1 : !is_not_true;
}

/* The same for an attribute that has this value. */
static int attribute_is(PyObject* object, PyObject* attribute, long wanted) {
    PyObject* value = PyObject_GetAttr(object, attribute);
    long number = value ? PyLong_AsLong(value) : -1;
    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : number == wanted;
}

/* Return one of our element types for that of an array of CuPy, a borrowed reference, or NULL. */
static PyObject* cupy_dtype(PyObject* array, Reader* reader) {
    PyObject* theirs = PyObject_GetAttr(array, name.dtype);
    PyObject* ours = theirs ? PyDict_GetItemWithError(PyTuple_GET_ITEM(reader, 1), theirs) : NULL;
    Py_XDECREF(theirs);
    return ours;
}

/* The same for an array of CuPy. Its memory is the attribute `data`. */
static Outcome store_by_attributes(Launcher* self, const Param* param, PyObject* array, Reader* reader,
                                   void* out) {
    if (PyLong_AsLong(PyTuple_GET_ITEM(reader, 0)) != self->device_type)
        return unfit_or_failed();
    PyObject* dtype = cupy_dtype(array, reader);
    if (!dtype || !has_dtype(param, dtype) || attribute_is_true(array, name._c_contiguous) != 1)
        return unfit_or_failed();
    PyObject *data = PyObject_GetAttr(array, name.data), *address = NULL;
    if (data && attribute_is(data, name.device_id, self->device) == 1)
        address = PyObject_GetAttr(data, name.ptr);
    Py_XDECREF(data);
    Outcome stored = address && PyLong_CheckExact(address) ? store_integer(address, 'Q', out) : UNFIT;
    Py_XDECREF(address);
    return stored == DONE ? DONE : unfit_or_failed();
}

/* The packed parameters of one launch. */
typedef struct {
    _Alignas(16) unsigned char data[MAX_BYTES];
    void* pointers[MAX_PARAMS];
    int of_ours;    /* Memory of preheat is among them. */
    Reader* reader; /* of the library whose memory is among them, or NULL */
} Packed;

static Outcome store_tensor(Launcher* self, const Param* param, PyObject* tensor, void* out,
                            Packed* packed) {
    Reader* reader = PyDict_GetItemWithError(self->readers, (PyObject*)Py_TYPE(tensor));
    if (!reader)
        return unfit_or_failed();
    if (!packed->reader)
        packed->reader = Py_NewRef(reader);
    if (packed->reader != reader)
        return UNFIT; /* Tensors of two libraries need an order. */
    return PyTuple_CheckExact(reader) ? store_by_attributes(self, param, tensor, reader, out)
                                      : store_by_dlpack(self, param, tensor, reader, out);
}

/* Test all arguments and store them. UNFIT for memory of preheat and of a library together. */
static Outcome pack(Launcher* self, PyObject* const* args, int recording, Packed* packed) {
    packed->of_ours = 0;
    packed->reader = NULL;
    PyTypeObject* array_type = (PyTypeObject*)self->array_type;
    for (int at = 0; at < self->num_params; at++) {
        const Param* param = &self->params[at];
        PyObject* given = args[at];
        void* out = packed->pointers[at] = packed->data + param->offset;
        Outcome stored = UNFIT;
        if (param->boolean)
            stored = store_boolean(given, out);
        else if (param->code && is_plain_number(given, param->code))
            stored = store_number(given, param->code, out);
        else if (param->memory && PyObject_TypeCheck(given, array_type)) {
            packed->of_ours = 1;
            stored = store_array(self, param, given, recording, out);
        } else if (param->memory && !recording)
            stored = store_tensor(self, param, given, out, packed);
        if (stored != DONE)
            return stored;
    }
    return packed->of_ours && packed->reader ? UNFIT : DONE;
}

/* The prepared launch in the stream with this handle, a new reference. NULL if there is none. */
static PyObject* prepared_in(Launcher* self, PyObject* handle) { /* Steals the handle, which may be NULL. */
    PyObject* prepared = handle ? PyDict_GetItemWithError(self->submits, handle) : NULL;
    Py_XINCREF(prepared);
    Py_XDECREF(handle);
    return prepared;
}

static PyObject* own_submit(Launcher* self) {
    PyObject* prepared = prepared_in(self, Py_NewRef(self->stream_handle));
    return prepared || PyErr_Occurred() ? prepared : PyObject_CallOneArg(self->prepare, self->stream);
}

/* The handle of the stream that is current in a library, a new reference. NULL if it cannot be read. */
static PyObject* current_stream(Launcher* self, Reader* reader) {
    if (!PyTuple_CheckExact(reader)) {
        const ExchangeApi* api = exchange_api(reader);
        void* handle;
        int known = api && !api->current_stream(self->device_type, self->device, &handle);
        return known ? PyLong_FromVoidPtr(handle) : NULL;
    }
    PyObject* device = PyLong_FromLong(self->device);
    PyObject* stream = device ? PyObject_CallOneArg(PyTuple_GET_ITEM(reader, 2), device) : NULL;
    PyObject* handle = stream ? PyObject_GetAttr(stream, name.ptr) : NULL;
    Py_XDECREF(device);
    Py_XDECREF(stream);
    return handle;
}

/* Raise the error that is set, or the one that a status means, after the capture has remembered it. */
static PyObject* raise_in_capture(Launcher* self, PyObject* capture, PyObject* status) {
    PyObject* error = take_error();
    PyObject* raised = PyObject_CallFunctionObjArgs(
        self->raise_in_capture, capture, status ? status : Py_None, error ? error : Py_None, NULL);
    Py_XDECREF(error);
    return raised;
}

/* Submit, and let Python raise the error of a status. */
static Outcome submit_packed(Launcher* self, PyObject* prepared, void** pointers, PyObject* capture) {
    PyObject* status = submit(prepared, pointers);
    int failed = has_failed(status);
    if (failed) {
        PyObject* raised = NULL;
        if (capture)
            raised = raise_in_capture(self, capture, status);
        else if (failed > 0)
            raised = PyObject_CallOneArg(self->raise_for_status, status);
        failed = !raised;
        Py_XDECREF(raised);
    }
    Py_XDECREF(status);
    return failed ? FAILED : DONE;
}

static Outcome launch_packed(Launcher* self, Packed* packed) {
    PyObject* prepared =
        packed->reader ? prepared_in(self, current_stream(self, packed->reader)) : own_submit(self);
    if (!prepared)
        return packed->reader ? unfit_or_failed() : FAILED;
    Outcome outcome = submit_packed(self, prepared, packed->pointers, NULL);
    Py_DECREF(prepared);
    return outcome;
}

static Outcome launch_now(Launcher* self, PyObject* const* args) {
    Packed packed;
    Outcome outcome = pack(self, args, 0, &packed);
    if (outcome == DONE)
        outcome = launch_packed(self, &packed);
    Py_XDECREF(packed.reader);
    return outcome;
}

/* Return the place in the program that called the launcher: see `preheat.process.callsite`. */
static PyObject* find_site(Launcher* self) {
    PyFrameObject* frame = PyEval_GetFrame();
    if (frame) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        PyObject* outside = PyDict_GetItemWithError(self->is_user_file, code->co_filename);
        if (outside == Py_True)
            return Py_BuildValue("(Ni)", code, PyFrame_GetLasti(frame));
        Py_DECREF(code);
        if (PyErr_Occurred())
            return NULL;
    }
    return PyObject_CallNoArgs(self->call_site);
}

/* Append a `RecordedLaunch` to the capture. */
static Outcome append_record(Launcher* self, PyObject* capture, PyObject* const* args, PyObject* site,
                             const unsigned char* data) {
    Outcome outcome = FAILED;
    PyObject *record = NULL, *records = NULL;
    PyObject* bytes = PyBytes_FromStringAndSize((const char*)data, self->size);
    PyObject* given = PyTuple_New(self->num_params);
    if (!bytes || !given)
        goto done;
    for (int at = 0; at < self->num_params; at++)
        PyTuple_SET_ITEM(given, at, Py_NewRef(args[at]));
    record = PyTuple_Pack(5, self->launch, bytes, given, site, empty);
    records = PyObject_GetAttr(capture, name.records);
    if (record && records && !PyList_Append(records, record))
        outcome = DONE;
done:
    Py_XDECREF(record);
    Py_XDECREF(records);
    Py_XDECREF(bytes);
    Py_XDECREF(given);
    return outcome;
}

static Outcome can_record(Launcher* self, PyObject* capture) {
    if (slot(self->context, self->context_lost) != Py_None)
        return UNFIT;
    int whole = is_false(PyObject_GetAttr(capture, name.interrupted));
    if (whole <= 0)
        return whole ? FAILED : UNFIT;
    PyObject* graph = PyObject_CallMethodNoArgs(capture, name.graph);
    if (!graph)
        return FAILED;
    Py_DECREF(graph);
    return graph == Py_None ? UNFIT : DONE;
}

/* The prepared launch in the captured stream. The first launch in a stream prepares it. */
static PyObject* captured_submit(Launcher* self, PyObject* capture) {
    PyObject* stream = PyObject_GetAttr(capture, name.stream);
    PyObject* prepared = prepared_in(self, stream ? PyObject_GetAttr(stream, name.handle) : NULL);
    if (!prepared && !PyErr_Occurred())
        prepared = PyObject_CallOneArg(self->prepare, stream);
    Py_XDECREF(stream);
    return prepared;
}

/* Record a launch, and submit it. The record comes first, because it keeps the memory of the node. */
static Outcome submit_recorded(Launcher* self, PyObject* capture, PyObject* const* args, PyObject* prepared,
                               Packed* packed) {
    PyObject* site = find_site(self);
    Outcome outcome = site ? append_record(self, capture, args, site, packed->data) : FAILED;
    if (outcome == DONE) {
        outcome = submit_packed(self, prepared, packed->pointers, capture);
        if (outcome == DONE && PyObject_SetAttr(capture, name.last_site, site))
            outcome = FAILED;
    } else
        Py_XDECREF(raise_in_capture(self, capture, NULL));
    Py_XDECREF(site);
    return outcome;
}

/* Make a launch of a thread that captures part of its graph. */
static Outcome record_launch(Launcher* self, PyObject* const* args) {
    Packed packed;
    if (!self->records)
        return UNFIT;
    PyObject* capture = PyObject_GetAttr(self->thread_state, name.capture);
    if (!capture)
        return FAILED;
    Outcome outcome = capture == Py_None ? UNFIT : can_record(self, capture);
    if (outcome == DONE) {
        memset(packed.data, 0, self->size);
        outcome = pack(self, args, 1, &packed);
    }
    if (outcome == DONE) {
        PyObject* prepared = captured_submit(self, capture);
        if (prepared)
            outcome = submit_recorded(self, capture, args, prepared, &packed);
        else {
            Py_XDECREF(raise_in_capture(self, capture, NULL));
            outcome = FAILED;
        }
        Py_XDECREF(prepared);
    }
    Py_DECREF(capture);
    return outcome;
}

static PyObject* Launcher_call(PyObject* callable, PyObject* const* args, size_t nargsf,
                               PyObject* kwnames) {
    Launcher* self = (Launcher*)callable;
    Outcome outcome = UNFIT;
    if (PyVectorcall_NARGS(nargsf) == self->num_params && !(kwnames && PyTuple_GET_SIZE(kwnames))) {
        int direct = slot(self->context, self->context_unrestricted) == Py_True;
        outcome = direct ? launch_now(self, args) : record_launch(self, args);
    }
    return outcome == UNFIT  ? call_general(self->launch, args, nargsf, kwnames)
           : outcome == DONE ? Py_NewRef(Py_None)
                             : NULL;
}

static int find_offsets(Launcher* self) {
    PyObject *context = self->context_type, *array = self->array_type, *uses = self->uses_type;
    PyObject* buffer = self->buffer_type;
    return slot_offset(context, "unrestricted", &self->context_unrestricted) ||
           slot_offset(context, "lost", &self->context_lost) ||
           slot_offset(array, "address", &self->array_address) ||
           slot_offset(array, "buffer", &self->array_buffer) ||
           slot_offset(array, "dtype", &self->array_dtype) || slot_offset(array, "uses", &self->array_uses) ||
           slot_offset(uses, "writer", &self->uses_writer) ||
           slot_offset(uses, "readers", &self->uses_readers) ||
           slot_offset(uses, "dlpack_exports", &self->uses_exports) ||
           slot_offset(uses, "exported_by_interface", &self->uses_interface) ||
           slot_offset(buffer, "context", &self->buffer_context) ||
           slot_offset(buffer, "open", &self->buffer_open) || slot_offset(buffer, "uses", &self->buffer_uses);
}

static int add_param(Launcher* self, PyObject* given) {
    Param* param = &self->params[self->num_params++];
    const char* code;
    int boolean, memory, writes, maybe_complex;
    PyObject* types;
    if (!PyArg_ParseTuple(given, "IsppppO!", &param->offset, &code, &boolean, &memory, &writes,
                          &maybe_complex, &PyTuple_Type, &types))
        return -1;
    param->code = *code;
    param->boolean = (char)boolean;
    param->memory = (char)memory;
    param->writes = (char)writes;
    param->maybe_complex = (char)maybe_complex;
    if (PyTuple_GET_SIZE(types) > MAX_TYPES || param->offset > MAX_BYTES - 8) {
        PyErr_SetString(PyExc_ValueError, "a parameter has too many types, or lies beyond the buffer");
        return -1;
    }
    for (; param->num_types < PyTuple_GET_SIZE(types); param->num_types++) {
        int at = param->num_types;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(types, at), "OI", &param->dtypes[at], &param->dlpack_types[at]))
            return -1;
    }
    return 0;
}

static PyObject* Launcher_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    PyObject *references, *params;
    int device_type, device, records;
    unsigned size;
    if (has_names(type, kwargs) ||
        !PyArg_ParseTuple(args, "O!(ii)pIO!", &PyTuple_Type, &references, &device_type, &device, &records, &size,
                          &PyTuple_Type, &params))
        return NULL;
    if (PyTuple_GET_SIZE(params) > MAX_PARAMS || size > MAX_BYTES)
        return PyErr_Format(PyExc_ValueError, "too many parameters");
    Launcher* self = (Launcher*)type->tp_alloc(type, PyTuple_GET_SIZE(params));
    if (!self)
        return NULL;
    self->vectorcall = Launcher_call;
    self->device_type = device_type;
    self->device = device;
    self->records = records;
    self->size = size;
    int failed = take_references(references, &self->launch, &self->buffer_type + 1) || find_offsets(self);
    for (Py_ssize_t at = 0; !failed && at < PyTuple_GET_SIZE(params); at++)
        failed = add_param(self, PyTuple_GET_ITEM(params, at));
    if (failed)
        Py_CLEAR(self);
    return (PyObject*)self;
}

TRACK(Launcher, launch, buffer_type)

static PyObject* Launcher_repr(Launcher* self) {
    return PyUnicode_FromFormat("<launcher of %R>", self->launch);
}

/* Replay */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *replayer, *fallback, *raise_launch_error, *raise_setter_error; /* a Replayer and functions */
    PyObject *context, *title, *lock, *not_submitted;
    PyObject* number_setters; /* by the names of scalars: the device's function and their formats */
    PyObject *context_type, *replayer_type;
    Py_ssize_t context_unrestricted, context_last_replayed, launch, num_replays; /* slots of both */
} Replay;

static PyTypeObject Replay_Type;

/* Set a slot of a Python class. Steals the reference. -1 without one. */
static int set_slot(PyObject* object, Py_ssize_t offset, PyObject* value) {
    PyObject** where = (PyObject**)((char*)object + offset);
    PyObject* before = *where;
    if (!value)
        return -1;
    *where = value;
    Py_XDECREF(before);
    return 0;
}

static int count_replay(Replay* self) {
    long long count = PyLong_AsLongLong(slot(self->replayer, self->num_replays));
    return set_slot(self->replayer, self->num_replays, PyLong_FromLongLong(count + 1));
}

static PyObject* launch_graph(PyObject* launch) {
    if (Py_IS_TYPE(launch, &GraphLaunch_Type))
        return launch_native((GraphLaunch*)launch);
    return PyObject_CallNoArgs(launch);
}

static unsigned size_of(char code) { /* of a format of the module struct */
    switch (code) {
    case 'b': case 'B': return 1;
    case 'h': case 'H': return 2;
    case 'i': case 'I': case 'f': return 4;
    default: return 8;
    }
}

/* The scalars of one replay: the device's function that sets them, their formats and their bytes. */
typedef struct {
    PyObject *setter, *names;
    const char* codes;
    unsigned size;
    unsigned char values[MAX_SCALARS * 8];
} Scalars;

/* Pack numbers as the module struct does. UNFIT for what it would not pack. */
static Outcome pack_scalars(Scalars* scalars, PyObject* const* args) {
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(scalars->names); at++) {
        char code = scalars->codes[at];
        unsigned char* out = scalars->values + scalars->size;
        if (!is_plain_number(args[at], code))
            return UNFIT;
        Outcome stored = store_number(args[at], code, out);
        if (stored != DONE)
            return stored;
        float single;
        memcpy(&single, out, 4);
        if (code == 'f' && Py_IS_INFINITY(single) && !Py_IS_INFINITY(PyFloat_AsDouble(args[at])))
            return UNFIT; /* Struct refuses a finite number that becomes infinite. */
        scalars->size += size_of(code);
    }
    return DONE;
}

static PyObject* set_scalars(Scalars* scalars) {
    if (Py_IS_TYPE(scalars->setter, &WordSetter_Type))
        return status_tuple(set_words((WordSetter*)scalars->setter, scalars->values));
    PyObject* bytes = PyBytes_FromStringAndSize((const char*)scalars->values, scalars->size);
    PyObject* status = bytes ? PyObject_CallOneArg(scalars->setter, bytes) : NULL;
    Py_XDECREF(bytes);
    return status;
}

/* Replay while this thread holds the lock. */
static Outcome replay_locked(Replay* self, Scalars* scalars) {
    Outcome outcome = FAILED;
    PyObject* status = NULL;
    PyObject* launch = Py_NewRef(slot(self->replayer, self->launch));
    if (launch == Py_None) {
        outcome = UNFIT;
        goto done;
    }
    set_slot(self->context, self->context_last_replayed, Py_NewRef(self->title));
    if (scalars) {
        status = set_scalars(scalars);
        int failed = has_failed(status);
        if (failed > 0)
            Py_XDECREF(PyObject_CallFunctionObjArgs(self->raise_setter_error, status, scalars->names, NULL));
        if (failed)
            goto done;
        Py_CLEAR(status);
    }
    status = launch_graph(launch);
    if (status == self->not_submitted)
        outcome = UNFIT;
    else {
        int failed = has_failed(status);
        if (failed > 0)
            Py_XDECREF(PyObject_CallOneArg(self->raise_launch_error, status));
        else if (!failed && !count_replay(self))
            outcome = DONE;
    }
done:
    Py_XDECREF(status);
    Py_DECREF(launch);
    return outcome;
}

/* Take the lock, a dictionary with one item, replay and put the item back: see `DictLock`. */
static Outcome replay_now(Replay* self, Scalars* scalars) {
    if (slot(self->context, self->context_unrestricted) != Py_True)
        return UNFIT;
    if (PyDict_DelItem(self->lock, zero))
        return unfit_or_failed(); /* Another thread holds it. */
    Outcome outcome = replay_locked(self, scalars);
    PyObject* error = take_error();
    if (PyDict_SetItem(self->lock, zero, Py_True))
        outcome = FAILED;
    if (error)
        raise_again(error);
    return outcome;
}

static Outcome replay_with(Replay* self, PyObject* const* args, PyObject* names) {
    Scalars scalars = {.names = names};
    PyObject* entry = PyDict_GetItemWithError(self->number_setters, names);
    if (!entry || !PyTuple_CheckExact(entry) || PyTuple_GET_SIZE(entry) != 2)
        return unfit_or_failed();
    scalars.setter = PyTuple_GET_ITEM(entry, 0);
    scalars.codes = PyUnicode_AsUTF8(PyTuple_GET_ITEM(entry, 1));
    if (!scalars.codes)
        return unfit_or_failed();
    Py_INCREF(entry); /* Closing the graph drops it. */
    Outcome outcome = pack_scalars(&scalars, args);
    if (outcome == DONE)
        outcome = replay_now(self, &scalars);
    Py_DECREF(entry);
    return outcome;
}

static PyObject* Replay_call(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
    Replay* self = (Replay*)callable;
    Outcome outcome = UNFIT;
    if (!PyVectorcall_NARGS(nargsf))
        outcome = kwnames ? replay_with(self, args, kwnames) : replay_now(self, NULL);
    return outcome == UNFIT  ? call_general(self->fallback, args, nargsf, kwnames)
           : outcome == DONE ? Py_NewRef(Py_None)
                             : NULL;
}

static PyObject* Replay_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    Replay* self = alloc_from(type, kwargs, Replay_call);
    if (self && (take_references(args, &self->replayer, &self->replayer_type + 1) ||
                 slot_offset(self->context_type, "unrestricted", &self->context_unrestricted) ||
                 slot_offset(self->context_type, "last_replayed", &self->context_last_replayed) ||
                 slot_offset(self->replayer_type, "launch", &self->launch) ||
                 slot_offset(self->replayer_type, "num_replays", &self->num_replays)))
        Py_CLEAR(self);
    return (PyObject*)self;
}

TRACK(Replay, replayer, replayer_type)

/* The module */

static void dealloc_tracked(PyObject* self) {
    PyObject_GC_UnTrack(self);
    Py_TYPE(self)->tp_clear(self);
    Py_TYPE(self)->tp_free(self);
}

#define TYPE(Name, doc, flags, ...)                                                                         \
    static PyTypeObject Name##_Type = {                                                                     \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "preheat.native._core." #Name, .tp_basicsize = sizeof(Name),    \
        .tp_doc = doc, .tp_new = Name##_new, .tp_call = PyVectorcall_Call,                                  \
        .tp_vectorcall_offset = offsetof(Name, vectorcall),                                                 \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | (flags), __VA_ARGS__};
#define TRACKED_TYPE(Name, doc, ...)                                                                        \
    TYPE(Name, doc, Py_TPFLAGS_HAVE_GC, .tp_traverse = (traverseproc)Name##_traverse,                       \
         .tp_clear = (inquiry)Name##_clear, .tp_dealloc = dealloc_tracked, __VA_ARGS__)

TRACKED_TYPE(KernelLaunch, "A prepared launch of a kernel: launch(pointers, 0) returns the status in a tuple.")
TRACKED_TYPE(GraphLaunch, "A prepared replay of a graph: launch() returns the status in a tuple.")
TYPE(WordSetter, "Prepared fills: setter(values) sets each address to its bytes.", 0)
TRACKED_TYPE(Launcher, "Launches a kernel with the arguments that most launches have.",
             .tp_itemsize = sizeof(Param), .tp_repr = (reprfunc)Launcher_repr)
TRACKED_TYPE(Replay, "Replays a graph: replay(**scalars).")

/* Stamps of files. */

enum { STAMP_WORDS = 5 };

/* Return size, mtime, ctime, inode and device of each file, 8 bytes each; OSError if one has no status. */
static PyObject* file_times(PyObject* Py_UNUSED(self), PyObject* paths) {
    if (!PyBytes_Check(paths))
        return PyErr_Format(PyExc_TypeError, "paths are bytes, each with a NUL at its end");
    const char *path = PyBytes_AS_STRING(paths), *end = path + PyBytes_GET_SIZE(paths);
    Py_ssize_t count = 0;
    for (const char* at = path; at < end; at++)
        count += !*at;
    PyObject* stamps = PyBytes_FromStringAndSize(NULL, count * STAMP_WORDS * 8);
    if (!stamps)
        return NULL;
    int64_t* word = (int64_t*)PyBytes_AS_STRING(stamps);
    int failed = 0;
    Py_BEGIN_ALLOW_THREADS /* `paths` cannot change, and nothing else knows `stamps` yet. */
    for (; count && !failed; count--, path += strlen(path) + 1) {
        struct stat file;
        failed = stat(path, &file);
        if (failed)
            continue;
        int64_t stamp[STAMP_WORDS] = {
            file.st_size, file.st_mtim.tv_sec * INT64_C(1000000000) + file.st_mtim.tv_nsec,
            file.st_ctim.tv_sec * INT64_C(1000000000) + file.st_ctim.tv_nsec, (int64_t)file.st_ino,
            (int64_t)file.st_dev};
        memcpy(word, stamp, sizeof stamp);
        word += STAMP_WORDS;
    }
    Py_END_ALLOW_THREADS
    if (!failed)
        return stamps;
    Py_DECREF(stamps);
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* Loading. After any status but success the result is None: Python code makes the calls again, and
   reports what fails. */

static PyObject* load_module(PyObject* Py_UNUSED(self), PyObject* args) {
    InContext in = {NULL};
    int (*load)(void**, const void*);
    PyObject* code;
    if (!PyArg_ParseTuple(args, "O&O&S", to_in_context, &in, to_pointer, &load, &code))
        return NULL;
    void* module = NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = enter(&in);
    if (!status) {
        status = load(&module, PyBytes_AS_STRING(code));
        leave(&in);
    }
    Py_END_ALLOW_THREADS
    return status ? Py_NewRef(Py_None) : PyLong_FromVoidPtr(module);
}

typedef struct {
    int (*get_function)(void**, void*, const char*);
    int (*load)(void*);
    int (*get_attribute)(int*, int, void*);
} LoadCalls;

/* Resolve and load a kernel, and read its attributes: threads, shared memory and three sizes of a cluster. */
static int resolve(const LoadCalls* driver, void* module, const char* symbol, int clusters, void** function,
                   int bounds[5]) {
    int status = driver->get_function(function, module, symbol);
    if (!status)
        status = driver->load(*function);
    if (!status)
        status = driver->get_attribute(&bounds[0], THREADS, *function);
    if (!status)
        status = driver->get_attribute(&bounds[1], SHARED, *function);
    int has_cluster = 0;
    if (!status && clusters)
        status = driver->get_attribute(&has_cluster, HAS_CLUSTER, *function);
    for (int axis = 0; axis < 3 && !status && has_cluster; axis++)
        status = driver->get_attribute(&bounds[2 + axis], CLUSTER + axis, *function);
    return status;
}

static PyObject* load_function(PyObject* Py_UNUSED(self), PyObject* args) {
    InContext in = {NULL};
    LoadCalls driver;
    void *module, *function = NULL;
    const char* symbol;
    int clusters, status, bounds[5] = {0, 0, -1};
    if (!PyArg_ParseTuple(args, "O&O&O&O&O&yp", to_in_context, &in, to_pointer, &driver.get_function,
                          to_pointer, &driver.load, to_pointer, &driver.get_attribute, to_pointer, &module,
                          &symbol, &clusters))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = enter(&in);
    if (!status) {
        status = resolve(&driver, module, symbol, clusters, &function, bounds);
        leave(&in);
    }
    Py_END_ALLOW_THREADS
    if (status)
        return Py_NewRef(Py_None);
    if (bounds[2] < 0) /* No launch has to have a cluster. */
        return Py_BuildValue("K(ii)", (unsigned long long)(uintptr_t)function, bounds[0], bounds[1]);
    return Py_BuildValue("K(ii(iii))", (unsigned long long)(uintptr_t)function, bounds[0], bounds[1],
                         bounds[2], bounds[3], bounds[4]);
}

static PyMethodDef functions[] = {
    {"load_module", load_module, METH_VARARGS,
     "load_module(context, cuModuleLoadData, code) returns the handle of a module; None if a call failed."},
    {"load_function", load_function, METH_VARARGS,
     "load_function(context, cuModuleGetFunction, cuFuncLoad, cuFuncGetAttribute, module, name, clusters) "
     "returns the handle of a kernel and its bounds; None if a call failed."},
    {"file_times", file_times, METH_O,
     "file_times(paths) returns size, mtime, ctime, inode and device of files, as 64-bit words."},
    {NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "preheat.native._core", "The native core of preheat.", -1, functions, NULL, NULL, NULL,
    NULL,
};

static int intern_names(void) {
#define INTERN(word)                                                                                        \
    if (!(name.word = PyUnicode_InternFromString(#word)))                                                   \
        return -1;
    INTERN(_c_contiguous) INTERN(capture) INTERN(data) INTERN(device_id) INTERN(dtype) INTERN(graph)
    INTERN(handle) INTERN(interrupted) INTERN(is_conj) INTERN(is_neg) INTERN(last_site) INTERN(ptr)
    INTERN(records) INTERN(stream)
#undef INTERN
    return 0;
}

/* Make the constants, and add to the module what it offers. */
static int fill_module(PyObject* made) {
    PyTypeObject* types[] = {&KernelLaunch_Type, &GraphLaunch_Type, &WordSetter_Type, &Launcher_Type,
                             &Replay_Type};
    zero = PyLong_FromLong(0);
    no_error = Py_BuildValue("(i)", 0);
    empty = PyTuple_New(0);
    unfit_errors = PyTuple_Pack(7, PyExc_LookupError, PyExc_AttributeError, PyExc_TypeError, PyExc_ValueError,
                                PyExc_OverflowError, PyExc_BufferError, PyExc_RuntimeError);
    for (size_t at = 0; at < sizeof types / sizeof *types; at++)
        if (PyModule_AddType(made, types[at]))
            return -1;
    return !zero || !no_error || !empty || !unfit_errors || intern_names() ||
           PyModule_AddStringConstant(made, "SOURCES", PREHEAT_SOURCES) ||
           PyModule_AddIntConstant(made, "MAX_PARAMS", MAX_PARAMS) ||
           PyModule_AddIntConstant(made, "MAX_BYTES", MAX_BYTES) ||
           PyModule_AddIntConstant(made, "MAX_SCALARS", MAX_SCALARS);
}

PyMODINIT_FUNC PyInit__core(void) {
    PyObject* made = PyModule_Create(&module);
    if (made && fill_module(made))
        Py_CLEAR(made);
    return made;
}
