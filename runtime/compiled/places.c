/* The inputs of a head's graph: rows that form a chain or a tree, their positions, cells and mask.

   As `fill_chain` and `fill_places` of runtime/heads/graphs.py write them, in one call in place of
   one for every array: after an evaluation numpy's code is not in the processor's caches. */

#include "places.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "arrays.h"

/* Rows 0 to n - 1 and those from `width` on are the chain's; the others only fill up. */
typedef struct {
    Py_ssize_t rows, n, width, length;
} Chain;

static Py_ssize_t step_of(const Chain *chain, Py_ssize_t row)
{
    return row < chain->width ? (row < chain->n ? row : 0) : row - chain->width + chain->n;
}

/* Write columns from `seen` on: the text before `count`, then the chain's own cells, then nothing. */
static void write_mask(float *mask, const Chain *chain, Py_ssize_t seen, Py_ssize_t count)
{
    Py_ssize_t end = count + 2 * chain->rows;
    if (end > chain->length)
        end = chain->length;
    for (Py_ssize_t row = 0; row < chain->rows; row++) {
        float *line = mask + row * chain->length;
        int fills_up = row >= chain->n && row < chain->width;
        Py_ssize_t visible = fills_up ? count : count + step_of(chain, row) + 1;
        for (Py_ssize_t column = seen; column < end; column++)
            line[column] = column < visible ? 0.0f : -INFINITY;
    }
}

static void copy_rows(const Py_buffer *into, const Py_buffer *given)
{
    memcpy(into->buf, given->buf, given->len);
    /* What an earlier round left there may be anything; zeros are finite. */
    memset((char *)into->buf + given->len, 0, into->len - given->len);
}

const char chain_places_doc[] =
"chain_places(positions, cells, mask, into, given, position, count, below, seen, spare): write rows and places.\n\n"
"The rows given, [n, width], stand from a position on, in the cells after the first `count`; rows that\n"
"only fill up follow, then `below` more, not given, that go on from the n-th. The mask, rows times\n"
"cells, was written for a text of `seen` cells before; -1: not yet.";

PyObject *chain_places(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Py_buffer views[5];
    Py_ssize_t numbers[5]; /* position, count, below, seen, spare */
    if (check_count(n_args, 10))
        return NULL;
    for (int i = 0; i < 5; i++)
        numbers[i] = PyLong_AsSsize_t(args[5 + i]);
    if (PyErr_Occurred() || open_arrays(args, views, "IQFF"))
        return NULL;
    if (open_shaped(args[4], &views[4], 'f', 0, 2)) {
        close_arrays(views, 4);
        return NULL;
    }
    Py_ssize_t position = numbers[0], count = numbers[1], below = numbers[2], seen = numbers[3];
    Py_ssize_t rows = length_of(&views[0]), size = length_of(&views[2]), n = views[4].shape[0];
    Chain chain = {rows, n, rows - below, rows ? size / rows : 0};
    int fits = rows > 0 && length_of(&views[1]) == rows && size == rows * chain.length
        && below >= 0 && n <= chain.width && count >= 0 && count <= chain.length
        && length_of(&views[3]) == chain.width * views[4].shape[1];
    if (fits) {
        copy_rows(&views[3], &views[4]);
        int32_t *positions = views[0].buf;
        int64_t *cells = views[1].buf;
        float *mask = views[2].buf;
        for (Py_ssize_t row = 0; row < rows; row++) {
            int fills_up = row >= n && row < chain.width;
            Py_ssize_t step = step_of(&chain, row);
            positions[row] = fills_up ? 0 : (int32_t)(position + step);
            cells[row] = fills_up ? numbers[4] : count + step;
        }
        if (seen < 0 || seen > count) {
            for (Py_ssize_t i = 0; i < size; i++)
                mask[i] = -INFINITY;
            seen = 0;
        }
        write_mask(mask, &chain, seen, count);
    }
    close_arrays(views, 5);
    if (fits)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "the arrays of a chain's places do not fit one another");
    return NULL;
}

/* Read n whole numbers, of 32 or of 64 bits; -1 is an error. */
static int read_numbers(PyObject *given, Py_ssize_t n, int32_t *narrow, int64_t *wide)
{
    PyObject *numbers = PySequence_Fast(given, "places are no sequence");
    if (numbers == NULL)
        return -1;
    int fits = PySequence_Fast_GET_SIZE(numbers) == n;
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "as many tokens as places are needed");
    for (Py_ssize_t i = 0; fits && i < n; i++) {
        long long number = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(numbers, i));
        fits = !(number == -1 && PyErr_Occurred()) && (wide || (number >= 0 && number <= INT32_MAX));
        if (!fits && !PyErr_Occurred())
            PyErr_Format(PyExc_OverflowError, "%lld is no token or position", number);
        if (wide)
            wide[i] = number;
        else
            narrow[i] = (int32_t)number;
    }
    Py_DECREF(numbers);
    return fits ? 0 : -1;
}

