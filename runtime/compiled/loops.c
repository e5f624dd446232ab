/* Inner loops of laws: what truncation leaves of a row, draws from short laws, residuals.

   Everything here has a twin in Python, which serves where there was no compiler, and both give
   the same bits: sums run in the same order, exponentials stay with numpy, and the compiler may not
   contract or reorder (-ffp-contract=off, no -ffast-math). All arrays are one-dimensional and
   contiguous. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>

#include "arrays.h"
#include "chain.h"
#include "draws.h"
#include "highest.h"
#include "log_mass.h"
#include "moves.h"
#include "noise.h"
#include "pairs.h"
#include "places.h"
#include "rows.h"
#include "short_laws.h"
#include "tree.h"
#include "truncation.h"
#include "verification.h"
#include "words.h"

/* -- sums -------------------------------------------------------------------------------------- */

PyDoc_STRVAR(scale_to_one_doc,
"scale_to_one(weights): divide by the sum, unless that is not positive; return the sum.");

static PyObject *scale_to_one(PyObject *self, PyObject *weights)
{
    Py_buffer view;
    if (open_array(weights, &view, 'd', 1))
        return NULL;
    double total = scale_weights(view.buf, length_of(&view));
    PyBuffer_Release(&view);
    return PyFloat_FromDouble(total);
}

/* -- truncation -------------------------------------------------------------------------------- */

PyDoc_STRVAR(truncate_doc,
"truncate(row, ids, probs, exp, share, lowest, temperature): make the law of a row's highest.\n\n"
"The len(ids) highest stand, at most 256 and no more than the row has; of equals the lower ids. Of\n"
"these the first stay, up to the one that brings their masses to `share` of all (1: all), and of\n"
"these those no further than `lowest` below the highest. Writes their ids, ascending, and their\n"
"probabilities. Returns how many; 0 if the highest is not finite or there is a NaN.");

static PyObject *truncate_row(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[3];
    if (check_count(n_args, 7))
        return NULL;
    double share = PyFloat_AsDouble(args[4]), lowest = PyFloat_AsDouble(args[5]);
    double temperature = PyFloat_AsDouble(args[6]);
    if (PyErr_Occurred() || open_arrays(args, views, "fQD"))
        return NULL;
    Py_ssize_t size = length_of(&views[0]), k = length_of(&views[1]), count = 0;
    int64_t *ids = views[1].buf;
    double *probs = views[2].buf;
    if (k < 1 || k > MOST_RANKED || k > size || k != length_of(&views[2])) {
        PyErr_Format(PyExc_ValueError, "the %zd highest of %zd entries", k, size);
        count = -1;
        goto done;
    }
    Cuts cuts = {args[3], share, lowest, temperature};
    count = law_of_row(views[0].buf, size, &cuts, k, ids, probs, args[2]);
done:
    close_arrays(views, 3);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

PyDoc_STRVAR(truncate_rows_doc,
"truncate_rows(rows, names, ids, probs, array, cuts): make the laws of several rows' highest.\n\n"
"They are written side by side, as `truncate` makes them, each with room for the len(array) highest;\n"
"it is only worked in. Where `names` are given, as many of 32 bits as there are entries, ascending in\n"
"each row, they stand for the entries' places. "
"`cuts` are exp, share, lowest and temperature. Returns how many tokens each has; 0 where a row is\n"
"broken, which ends them.");

static PyObject *truncate_rows(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[3], row, named = {.buf = NULL};
    Cuts cuts;
    if (check_count(n_args, 6))
        return NULL;
    if (!PyList_Check(args[0]) || !PyTuple_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "rows are a list, and cuts a tuple");
        return NULL;
    }
    if (!PyArg_ParseTuple(args[5], "Oddd", &cuts.exp, &cuts.share, &cuts.lowest, &cuts.temperature)
        || open_arrays(args + 2, views, "QDD"))
        return NULL;
    if (args[1] != Py_None && open_array(args[1], &named, 'i', 0)) {
        close_arrays(views, 3);
        return NULL;
    }
    Py_ssize_t n = PyList_GET_SIZE(args[0]), k = length_of(&views[2]), size = 1;
    PyObject *sizes = PyList_New(0);
    if (k < 1 || k > MOST_RANKED || length_of(&views[0]) != n * k || length_of(&views[1]) != n * k) {
        PyErr_Format(PyExc_ValueError, "the %zd highest of %zd rows in other room", k, n);
        Py_CLEAR(sizes);
    }
    for (Py_ssize_t i = 0; sizes != NULL && size && i < PyList_GET_SIZE(args[0]) && i < n; i++) {
        if (open_array(PyList_GET_ITEM(args[0], i), &row, 'f', 0)) {
            Py_CLEAR(sizes);
            break;
        }
        int64_t *ids = (int64_t *)views[0].buf + i * k;
        Py_ssize_t entries = length_of(&row);
        size = -1;
        if (named.buf != NULL && length_of(&named) != n * entries)
            PyErr_SetString(PyExc_ValueError, "not as many names as entries of rows");
        else if (k > entries)
            PyErr_Format(PyExc_ValueError, "the %zd highest of %zd entries", k, entries);
        else
            size = law_of_row(row.buf, entries, &cuts, k, ids, views[2].buf, args[4]);
        for (Py_ssize_t j = 0; named.buf != NULL && j < size; j++)
            ids[j] = ((const int32_t *)named.buf)[i * entries + ids[j]];
        PyBuffer_Release(&row);
        if (size > 0)
            memcpy((double *)views[1].buf + i * k, views[2].buf, (size_t)size * sizeof(double));
        PyObject *made = size < 0 ? NULL : PyLong_FromSsize_t(size);
        if (made == NULL || PyList_Append(sizes, made))
            Py_CLEAR(sizes);
        Py_XDECREF(made);
    }
    if (named.buf != NULL)
        PyBuffer_Release(&named);
    close_arrays(views, 3);
    return sizes;
}

