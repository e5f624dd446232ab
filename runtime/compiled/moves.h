/* Moves of sequences among the cells of llama.cpp's memory. */

#ifndef MOVES_H
#define MOVES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char follow_doc[];
PyObject *follow(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

#endif
