/* The native core of preheat: launches, recorded launches and replays without a Python frame.

   Each type here handles the arguments that most calls have. Everything else, and every error, goes to
   the Python function that the object was given, so that both paths behave the same by construction.
   `preheat.runtime.fast_launch` and `preheat.graph.replay` have the same logic in Python.

     KernelLaunch   a prepared launch of the driver      devices/cuda/module.py
     GraphLaunch    a prepared replay of the driver      devices/cuda/graph.py
     WordSetter     prepared fills of the driver         devices/cuda/device.py
     Launcher       checks arguments and launches        runtime/fast_launch.py
     NumberSetter   packs numbers for scalars            graph/replay.py
     Replay         sets scalars and replays a graph     graph/replay.py

   The driver's functions are given as addresses, so that this file needs neither its headers nor its
   library. The GIL is released during their calls. Arrays of preheat are read at the offsets of their
   slots, without a lookup by name. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

#define INTERFACE 1 /* `preheat.native` refuses an extension with another number. */

enum { MOST_PARAMS = 64, PARAM_BYTES = 8, MOST_SCALARS = 16, SCALAR_BYTES = 8 };
enum { INVALID_CONTEXT = 201, INVALID_HANDLE = 400 }; /* of a launch under another context */

/* The result of an attempt: done, not for this path (without an error set), or an error. */
typedef enum { DONE, UNFIT, FAILED } Outcome;

static PyObject *zero, *no_error, *empty;
static PyObject* unfit_errors; /* exceptions which mean that an argument is for the general path */
static struct {
    PyObject *capture, *current, *data_ptr, *dtype, *get_device, *graph, *handle, *interrupted;
    PyObject *is_conj, *is_contiguous, *is_neg, *last_replayed, *last_site, *launch, *lost;
    PyObject *lost_or_capturing, *num_replays, *records, *stream;
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

static void raise_again(PyObject* error) { /* Steals the reference. */
    PyErr_SetObject((PyObject*)Py_TYPE(error), error);
    Py_DECREF(error);
}

static int is_none(PyObject* owner, PyObject* attribute) { /* 1, 0, or -1 with an error */
    PyObject* value = PyObject_GetAttr(owner, attribute);
    if (!value)
        return -1;
    Py_DECREF(value);
    return value == Py_None;
}

static int is_false(PyObject* value) { /* Steals the reference. */
    if (!value)
        return -1;
    int result = PyObject_Not(value);
    Py_DECREF(value);
    return result;
}

static void* address_of(PyObject* number) { /* NULL with an error, or for 0 */
    return (void*)(uintptr_t)PyLong_AsUnsignedLongLong(number);
}

/* Read a slot of a Python class at its offset. The reference is borrowed. NULL if it is not set. */
static inline PyObject* slot(PyObject* object, Py_ssize_t offset) {
    return *(PyObject**)((char*)object + offset);
}

static Py_ssize_t slot_offset(PyObject* type, const char* attribute) { /* -1 with an error */
    PyObject* descriptor = PyObject_GetAttrString(type, attribute);
    if (!descriptor)
        return -1;
    if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) {
        PyErr_Format(PyExc_TypeError, "%R.%s is not a slot", type, attribute);
        Py_DECREF(descriptor);
        return -1;
    }
    Py_ssize_t offset = ((PyMemberDescrObject*)descriptor)->d_member->offset;
    Py_DECREF(descriptor);
    return offset;
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

static int parse_in_context(PyObject* given, InContext* in) { /* None, or context, push and pop */
    in->context = NULL;
    if (given == Py_None)
        return 0;
    unsigned long long context, push, pop;
    if (!PyArg_ParseTuple(given, "KKK", &context, &push, &pop))
        return -1;
    in->context = (void*)(uintptr_t)context;
    in->push = (int (*)(void*))(uintptr_t)push;
    in->pop = (int (*)(void**))(uintptr_t)pop;
    return 0;
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

/* 1 for the status of a call that failed, 0 for success, -1 with an error. */
static int has_failed(PyObject* status) {
    if (status == no_error)
        return 0;
    PyObject* first = PySequence_GetItem(status, 0);
    if (!first)
        return -1;
    int failed = PyObject_IsTrue(first);
    Py_DECREF(first);
    return failed;
}

static PyObject* KernelLaunch_call(PyObject* callable, PyObject* const* args, size_t nargsf,
                                   PyObject* kwnames) {
    if (PyVectorcall_NARGS(nargsf) != 2 || kwnames) {
        PyErr_SetString(PyExc_TypeError, "a prepared launch takes the address of the pointers, and 0");
        return NULL;
    }
    void** pointers = address_of(args[0]);
    return PyErr_Occurred() ? NULL : submit(callable, pointers);
}

static PyObject* KernelLaunch_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static char* names[] = {"launch", "function", "grid", "block", "shared", "stream", "retry", NULL};
    unsigned long long launch, function, stream;
    unsigned grid[3], block[3], shared;
    PyObject* retry = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KK(III)(III)IK|O", names, &launch, &function,
                                     &grid[0], &grid[1], &grid[2], &block[0], &block[1], &block[2],
                                     &shared, &stream, &retry))
        return NULL;
    KernelLaunch* self = (KernelLaunch*)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = KernelLaunch_call;
    *(void**)&self->launch = (void*)(uintptr_t)launch;
    self->function = (void*)(uintptr_t)function;
    self->stream = (void*)(uintptr_t)stream;
    memcpy(self->grid, grid, sizeof grid);
    memcpy(self->block, block, sizeof block);
    self->shared = shared;
    self->retry = Py_NewRef(retry);
    return (PyObject*)self;
}