/* -- draws and residuals ------------------------------------------------------------------------ */

PyDoc_STRVAR(place_at_doc,
"place_at(probs, uniform): return the place at `uniform` of the cumulative law, none of zero mass.");

static PyObject *place_at(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer view;
    if (check_count(n_args, 2))
        return NULL;
    double uniform = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred() || open_array(args[0], &view, 'd', 0))
        return NULL;
    Py_ssize_t place = place_in(view.buf, length_of(&view), uniform);
    PyBuffer_Release(&view);
    return PyLong_FromSsize_t(place);
}

PyDoc_STRVAR(draw_distinct_doc,
"draw_distinct(probs, ids, count, noise): draw up to `count` tokens, each from what is left.\n\n"
"By the numbers (word, first), draw i takes number 2 (first + i) of the SplitMix64 sequence from `word`;\n"
"by the three functions of `verify`, another source is asked. With `ids` None, tokens are numbered by\n"
"their places. Laws have at most 128 tokens.");

/* Read the numbers of a position, or another source; -1 is an error. */
static int open_position(PyObject *given, Noise *noise)
{
    if (open_noise(given, noise))
        return -1;
    noise->word = noise->key;
    noise->n_choices = (uint64_t)noise->stream - 1;
    return 0;
}

static PyObject *draw_distinct_tokens(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[2];
    Noise noise;
    if (check_count(n_args, 4))
        return NULL;
    Py_ssize_t count = PyLong_AsSsize_t(args[2]);
    int is_dense = args[1] == Py_None;
    if (PyErr_Occurred() || open_position(args[3], &noise) || open_arrays(args, views, is_dense ? "d" : "dq"))
        return NULL;
    Py_ssize_t size = length_of(&views[0]);
    const int64_t *ids = is_dense ? NULL : views[1].buf;
    PyObject *tokens = NULL;
    if (size < 1 || size > MOST_DRAWN || (!is_dense && length_of(&views[1]) != size))
        PyErr_Format(PyExc_ValueError, "draws from a law of %zd tokens", size);
    else
        tokens = PyList_New(0);
    double left[MOST_DRAWN];
    Py_ssize_t places[MOST_DRAWN], n = 0;
    if (tokens != NULL) {
        memcpy(left, views[0].buf, (size_t)size * sizeof *left);
        n = draw_distinct(&noise, left, ids, size, count < size ? count : size, places);
        if (n < 0)
            Py_CLEAR(tokens);
    }
    for (Py_ssize_t i = 0; tokens != NULL && i < n; i++) {
        PyObject *token = PyLong_FromLongLong(is_dense ? places[i] : ids[places[i]]);
        if (token == NULL || PyList_Append(tokens, token))
            Py_CLEAR(tokens);
        Py_XDECREF(token);
    }
    close_arrays(views, is_dense ? 1 : 2);
    return tokens;
}

PyDoc_STRVAR(race_doc,
"race(probs, ids, key): return the token that arrives first, by the SplitMix64 sequence of a key.\n\n"
"With `ids` None, tokens are numbered by their places.");

