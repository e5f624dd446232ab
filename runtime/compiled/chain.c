/* A chain of most likely tokens: evaluate one, look for the next in its row, and so on.

   A draft model's evaluation drives the interpreter's data out of the processor's caches, so that
   what Python does between two of them costs several times what it costs elsewhere. */

#include "chain.h"

#include <stdint.h>
#include <time.h>

#include "arrays.h"
#include "highest.h"

/* llama.cpp's llama_batch. Its size is compared with the library's before any of this is used. */
typedef struct {
    int32_t n_tokens, *token;
    float *embd;
    int32_t *pos, *n_seq_id, **seq_id;
    int8_t *logits;
} Batch;

Py_ssize_t batch_bytes(void)
{
    return sizeof(Batch);
}

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

const char greedy_chain_doc[] =
"greedy_chain(addresses, token, position, count, n_known, ends): a chain of most likely tokens.\n\n"
"Evaluates a token, then the most likely one of the first `n_known` after it, up to `count` times,\n"
"and stops after one of `ends`. Returns llama.cpp's last code, the seconds in its evaluation, and\n"
"the most likely token after each; -1 ends them where a row's highest is not finite.";

PyObject *greedy_chain(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Steps steps;
    if (check_count(n_args, 6) || open_steps(args[0], &steps))
        return NULL;
    long token = PyLong_AsLong(args[1]), position = PyLong_AsLong(args[2]);
    Py_ssize_t count = PyLong_AsSsize_t(args[3]), n_known = PyLong_AsSsize_t(args[4]);
    PyObject *tokens = PyErr_Occurred() ? NULL : PyList_New(0);
    int32_t code = 0;
    double seconds = 0.0;
    for (Py_ssize_t i = 0; tokens != NULL && i < count; i++) {
        ptrdiff_t next = -1;
        steps.batch->token[0] = (int32_t)token;
        steps.batch->pos[0] = (int32_t)(position + i);
        Py_BEGIN_ALLOW_THREADS
        double started = now();
        code = steps.decode(steps.context, *steps.batch);
        if (steps.synchronize != NULL)
            steps.synchronize(steps.context);
        seconds += now() - started;
        if (code == 0)
            next = place_of_highest(steps.logits(steps.context), n_known);
        Py_END_ALLOW_THREADS
        if (code != 0)
            break;
        if (PyErr_CheckSignals()) { /* Ctrl-C, as between two evaluations in Python */
            Py_CLEAR(tokens);
            break;
        }
        PyObject *named = PyLong_FromSsize_t(next);
        int ended = named == NULL || PyList_Append(tokens, named) ? -1 : PySet_Contains(args[5], named);
        Py_XDECREF(named);
        if (ended < 0)
            Py_CLEAR(tokens);
        if (ended || next < 0)
            break;
        token = (long)next;
    }
    return tokens == NULL ? NULL : Py_BuildValue("idN", (int)code, seconds, tokens);
}