static int KernelLaunch_traverse(KernelLaunch* self, visitproc visit, void* arg) {
    Py_VISIT(self->retry);
    return 0;
}

static int KernelLaunch_clear(KernelLaunch* self) {
    Py_CLEAR(self->retry);
    return 0;
}

/* GraphLaunch */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int (*launch)(void*, void*);
    void *executable, *stream;
    InContext in_context;
} GraphLaunch;

static PyTypeObject GraphLaunch_Type;

static int call_graph(GraphLaunch* self) {
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = enter(&self->in_context);
    if (!status) {
        status = self->launch(self->executable, self->stream);
        leave(&self->in_context);
    }
    Py_END_ALLOW_THREADS
    return status;
}

static PyObject* GraphLaunch_call(PyObject* callable, PyObject* const* args, size_t nargsf,
                                  PyObject* kwnames) {
    (void)args;
    if (PyVectorcall_NARGS(nargsf) || kwnames) {
        PyErr_SetString(PyExc_TypeError, "a prepared replay takes no arguments");
        return NULL;
    }
    return status_tuple(call_graph((GraphLaunch*)callable));
}

static PyObject* GraphLaunch_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static char* names[] = {"launch", "executable", "stream", "in_context", NULL};
    unsigned long long launch, executable, stream;
    PyObject* in_context = Py_None;
    InContext in;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKK|O", names, &launch, &executable, &stream,
                                     &in_context) ||
        parse_in_context(in_context, &in))
        return NULL;
    GraphLaunch* self = (GraphLaunch*)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = GraphLaunch_call;
    *(void**)&self->launch = (void*)(uintptr_t)launch;
    self->executable = (void*)(uintptr_t)executable;
    self->stream = (void*)(uintptr_t)stream;
    self->in_context = in;
    return (PyObject*)self;
}

/* WordSetter */

typedef struct {
    uint64_t address;
    unsigned char value, start, size; /* which bytes of which value: `size` bytes from `start` */
} Word;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int (*fill8)(uint64_t, unsigned char, size_t, void*);
    int (*fill16)(uint64_t, unsigned short, size_t, void*);
    int (*fill32)(uint64_t, unsigned, size_t, void*);
    void* stream;
    InContext in_context;
    int num_values, num_words;
    unsigned char sizes[MOST_SCALARS];
    Word words[2 * MOST_SCALARS];
} WordSetter;

static PyTypeObject WordSetter_Type;

static int fill_word(WordSetter* self, const Word* word, const unsigned char* bytes) {
    uint16_t half;
    uint32_t whole;
    switch (word->size) {
    case 1: return self->fill8(word->address, *bytes, 1, self->stream);
    case 2: memcpy(&half, bytes, 2); return self->fill16(word->address, half, 1, self->stream);
    default: memcpy(&whole, bytes, 4); return self->fill32(word->address, whole, 1, self->stream);
    }
}

static int set_words(WordSetter* self, unsigned char values[][SCALAR_BYTES]) {
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = enter(&self->in_context);
    if (!status) {
        for (int at = 0; at < self->num_words && !status; at++) {
            const Word* word = &self->words[at];
            status = fill_word(self, word, values[word->value] + word->start);
        }
        leave(&self->in_context);
    }
    Py_END_ALLOW_THREADS
    return status;
}

static PyObject* WordSetter_call(PyObject* callable, PyObject* const* args, size_t nargsf,
                                 PyObject* kwnames) {
    WordSetter* self = (WordSetter*)callable;
    unsigned char values[MOST_SCALARS][SCALAR_BYTES];
    if (PyVectorcall_NARGS(nargsf) != 1 || kwnames) {
        PyErr_SetString(PyExc_TypeError, "a setter takes a sequence of bytes");
        return NULL;
    }
    PyObject* given = PySequence_Fast(args[0], "a setter takes a sequence of bytes");
    if (!given)
        return NULL;
    int fits = PySequence_Fast_GET_SIZE(given) == self->num_values;
    for (int at = 0; fits && at < self->num_values; at++) {
        PyObject* value = PySequence_Fast_GET_ITEM(given, at);
        fits = PyBytes_Check(value) && PyBytes_GET_SIZE(value) == self->sizes[at];
        if (fits)
            memcpy(values[at], PyBytes_AS_STRING(value), self->sizes[at]);
    }
    Py_DECREF(given);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "each value needs as many bytes as its address was given with");
        return NULL;
    }
    return status_tuple(set_words(self, values));
}

