/* Trees drawn without replacement: a draft model's whole one, and a depth of a head's. */

#ifndef TREE_H
#define TREE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char drawn_tree_doc[], drawn_depth_doc[];
PyObject *drawn_tree(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *drawn_depth(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

#endif
