/* llama.cpp's small functions, called by address, and a batch's tokens, written into its memory.

   ctypes converts every argument by its type and calls through libffi. Right after an evaluation
   none of that is in the processor's caches, and the call takes longer than what it calls. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <time.h>

#define PIECE_SIZE 64 /* longer ones are rare */

static int check_count(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments where %zd are needed", given, wanted);
    return -1;
}

/* Read numbers of 32 bits; -1 is an error. */
static int read_numbers(PyObject *const *given, int32_t *numbers, int count)
{
    for (int i = 0; i < count; i++) {
        long number = PyLong_AsLong(given[i]);
        if (number == -1 && PyErr_Occurred())
            return -1;
        if (number < INT32_MIN || number > INT32_MAX) {
            PyErr_Format(PyExc_OverflowError, "%ld has more than 32 bits", number);
            return -1;
        }
        numbers[i] = (int32_t)number;
    }
    return 0;
}

/* Read the address of a function and of what it is asked about; -1 is an error. */
static int read_addresses(PyObject *const *given, void **function, void **subject)
{
    *function = PyLong_AsVoidPtr(given[0]);
    *subject = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(given[1]);
    if (!PyErr_Occurred() && *function != NULL && *subject != NULL)
        return 0;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "an address is null");
    return -1;
}

PyDoc_STRVAR(address_doc,
"address(function, subject): return the address that a function gives for a context, 0 for none.");

static PyObject *address(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    void *function, *subject, *found;
    if (check_count(n_args, 2) || read_addresses(args, &function, &subject))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    found = ((void *(*)(void *))(uintptr_t)function)(subject);
    Py_END_ALLOW_THREADS
    return PyLong_FromVoidPtr(found);
}

PyDoc_STRVAR(remove_doc,
"remove(function, memory, sequence, start, end): call llama_memory_seq_rm.");

static PyObject *remove_positions(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    void *function, *memory;
    int32_t n[3];
    _Bool done;
    if (check_count(n_args, 5) || read_addresses(args, &function, &memory) || read_numbers(args + 2, n, 3))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = ((_Bool (*)(void *, int32_t, int32_t, int32_t))(uintptr_t)function)(memory, n[0], n[1], n[2]);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(done);
}

PyDoc_STRVAR(share_doc,
"share(function, memory, source, target, start, end): call llama_memory_seq_cp.");