static int add_words(WordSetter* self, uint64_t address, int size) {
    int word_size = size < 4 ? size : 4;
    if (self->num_values == MOST_SCALARS || (size != 1 && size != 2 && size != 4 && size != 8)) {
        PyErr_Format(PyExc_ValueError, "a setter takes up to %d values of 1, 2, 4 or 8 bytes", MOST_SCALARS);
        return -1;
    }
    for (int start = 0; start < size; start += word_size)
        self->words[self->num_words++] = (Word){address + start, self->num_values, start, word_size};
    self->sizes[self->num_values++] = size;
    return 0;
}

static PyObject* WordSetter_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static char* names[] = {"fills", "stream", "places", "in_context", NULL};
    unsigned long long fill8, fill16, fill32, stream;
    PyObject *places, *in_context = Py_None;
    InContext in;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "(KKK)KO!|O", names, &fill8, &fill16, &fill32, &stream,
                                     &PyList_Type, &places, &in_context) ||
        parse_in_context(in_context, &in))
        return NULL;
    WordSetter* self = (WordSetter*)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = WordSetter_call;
    *(void**)&self->fill8 = (void*)(uintptr_t)fill8;
    *(void**)&self->fill16 = (void*)(uintptr_t)fill16;
    *(void**)&self->fill32 = (void*)(uintptr_t)fill32;
    self->stream = (void*)(uintptr_t)stream;
    self->in_context = in;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(places); at++) {
        unsigned long long address;
        int size;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(places, at), "Ki", &address, &size) ||
            add_words(self, address, size)) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject*)self;
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
    PyObject* dtypes;   /* a tuple of element types of preheat, or None for any */
    PyObject* elements; /* a tuple of sets of element types of the library, or None for any */
} Param;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *launch, *fallback, *prepare, *raise_for_status, *raise_in_capture; /* with functions of it */
    PyObject *context, *thread_state, *submits;
    PyObject *stream, *stream_id, *stream_handle;
    PyObject *library, *index; /* the library whose tensors are taken, or None; the number of the GPU */
    PyObject *call_site, *outside_files;
    PyObject *array_type, *uses_type, *buffer_type;
    Py_ssize_t array_address, array_buffer, array_dtype, array_uses, uses_writer, uses_readers;
    Py_ssize_t buffer_context, buffer_open, buffer_uses;
    int records; /* Launches can be recorded into captures. */
    int num_params;
    unsigned size; /* of the packed parameters */
    Param params[MOST_PARAMS];
} Launcher;

static PyTypeObject Launcher_Type;

typedef enum { NOBODY, OURS, LIBRARY } Owner; /* whose memory a launch uses */

static int has_item(PyObject* tuple, PyObject* item) {
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(tuple); at++)
        if (PyTuple_GET_ITEM(tuple, at) == item)
            return 1;
    return 0;
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

/* Return DONE if this memory of ours is valid here, for a launch that a replay will order. */
static Outcome is_open(Launcher* self, PyObject* array, PyObject* uses) {
    PyObject* buffer = slot(array, self->array_buffer);
    if (!buffer || !PyObject_TypeCheck(buffer, (PyTypeObject*)self->buffer_type))
        return UNFIT;
    int usable = slot(buffer, self->buffer_context) == self->context &&
                 slot(buffer, self->buffer_open) == Py_True && slot(buffer, self->buffer_uses) == uses;
    return usable ? DONE : UNFIT;
}

static Outcome store_array(Launcher* self, const Param* param, PyObject* array, int recording, void* out) {
    PyObject* dtype = slot(array, self->array_dtype);
    PyObject* uses = slot(array, self->array_uses);
    PyObject* address = slot(array, self->array_address);
    if (!uses || !Py_IS_TYPE(uses, (PyTypeObject*)self->uses_type) || !address || !PyLong_CheckExact(address))
        return UNFIT;
    if (param->dtypes != Py_None && !has_item(param->dtypes, dtype))
        return UNFIT;
    Outcome usable = recording ? is_open(self, array, uses) : has_right(self, uses, param->writes);
    return usable == DONE ? store_integer(address, 'Q', out) : usable;
}

static Outcome has_element(PyObject* tensor, PyObject* elements) {
    PyObject* dtype = PyObject_GetAttr(tensor, name.dtype);
    int found = dtype ? 0 : -1;
    for (Py_ssize_t at = 0; !found && at < PyTuple_GET_SIZE(elements); at++)
        found = PySet_Contains(PyTuple_GET_ITEM(elements, at), dtype);
    Py_XDECREF(dtype);
    return found > 0 ? DONE : unfit_or_failed();
}

