/* Evaluations by llama.cpp, one after the other, without the interpreter in between. */

#ifndef STEPS_H
#define STEPS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <time.h>

/* llama.cpp's llama_batch. Its size is compared with the library's before any of this is used. */
typedef struct {
    int32_t n_tokens, *token;
    float *embd;
    int32_t *pos, *n_seq_id, **seq_id;
    int8_t *logits;
} Batch;

/* The functions of llama.cpp, and what they are called with; `synchronize` may be null. */
typedef struct {
    int32_t (*decode)(void *, Batch);
    void (*synchronize)(void *);
    const float *(*logits)(void *);
    void *context;
    Batch *batch;
} Steps;

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

static int open_steps(PyObject *addresses, Steps *steps)
{
    void *found[5];
    if (!PyTuple_Check(addresses) || PyTuple_GET_SIZE(addresses) != 5) {
        PyErr_SetString(PyExc_TypeError, "the addresses of a step are a tuple of 5");
        return -1;
    }
    for (int i = 0; i < 5; i++)
        found[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i));
    if (PyErr_Occurred())
        return -1;
    steps->decode = (int32_t (*)(void *, Batch))(uintptr_t)found[0];
    steps->synchronize = (void (*)(void *))(uintptr_t)found[1];
    steps->logits = (const float *(*)(void *))(uintptr_t)found[2];
    steps->context = found[3];
    steps->batch = found[4];
    return 0;
}

/* Evaluate the batch; return llama.cpp's code. The interpreter's lock is given up meanwhile. */
static int32_t evaluate(const Steps *steps, double *seconds)
{
    int32_t code;
    Py_BEGIN_ALLOW_THREADS
    double started = now();
    code = steps->decode(steps->context, *steps->batch);
    if (steps->synchronize != NULL)
        steps->synchronize(steps->context);
    *seconds += now() - started;
    Py_END_ALLOW_THREADS
    return code;
}

#endif
