/* Two laws of one place, each on a short support of its own; see Loops. */

#ifndef PAIRS_H
#define PAIRS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char interleave_doc[], join_doc[], distance_doc[];

PyObject *interleave(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *join(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *distance(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

#endif