/* Store the address of a tensor of the library, after testing what its memory must be like. */
static Outcome store_tensor(Launcher* self, const Param* param, PyObject* tensor, void* out) {
    if (param->elements != Py_None) {
        Outcome fits = has_element(tensor, param->elements);
        if (fits != DONE)
            return fits;
    }
    PyObject* device = PyObject_CallMethodNoArgs(tensor, name.get_device);
    if (!device)
        return unfit_or_failed();
    int here = PyObject_RichCompareBool(device, self->index, Py_EQ);
    Py_DECREF(device);
    if (here <= 0)
        return unfit_or_failed();
    if (is_false(PyObject_CallMethodNoArgs(tensor, name.is_contiguous)) != 0 ||
        is_false(PyObject_CallMethodNoArgs(tensor, name.is_neg)) != 1 ||
        (param->maybe_complex && is_false(PyObject_CallMethodNoArgs(tensor, name.is_conj)) != 1))
        return unfit_or_failed();
    PyObject* address = PyObject_CallMethodNoArgs(tensor, name.data_ptr);
    if (!address)
        return unfit_or_failed();
    Outcome stored = PyLong_CheckExact(address) ? store_integer(address, 'Q', out) : UNFIT;
    Py_DECREF(address);
    return stored;
}

/* Test all arguments and store them. `pointers` point to them; `owner` tells whose memory they are. */
static Outcome pack(Launcher* self, PyObject* const* args, int recording, unsigned char* data,
                    void** pointers, Owner* owner) {
    *owner = NOBODY;
    PyTypeObject* array_type = (PyTypeObject*)self->array_type;
    for (int at = 0; at < self->num_params; at++) {
        const Param* param = &self->params[at];
        PyObject* given = args[at];
        void* out = pointers[at] = data + param->offset;
        Outcome stored = UNFIT;
        if (param->boolean)
            stored = store_boolean(given, out);
        else if (param->code && is_plain_number(given, param->code))
            stored = store_number(given, param->code, out);
        else if (param->memory && PyObject_TypeCheck(given, array_type) && *owner != LIBRARY) {
            *owner = OURS;
            stored = store_array(self, param, given, recording, out);
        } else if (param->memory && self->library != Py_None && *owner != OURS && !recording) {
            *owner = LIBRARY;
            stored = store_tensor(self, param, given, out);
        }
        if (stored != DONE)
            return stored;
    }
    return DONE;
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

static PyObject* library_submit(Launcher* self) {
    PyObject* args[] = {self->library, self->index};
    return prepared_in(self, PyObject_VectorcallMethod(name.current, args, 2, NULL));
}

/* Submit, and let Python raise the error of a status. A capture remembers every error. */
static Outcome submit_packed(Launcher* self, PyObject* prepared, void** pointers, PyObject* capture) {
    PyObject* status = submit(prepared, pointers);
    int failed = status ? has_failed(status) : -1;
    if (failed) {
        PyObject* raised = NULL;
        if (capture) {
            PyObject* error = take_error();
            raised = PyObject_CallFunctionObjArgs(self->raise_in_capture, capture, status ? status : Py_None,
                                                  error ? error : Py_None, NULL);
            Py_XDECREF(error);
        } else if (failed > 0)
            raised = PyObject_CallOneArg(self->raise_for_status, status);
        failed = !raised;
        Py_XDECREF(raised);
    }
    Py_XDECREF(status);
    return failed ? FAILED : DONE;
}

static Outcome launch_now(Launcher* self, PyObject* const* args) {
    _Alignas(16) unsigned char data[MOST_PARAMS * PARAM_BYTES];
    void* pointers[MOST_PARAMS];
    Owner owner;
    Outcome packed = pack(self, args, 0, data, pointers, &owner);
    if (packed != DONE)
        return packed;
    PyObject* prepared = owner == LIBRARY ? library_submit(self) : own_submit(self);
    if (!prepared)
        return owner == LIBRARY ? unfit_or_failed() : FAILED;
    Outcome submitted = submit_packed(self, prepared, pointers, NULL);
    Py_DECREF(prepared);
    return submitted;
}

/* Return the place in the program that called the launcher: see `preheat.callsite`. */
static PyObject* find_site(Launcher* self) {
    PyFrameObject* frame = PyEval_GetFrame();
    if (frame) {
        PyCodeObject* code = PyFrame_GetCode(frame);
        PyObject* outside = PyDict_GetItemWithError(self->outside_files, code->co_filename);
        if (outside == Py_True)
            return Py_BuildValue("(Ni)", code, PyFrame_GetLasti(frame));
        Py_DECREF(code);
        if (PyErr_Occurred())
            return NULL;
    }
    return PyObject_CallNoArgs(self->call_site);
}

/* Append a `RecordedLaunch` to the capture. */
static Outcome append_record(Launcher* self, PyObject* capture, PyObject* const* args,
                             const unsigned char* data) {
    Outcome outcome = FAILED;
    PyObject *record = NULL, *records = NULL;
    PyObject* site = find_site(self);
    PyObject* bytes = PyBytes_FromStringAndSize((const char*)data, self->size);
    PyObject* given = PyTuple_New(self->num_params);
    if (!site || !bytes || !given)
        goto done;
    for (int at = 0; at < self->num_params; at++)
        PyTuple_SET_ITEM(given, at, Py_NewRef(args[at]));
    record = PyTuple_Pack(5, self->launch, bytes, given, site, empty);
    records = PyObject_GetAttr(capture, name.records);
    if (record && records && !PyList_Append(records, record) &&
        !PyObject_SetAttr(capture, name.last_site, site))
        outcome = DONE;
done:
    Py_XDECREF(record);
    Py_XDECREF(records);
    Py_XDECREF(site);
    Py_XDECREF(bytes);
    Py_XDECREF(given);
    return outcome;
}

static Outcome can_record(Launcher* self, PyObject* capture) {
    int alive = is_none(self->context, name.lost);
    if (alive <= 0)
        return alive ? FAILED : UNFIT;
    int whole = is_false(PyObject_GetAttr(capture, name.interrupted));
    if (whole <= 0)
        return whole ? FAILED : UNFIT;
    PyObject* graph = PyObject_CallMethodNoArgs(capture, name.graph);
    if (!graph)
        return FAILED;
    Py_DECREF(graph);
    return graph == Py_None ? UNFIT : DONE;
}

static PyObject* captured_submit(Launcher* self, PyObject* capture) {
    PyObject* stream = PyObject_GetAttr(capture, name.stream);
    PyObject* handle = stream ? PyObject_GetAttr(stream, name.handle) : NULL;
    Py_XDECREF(stream);
    return prepared_in(self, handle);
}

/* Make a launch of a thread that captures part of its graph. */
static Outcome record_launch(Launcher* self, PyObject* const* args) {
    _Alignas(16) unsigned char data[MOST_PARAMS * PARAM_BYTES];
    void* pointers[MOST_PARAMS];
    Owner owner;
    if (!self->records)
        return UNFIT;
    PyObject* capture = PyObject_GetAttr(self->thread_state, name.capture);
    if (!capture)
        return FAILED;
    Outcome outcome = capture == Py_None ? UNFIT : can_record(self, capture);
    if (outcome == DONE) {
        memset(data, 0, self->size);
        outcome = pack(self, args, 1, data, pointers, &owner);
    }
    if (outcome == DONE) {
        PyObject* prepared = captured_submit(self, capture);
        outcome = prepared ? submit_packed(self, prepared, pointers, capture) : unfit_or_failed();
        Py_XDECREF(prepared);
    }
    if (outcome == DONE)
        outcome = append_record(self, capture, args, data);
    Py_DECREF(capture);
    return outcome;
}

static PyObject* Launcher_call(PyObject* callable, PyObject* const* args, size_t nargsf,
                               PyObject* kwnames) {
    Launcher* self = (Launcher*)callable;
    Outcome outcome = UNFIT;
    if (PyVectorcall_NARGS(nargsf) == self->num_params && !(kwnames && PyTuple_GET_SIZE(kwnames))) {
        int idle = is_none(self->context, name.lost_or_capturing);
        outcome = idle < 0 ? FAILED : idle ? launch_now(self, args) : record_launch(self, args);
    }
    if (outcome == UNFIT)
        return PyObject_Vectorcall(self->fallback, args, nargsf & ~PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
    if (outcome == FAILED)
        return NULL;
    Py_RETURN_NONE;
}

static int find_offsets(Launcher* self) {
    PyObject *array = self->array_type, *uses = self->uses_type, *buffer = self->buffer_type;
    return (self->array_address = slot_offset(array, "address")) < 0 ||
           (self->array_buffer = slot_offset(array, "buffer")) < 0 ||
           (self->array_dtype = slot_offset(array, "dtype")) < 0 ||
           (self->array_uses = slot_offset(array, "uses")) < 0 ||
           (self->uses_writer = slot_offset(uses, "writer")) < 0 ||
           (self->uses_readers = slot_offset(uses, "readers")) < 0 ||
           (self->buffer_context = slot_offset(buffer, "context")) < 0 ||
           (self->buffer_open = slot_offset(buffer, "open")) < 0 ||
           (self->buffer_uses = slot_offset(buffer, "uses")) < 0;
}

static int add_param(Launcher* self, PyObject* given) {
    Param* param = &self->params[self->num_params];
    const char* code;
    int boolean, memory, writes, maybe_complex;
    if (!PyArg_ParseTuple(given, "IsppppOO", &param->offset, &code, &boolean, &memory, &writes,
                          &maybe_complex, &param->dtypes, &param->elements)) {
        param->dtypes = param->elements = NULL;
        return -1;
    }
    Py_INCREF(param->dtypes);
    Py_INCREF(param->elements);
    self->num_params++;
    param->code = *code;
    param->boolean = (char)boolean;
    param->memory = (char)memory;
    param->writes = (char)writes;
    param->maybe_complex = (char)maybe_complex;
    int tuples = (param->dtypes == Py_None || PyTuple_Check(param->dtypes)) &&
                 (param->elements == Py_None || PyTuple_Check(param->elements));
    if (param->offset + PARAM_BYTES > MOST_PARAMS * PARAM_BYTES || !tuples) {
        PyErr_SetString(PyExc_ValueError, "a parameter lies beyond the buffer, or its types are no tuple");
        return -1;
    }
    return 0;
}

static PyObject* Launcher_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static char* names[] = {"launch", "fallback", "prepare", "raise_for_status", "raise_in_capture",
                            "context", "thread_state", "submits", "stream", "stream_id", "stream_handle",
                            "library", "index", "call_site", "outside_files", "array_type", "uses_type",
                            "buffer_type", "records", "size", "params", NULL};
    PyObject* params;
    Launcher* self = (Launcher*)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    PyObject_GC_UnTrack(self); /* Its references are borrowed for a while. */
    self->vectorcall = Launcher_call;
    int parsed = PyArg_ParseTupleAndKeywords(
        args, kwargs, "OOOOOOOO!OOOOOOO!O!O!O!pIO!", names, &self->launch, &self->fallback, &self->prepare,
        &self->raise_for_status, &self->raise_in_capture, &self->context, &self->thread_state, &PyDict_Type,
        &self->submits, &self->stream, &self->stream_id, &self->stream_handle, &self->library, &self->index,
        &self->call_site, &PyDict_Type, &self->outside_files, &PyType_Type, &self->array_type,
        &PyType_Type, &self->uses_type, &PyType_Type, &self->buffer_type, &self->records, &self->size,
        &PyTuple_Type, &params);
    if (!parsed) { /* Some references are borrowed and some are not set. */
        memset(&self->launch, 0, (char*)(&self->buffer_type + 1) - (char*)&self->launch);
        Py_DECREF(self);
        return NULL;
    }
    for (PyObject** each = &self->launch; each <= &self->buffer_type; each++)
        Py_INCREF(*each);
    if (PyTuple_GET_SIZE(params) > MOST_PARAMS || self->size > MOST_PARAMS * PARAM_BYTES)
        PyErr_SetString(PyExc_ValueError, "too many parameters");
    for (Py_ssize_t at = 0; !PyErr_Occurred() && at < PyTuple_GET_SIZE(params); at++)
        add_param(self, PyTuple_GET_ITEM(params, at));
    PyObject_GC_Track(self);
    if (PyErr_Occurred() || find_offsets(self)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject*)self;
}

static int Launcher_traverse(Launcher* self, visitproc visit, void* arg) {
    for (PyObject** each = &self->launch; each <= &self->buffer_type; each++)
        Py_VISIT(*each);
    for (int at = 0; at < self->num_params; at++) {
        Py_VISIT(self->params[at].dtypes);
        Py_VISIT(self->params[at].elements);
    }
    return 0;
}

static int Launcher_clear(Launcher* self) {
    for (PyObject** each = &self->launch; each <= &self->buffer_type; each++)
        Py_CLEAR(*each);
    for (int at = 0; at < self->num_params; at++) {
        Py_CLEAR(self->params[at].dtypes);
        Py_CLEAR(self->params[at].elements);
    }
    return 0;
}

static PyObject* Launcher_repr(Launcher* self) {
    return PyUnicode_FromFormat("<launcher of %R>", self->launch);
}

/* NumberSetter */

typedef struct {
    PyObject_HEAD
    PyObject* setter; /* of the device, called with a sequence of bytes */
    int num_values;
    char codes[MOST_SCALARS];
} NumberSetter;

static PyTypeObject NumberSetter_Type;

static int size_of(char code) { /* 0 for a format that is not packed here */
    switch (code) {
    case 'b': case 'B': return 1;
    case 'h': case 'H': return 2;
    case 'i': case 'I': case 'f': return 4;
    case 'q': case 'Q': case 'd': return 8;
    }
    return 0;
}

static PyObject* NumberSetter_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static char* names[] = {"setter", "codes", NULL};
    PyObject* setter;
    const char* codes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Os", names, &setter, &codes))
        return NULL;
    size_t count = strlen(codes);
    int known = count <= MOST_SCALARS;
    for (size_t at = 0; known && at < count; at++)
        known = size_of(codes[at]) > 0;
    if (known && Py_IS_TYPE(setter, &WordSetter_Type)) {
        WordSetter* words = (WordSetter*)setter;
        known = words->num_values == (int)count;
        for (size_t at = 0; known && at < count; at++)
            known = words->sizes[at] == size_of(codes[at]);
    }
    if (!known) {
        PyErr_Format(PyExc_ValueError, "%s are not the formats of these scalars", codes);
        return NULL;
    }
    NumberSetter* self = (NumberSetter*)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->setter = Py_NewRef(setter);
    self->num_values = (int)count;
    memcpy(self->codes, codes, count);
    return (PyObject*)self;
}