/* Write what n rows see, the others only their first cell: of no cell a softmax is NaN. */
static void write_seen(
    float *mask, Py_ssize_t rows, Py_ssize_t length, Py_ssize_t n, Py_ssize_t seen, const Py_buffer *sees)
{
    const char *own = sees->buf;
    Py_ssize_t more = sees->shape[1];
    for (Py_ssize_t row = 0; row < rows; row++, mask += length) {
        Py_ssize_t known = row < n ? seen : 1, end = row < n ? seen + more : 1;
        for (Py_ssize_t column = 0; column < known; column++)
            mask[column] = 0.0f;
        for (Py_ssize_t column = known; column < end; column++)
            mask[column] = *own++ ? 0.0f : -INFINITY;
        for (Py_ssize_t column = end; column < length; column++)
            mask[column] = -INFINITY;
    }
}

const char places_doc[] =
"places(positions, cells, mask, tokens, into, given, at, own, named, seen, sees, spare): write rows and places.\n\n"
"Row i, of the token named[i], stands at at[i] in the cell own[i]. It sees the first `seen` cells, and\n"
"of those from there on what sees[i] says. `given`, [n, width], goes into `into`, if they are not None.\n"
"Rows that only fill up are zeros, in the spare cell.";

/* What `places` writes to and reads: positions, cells, mask, tokens, what is seen, then rows, if any. */
typedef struct {
    Py_buffer views[7];
    int n_open, has_rows;
} Inputs;

static int open_inputs(PyObject *const *args, Inputs *inputs)
{
    Py_buffer *views = inputs->views;
    inputs->has_rows = args[5] != Py_None;
    inputs->n_open = 0;
    if (open_arrays(args, views, "IQFI"))
        return -1;
    inputs->n_open = 4;
    if (open_shaped(args[10], &views[4], '?', 0, 2))
        return -1;
    inputs->n_open = 5;
    if (!inputs->has_rows)
        return 0;
    if (open_array(args[4], &views[5], 'f', 1))
        return -1;
    inputs->n_open = 6;
    if (open_shaped(args[5], &views[6], 'f', 0, 2))
        return -1;
    inputs->n_open = 7;
    return 0;
}

static int fit_together(const Inputs *inputs, Py_ssize_t seen)
{
    const Py_buffer *views = inputs->views;
    Py_ssize_t rows = length_of(&views[0]), n = views[4].shape[0], size = length_of(&views[2]);
    if (rows < 1 || n > rows || size < rows || size % rows || seen < 0
        || seen + views[4].shape[1] > size / rows || length_of(&views[1]) != rows
        || length_of(&views[3]) != rows)
        return 0;
    return !inputs->has_rows
        || (views[6].shape[0] == n && length_of(&views[5]) == rows * views[6].shape[1]);
}

PyObject *places(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    Inputs inputs;
    if (check_count(n_args, 12))
        return NULL;
    Py_ssize_t seen = PyLong_AsSsize_t(args[9]), spare = PyLong_AsSsize_t(args[11]);
    if (PyErr_Occurred())
        return NULL;
    int failed = open_inputs(args, &inputs);
    if (!failed && !fit_together(&inputs, seen)) {
        PyErr_SetString(PyExc_ValueError, "the arrays of places do not fit one another");
        failed = 1;
    }
    if (!failed) {
        const Py_buffer *views = inputs.views;
        int32_t *positions = views[0].buf, *tokens = views[3].buf;
        int64_t *cells = views[1].buf;
        Py_ssize_t rows = length_of(&views[0]), n = views[4].shape[0];
        failed = read_numbers(args[8], n, tokens, NULL) || read_numbers(args[6], n, positions, NULL)
            || read_numbers(args[7], n, NULL, cells);
        for (Py_ssize_t row = n; !failed && row < rows; row++) {
            positions[row] = tokens[row] = 0;
            cells[row] = spare;
        }
        if (!failed && inputs.has_rows)
            copy_rows(&views[5], &views[6]);
        if (!failed)
            write_seen(views[2].buf, rows, length_of(&views[2]) / rows, n, seen, &views[4]);
    }
    close_arrays(inputs.views, inputs.n_open);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}