static PyObject *race(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[2];
    if (check_count(n_args, 3))
        return NULL;
    uint64_t key = PyLong_AsUnsignedLongLong(args[2]);
    int is_dense = args[1] == Py_None;
    if (PyErr_Occurred() || open_arrays(args, views, is_dense ? "d" : "dq"))
        return NULL;
    const int64_t *ids = is_dense ? NULL : views[1].buf;
    Py_ssize_t size = length_of(&views[0]);
    int fits = size > 0 && (is_dense || length_of(&views[1]) == size);
    int64_t best = fits ? first_of_race(views[0].buf, ids, size, key) : 0;
    close_arrays(views, is_dense ? 1 : 2);
    if (fits)
        return PyLong_FromLongLong(best);
    PyErr_SetString(PyExc_ValueError, "no tokens, or probabilities and ids differ in length");
    return NULL;
}

PyDoc_STRVAR(left_over_doc,
"left_over(probs, ids, draft_probs, draft_ids, share, out): write max(0, share P - Q).\n\n"
"Both ids ascend; `out` is on the support of P.");

static PyObject *left_over(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[4], view;
    if (check_count(n_args, 6))
        return NULL;
    double share = PyFloat_AsDouble(args[4]);
    if (PyErr_Occurred() || open_arrays(args, views, "dqdq"))
        return NULL;
    if (open_array(args[5], &view, 'd', 1)) {
        close_arrays(views, 4);
        return NULL;
    }
    Py_ssize_t size = length_of(&views[0]), n_drafted = length_of(&views[2]);
    int fits = length_of(&views[1]) == size && length_of(&view) == size
        && length_of(&views[3]) == n_drafted;
    if (fits)
        write_left_over(
            views[0].buf, views[1].buf, size, views[2].buf, views[3].buf, n_drafted, share, view.buf);
    PyBuffer_Release(&view);
    close_arrays(views, 4);
    if (fits)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "probabilities and ids differ in length");
    return NULL;
}

PyDoc_STRVAR(place_of_doc,
"place_of(token, ids): return the place of a token among ascending ids, -1 if it is not there.");

static PyObject *place_of(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer view;
    if (check_count(n_args, 2))
        return NULL;
    int64_t token = PyLong_AsLongLong(args[0]);
    if (PyErr_Occurred() || open_array(args[1], &view, 'q', 0))
        return NULL;
    Py_ssize_t place = place_among(view.buf, length_of(&view), token);
    PyBuffer_Release(&view);
    return PyLong_FromSsize_t(place);
}

PyDoc_STRVAR(log_mass_doc,
"log_mass(row, highest): return, of x = entry - highest, the sums of exp(x) and x exp(x).");

static PyObject *log_mass(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer view;
    if (check_count(n_args, 2))
        return NULL;
    double highest = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred() || open_array(args[0], &view, 'f', 0))
        return NULL;
    LogMass found = log_mass_of(view.buf, length_of(&view), (float)highest);
    PyBuffer_Release(&view);
    return Py_BuildValue("(dd)", found.mass, found.weighted);
}

PyDoc_STRVAR(rough_mass_doc,
"rough_mass(row): return the highest entry, and log_mass's sums within 0.01 %.");

static PyObject *rough_mass(PyObject *self, PyObject *row)
{
    Py_buffer view;
    if (open_array(row, &view, 'f', 0))
        return NULL;
    LogMass found = rough_mass_of(view.buf, length_of(&view));
    PyBuffer_Release(&view);
    return Py_BuildValue("(ddd)", (double)found.highest, found.mass, found.weighted);
}

PyDoc_STRVAR(highest_doc, "highest(row): return the highest entry, -inf of none.");

static PyObject *highest(PyObject *self, PyObject *row)
{
    Py_buffer view;
    if (open_array(row, &view, 'f', 0))
        return NULL;
    Py_ssize_t size = length_of(&view);
    double found = size ? highest_entry(view.buf, size) : -INFINITY;
    PyBuffer_Release(&view);
    return PyFloat_FromDouble(found);
}

/* -- the walk at temperature 0 ------------------------------------------------------------------- */

/* Return the place of the highest entry of a row; -1: none, -2: an error. */
static Py_ssize_t highest_of_row(const RowSource *rows, Py_ssize_t number)
{
    Row row;
    int opened = open_row(rows, number, &row);
    if (opened <= 0)
        return opened < 0 ? -2 : -1; /* numbers of another kind are for Python */
    Py_ssize_t place = place_of_highest(row.entries, row.size);
    close_row(&row);
    return place;
}

