/* A chain of most likely tokens, or of draws: evaluate one, find the next in its row, and so on.

   A draft model's evaluation drives the interpreter's data out of the processor's caches, so that
   what Python does between two of them costs several times what it costs elsewhere. */

#include "chain.h"

#include <stdint.h>

#include "arrays.h"
#include "draws.h"
#include "highest.h"
#include "law_room.h"
#include "noise.h"
#include "steps.h"
#include "truncation.h"

Py_ssize_t batch_bytes(void)
{
    return sizeof(Batch);
}

/* Evaluate a token at a position; return llama.cpp's code. */
static int32_t step(const Steps *steps, long token, long position, double *seconds)
{
    steps->batch->token[0] = (int32_t)token;
    steps->batch->pos[0] = (int32_t)position;
    return evaluate(steps, seconds);
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

   -1: the row is broken, -2: an error. It is the first draw of a position. */
static int64_t draw(
    const Steps *steps, Py_ssize_t n_known, const Cuts *cuts, LawRoom *room, Noise *noise,
    int64_t position, PyObject *laws)
{
    const double *probs;
    const int64_t *ids;
    Py_ssize_t size = make_law(
        room, steps->logits(steps->context), NULL, n_known, cuts, &ids, &probs);
    if (size <= 0)
        return size < 0 ? -2 : -1;
    PyObject *law = name_law(room, size);
    int failed = law == NULL || PyList_Append(laws, law);
    Py_XDECREF(law);
    if (failed || seek(noise, position))
        return -2;
    Py_ssize_t place = place_of_draw(noise, probs, ids, size);
    return place < 0 ? place : ids[place];
}

const char drawn_chain_doc[] =
"drawn_chain(addresses, token, place, ends, noise, laws, scratch, cuts): a drawn chain.\n\n"
"Evaluates a token, draws the next one from the law after it, and so on, unless it drew one of `ends`.\n"
"With the token -1 it begins with a draw, from the row that is there. `place` is the token's position,\n"
"and how many entries of a row count; `noise` are the key and the stream of the draws (or the three\n"
"functions of `verify`), the position of the first and how many. `scratch` has room for one law's probabilities, as many as top-k is;\n"
"`cuts` as in `truncate`: exp, share, lowest, temperature. To `laws` each one is appended that was\n"
"drawn from: bytes, its number in them, top-k, its size (see law_room.h).\n"
"Returns llama.cpp's last code, the seconds in its evaluation, and the tokens; -1 ends them where a\n"
"row's highest is not finite.";

PyObject *drawn_chain(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Steps steps;
    Cuts cuts;
    LawRoom room;
    Draws draws;
    Py_ssize_t n_known;
    long position;
    if (check_count(n_args, 8) || open_steps(args[0], &steps))
        return NULL;
    long token = PyLong_AsLong(args[1]);
    if (PyErr_Occurred() || open_draws(args[4], &draws))
        return NULL;
    if (!PyTuple_Check(args[2]) || !PyList_Check(args[5]) || !PyTuple_Check(args[7])) {
        PyErr_SetString(PyExc_TypeError, "a place and cuts are tuples, laws a list");
        return NULL;
    }
    if (!PyArg_ParseTuple(args[2], "ln", &position, &n_known)
        || !PyArg_ParseTuple(args[7], "ddd", &cuts.share, &cuts.lowest, &cuts.temperature)
        || open_law_room(args[6], draws.count, n_known, &room))
        return NULL;
    PyObject *tokens = PyList_New(0);
    int32_t code = 0;
    double seconds = 0.0;
    long is_there = token < 0; /* the first row */
    for (Py_ssize_t i = 0; tokens != NULL && i < draws.count; i++) {
        int64_t next = -2;
        if (i > 0 || !is_there)
            code = step(&steps, token, position + i - is_there, &seconds);
        if (code != 0)
            break;
        /* Ctrl-C, as between two evaluations in Python. */
        if (PyErr_CheckSignals() == 0)
            next = draw(
                &steps, n_known, &cuts, &room, &draws.noise, draws.start + i, args[5]);
        PyObject *named = next == -2 ? NULL : PyLong_FromLongLong(next);
        int ended = named == NULL || PyList_Append(tokens, named) ? -1 : PySet_Contains(args[3], named);
        Py_XDECREF(named);
        if (ended < 0)
            Py_CLEAR(tokens);
        if (ended || next < 0)
            break;
        token = (long)next;
    }
    close_law_room(&room);
    return tokens == NULL ? NULL : Py_BuildValue("idN", (int)code, seconds, tokens);
}