/* Pack numbers as the module struct does. UNFIT for what it would not pack. */
static Outcome pack_numbers(NumberSetter* self, PyObject* const* args, unsigned char values[][SCALAR_BYTES]) {
    for (int at = 0; at < self->num_values; at++) {
        char code = self->codes[at];
        if (!is_plain_number(args[at], code))
            return UNFIT;
        Outcome stored = store_number(args[at], code, values[at]);
        if (stored != DONE)
            return stored;
        if (code == 'f') { /* Struct refuses a finite number that becomes infinite. */
            float single;
            memcpy(&single, values[at], 4);
            if (Py_IS_INFINITY(single) && !Py_IS_INFINITY(PyFloat_AsDouble(args[at])))
                return UNFIT;
        }
    }
    return DONE;
}

static PyObject* set_numbers(NumberSetter* self, unsigned char values[][SCALAR_BYTES]) {
    if (Py_IS_TYPE(self->setter, &WordSetter_Type))
        return status_tuple(set_words((WordSetter*)self->setter, values));
    PyObject* list = PyList_New(self->num_values);
    for (int at = 0; list && at < self->num_values; at++) {
        PyObject* bytes = PyBytes_FromStringAndSize((char*)values[at], size_of(self->codes[at]));
        if (!bytes)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, at, bytes);
    }
    PyObject* status = list ? PyObject_CallOneArg(self->setter, list) : NULL;
    Py_XDECREF(list);
    return status;
}

