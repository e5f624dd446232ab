/* A draft model's tree: drawn depth by depth, and brought onto the accepted path. */

#ifndef TREE_H
#define TREE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char drawn_tree_doc[], drawn_depth_doc[], keep_path_doc[];
PyObject *drawn_tree(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *drawn_depth(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *keep_path(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

#endif
