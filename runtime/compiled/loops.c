/* Moves of cells between two evaluations of llama.cpp. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "moves.h"

/* -- the module -------------------------------------------------------------------------------- */

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}

static PyMethodDef functions[] = {
    FUNCTION(keep_path), FUNCTION(follow), {NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_loops", "Loops between evaluations; see Loops.", -1, functions};

PyMODINIT_FUNC PyInit__loops(void)
{
    return PyModule_Create(&module);
}
