/* The inputs of a head's graph: rows that form a chain, their positions, cells and mask.

   As `fill_chain_places` of runtime/heads/attention.py writes them, in one call in place of one for
   every array: after an evaluation numpy's code is not in the processor's caches. */

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
        memcpy(views[3].buf, views[4].buf, views[4].len);
        /* What an earlier round left there may be anything; zeros are finite. */
        memset((char *)views[3].buf + views[4].len, 0, views[3].len - views[4].len);
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