static int NumberSetter_traverse(NumberSetter* self, visitproc visit, void* arg) {
    Py_VISIT(self->setter);
    return 0;
}

static int NumberSetter_clear(NumberSetter* self) {
    Py_CLEAR(self->setter);
    return 0;
}

/* Replay */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *replayer, *fallback, *raise_launch_error, *raise_setter_error; /* a Replayer and functions */
    PyObject *context, *title, *lock, *number_setters, *not_prepared;
} Replay;

static PyTypeObject Replay_Type;

static int count_replay(Replay* self) {
    PyObject* before = PyObject_GetAttr(self->replayer, name.num_replays);
    long count = before ? PyLong_AsLong(before) : -1;
    Py_XDECREF(before);
    PyObject* after = PyErr_Occurred() ? NULL : PyLong_FromLong(count + 1);
    int failed = !after || PyObject_SetAttr(self->replayer, name.num_replays, after);
    Py_XDECREF(after);
    return failed ? -1 : 0;
}

static PyObject* launch_graph(PyObject* launch) {
    if (Py_IS_TYPE(launch, &GraphLaunch_Type))
        return status_tuple(call_graph((GraphLaunch*)launch));
    return PyObject_CallNoArgs(launch);
}

/* Replay while this thread holds the lock. */
static Outcome replay_locked(Replay* self, NumberSetter* setter, unsigned char values[][SCALAR_BYTES],
                             PyObject* names) {
    Outcome outcome = FAILED;
    PyObject* status = NULL;
    PyObject* launch = PyObject_GetAttr(self->replayer, name.launch);
    if (!launch)
        return FAILED;
    if (launch == Py_None) {
        outcome = UNFIT;
        goto done;
    }
    if (PyObject_SetAttr(self->context, name.last_replayed, self->title))
        goto done;
    if (setter) {
        status = set_numbers(setter, values);
        int failed = status ? has_failed(status) : -1;
        if (failed > 0)
            Py_XDECREF(PyObject_CallFunctionObjArgs(self->raise_setter_error, status, names, NULL));
        if (failed)
            goto done;
        Py_CLEAR(status);
    }
    status = launch_graph(launch);
    if (status == self->not_prepared)
        outcome = UNFIT;
    else {
        int failed = status ? has_failed(status) : -1;
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

/* Take the lock, a dictionary with one item, replay and put the item back: see `dict_lock`. */
static Outcome replay_now(Replay* self, NumberSetter* setter, PyObject* const* args, PyObject* names) {
    unsigned char values[MOST_SCALARS][SCALAR_BYTES];
    int idle = is_none(self->context, name.lost_or_capturing);
    if (idle <= 0)
        return idle ? FAILED : UNFIT;
    Outcome outcome = setter ? pack_numbers(setter, args, values) : DONE;
    if (outcome != DONE)
        return outcome;
    if (PyDict_DelItem(self->lock, zero))
        return unfit_or_failed(); /* Another thread holds it. */
    outcome = replay_locked(self, setter, values, names);
    PyObject* error = take_error();
    if (PyDict_SetItem(self->lock, zero, Py_True))
        outcome = FAILED;
    if (error)
        raise_again(error);
    return outcome;
}

static PyObject* Replay_call(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
    Replay* self = (Replay*)callable;
    Outcome outcome = UNFIT;
    PyObject* setter = NULL;
    if (!PyVectorcall_NARGS(nargsf)) {
        if (kwnames && PyTuple_GET_SIZE(kwnames)) {
            setter = Py_XNewRef(PyDict_GetItemWithError(self->number_setters, kwnames));
            outcome = setter ? replay_now(self, (NumberSetter*)setter, args, kwnames) : unfit_or_failed();
            Py_XDECREF(setter);
        } else
            outcome = replay_now(self, NULL, args, NULL);
    }
    if (outcome == UNFIT)
        return PyObject_Vectorcall(self->fallback, args, nargsf & ~PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
    if (outcome == FAILED)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject* Replay_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static char* names[] = {"replayer", "fallback", "raise_launch_error", "raise_setter_error", "context",
                            "title", "lock", "number_setters", "not_prepared", NULL};
    Replay* self = (Replay*)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    PyObject_GC_UnTrack(self); /* Its references are borrowed for a while. */
    self->vectorcall = Replay_call;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOO!O!O", names, &self->replayer, &self->fallback,
                                     &self->raise_launch_error, &self->raise_setter_error, &self->context,
                                     &self->title, &PyDict_Type, &self->lock, &PyDict_Type,
                                     &self->number_setters, &self->not_prepared)) {
        memset(&self->replayer, 0, (char*)(&self->not_prepared + 1) - (char*)&self->replayer);
        Py_DECREF(self);
        return NULL;
    }
    for (PyObject** each = &self->replayer; each <= &self->not_prepared; each++)
        Py_INCREF(*each);
    PyObject_GC_Track(self);
    return (PyObject*)self;
}

static int Replay_traverse(Replay* self, visitproc visit, void* arg) {
    for (PyObject** each = &self->replayer; each <= &self->not_prepared; each++)
        Py_VISIT(*each);
    return 0;
}

static int Replay_clear(Replay* self) {
    for (PyObject** each = &self->replayer; each <= &self->not_prepared; each++)
        Py_CLEAR(*each);
    return 0;
}

/* The module */

static void dealloc_tracked(PyObject* self) {
    PyObject_GC_UnTrack(self);
    Py_TYPE(self)->tp_clear(self);
    Py_TYPE(self)->tp_free(self);
}

#define TYPE(Name, doc, ...)                                                                                \
    static PyTypeObject Name##_Type = {                                                                     \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "preheat._native." #Name, .tp_basicsize = sizeof(Name),    \
        .tp_doc = doc, .tp_new = Name##_new, __VA_ARGS__};
#define CALLABLE(Name)                                                                                      \
    .tp_call = PyVectorcall_Call, .tp_vectorcall_offset = offsetof(Name, vectorcall)
#define PLAIN Py_TPFLAGS_DEFAULT
#define TRACKED(Name)                                                                                       \
    .tp_traverse = (traverseproc)Name##_traverse, .tp_clear = (inquiry)Name##_clear,                        \
    .tp_dealloc = dealloc_tracked

TYPE(KernelLaunch, "A prepared launch of a kernel: launch(pointers, 0) returns the status in a tuple.",
     CALLABLE(KernelLaunch), TRACKED(KernelLaunch),
     .tp_flags = PLAIN | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC)
TYPE(GraphLaunch, "A prepared replay of a graph: launch() returns the status in a tuple.",
     CALLABLE(GraphLaunch), .tp_flags = PLAIN | Py_TPFLAGS_HAVE_VECTORCALL)
TYPE(WordSetter, "Prepared fills: setter(values) sets each address to its bytes.", CALLABLE(WordSetter),
     .tp_flags = PLAIN | Py_TPFLAGS_HAVE_VECTORCALL)
TYPE(Launcher, "Launches a kernel with the arguments that most launches have.", CALLABLE(Launcher),
     TRACKED(Launcher), .tp_repr = (reprfunc)Launcher_repr,
     .tp_flags = PLAIN | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC)
TYPE(NumberSetter, "Packs numbers for scalars and sets them.", TRACKED(NumberSetter),
     .tp_flags = PLAIN | Py_TPFLAGS_HAVE_GC)
TYPE(Replay, "Replays a graph: replay(**scalars).", CALLABLE(Replay), TRACKED(Replay),
     .tp_flags = PLAIN | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC)

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "preheat._native", "The native core of preheat.", -1, NULL, NULL, NULL, NULL, NULL,
};

