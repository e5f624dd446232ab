/* What an exact rule keeps of a tree of draws, by laws that are made of the target's rows. */

#ifndef VERIFICATION_H
#define VERIFICATION_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char verify_doc[];
PyObject *verify(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

#endif