static PyObject *share(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    void *function, *memory;
    int32_t n[4];
    if (check_count(n_args, 6) || read_addresses(args, &function, &memory) || read_numbers(args + 2, n, 4))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    ((void (*)(void *, int32_t, int32_t, int32_t, int32_t))(uintptr_t)function)(
        memory, n[0], n[1], n[2], n[3]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(piece_doc,
"piece(function, vocabulary, token, special): return the bytes that llama_token_to_piece writes.");

static PyObject *piece(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    void *function, *vocabulary;
    int32_t token;
    if (check_count(n_args, 4) || read_addresses(args, &function, &vocabulary)
        || read_numbers(args + 2, &token, 1))
        return NULL;
    int32_t (*write)(const void *, int32_t, char *, int32_t, int32_t, _Bool) =
        (int32_t (*)(const void *, int32_t, char *, int32_t, int32_t, _Bool))(uintptr_t)function;
    int special = PyObject_IsTrue(args[3]);
    char own[PIECE_SIZE];
    int32_t size = special < 0 ? 0 : write(vocabulary, token, own, PIECE_SIZE, 0, special);
    if (special < 0 || size >= 0)
        return special < 0 ? NULL : PyBytes_FromStringAndSize(own, size);
    /* It says how many bytes it needs, as a negative number. */
    PyObject *longer = PyBytes_FromStringAndSize(NULL, -(Py_ssize_t)size);
    if (longer != NULL && write(vocabulary, token, PyBytes_AS_STRING(longer), -size, 0, special) < 0) {
        Py_CLEAR(longer);
        PyErr_Format(PyExc_SystemError, "llama.cpp has no text of token %d", (int)token);
    }
    return longer;
}

static double now(void)
{
    struct timespec time;
#ifdef CLOCK_MONOTONIC
    clock_gettime(CLOCK_MONOTONIC, &time);
#else
    timespec_get(&time, TIME_UTC);
#endif
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* llama.cpp's llama_batch. Its size is compared with the library's before any of this is used. */
typedef struct {
    int32_t n_tokens, *token;
    float *embd;
    int32_t *pos, *n_seq_id, **seq_id;
    int8_t *logits;
} Batch;

PyDoc_STRVAR(step_doc,
"step(decode, logits, synchronize, batch, context, token, position): evaluate a batch of one token.\n\n"
"Returns the code of llama_decode, the seconds in it and in llama_synchronize (0: not called), and\n"
"the address of the logits.");

static PyObject *step(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    void *decode, *logits, *batch, *context;
    int32_t given[2], code;
    if (check_count(n_args, 7) || read_addresses(args, &decode, &logits)
        || read_addresses(args + 3, &batch, &context) || read_numbers(args + 5, given, 2))
        return NULL;
    void *synchronize = PyLong_AsVoidPtr(args[2]), *found;
    if (PyErr_Occurred())
        return NULL;
    Batch *one = batch;
    one->token[0] = given[0];
    one->pos[0] = given[1];
    double seconds;
    Py_BEGIN_ALLOW_THREADS
    double started = now();
    code = ((int32_t (*)(void *, Batch))(uintptr_t)decode)(context, *one);
    if (synchronize != NULL)
        ((void (*)(void *))(uintptr_t)synchronize)(context);
    seconds = now() - started;
    found = ((void *(*)(void *))(uintptr_t)logits)(context);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("idN", (int)code, seconds, PyLong_FromVoidPtr(found));
}

/* Open a writable array of 32-bit integers; -1 is an error. */
static int open_integers(PyObject *given, Py_buffer *view)
{
    if (PyObject_GetBuffer(given, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE))
        return -1;
    if (view->itemsize == sizeof(int32_t) && view->format && view->format[0] == 'i')
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_TypeError, "an array of 32-bit integers is needed");
    return -1;
}

/* Write start + number for each of a sequence's numbers, and note lowest and highest; -1 is an error. */
static int write_integers(PyObject *sequence, int64_t start, int32_t *cells, int32_t bounds[2])
{
    PyObject **items = PySequence_Fast_ITEMS(sequence);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    for (Py_ssize_t i = 0; i < count; i++) {
        int32_t number;
        if (read_numbers(items + i, &number, 1))
            return -1;
        if (start + number > INT32_MAX || start + number < INT32_MIN) {
            PyErr_SetString(PyExc_OverflowError, "a position has more than 32 bits");
            return -1;
        }
        cells[i] = (int32_t)(start + number);
        if (i == 0 || number < bounds[0])
            bounds[0] = number;
        if (i == 0 || number > bounds[1])
            bounds[1] = number;
    }
    return 0;
}

PyDoc_STRVAR(fill_doc,
"fill(token_cells, position_cells, first, tokens, start, depths): write tokens and start + depths\n"
"from the cell `first` on; return the lowest and the highest token.");

static PyObject *fill(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    int32_t first, start, bounds[2], depths_bounds[2];
    Py_buffer views[2];
    PyObject *found = NULL, *tokens = NULL, *depths = NULL;
    if (check_count(n_args, 6) || read_numbers(args + 2, &first, 1) || read_numbers(args + 4, &start, 1))
        return NULL;
    if (open_integers(args[0], &views[0]))
        return NULL;
    if (open_integers(args[1], &views[1])) {
        PyBuffer_Release(&views[0]);
        return NULL;
    }
    tokens = PySequence_Fast(args[3], "tokens are a sequence");
    depths = tokens == NULL ? NULL : PySequence_Fast(args[5], "depths are a sequence");
    if (depths != NULL) {
        Py_ssize_t count = PySequence_Fast_GET_SIZE(tokens), end = first + count;
        Py_ssize_t size = (views[0].len < views[1].len ? views[0].len : views[1].len) / 4;
        if (count < 1 || count != PySequence_Fast_GET_SIZE(depths) || first < 0 || end > size)
            PyErr_SetString(PyExc_ValueError, "tokens and depths do not fit a batch");
        else if (!write_integers(tokens, 0, (int32_t *)views[0].buf + first, bounds)
                 && !write_integers(depths, start, (int32_t *)views[1].buf + first, depths_bounds))
            found = Py_BuildValue("(ii)", (int)bounds[0], (int)bounds[1]);
    }
    Py_XDECREF(tokens);
    Py_XDECREF(depths);
    PyBuffer_Release(&views[0]);
    PyBuffer_Release(&views[1]);
    return found;
}

#define FUNCTION(name, code) {#name, (PyCFunction)(void (*)(void))code, METH_FASTCALL, name##_doc}

static PyMethodDef functions[] = {
    FUNCTION(address, address), FUNCTION(remove, remove_positions), FUNCTION(share, share),
    FUNCTION(piece, piece), FUNCTION(step, step),
    FUNCTION(fill, fill), {NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_calls", "Calls of llama.cpp by address; see DirectCalls.", -1, functions};

PyMODINIT_FUNC PyInit__calls(void)
{
    PyObject *calls = PyModule_Create(&module);
    if (calls != NULL && PyModule_AddIntConstant(calls, "BATCH_BYTES", sizeof(Batch)))
        Py_CLEAR(calls);
    return calls;
}
