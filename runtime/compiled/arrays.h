/* Arrays of numbers that Python hands over: contiguous, of the kind and dimensions that are asked. */

#ifndef ARRAYS_H
#define ARRAYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NATIVE_ORDER (PY_LITTLE_ENDIAN ? '<' : '>') /* ctypes says it, numpy does not */

/* Open a contiguous array of numbers of one kind: 'f', 'd', 'i', or 'q' for integers of 64 bits. */
static int open_shaped(PyObject *object, Py_buffer *view, char kind, int writable, int n_dimensions)
{
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags))
        return -1;
    const char *order = view->format ? view->format : "B";
    char format = order[*order == '@' || *order == '=' || *order == NATIVE_ORDER];
    if (format == 'l' && view->itemsize == 8)
        format = 'q';
    if (format == kind && view->ndim == n_dimensions)
        return 0;
    if (format != kind)
        PyErr_Format(PyExc_TypeError, "an array of kind '%c' where one of '%c' is needed", format, kind);
    else
        PyErr_Format(PyExc_TypeError, "%d dimensions where %d are needed", view->ndim, n_dimensions);
    PyBuffer_Release(view);
    return -1;
}

static int open_array(PyObject *object, Py_buffer *view, char kind, int writable)
{
    return open_shaped(object, view, kind, writable, 1);
}

/* Open arrays of these kinds, an upper-case letter for those that are written to: all or none. */
static int open_arrays(PyObject *const *objects, Py_buffer *views, const char *kinds)
{
    for (int i = 0; kinds[i]; i++) {
        int writable = kinds[i] < 'a';
        if (open_array(objects[i], &views[i], writable ? kinds[i] + 32 : kinds[i], writable)) {
            while (i--)
                PyBuffer_Release(&views[i]);
            return -1;
        }
    }
    return 0;
}

static void close_arrays(Py_buffer *views, int count)
{
    while (count--)
        PyBuffer_Release(&views[count]);
}

static Py_ssize_t length_of(const Py_buffer *view)
{
    return view->len / view->itemsize;
}

static int check_count(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments where %zd are needed", given, wanted);
    return -1;
}

#endif