static int intern_names(void) {
#define INTERN(word)                                                                                        \
    if (!(name.word = PyUnicode_InternFromString(#word)))                                                   \
        return -1;
    INTERN(capture) INTERN(current) INTERN(data_ptr) INTERN(dtype) INTERN(get_device) INTERN(graph) INTERN(handle)
    INTERN(interrupted) INTERN(is_conj) INTERN(is_contiguous) INTERN(is_neg) INTERN(last_replayed)
    INTERN(last_site) INTERN(launch) INTERN(lost) INTERN(lost_or_capturing) INTERN(num_replays)
    INTERN(records) INTERN(stream)
#undef INTERN
    return 0;
}

PyMODINIT_FUNC PyInit__native(void) {
    PyTypeObject* types[] = {&KernelLaunch_Type, &GraphLaunch_Type,  &WordSetter_Type,
                             &Launcher_Type,     &NumberSetter_Type, &Replay_Type};
    PyObject* made = PyModule_Create(&module);
    zero = PyLong_FromLong(0);
    no_error = Py_BuildValue("(i)", 0);
    empty = PyTuple_New(0);
    unfit_errors = PyTuple_Pack(6, PyExc_LookupError, PyExc_AttributeError, PyExc_TypeError,
                                PyExc_ValueError, PyExc_OverflowError, PyExc_RuntimeError);
    if (!made || !zero || !no_error || !empty || !unfit_errors || intern_names() ||
        PyModule_AddIntConstant(made, "INTERFACE", INTERFACE) ||
        PyModule_AddIntConstant(made, "MOST_PARAMS", MOST_PARAMS) ||
        PyModule_AddIntConstant(made, "MOST_BYTES", MOST_PARAMS * PARAM_BYTES) ||
        PyModule_AddIntConstant(made, "MOST_SCALARS", MOST_SCALARS)) {
        Py_XDECREF(made);
        return NULL;
    }
    for (size_t at = 0; at < sizeof types / sizeof *types; at++)
        if (PyModule_AddType(made, types[at])) {
            Py_DECREF(made);
            return NULL;
        }
    return made;
}