/* Return the child that was drafted as this token; -1: none was, -2: an error, -3: not only points. */
static Py_ssize_t child_named(PyObject *drawn, PyObject *tokens, Py_ssize_t token)
{
    Py_ssize_t found = -1;
    for (Py_ssize_t i = 0; drawn != Py_None && i < PyTuple_GET_SIZE(drawn); i++) {
        PyObject *draw = PyTuple_GET_ITEM(drawn, i);
        if (!PyTuple_Check(draw) || PyTuple_GET_SIZE(draw) != 2
            || PyTuple_GET_ITEM(draw, 1) != Py_None)
            return -3;
        Py_ssize_t node = PyLong_AsSsize_t(PyTuple_GET_ITEM(draw, 0));
        if (node < 0 || node >= PyTuple_GET_SIZE(tokens))
            return PyErr_Occurred() ? -2 : -3;
        if (found < 0 && PyLong_AsSsize_t(PyTuple_GET_ITEM(tokens, node)) == token)
            found = node;
    }
    return PyErr_Occurred() ? -2 : found;
}

PyDoc_STRVAR(walk_highest_doc,
"walk_highest(logits, tokens, draws): walk down a tree of point masses as rows' highest say.\n\n"
"Row 0 of `logits`, a function or a matrix, is the root's, row i + 1 that of node i; `draws(node)`\n"
"are a node's draws, or None. Returns the path, the token after it, and whether there were draws to refuse; None if\n"
"there is another kind of draw, or a row whose highest is not finite, or not of 32 bits.");

static PyObject *walk_highest(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    if (check_count(n_args, 3))
        return NULL;
    if (!PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "the tokens of a tree are a tuple");
        return NULL;
    }
    RowSource rows;
    if (open_rows(args[0], &rows))
        return NULL;
    PyObject *path = PyList_New(0), *drawn = NULL, *name = NULL, *result = NULL;
    for (Py_ssize_t node = -1; path != NULL;) {
        Py_ssize_t token = highest_of_row(&rows, node + 1);
        Py_XSETREF(name, PyLong_FromSsize_t(node));
        if (token == -2 || name == NULL)
            break;
        Py_XSETREF(drawn, PyObject_CallOneArg(args[2], name));
        if (drawn == NULL)
            break;
        int is_known = token >= 0 && (drawn == Py_None || PyTuple_Check(drawn));
        node = is_known ? child_named(drawn, args[1], token) : -3;
        if (node == -1) {
            int refused = drawn != Py_None && PyTuple_GET_SIZE(drawn) > 0;
            PyObject *kept = PyList_AsTuple(path);
            if (kept != NULL)
                result = Py_BuildValue("NnO", kept, token, refused ? Py_True : Py_False);
            break;
        }
        if (node == -3)
            result = Py_NewRef(Py_None);
        if (node < 0)
            break;
        Py_XSETREF(name, PyLong_FromSsize_t(node));
        if (name == NULL || PyList_Append(path, name))
            break;
    }
    Py_XDECREF(name);
    Py_XDECREF(drawn);
    Py_XDECREF(path);
    close_rows(&rows);
    return result;
}

/* -- the module -------------------------------------------------------------------------------- */

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}

static PyMethodDef functions[] = {
    {"truncate", (PyCFunction)(void (*)(void))truncate_row, METH_FASTCALL, truncate_doc},
    {"draw_distinct", (PyCFunction)(void (*)(void))draw_distinct_tokens, METH_FASTCALL,
     draw_distinct_doc},
    FUNCTION(truncate_rows), FUNCTION(place_at), FUNCTION(race),
    FUNCTION(left_over), FUNCTION(place_of),
    FUNCTION(greedy_chain), FUNCTION(chain_places), FUNCTION(places), FUNCTION(follow),
    FUNCTION(drawn_chain), FUNCTION(drawn_tree), FUNCTION(drawn_depth), FUNCTION(keep_path), FUNCTION(digest), FUNCTION(verify), FUNCTION(walk_highest), FUNCTION(log_mass),
    FUNCTION(interleave), FUNCTION(join), FUNCTION(distance),
    {"rough_mass", rough_mass, METH_O, rough_mass_doc},
    {"scale_to_one", scale_to_one, METH_O, scale_to_one_doc},
    {"highest", highest, METH_O, highest_doc}, {NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_loops", "Inner loops of laws; see Loops.", -1, functions};

PyMODINIT_FUNC PyInit__loops(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddIntConstant(made, "BATCH_BYTES", (long)batch_bytes()))
        Py_CLEAR(made);
    return made;
}
