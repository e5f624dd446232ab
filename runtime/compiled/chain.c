/* A chain of most likely tokens, or of draws: evaluate one, find the next in its row, and so on.

   A draft model's evaluation drives the interpreter's data out of the processor's caches, so that
   what Python does between two of them costs several times what it costs elsewhere. */

#include "chain.h"

#include <stdint.h>
#include <time.h>

#include "arrays.h"
#include "draws.h"
#include "highest.h"
#include "truncation.h"

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

/* Evaluate a token at a position; return llama.cpp's code. The lock is given up meanwhile. */
static int32_t step(const Steps *steps, long token, long position, double *seconds)
{
    int32_t code;
    steps->batch->token[0] = (int32_t)token;
    steps->batch->pos[0] = (int32_t)position;
    Py_BEGIN_ALLOW_THREADS
    double started = now();
    code = steps->decode(steps->context, *steps->batch);
    if (steps->synchronize != NULL)
        steps->synchronize(steps->context);
    *seconds += now() - started;
    Py_END_ALLOW_THREADS
    return code;
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
        code = step(&steps, token, position + i, &seconds);
        if (code != 0)
            break;
        ptrdiff_t next = place_of_highest(steps.logits(steps.context), n_known);
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

/* Write the law of the row that was evaluated last, and draw from it; return the token.

   -1: the row is broken, -2: an error. */
static int64_t draw(
    const Steps *steps, Py_ssize_t n_known, const Cuts *cuts, PyObject *const *arrays, uint64_t word,
    Py_ssize_t *count)
{
    Py_buffer views[2];
    if (open_arrays(arrays, views, "QD"))
        return -2;
    Py_ssize_t k = length_of(&views[0]);
    int64_t token = -2, *ids = views[0].buf;
    double *probs = views[1].buf;
    if (k < 1 || k > MOST_RANKED || k > n_known || k != length_of(&views[1]))
        PyErr_Format(PyExc_ValueError, "the %zd highest of %zd entries", k, n_known);
    else {
        const float *row = steps->logits(steps->context);
        *count = law_of_row(row, n_known, cuts, k, ids, probs, arrays[1]);
        if (*count == 0)
            token = -1;
        else if (*count > 0) {
            /* The first draw of a position; a law of one token asks for no number. */
            double uniform = *count > 1 ? uniform_of(split_mix(word, 2)) : 0.0;
            Py_ssize_t place = place_in(probs, *count, uniform);
            token = place < 0 ? -1 : ids[place];
        }
    }
    close_arrays(views, 2);
    return token;
}

const char drawn_chain_doc[] =
"drawn_chain(addresses, token, position, n_known, ends, words, arrays, counts, cuts): a drawn chain.\n\n"
"Evaluates a token, draws the next one from the law of the first `n_known` after it, and so on: once\n"
"for each of `words`, from whose SplitMix64 sequences the draws take a number, unless it drew one of\n"
"`ends`. With the token -1 it begins with a draw, from the row that is there. `arrays` are pairs of\n"
"ids and probabilities, into which the laws are written, by `cuts`: exp, share, lowest and\n"
"temperature, as in `truncate`; how many tokens each has is appended to `counts`.\n"
"Returns llama.cpp's last code, the seconds in its evaluation, and the tokens; -1 ends them where a\n"
"row's highest is not finite.";

PyObject *drawn_chain(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Steps steps;
    Cuts cuts;
    if (check_count(n_args, 9) || open_steps(args[0], &steps))
        return NULL;
    if (!PyTuple_Check(args[5]) || !PyTuple_Check(args[6]) || !PyList_Check(args[7])
        || PyTuple_GET_SIZE(args[5]) != PyTuple_GET_SIZE(args[6])
        || !PyArg_ParseTuple(args[8], "Oddd", &cuts.exp, &cuts.share, &cuts.lowest, &cuts.temperature)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "as many words as pairs of arrays, tuples, and a list");
        return NULL;
    }
    long token = PyLong_AsLong(args[1]), position = PyLong_AsLong(args[2]);
    Py_ssize_t n_known = PyLong_AsSsize_t(args[3]);
    PyObject *tokens = PyErr_Occurred() ? NULL : PyList_New(0);
    int32_t code = 0;
    double seconds = 0.0;
    long is_there = token < 0; /* the first row */
    for (Py_ssize_t i = 0; tokens != NULL && i < PyTuple_GET_SIZE(args[5]); i++) {
        PyObject *pair = PyTuple_GET_ITEM(args[6], i);
        uint64_t word = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(args[5], i));
        Py_ssize_t count = 0;
        int64_t next = -2;
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
            PyErr_SetString(PyExc_TypeError, "a law's arrays are a pair");
        else if (!PyErr_Occurred()) {
            PyObject *const own[] = {PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)};
            if (i > 0 || !is_there)
                code = step(&steps, token, position + i - is_there, &seconds);
            if (code != 0)
                break;
            /* Ctrl-C, as between two evaluations in Python. */
            if (PyErr_CheckSignals() == 0)
                next = draw(&steps, n_known, &cuts, own, word, &count);
        }
        PyObject *named = next == -2 ? NULL : PyLong_FromLongLong(next);
        PyObject *size = named == NULL ? NULL : PyLong_FromSsize_t(count);
        int failed = size == NULL || PyList_Append(tokens, named) || PyList_Append(args[7], size);
        int ended = failed ? -1 : PySet_Contains(args[4], named);
        Py_XDECREF(named);
        Py_XDECREF(size);
        if (ended < 0)
            Py_CLEAR(tokens);
        if (ended || next < 0)
            break;
        token = (long)next;
    }
    return tokens == NULL ? NULL : Py_BuildValue("idN", (int)code, seconds, tokens);
}
