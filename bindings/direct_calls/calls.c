/* llama.cpp's small functions, called by address.

   ctypes converts every argument by its type and calls through libffi. Right after an evaluation
   none of that is in the processor's caches, and the call takes longer than what it calls. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

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

#define FUNCTION(name, code) {#name, (PyCFunction)(void (*)(void))code, METH_FASTCALL, name##_doc}

static PyMethodDef functions[] = {
    FUNCTION(address, address), FUNCTION(remove, remove_positions), FUNCTION(share, share),
    FUNCTION(piece, piece), {NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_calls", "Calls of llama.cpp by address; see DirectCalls.", -1, functions};

PyMODINIT_FUNC PyInit__calls(void)
{
    return PyModule_Create(&module);
}
